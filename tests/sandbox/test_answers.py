"""Answers of an agent that was taken over: nothing in them runs, none takes the grader's memory.

``test_wire.py`` has those that are no answers; these look like ones.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.course.catalogue import root
from distlab.observe.log import Event, Log
from distlab.ranks.content import packed
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


def written(text: str, memory: bytes = b"") -> bytes:
    """Values as a rank could write them that does not use the toolkit's own function."""
    return wire.joined(text.encode(), memory)


def tensor(shape: list[int], stride: list[int], length: int = 4) -> bytes:
    """A tensor of float32 in 4 bytes."""
    told = [0, length, "torch.float32", shape, stride, False]
    return written(json.dumps([[{"Tensor": told}]]), bytes(4))


def answer(values: bytes = b"", line: str = "") -> bytes:
    """That of one rank, with other values."""
    event = Event("send", (0,), 0, 1, "float32", 4, 0, 0, 0.0, 0.1, line=line)
    right = wire.packed([RankResults([torch.ones(1)], [Log(0, [event], [])], ["printed"])])
    text, own = wire.parted(right)
    assert json.loads(text)["runs"]
    return wire.joined(text, values or own)


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda path: pickle.dumps([[Bomb(path)]]),
    "pickle of long ago": lambda path: b"cos\nsystem\n(S'touch " + os.fsencode(path) + b"'\ntR.",
    "a type that is not plain": lambda _: written('[[{"Linear": [1, 1]}]]'),
    "a type with a length": lambda _: written(f'[[{{"bytes": {LARGE}}}]]'),
    "an entry of two types": lambda _: written('[[{"tuple": [], "dict": []}]]'),
    "more ranks than there are": lambda _: packed([[torch.ones(1)] * 3]),
    "number": lambda _: packed(7),
    "deep nesting": lambda _: written("[" * 100_000 + "]" * 100_000),
    "memory that is not there": lambda _: tensor([LARGE // 4], [1], LARGE),
    "a view beyond its memory": lambda _: tensor([LARGE // 4], [1]),
    "a view before its memory": lambda _: tensor([2], [-1]),
    "long tensor in little memory": lambda _: packed([[torch.zeros(1).expand(LARGE)]]),
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


def test_values_with_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before it is read."""
    monkeypatch.setattr(wire, "LONGEST_TEXT", 2000)
    with pytest.raises(wire.Unreadable, match="too long"):
        READER.results(answer(packed([["x" * 2000]])), (1,))


def test_the_right_answer_is_read() -> None:
    """So none of the above was refused for another reason; views of one memory are right, too."""
    whole = torch.arange(6.0)
    values = packed([[[whole[::2], whole.view(2, 3).t(), torch.zeros(1).expand(4)]]])
    (results,) = READER.results(answer(values), (1,))
    assert results[0][1].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize("folder", ["alternatives", "mutants"])
def test_lines_of_answers_among_the_tests_are_not_looked_up(folder: str) -> None:
    """A report quotes lines of checks, but right and wrong implementations lie beside them."""
    path = next((root() / "tests" / folder).rglob("*.py"))
    (results,) = READER.results(answer(line=f"{path}:3"), (1,))
    assert results.logs[0].events[0].line == f"{path.name}:3"
