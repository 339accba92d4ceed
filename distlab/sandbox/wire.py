"""The messages on the socket of a sandbox: trusted requests in, plain data out.

A request is pickled, because it comes from the grader. An answer comes from a process next to
untrusted code. It is JSON, and behind that the values (``ranks/content.py``). Each field is
checked. With a field that does not fit, the answer counts as unreadable.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..observe.log import Event, Log
from ..observe.raised import printable
from ..ranks.content import packed as packed_values
from ..ranks.content import unpacked
from ..ranks.results import RankFailure, RankReport, RankResults
from ..virtual import VirtualResults
from ..virtual.reports import HostRead

HEAD = 8  # bytes: the length of the rest
LONGEST = 100_000  # characters of a text
LONGEST_TEXT = 64 << 20  # bytes of everything but values
MORE = ("clocks", "traffic", "unmodelled", "peaks", "flops")  # what virtual results have
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "object": (type(None),),  # the value: no run in a sandbox records any
}
_KINDS_OF = {each.name: _KINDS.get(str(each.type), ()) for each in dataclasses.fields(Event)}
del _KINDS_OF["group"]  # the one that is a list


class Unreadable(Exception):
    """An answer is not one that an agent sends."""


def send(to: socket.socket, content: bytes) -> None:
    """One frame."""
    to.sendall(joined(content))


def receive(source: socket.socket) -> bytes:
    """One frame; empty at the end."""
    size = int.from_bytes(_exactly(source, HEAD), "little")
    return _exactly(source, size)


def joined(first: bytes, rest: bytes = b"") -> bytes:
    """Two parts in one."""
    return len(first).to_bytes(HEAD, "little") + first + rest


def parted(both: bytes) -> tuple[bytes, bytes]:
    """The two parts again."""
    size = HEAD + int.from_bytes(both[:HEAD], "little")
    return both[HEAD:size], both[size:]


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)


# -- inside ---------------------------------------------------------------------------------------
def packed(results: Sequence[RankResults]) -> bytes:
    """Pack the results of runs."""
    runs = []
    for each in results:
        run: dict[str, Any] = {"logs": [_log(log) for log in each.logs], "output": each.output}
        if isinstance(each, VirtualResults):
            run |= {name: getattr(each, name) for name in MORE}
            run["host_reads"] = each.host_reads
        runs.append(run)
    return _with_values({"runs": runs}, packed_values([list(each) for each in results]))


def packed_failure(failure: RankFailure) -> bytes:
    """Pack the failure of a run."""
    told = ("message", "kind", "cause", "rank", "line", "interleaving")
    fields = {name: getattr(failure, name) for name in told}
    reports = [vars(report) for report in failure.reports]
    return _with_values({"failure": fields | {"reports": reports}})


def packed_error(error: BaseException) -> bytes:
    """Pack an error in the request itself."""
    return _with_values({"error": f"{type(error).__name__}: {error}"[:LONGEST]})


def _log(log: Log) -> dict[str, Any]:
    events = [vars(event) for event in log.events]
    return vars(log) | {"events": events, "on_gpu": sorted(log.on_gpu)}


def _with_values(data: dict[str, Any], values: bytes = b"") -> bytes:
    return joined(json.dumps(data).encode(), values)


# -- outside --------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads answers. A line must belong to the code ``shown`` to learners, or to no file.

    (The grader looks up the text of lines. An answer must not make it show a line of any other
    file.)
    """

    shown: tuple[str, ...]  # files, and folders with a slash at the end
    most: int  # bytes of all tensors, as if each element had memory of its own

    def results(self, answer: bytes, world_sizes: Sequence[int]) -> list[RankResults]:
        """The results of runs of these sizes; raises the run's own failure, or Unreadable."""
        try:
            found = self._read(answer, world_sizes)
        except Exception as error:
            raise Unreadable(str(error)) from None
        if isinstance(found, Exception):
            raise found
        return found

    def _read(self, answer: bytes, world_sizes: Sequence[int]) -> list[RankResults] | Exception:
        text, content = parted(answer)
        if max(len(text), int.from_bytes(content[:HEAD], "little")) > LONGEST_TEXT:
            raise Unreadable("its text is too long")
        data = json.loads(text)
        if "error" in data:
            return RuntimeError(_text(data["error"]))
        if "failure" in data:
            return _failure(data["failure"])
        values = unpacked(content)
        tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
        if sum(each.numel() * each.element_size() for each in tensors) > self.most:
            raise Unreadable(f"its tensors have more than {self.most:,} bytes")
        return [
            self._results(run, own, world_size)
            for run, own, world_size in zip(data["runs"], values, world_sizes, strict=True)
        ]

    def _results(self, run: dict[str, Any], values: Any, world_size: int) -> RankResults:
        logs = [self._log(log) for log in run["logs"]]
        output = [str(text) for text in run["output"]]
        if not len(values) == len(logs) == len(output) == world_size:
            raise Unreadable(f"{len(values)} results of {world_size} ranks")
        if "clocks" not in run:
            return RankResults(list(values), logs, output)
        reads = [[HostRead(*map(_text, read)) for read in each] for each in run["host_reads"]]
        more = {
            "clocks": _numbers(run["clocks"]),
            "traffic": _counts(run["traffic"]),
            "unmodelled": _counts(run["unmodelled"]),
            "peaks": _numbers(run["peaks"]),
            "flops": _numbers(run["flops"]),
            "host_reads": reads,
        }
        return VirtualResults(list(values), logs, output, more)

    def _log(self, fields: dict[str, Any]) -> Log:
        spans = [(_text(n), float(start), float(end)) for n, start, end in fields["spans"]]
        events = [self._event(event) for event in fields["events"]]
        begin, on_gpu = float(fields["picture_from"]), frozenset(map(_number, fields["on_gpu"]))
        return Log(_number(fields["rank"]), events, spans, begin, on_gpu)

    def _event(self, fields: dict[str, Any]) -> Event:
        found: dict[str, Any] = {"group": tuple(map(_number, fields["group"]))}
        for name, kinds in _KINDS_OF.items():
            value = fields[name]
            if type(value) not in kinds:
                raise Unreadable(f"{name} of an event is {value!r}")
            found[name] = _text(value) if type(value) is str else value
        path, _, number = found["line"].rpartition(":")
        if os.path.isabs(path) and not self._is_shown(path):
            found["line"] = f"{os.path.basename(path)}:{number}"
        return Event(**found)

    def _is_shown(self, path: str) -> bool:
        folders = tuple(each for each in self.shown if each.endswith(os.sep))
        return path in self.shown or (path.startswith(folders) and os.path.normpath(path) == path)


def _failure(fields: dict[str, Any]) -> RankFailure:
    reports = []
    for each in fields["reports"]:
        state, line = _text(each["state"]), _text(each["line"])
        output = printable(str(each["output"]))
        reports.append(RankReport(_number(each["rank"]), state, line, output, dict(each["detail"])))
    rank, seed = fields["rank"], fields["interleaving"]
    failure = RankFailure(
        _text(fields["message"]),
        kind=_text(fields["kind"]),
        cause=_text(fields["cause"]),
        rank=None if rank is None else _number(rank),
        line=_text(fields["line"]),
        reports=reports,
    )
    failure.interleaving = None if seed is None else _number(seed)
    return failure


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise Unreadable("a text is no text, or too long")
    return printable(value)


def _number(value: object) -> int:
    if type(value) is not int:
        raise Unreadable(f"no whole number: {value!r}")
    return value


def _numbers(values: Sequence[object]) -> list[Any]:
    return [value if type(value) is float else _number(value) for value in values]


def _counts(values: dict[str, object]) -> dict[str, int]:
    return {_text(name): _number(count) for name, count in values.items()}
