"""Files of a profiler, and the types that reading them gives.

A trace is JSON (Chrome's trace event format). A memory snapshot is a pickle, and a pickle can run
any function while it is read. This one holds plain data, so it is read without any function.
"""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

Lane = tuple[Any, Any]  # process and thread of the host, or device and stream
Event = dict[str, Any]
ANNOTATIONS = {
    "ProfilerStep#": "step",
    "enumerate(DataLoader)#": "data",
    "Optimizer.step#": "optimizer",
    "gloo:": "communication",
}
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError)


@dataclass(frozen=True)
class Span:
    """A piece of work (compute, communication, copy) or a mark (step, data, optimizer).

    ``begin``, ``end``, and ``launched``, when the host asked for it: ns since 1970.
    """

    kind: str
    name: str
    lane: Lane
    begin: int
    end: int
    launched: int


@dataclass(frozen=True)
class Change:
    """``size`` bytes more (below 0: fewer) in use from ``at`` on; ``site``: file and line."""

    at: int
    size: int
    address: int
    site: str = ""


@dataclass(frozen=True)
class Trace:
    """What a trace tells of a run: spans in any order, changes of memory by their time."""

    spans: tuple[Span, ...]
    changes: tuple[Change, ...] = ()

    def of(self, *kinds: str) -> list[Span]:
        """The spans of these kinds, by their begin."""
        return sorted((s for s in self.spans if s.kind in kinds), key=lambda s: s.begin)

    @property
    def window(self) -> tuple[int, int]:
        """From the begin of the first step to the latest end of a step."""
        steps = self.of("step")
        return steps[0].begin, max(s.end for s in steps)


@dataclass(frozen=True)
class Finding:
    """The ``part`` to mend first, and its evidence: ``amount`` of ``whole``, by ``count`` spans."""

    part: str
    amount: int
    whole: int
    count: int
    detail: str = ""


def trace_events(path: str | Path) -> list[Event]:
    """The events of a trace that ``torch.profiler`` exported, as JSON or gzip of it (``.gz``).

    Each has its ``begin`` and ``end`` besides: ns since 1970, exact. Raises ValueError for a file
    that is no trace.
    """
    try:
        content = Path(path).read_bytes()
        content = gzip.decompress(content) if str(path).endswith(".gz") else content
        # a float of 10^12 µs is wrong by up to half a ns, so equal moments would differ
        file = json.loads(content, parse_float=Decimal)
        base, events = int(file.get("baseTimeNanoseconds", 0)), []
        for event in file["traceEvents"]:
            begin = base + int(1000 * event.get("ts", 0))
            end = begin + int(1000 * event.get("dur", 0))
            events.append({**event, "begin": begin, "end": end})
    except (*BROKEN, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no trace of torch.profiler: {error!r}") from None
    return events


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, words, lists and dicts. Refuses every function that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for each class and function that the file names."""
        raise pickle.UnpicklingError(f"it names {module}.{name}, and plain data names nothing")


def snapshot_entries(path: str | Path, device: int = 0) -> list[Event]:
    """The allocator's actions in a file of ``torch.cuda.memory._dump_snapshot``, in their order.

    No code of the file runs. Raises ValueError for a file that is no snapshot, or that names a
    class or function, and for a device that is not in it.
    """
    try:
        with Path(path).open("rb") as file:
            traces = PlainUnpickler(file).load()["device_traces"]
        if device not in range(len(traces)):
            raise ValueError(f"it has {len(traces)} devices, and none of them is {device}")
        return [dict(entry) for entry in traces[device]]
    except (*BROKEN, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no memory snapshot to read: {error!r}") from None


def annotated(event: Event) -> str | None:
    """The kind of an annotation of the host: step, data, optimizer or communication, else None."""
    if event.get("cat") != "user_annotation":
        return None
    return next((kind for w, kind in ANNOTATIONS.items() if event["name"].startswith(w)), None)


def span_of(event: Event, kind: str, launched: int | None = None) -> Span:
    """The span of a complete event; if nothing else is known, it is launched when it begins."""
    begin, lane = event["begin"], (event["pid"], event["tid"])
    launched = begin if launched is None else launched
    return Span(kind, event["name"], lane, begin, event["end"], launched)


def operation(name: str) -> str:
    """The collective of a communication's name: "allgather" for gloo's "gloo:all_gather" and for
    NCCL's "ncclDevKernel_AllGather_RING_LL(…)"."""
    after = name.partition("Kernel_")[2].partition("_")[0] or name.partition(":")[2]
    return after.partition("(")[0].replace("_", "").lower()


def noted_changes(events: Iterable[Event]) -> tuple[Change, ...]:
    """The changes of memory in a trace with ``profile_memory=True``, by their time, without a site.

    They are those of the GPU if there are any, else those of the CPU.
    """
    notes = [e for e in events if e.get("ph") == "i" and e["name"] == "[memory]"]
    device = int(any(e["args"]["Device Type"] == 1 for e in notes))
    mine = [e for e in notes if e["args"]["Device Type"] == device]
    mine.sort(key=lambda e: e["begin"])  # equal times: in the file's order
    return tuple(Change(e["begin"], e["args"]["Bytes"], e["args"]["Addr"]) for e in mine)


def site_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """"FILE:LINE" of the first frame of Python outside of torch; "" if there is none.

    The first is the innermost.
    """
    for frame in frames:
        file = PurePosixPath(frame["filename"])
        if file.suffix == ".py" and "torch" not in file.parent.parts:
            return f"{file}:{frame['line']}"
    return ""
