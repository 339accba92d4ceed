"""pytest plugin for the project's own tests on several workers: their order and who runs them.

`make test` has two workers more than processors. One of them takes what mostly waits (a SLURM
cluster, nodes behind slow links, restarts), and the others have the processors meanwhile. Long
tests come first and wrong implementations, which are many and short, come last: no worker is left
with a long test at the end. `make check` takes one wrong implementation per exercise
(``--one-each``).
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from xdist import is_xdist_worker
from xdist.scheduler import LoadScopeScheduling

from distlab.course.catalogue import root

# minutes of waiting for time-outs, links and restarts, in one chain
WAITS = (
    "tests/deployment/test_slurm.py",
    "tests/distlab/test_train_two_nodes.py",
    "tests/distlab/test_cluster_run.py",
    "tests/phase4/test_train_elastic.py",
    "tests/phase4/test_imagenet_trainer_resume.py",
    "tests/phase4/test_joining.py",
    "tests/phase4/test_recovery.py",
    "tests/phase4/test_watchdog.py",
    "tests/phase4/test_checkpoint_folder_kills.py",
    "tests/phase4/test_fault_tolerance_kills.py",
)
# single tests of other files that wait as well, by the name in their brackets: watchdogs that have
# to find a rank hung, or not to
WAITING = (
    "gossip-4.5",
    "joining-answers-too-much",
    "joining-old-answers",
    "joining-old-call",
    "locked_beats-4.5",
    "watchdog-all-blamed",
    "watchdog-disk-ends-the-watch",
    "watchdog-failure-not-told",
    "watchdog-no-stack",
    "watchdog-raises-in-the-thread",
    "watchdog-silent-report",
    "watchdog-slow-is-hung",
    "watchdog-stopped-left-alone",
    "watchdog-thread-beats",
)
# 5 to 25 seconds of the processor's time in single tests
LONG = (
    "tests/notebooks/*.py",
    "tests/phase4/test_imagenet_trainer*.py",
    "tests/distlab/test_parallel_gpt.py",
    "tests/distlab/test_references.py",
    "tests/deployment/test_terraform.py",
    "tests/alternatives/*.py",
    "tests/site/*.py",
    "tests/distlab/*.py",
)
SHORT = ("tests/mutants/*.py",)


def waits(nodeid: str) -> bool:
    """Whether this one test of its file waits."""
    return nodeid.endswith("]") and nodeid[:-1].partition("[")[2] in WAITING


def place(path: Path) -> int:
    """When the tests of a file have their turn: 0 comes first."""
    name = path.relative_to(root()) if path.is_relative_to(root()) else path
    kinds = ((0, WAITS), (1, LONG), (3, SHORT))
    return next((n for n, patterns in kinds if any(map(name.match, patterns))), 2)


@functools.cache
def group(path: Path) -> str:
    """The tests of a group go to one worker: those that share a run, and those that wait.

    A warm grader is shared as well, but one per worker costs less than to leave the others idle.
    """
    if place(path) == 0:
        return "waits"
    text = path.read_text(encoding="utf-8")
    shared = r'scope="(module|session)"|^from tests\.browser import'
    shares = re.search(shared, text, re.M) and "WarmGrader" not in text
    return path.stem if shares else ""


class Groups(LoadScopeScheduling):
    """Hands out whole groups, and all other tests one by one."""

    def _split_scope(self, nodeid: str) -> str:
        if waits(nodeid):
            return "waits"
        return group(root() / nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    """Who runs what, in the order of the tests (with ``--no-loadscope-reorder``)."""
    return Groups(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make check` leaves out."""
    parser.addoption("--one-each", action="store_true", help="one wrong program per exercise")


def one_each(items: list[pytest.Item]) -> list[pytest.Item]:
    """Without all wrong implementations of an exercise but the first."""
    seen: set[str] = set()
    kept = []
    for item in items:
        mutant = item.callspec.params.get("mutant") if hasattr(item, "callspec") else None
        if mutant is None or mutant.exercise not in seen:
            kept.append(item)
        if mutant is not None:
            seen.add(mutant.exercise)
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that tests are made of is garbage: looking for some is a quarter of this work."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Later collections, of this process and of what it forks, leave out what is there now."""
    gc.freeze()
    # a library tells at the end of a process which of its objects are left: frozen ones are
    atexit.register(_leave if is_xdist_worker(session) else gc.unfreeze)


def _leave() -> None:
    """A worker that is done ends at once: to take apart all that torch made takes 2 seconds."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    os._exit(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Order at the end, whoever ordered before."""
    if config.getoption("one_each"):
        items[:] = one_each(items)
    yield
    last = place(root() / "tests" / "mutants" / "test_mutants.py")

    def turn(pair: tuple[int, pytest.Item]) -> tuple[int, int]:
        number, item = pair
        kind = 0 if waits(item.nodeid) else place(item.path)
        # the wrong implementations backwards: those of phase 4 take longest
        return kind, -number if kind == last else number

    items[:] = [item for _, item in sorted(enumerate(items), key=turn)]


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors: one runs what waits, one uses what the others leave."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return (len(usable) or os.cpu_count() or 1) + 2
