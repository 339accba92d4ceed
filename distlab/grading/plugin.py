"""pytest plugin: the implementation under test as a fixture, and a verdict for every check.

``pytest tests/phase1`` grades the solutions; ``--impl templates`` or ``--impl PATH`` another
implementation. ``distlab.grading.main`` drives it for ``test_phase1.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ..course.catalogue import Exercise
from ..host.forking import prepare_to_fork
from ..netcluster import Network, cluster_obstacle
from ..observe.failure import CheckFailed
from ..ranks import zygote
from ..reference.compare import best
from .definitions import definition
from .implementation import Implementation, protect_this_process
from .judge import verdict_of
from .runners import Runner
from .session import SESSION, Request, Session
from .verdicts import TIERS, CheckResult, NotRun

KEPT_OUTPUT = 4096  # characters of what a rank printed
TROUBLE = ("fail", "error", "hang", "crash")
MANY = 30  # from so many checks on it pays to prepare for forks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the grader."""
    group = parser.getgroup("distlab", "grading of the course's exercises")
    group.addoption("--impl", default="solutions", help="solutions, templates or a folder")
    group.addoption("--device", default="auto", choices=["auto", "cpu", "cuda"])
    group.addoption("--tier", default="", help=f"run this tier only: {', '.join(TIERS)}")
    group.addoption("--seed", type=int, default=None, help="seed of inputs and delays")


def pytest_configure(config: pytest.Config) -> None:
    """Make the session's state, unless the caller brought one."""
    config.addinivalue_line("markers", "exercise(id, tiers): a check of this exercise")
    protect_this_process()
    torch.set_num_threads(1)  # a process forked from this one would wait for its lost threads
    if SESSION not in config.stash:
        chosen = config.option
        request = Request(
            impl=chosen.impl,
            device=chosen.device,
            seed=chosen.seed,
            tier=chosen.tier,
            # the checks may be split over processes, and none of them sees every exercise pass
            trusted=chosen.impl == "solutions",
        )
        config.stash[SESSION] = Session(request)


def pytest_report_header(config: pytest.Config) -> str:
    """Name the implementation and the seed, so that a failure can be repeated."""
    session = config.stash[SESSION]
    return f"implementation: {session.request.impl}, --seed {session.seed}"


