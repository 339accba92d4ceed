"""Where the system lacks what Linux has, runs go on without it, or say why they can't."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from distlab.commands.watch import watch
from distlab.course.catalogue import load_course, root
from distlab.grading.session import Request, Session
from distlab.grading.verdicts import NotRun
from distlab.host import system
from distlab.host.system import fork_obstacle
from distlab.ranks import RankContext, RankFailure, fork_problem, run_ranks
from distlab.virtual import reap_children, run_virtual


class LibraryWithoutPrctl:
    """A C library like any but Linux's, as far as it is asked here."""

    def __init__(self, name: str | None) -> None:
        pass


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A system without /proc, prctl and scheduling classes, whose new processes begin empty."""
    monkeypatch.setattr(system, "PROC", tmp_path / "none")
    monkeypatch.setattr(ctypes, "CDLL", LibraryWithoutPrctl)
    for name in ("sched_setaffinity", "SCHED_BATCH"):
        monkeypatch.delattr(os, name, raising=False)
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    fork_obstacle.cache_clear()
    yield
    multiprocessing.set_start_method(method, force=True)
    fork_obstacle.cache_clear()


def total(ctx: RankContext) -> float:
    value = torch.tensor([float(ctx.rank + 1)])
    dist.all_reduce(value)
    return value.item()


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("run", [run_ranks, run_virtual])
def test_ranks_run_on_a_bare_system(run: Callable[..., list[float]]) -> None:
    assert not system.prctl(1, 9)
    assert system.threads() == []
    assert fork_problem() == ""
    assert list(run(total, 2)) == [3.0, 3.0]

    def raises(ctx: RankContext) -> None:
        raise ValueError("odd")

    with pytest.raises(RankFailure, match="odd"):
        run(raises, 2)
    reap_children()


class Squares(TensorDataset):
    """As in a learner's file: by this name no other process can import it."""

    __module__ = "implementation"


@pytest.mark.usefixtures("bare")
def test_loaders_have_workers_where_new_processes_begin_empty() -> None:
    def body(ctx: RankContext) -> list[float]:
        loader = DataLoader(Squares(torch.arange(4.0) ** 2), num_workers=1)
        return [value.item() for (value,) in loader]

    assert list(run_ranks(body, 1, process_group=False, timeout=60)) == [[0.0, 1.0, 4.0, 9.0]]


def no_numbers(count: int) -> None:
    raise RuntimeError("no threads after a fork")


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("copy", [no_numbers, lambda count: time.sleep(600)], ids=["ends", "hangs"])
def test_a_copy_that_cannot_compute_is_noticed(
    monkeypatch: pytest.MonkeyPatch, copy: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Real ranks are then new processes, virtual ones are told as "needs", watch says so."""
    monkeypatch.setattr(torch, "set_num_threads", copy)
    monkeypatch.setattr(system, "TRIAL_LIMIT", 0.3)
    reason = "a forked copy of this process can't compute on this system"
    assert fork_obstacle() == reason
    assert fork_problem() == reason
    exercise = load_course().exercise("1.4")
    with pytest.raises(NotRun) as caught:
        Session(Request()).runner(exercise, "virtual")
    assert caught.value.result.verdict == "needs"
    assert reason in caught.value.result.message
    Session(Request()).runner(exercise, "gloo")
    with pytest.raises(ValueError, match="use python test_phaseN"):
        watch(load_course(), "1.4", Console(file=open(os.devnull, "w")))  # noqa: SIM115
    assert capfd.readouterr() == ("", "")


def test_no_fork_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_obstacle.cache_clear()
    monkeypatch.delattr(os, "fork")
    assert fork_problem() == "this system has no fork"
    fork_obstacle.cache_clear()


@pytest.mark.parametrize("name", ["lo", "lo0"])
def test_loopback_is_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cards = [(1, "gif0"), (2, name), (3, "lo00"), (4, "en0")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: cards)
    assert system.loopback() == name


def test_no_two_files_differ_in_capitals_only() -> None:
    """Usual file systems of macOS and Windows hold only one of them."""
    command = ["git", "ls-files"]
    listing = subprocess.run(command, cwd=root(), capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a clone")
    files = [name.lower() for name in listing.stdout.splitlines()]
    assert len(files) > 100
    assert len(files) == len(set(files))
