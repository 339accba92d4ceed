"""Endless loops are named with the learner's line in the loop, on real and on virtual ranks."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.grading import grade, runners
from distlab.grading.report import LIKELY
from distlab.grading.session import Request
from distlab.observe.looks import ENOUGH, endless_loop
from distlab.ranks import RankFailure, run_ranks
from distlab.virtual import run_worlds

MINE = (__file__,)
LIMIT = 0.4  # seconds until the looks begin


def helper() -> int:
    return sum(i for i in range(500))


def calls_another() -> None:
    while True:
        helper()


def runs_operators() -> None:
    x = torch.ones(100, 100)
    while x is not None:
        x = x @ x
        x = x / x.norm()


def naps() -> None:
    while True:
        time.sleep(0.05)


def talks() -> None:
    x = torch.ones(3)
    for _ in itertools.count():
        dist.all_reduce(x)


def asks() -> None:
    handle = dist.irecv(torch.ones(3), 1 - dist.get_rank())
    while not handle.is_completed():
        pass


def one_rank() -> None:
    while dist.get_rank() == 1:
        pass
    dist.barrier()


def generates() -> list[int]:
    def numbers():
        while True:
            yield 0

    return [0 for _ in numbers() if helper() < 0]


def failure_of(body: Callable[[], object], tier: str, world_size: int) -> RankFailure:
    def run() -> None:
        if tier == "virtual":
            options = {"timeout": LIMIT, "patience": LIMIT, "learner_files": MINE}
            run_worlds(lambda ctx: body(), (world_size,), seed=1, seeds=2, **options)
        else:
            run_ranks(lambda ctx: body(), world_size, timeout=LIMIT, learner_files=MINE)

    with pytest.raises(RankFailure) as caught:
        run()
    return caught.value


@pytest.mark.parametrize(
    ("body", "tier", "world_size", "line"),
    [
        (calls_another, "gloo", 1, "while True:"),
        (calls_another, "virtual", 2, "while True:"),
        (runs_operators, "gloo", 1, "while x is not None:"),
        (runs_operators, "virtual", 1, "while x is not None:"),
        (naps, "virtual", 2, "while True:"),
        (talks, "gloo", 2, "for _ in itertools.count():"),
        (talks, "virtual", 2, "for _ in itertools.count():"),
        (asks, "virtual", 2, "while not handle.is_completed():"),
        (one_rank, "virtual", 3, "while dist.get_rank() == 1:"),
    ],
)
def test_the_loop_is_named(
    body: Callable[[], object], tier: str, world_size: int, line: str
) -> None:
    failure = failure_of(body, tier, world_size)
    assert (failure.kind, failure.cause) == ("hang", "endless-loop")
    assert "in a loop that does not end" in failure.message.splitlines()[0]
    assert failure.line.startswith("test_looks.py:")
    assert failure.line.endswith(f": {line}")
    if body is one_rank:
        assert failure.rank == 1
        assert "rank 0 waits in barrier" in failure.message


def test_the_consumer_of_an_endless_generator_is_named_as_well() -> None:
    failure = failure_of(generates, "virtual", 1)
    assert failure.cause == "endless-loop"
    assert failure.line.endswith(("while True:", "return [0 for _ in numbers() if helper() < 0]"))


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process sleeps is told by /proc")
def test_a_loop_that_sleeps_is_one_and_a_long_sleep_is_none() -> None:
    failure = failure_of(naps, "gloo", 1)
    assert failure.line.endswith("while True:")

    def one_nap() -> None:
        for _ in range(3):
            time.sleep(1000)

    for tier in ("gloo", "virtual"):
        failure = failure_of(one_nap, tier, 1)
        assert failure.cause == "running"
        assert "rank 0 is still running   at test_looks.py" in failure.message


def test_a_rank_in_one_long_call_is_in_no_loop() -> None:
    """Nothing of it can be looked at: it is told where it is, and no more."""
    failure = failure_of(lambda: all(itertools.count(1)), "gloo", 1)
    assert failure.cause == "running"
    assert "rank 0 is still running   at test_looks.py" in failure.message
    assert "is in a loop" not in failure.message


CODE = """
def outer(n):
    for epoch in range(n):
        def step(x):
            while x:
                x += 1
                x += [i for i in range(3)]
        step(1)
    return [y for y in endless()]
"""


@pytest.mark.parametrize(
    ("calls", "number"),
    [
        ([[3, 4, 8]], 3),
        ([[8], [5, 6]], 5),  # the innermost loop of the innermost call
        ([[8], [7]], 5),  # what a loop's body goes through is finite more often
        ([[8], [4]], 3),  # line 4 is in no loop of its own function, so the caller's it is
        ([[9]], 9),
        ([[2, 9]], 0),
    ],
)
def test_the_innermost_loop_around_all_lines(
    calls: list[list[int]], number: int, tmp_path: Path
) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    seen = [(str(path), lines, ENOUGH, False) for lines in calls]
    place = f"{path}:{number}" if number else ""
    assert endless_loop(ENOUGH, seen, [str(path)]) == place
    assert endless_loop(ENOUGH - 1, seen, [str(path)]) == ""
    assert endless_loop(ENOUGH + 1, seen, [str(path)]) == "", "the calls have returned"
    assert endless_loop(ENOUGH, seen, ["another.py"]) == ""


@pytest.mark.parametrize("place", ["sampler", "import"])
def test_an_endless_loop_in_the_first_exercise(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN_LIMIT", "CHECK_LIMIT"):
        monkeypatch.setattr(runners, name, 0.5)
    folder = Path(__file__).parents[2] / "solutions" / "phase1_data_parallel"
    text = (folder / "data_loader.py").read_text(encoding="utf-8")
    loop = "while True:\n{0}    number = 1\n"
    if place == "import":
        text += "\n\n" + loop.format("")
    else:
        head, step, tail = text.partition("        if self.shuffle:\n            generator")
        text = head + "        " + loop.format("        ") + step + tail
    (tmp_path / "data_loader.py").write_text(text, encoding="utf-8")
    report = grade(1, Request(impl=str(tmp_path), device="cpu", exercises=("1.1",)))
    (result,) = report.exercises
    assert result.verdict == "hang"
    check = result.decisive
    assert check is not None
    assert "rank 0 is in a loop that does not end" in check.message
    assert check.line.startswith("data_loader.py:")
    assert check.line.endswith("while True:")
    likely = LIKELY.get(check.cause, "")
    assert "collective" not in check.message + likely
    if place == "sampler":
        assert likely
        others = [c for c in result.checks if c is not check]
        assert {c.verdict for c in others} == {"blocked"}, "one hang is waited for, not five"