def exercise_of(item: pytest.Item) -> Exercise | None:
    """The exercise that a test is a check of."""
    marker = item.get_closest_marker("exercise")
    if marker is None:
        return None
    return item.config.stash[SESSION].course.exercise(marker.args[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A check runs once on each of its tiers."""
    marker = metafunc.definition.get_closest_marker("exercise")
    if marker is None or "run" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.stash[SESSION].tiers
    declared = marker.kwargs["tiers"]
    tiers = [tier for tier in declared if tier in wanted]
    asked = marker.kwargs["nccl"] or len(wanted) == 1
    if "nccl" in wanted and asked and {"virtual", "cuda"} <= {*declared}:
        tiers.append("nccl")
    metafunc.parametrize("tier", tiers or ["none"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort exercises in the order of the course, virtual ranks first, and keep only the
    checks that were asked for."""
    session = config.stash[SESSION]
    wanted = session.request
    order = {e.id: index for index, e in enumerate(session.course.exercises)}

    def position(item: pytest.Item) -> tuple[int, int, int]:
        exercise = exercise_of(item)
        if exercise is None:
            return -1, 0, 0
        check, first = item.name.split("[")[0], wanted.first
        early = first.index(check) if check in first else len(first)
        return order[exercise.id], early, TIERS.index(tier_of(item))

    items[:] = sorted((i for i in items if not i.name.endswith("[none]")), key=position)
    if wanted.exercises or wanted.checks:
        items[:] = [
            item
            for item in items
            if (exercise := exercise_of(item))
            and (not wanted.exercises or exercise.id in wanted.exercises)
            and (not wanted.checks or item.name.split("[")[0] in wanted.checks)
        ]
    if wanted.once:
        items[:] = [item for item in items if tier_of(item) == _first_tier(item)]


def _first_tier(item: pytest.Item) -> str:
    """The first tier that its check declares, if it runs ranks."""
    marker = item.get_closest_marker("exercise")
    runs = marker is not None and "run" in getattr(item, "fixturenames", ())
    return marker.kwargs["tiers"][0] if marker is not None and runs else tier_of(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for many forks; for a few checks it would not pay. No check has computed anything
    yet, so ranks of GPUs can still be forked from this process."""
    view = session.config.stash[SESSION].view
    if view is not None:
        view.checks.update(e.id for item in session.items if (e := exercise_of(item)))
    if len(session.items) >= MANY:
        prepare_to_fork()
    if any(tier_of(item) == "cuda" for item in session.items):
        zygote.prepare()


def pytest_sessionfinish() -> None:
    """Leave no process behind."""
    zygote.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Don't run checks of an exercise that is blank, broken or blocked."""
    exercise = exercise_of(item)
    if exercise is None:
        return
    session = item.config.stash[SESSION]
    if session.view is not None:
        session.view.begins(exercise, title_of(item), tier_of(item))
    session.prepare(exercise, tier_of(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Turn the outcome into a verdict; a check that could not run is never a pass."""
    report = yield
    exercise = exercise_of(item)
    if exercise is None or call.when == "teardown" or (call.when == "setup" and not call.excinfo):
        return report
    error = call.excinfo.value if call.excinfo else None
    check = verdict_of(error)
    if check.verdict in TROUBLE:
        gone = item.config.stash[SESSION].deleted(exercise, check.message)
        check = check if gone is None else verdict_of(gone)
    check.name = item.name
    check.tier = tier_of(item)
    check.title = title_of(item)
    check.seconds = call.duration
    runner = getattr(item, "funcargs", {}).get("run")
    if check.verdict != "pass" and not check.printed and isinstance(runner, Runner):
        check.printed = dict(enumerate(runner.printed))  # the check judged what ranks returned
    check.printed = {rank: text[-KEPT_OUTPUT:] for rank, text in check.printed.items()}
    if item.config.stash[SESSION].hides(exercise):
        check.printed = {}
    if check.verdict in ("fail", "hang") and not check.line:
        source = inspect.getsource(item.function)  # type: ignore[attr-defined]
        file = item.path.read_text(encoding="utf-8")
        own = item.config.stash[SESSION].source(exercise).path(exercise.file)
        check.line = definition(own, exercise, source, file)
    item.config.stash[SESSION].record(exercise, check)
    if error is not None:
        _tell(report, item, check)
    return report


def _tell(report: pytest.TestReport, item: pytest.Item, check: CheckResult) -> None:
    """The outcome that other readers get (JUnit's XML): needs and blocked are
    skipped, blank is a failure."""
    said = f"{check.verdict}: {check.message}"
    if check.verdict in ("needs", "blocked"):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: {said}")
        return
    if check.verdict == "blank":
        report.when = "call"  # JUnit calls a failure before the call an error
    report.longrepr = said + (f"\n  your line: {check.line}" if check.line else "")


def title_of(item: pytest.Item) -> str:
    """The first line of the check's docstring, which its reports name."""
    doc = inspect.getdoc(getattr(item, "function", None)) or ""
    return doc.splitlines()[0].rstrip(".") if doc else re.sub("_", " ", item.name)


def tier_of(item: pytest.Item) -> str:
    """The tier that a check runs on."""
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("tier") if callspec else None
    return found if found in TIERS else "gloo"


@pytest.fixture
def tier() -> str:
    """``virtual``, ``gloo``, ``nccl`` or ``cuda``."""
    return "gloo"


@pytest.fixture
def cases(request: pytest.FixtureRequest, tier: str) -> Callable[..., tuple[Any, ...]]:
    """``cases(3, 1, 2, 4, 5)``: the cases of a check, the most telling one first.

    All of them run on virtual ranks, which are cheap. Only the first runs on real ranks, and by
    NCCL's rules where nobody has asked for these.
    """
    asked = request.config.stash[SESSION].request.tier
    return lambda *every: every if tier == "virtual" or asked == "nccl" else every[:1]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed changes from run to run, is printed, and can be given with ``--seed``."""
    return request.config.stash[SESSION].seed


@pytest.fixture
def impl(request: pytest.FixtureRequest) -> Implementation:
    """The module under test; usable inside the body of ranks only."""
    session = request.config.stash[SESSION]
    exercise = exercise_of(request.node)
    if exercise is None:
        raise NotRun("error", "a check that uses impl must be marked @exercise(…)")
    return session.implementation(exercise)


@pytest.fixture
def run(request: pytest.FixtureRequest, tier: str) -> Runner:
    """``run(body, world_size, *args, timeout=10, …)`` on the check's tier; ``run.worlds``."""
    session = request.config.stash[SESSION]
    exercise = exercise_of(request.node)
    if exercise is None:
        raise NotRun("error", "a check that uses run must be marked @exercise(…)")
    return session.runner(exercise, tier)


@pytest.fixture
def reference(request: pytest.FixtureRequest) -> Callable[[str], tuple[dict[str, Any], str]]:
    """``reference("digits_mlp")``: the recorded run to compare with, and how it was made.

    The report names it.
    """
    used = request.config.stash[SESSION].references

    def take(name: str) -> tuple[dict[str, Any], str]:
        try:
            data, used[name] = best(name)
        except ValueError as error:
            raise CheckFailed(str(error), cause="reference") from None
        return data, used[name]

    return take


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> type[Network]:
    """``with nodes(2, rate="200mbit") as net``, then ``run(body, 4, enter=net.placement(…))``.

    Nodes on this machine, joined by links of that speed (gloo tier only). Where there can be none,
    the verdict is "needs".
    """
    if request.config.stash[SESSION].request.sandbox:
        raise NotRun("needs", "a cluster on this machine (not in a sandbox)")
    obstacle = cluster_obstacle()
    if obstacle is not None:
        raise NotRun("needs", f"a cluster on this machine ({obstacle})")
    return Network
