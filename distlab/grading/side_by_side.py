"""Grade checks side by side: as many at a time as there are processors to run them.

A check on virtual ranks uses one processor, so two of them take half the time on two. Processes
that are forked from the grader's own run the checks. The grader's process tells them which, and
collects their results. Which checks run at the same time must not show in the report:

- An exercise begins when all exercises that it builds on have ended.
- Its checks on real ranks begin when all of its checks on virtual ranks have ended.
- Results count in the order of the checks, whichever ended first. A check after one that hangs
  counts as not run, also where it had begun.
- Checks on GPUs run alone, in the grader's own process: they would wait for the same GPUs.
"""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from ..course.catalogue import Exercise
from ..host.processes import become_subreaper, die_with_parent, end_strays, not_for_children
from ..host.system import cores
from ..virtual import reap_children
from .implementation import protect_this_process
from .plugin import exercise_of, tier_of, title_of
from .session import SESSION, Session
from .verdicts import CheckResult, NotRun

MOST = 4  # checks at a time: each may have several ranks, and needs some 300 MB


def processors() -> int:
    """The number of checks to run at a time on this machine."""
    return min(cores(), MOST)


@dataclass(frozen=True)
class Outcome:
    """What a worker sends of a check: its result, and pytest's reports as plain data."""

    check: CheckResult
    reports: tuple[dict[str, Any], ...] = ()
    not_run: NotRun | None = None
    references: dict[str, str] = field(default_factory=dict)


@dataclass
class Worker:
    """A process that runs checks, and the one that it runs now."""

    pid: int
    pipe: Connection
    item: pytest.Item | None = None


