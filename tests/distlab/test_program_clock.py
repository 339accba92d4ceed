"""Limits are of a program's own time: what other programs take from it does not count."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distlab.grading.runners import CHECK_LIMIT, RUN_LIMIT, Runner
from distlab.host import program_clock
from distlab.host.program_clock import ProgramClock
from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.virtual import run_virtual


class System:
    """A /proc of processes with one thread each, and a wall clock; all seconds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder, 0.0
        monkeypatch.setattr(program_clock, "PROC", folder)
        monkeypatch.setattr(program_clock.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(program_clock.os, "sched_getaffinity", lambda _: {0, 1})

    def tell(self, pid: int, ran: float, waited: float, state: str = "S", children=()) -> None:
        task = self.folder / str(pid) / "task" / str(pid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran * 1e9:.0f} {waited * 1e9:.0f} 7")
        (task / "children").write_text(" ".join(map(str, children)))
        (task / "stat").write_text(f"{pid} (python) {state} 1")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("ranks", "counted"),
    [
        ([(0.0, 0.0), (0.0, 0.0)], 10.0),  # all sleep: it hangs
        ([(10.0, 0.0), (0.0, 0.0)], 10.0),  # one is in a loop, alone on its processor
        ([(2.5, 7.5), (0.0, 0.0)], 2.5),  # so it is beside three others
        ([(5.0, 5.0)] * 4, 10.0),  # four ranks in loops on two processors that are theirs
        ([(1.0, 9.0)] * 4, 2.0),  # the same beside others
        ([(0.1, 9.9), (0.1, 3.0)], 1.0),  # next to nothing: a tenth in any case
        ([(1.0, 3.0), (0.5, 0.5)], 5.0),  # in turn, and in between both sleep
    ],
)
def test_only_what_is_the_programs_own_counts(
    system: System, ranks: list[tuple[float, float]], counted: float
) -> None:
    for pid in range(len(ranks)):
        system.tell(pid + 2, 3.0, 2.0)
    clock = ProgramClock(range(2, 2 + len(ranks)))
    before = program_clock.spent()
    for pid, (ran, waited) in enumerate(ranks):
        system.tell(pid + 2, 3.0 + ran, 2.0 + waited)
    system.now += 10.0
    assert clock.read() == pytest.approx(counted)
    assert program_clock.spent() - before == pytest.approx(counted)
    assert clock.read() == clock.seconds


def test_a_disk_is_waited_for_as_for_a_processor(system: System) -> None:
    system.tell(2, 0.0, 0.0)
    clock = ProgramClock([2])
    system.tell(2, 0.5, 0.0, state="D")
    system.now += 10.0
    assert clock.read() == pytest.approx(1.0)


def test_what_a_rank_has_started_counts_with_it(system: System) -> None:
    system.tell(2, 0.0, 0.0)
    clock = ProgramClock([2])
    system.tell(2, 0.0, 0.0, children=[3])
    system.tell(3, 2.0, 7.0)
    system.now += 10.0
    assert clock.read() == pytest.approx(2.0)


def test_without_proc_it_is_the_wall_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program_clock, "PROC", tmp_path / "none")
    ticks = itertools.count(0.0, 0.25)
    monkeypatch.setattr(program_clock.time, "monotonic", lambda: next(ticks))
    clock = ProgramClock([os.getpid()])
    assert [clock.read() for _ in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_a_check_has_a_minute_for_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [100.0]
    monkeypatch.setattr("distlab.grading.runners.spent", lambda: used[0])
    runner = Runner((), 1, "cpu")
    assert runner.limit(RUN_LIMIT) == RUN_LIMIT
    used[0] += CHECK_LIMIT - 4
    assert [runner.limit(RUN_LIMIT), runner.limit(2.0)] == [4.0, 2.0]
    used[0] += 4
    assert runner.limit(RUN_LIMIT) == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/PID/schedstat")
def test_a_rank_that_got_no_processor_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is kept from running for longer than its limit: slow is not hung.

    The kernel is told apart by a table of its own: here every thread waits for a processor.
    """
    begun, tell = time.monotonic(), ProgramClock._threads

    def starved(clock: ProgramClock) -> dict:
        waiting = time.monotonic() - begun
        return {thread: (ran, waiting) for thread, (ran, _) in tell(clock).items()}

    monkeypatch.setattr(ProgramClock, "_threads", starved)

    def body(ctx: RankContext) -> str:
        time.sleep(1.2)
        dist.barrier()
        return "done"

    assert list(run_ranks(body, 2, timeout=0.4)) == ["done"] * 2
    monkeypatch.undo()
    with pytest.raises(RankFailure, match=r"no result after 0.4 s"):
        run_ranks(body, 2, timeout=0.4)


@pytest.mark.parametrize("hangs", ["in Python", "without Python's lock being free"])
def test_virtual_ranks_that_never_end_are_ended(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hangs != "in Python":
        monkeypatch.setattr("distlab.virtual.reports.GRACE", 0.5)  # it can't report: no use waiting

    def body(ctx: RankContext) -> None:
        x = torch.ones(3)
        while ctx.rank == 1:
            if hangs != "in Python":
                sum(range(10**12))
        dist.all_reduce(x)

    with pytest.raises(RankFailure, match=r"no result after 0.5 s") as caught:
        run_virtual(body, 3, seed=1, timeout=0.5, learner_files=(__file__,))
    assert caught.value.kind == "hang"
    if hangs == "in Python":
        told = "rank 1 is in a loop that does not end   at test_program_clock.py"
        assert told in caught.value.message
