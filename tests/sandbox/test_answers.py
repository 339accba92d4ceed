"""Answers of an agent that was taken over: nothing in them runs, none takes the grader's memory.

``test_wire.py`` has those that are no answers; these look like ones.
"""

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

from distlab.course.catalogue import root
from distlab.observe.log import Event, Log
from distlab.ranks.results import RankResults
from distlab.sandbox import Sandbox, wire

LARGE = 80 << 20  # bytes that an answer of a few bytes must not become
READER = Sandbox(root(), root())._reader({"learner_files": ("/learner.py",)})


class Bomb:
    """A pickle that runs a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


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


def answer(values: bytes = b"", line: str = "") -> bytes:
    """That of one rank, with other values."""
    event = Event("send", (0,), 0, 1, "float32", 4, 0, 0, 0.0, 0.1, line=line)
    right = wire.packed([RankResults([torch.ones(1)], [Log(0, [event], [])], ["printed"])])
    text, own = wire.parted(right)
    assert json.loads(text)["runs"]
    return wire.joined(text, values or own)


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda path: saved([[Bomb(path)]]),
    "pickle of long ago": lambda path: b"cos\nsystem\n(S'touch " + os.fsencode(path) + b"'\ntR.",
    "module": lambda _: saved([[torch.nn.Linear(1, 1)]]),
    "more ranks than there are": lambda _: saved([[torch.ones(1)] * 3]),
    "number": lambda _: saved(7),
    "squeezed tensor": lambda _: squeezed([[torch.zeros(LARGE // 4)]]),
    "long tensor in little memory": lambda _: saved([[torch.zeros(1).expand(LARGE)]]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_values_that_no_rank_returns(name: str, tmp_path: Path) -> None:
    """Refused before anything runs, and before memory is taken for what is not there."""
    values = HOSTILE[name](tmp_path / "hacked")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(wire.Unreadable):
        READER.results(answer(values), (1,))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < LARGE // 2048
    assert not (tmp_path / "hacked").exists()


def test_the_right_answer_is_read() -> None:
    """So none of the above was refused for another reason; views of one memory are right, too."""
    whole = torch.arange(6.0)
    values = saved([[[whole[::2], whole.view(2, 3).t(), torch.zeros(1).expand(4)]]])
    (results,) = READER.results(answer(values), (1,))
    assert results[0][1].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize("folder", ["alternatives", "mutants"])
def test_lines_of_answers_among_the_tests_are_not_looked_up(folder: str) -> None:
    """A report quotes lines of checks, but right and wrong implementations lie beside them."""
    path = next((root() / "tests" / folder).rglob("*.py"))
    (results,) = READER.results(answer(line=f"{path}:3"), (1,))
    assert results.logs[0].events[0].line == f"{path.name}:3"