class SideBySide:
    """Takes the place of pytest's own loop over the checks. ``jobs``: checks at a time."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.items: list[pytest.Item] = []
        self.waiting: list[pytest.Item] = []
        self.workers: list[Worker] = []
        self.due: dict[str, list[pytest.Item]] = defaultdict(list)  # by exercise, in their order
        self.open: Counter[tuple[str, str]] = Counter()  # those by exercise and tier
        self.arrived: dict[pytest.Item, Outcome | None] = {}  # None: to be run in this process
        self.before: dict[str, set[str]] = {}  # exercises on which each exercise builds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all checks."""
        if session.testsfailed:
            return None  # a file could not be loaded: pytest's own loop ends the session
        self.config, self.state = session.config, session.config.stash[SESSION]
        self.items, self.waiting = session.items, list(session.items)
        for item in session.items:
            exercise = _exercise(item)
            self.due[exercise.id].append(item)
            self.open[exercise.id, tier_of(item)] += 1
            if exercise.id not in self.before:
                self.before[exercise.id] = self.state.course.prerequisites([exercise.id])
        while self.waiting or self._busy():
            following = self._next() if len(self._busy()) < self.jobs else None
            if following is None:
                self._collect()
            else:
                self._begin(following)
        for worker in list(self.workers):
            self._end(worker)
        return True

    def _busy(self) -> list[Worker]:
        return [w for w in self.workers if w.item is not None]

    def _next(self) -> pytest.Item | None:
        """The first check that may begin now."""
        for item in self.waiting:
            exercise, tier = _exercise(item).id, tier_of(item)
            virtual_first = tier != "virtual" and self.open[exercise, "virtual"]
            if virtual_first or any(self.due[each] for each in self.before[exercise]):
                continue
            return None if tier == "cuda" and self._busy() else item
        return None

    def _begin(self, item: pytest.Item) -> None:
        self.waiting.remove(item)
        own, tier, view = _exercise(item), tier_of(item), self.state.view
        if tier == "cuda" or self._obstacle(own, tier):
            self.arrived[item] = None
            self._deliver(own)
            return
        if view is not None:
            view.begins(own, title_of(item), tier)
        worker = next((w for w in self.workers if w.item is None), None) or self._new_worker()
        worker.item = item
        concerned = {own.id, *self.before[own.id]}
        results = {k: v for k, v in self.state.results.items() if k in concerned}
        worker.pipe.send((self.items.index(item), results, self.state.references))

    def _obstacle(self, exercise: Exercise, tier: str) -> bool:
        """Whether the exercise's checks can't or need not run."""
        try:
            self.state.prepare(exercise, tier)
        except NotRun:
            return True
        return False

    def _new_worker(self) -> Worker:
        ours, theirs = Pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _work(self.items, self.config, self.state, parent, theirs)
        theirs.close()
        not_for_children.append(ours.fileno())
        self.workers.append(Worker(pid, ours))
        return self.workers[-1]

    def _collect(self) -> None:
        """Wait for results of workers."""
        busy = {w.pipe: w for w in self._busy()}
        for pipe in wait(list(busy)):
            worker = busy[pipe]  # type: ignore[index]
            assert worker.item is not None
            try:
                outcome = worker.pipe.recv()
            except (EOFError, OSError):
                outcome = self._crash(worker, worker.item)
            self.arrived[worker.item] = outcome
            exercise, worker.item = _exercise(worker.item), None
            self._deliver(exercise)

    def _crash(self, worker: Worker, item: pytest.Item) -> Outcome:
        """A worker ended before its check did."""
        code = self._end(worker)
        name = signal.Signals(-code).name if code < 0 else ""
        how = f"was ended by {name}" if name else f"ended with status {code}"
        message = f"the process that ran this check {how}, without a verdict"
        check = CheckResult(item.name, "crash", message, "crash", title=title_of(item))
        check.tier = tier_of(item)
        return Outcome(check)

    def _end(self, worker: Worker) -> int:
        """End a worker, which waits for a check or has ended already; returns its exit code."""
        self.workers.remove(worker)
        not_for_children.remove(worker.pipe.fileno())
        worker.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _deliver(self, exercise: Exercise) -> None:
        """Record the exercise's results that have no earlier one left to wait for."""
        due = self.due[exercise.id]
        while due and due[0] in self.arrived:
            item = due.pop(0)
            self.open[exercise.id, tier_of(item)] -= 1
            outcome = self.arrived.pop(item)
            if outcome is None or self.state.not_run.get(exercise.id) is not None:
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                continue
            self.state.record(exercise, outcome.check)
            self.state.references.update(outcome.references)
            if self.state.not_run.get(exercise.id) is None:
                self.state.not_run[exercise.id] = outcome.not_run
            for data in outcome.reports:
                made = self.config.hook.pytest_report_from_serializable
                report = made(config=self.config, data=data)
                item.ihook.pytest_runtest_logreport(report=report)


def _exercise(item: pytest.Item) -> Exercise:
    found = exercise_of(item)
    assert found is not None, f"{item.nodeid} is no check of an exercise"
    return found


def _work(
    items: list[pytest.Item], config: pytest.Config, state: Session, parent: int, pipe: Connection
) -> NoReturn:
    """A worker: run the checks that the grader names, and send each result."""
    status = 1
    try:
        die_with_parent(parent)
        become_subreaper()
        protect_this_process()
        not_for_children.append(pipe.fileno())
        state.view = None
        reports = _Reports(config)
        config.pluginmanager.register(reports)
        while True:
            number, results, state.references = pipe.recv()
            state.results |= results
            pipe.send(_outcome(items[number], config, state, reports))
    except EOFError:
        status = 0
    finally:
        reap_children()
        end_strays(())
        os._exit(status)


def _outcome(
    item: pytest.Item, config: pytest.Config, state: Session, reports: _Reports
) -> Outcome:
    exercise = _exercise(item)
    state.not_run[exercise.id] = None
    had = len(state.result(exercise).checks)
    config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    (check,) = state.result(exercise).checks[had:]
    told = state.not_run[exercise.id], state.references
    return Outcome(check, tuple(reports.taken()), *told)


class _Reports:
    """pytest's reports on a check, as plain data."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.found: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        made = self.config.hook.pytest_report_to_serializable
        self.found.append(made(config=self.config, report=report))

    def taken(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        found, self.found = self.found, []
        return found
