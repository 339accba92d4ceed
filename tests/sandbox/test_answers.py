"""What comes out of a sandbox is data, whoever wrote it: also an agent that was taken over."""

from __future__ import annotations

import io
import json
import os
import resource
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.observe.log import Event, Log
from distlab.ranks.results import RankFailure, RankResults
from distlab.sandbox import wire

LARGE = 80 << 20  # bytes that an answer of a few bytes must not become


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def squeezed(value: object) -> bytes:
    """The same, each record compressed."""
    found, there = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved(value)))
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as small:
        for record in there.infolist():
            small.writestr(record.filename, there.read(record))
    return found.getvalue()


class Bomb:
    """A pickle that runs a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def answer(change: Callable[[dict[str, Any]], object], values: bytes = b"") -> bytes:
    """The right answer of one rank, with something changed."""
    event = Event("all_reduce", (0,), None, 1, "float32", 4, 0, 0, 0.0, 0.1)
    right = wire.packed([RankResults([torch.ones(1)], [Log(0, [event], [])], ["printed"])])
    size = int.from_bytes(right[: wire.HEAD], "little")
    data = json.loads(right[wire.HEAD : wire.HEAD + size])
    change(data)
    text = json.dumps(data).encode()
    return len(text).to_bytes(wire.HEAD, "little") + text + (values or right[wire.HEAD + size :])


def nothing(data: dict[str, Any]) -> None:
    """No change."""


def event(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["runs"][0]["logs"][0]["events"][0].update(fields)


def log(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["runs"][0]["logs"][0].update(fields)


def run(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["runs"][0].update(fields)


DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "nothing": lambda _: b"",
    "junk": lambda _: b"junk" * 9,
    "a length that is none": lambda _: b"\xff" * 64,
    "deep nesting": lambda _: len(DEEP).to_bytes(wire.HEAD, "little") + DEEP,
    "no values": lambda _: answer(nothing, b"junk"),
    "a pickle": lambda path: answer(nothing, saved([[Bomb(path)]])),
    "a pickle of long ago": lambda path: answer(
        nothing, b"cos\nsystem\n(S'touch " + os.fsencode(path) + b"'\ntR."
    ),
    "nested values": lambda _: answer(nothing, saved([torch.ones(1)] * 3)),
    "numbers for values": lambda _: answer(nothing, saved(7)),
    "a squeezed tensor": lambda _: answer(nothing, squeezed([[torch.zeros(LARGE // 4)]])),
    "a long tensor in little memory": lambda _: answer(
        nothing, saved([[torch.zeros(1).expand(LARGE)]])
    ),
    "too many runs": lambda _: answer(lambda data: data["runs"].append(data["runs"][0])),
    "no runs": lambda _: answer(lambda data: data.update(runs=[])),
    "no logs": lambda _: answer(run(logs=[])),
    "other names": lambda _: answer(event(op="x", __class__="x") and log(events=[{}])),
    "an event's bytes": lambda _: answer(event(sent="0")),
    "an event's group": lambda _: answer(event(group=["0"])),
    "a truth for a number": lambda _: answer(event(sent=True)),
    "no rank": lambda _: answer(log(rank="0")),
    "spans": lambda _: answer(log(spans=[["forward", "now", "later"]])),
    "output that is no text": lambda _: answer(run(output=[["printed"]])),
    "clocks alone": lambda _: answer(run(clocks=[1.0])),
    "a failure of nothing": lambda _: answer(lambda data: data.update(failure={})),
    "a failure's line": lambda _: answer(lambda data: data.update(failure={"line": 7})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_answers_that_no_agent_sends(name: str, tmp_path: Path) -> None:
    """Refused, nothing runs, and no memory is taken for what is not there."""
    hostile = HOSTILE[name](tmp_path / "hacked")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(wire.Unreadable):
        wire.unpacked(hostile, (1,))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LARGE // 2048
    assert not (tmp_path / "hacked").exists()


def test_the_right_answer_is_read() -> None:
    """So none of the above was refused for another reason."""
    (results,) = wire.unpacked(answer(nothing), (1,))
    assert results[0] == torch.ones(1)
    assert results.logs[0].events[0].op == "all_reduce"


@pytest.mark.parametrize("path", ["/dev/zero:1", "/etc/passwd:1", "/no/../etc/passwd:1", "x\x1b:y"])
def test_lines_lead_to_no_file(path: str) -> None:
    """A report quotes lines of files: what comes from inside can't choose the file."""
    (results,) = wire.unpacked(answer(event(line=path)), (1,))
    shown = results.logs[0].events[0].line
    assert not os.path.exists(shown.rpartition(":")[0])
    assert "\x1b" not in shown


def test_failure_tells_plain_text() -> None:
    """Control characters of a message are shown as escapes."""
    told = RankFailure("\x1b[2J<script>", kind="crash\x07", line="/etc/passwd:1")
    with pytest.raises(RankFailure) as raised:
        wire.unpacked(wire.packed_failure(told), (1,))
    assert (raised.value.message, raised.value.kind) == ("\\x1b[2J<script>", "crash\\x07")
