"""pytest plugin: verdicts on exercises, notebooks and simulations that are known already.

A check of a solution on virtual ranks or gloo, and a test marked ``verdict``, give the same result
as long as all that they rest on is the same (``digests.py``). ``--verdicts record`` leaves out
tests whose subject has a verdict in the committed record, except for a fixed sample. ``--verdicts
write`` runs all others, and records a subject as soon as all its tests have passed. Without the
option all tests run.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from distlab.course.catalogue import root
from tests import suite
from tests.verdicts import record
from tests.verdicts.digests import WITH_SUBJECTS, Verdict, verdicts
from tests.verdicts.opened import Opened, sources_of
from tests.verdicts.sources import IN_PARTS, Sources

RECORD = root() / "tests" / "verdicts" / "record.json"
TIERS = ("virtual", "nccl", "gloo")  # where the same solution gives the same result
EVERY = 50  # of the tests that are left out one in so many runs; of wrong implementations, others


def pytest_addoption(parser: pytest.Parser) -> None:
    """How the record is used."""
    choices, words = ("all", "record", "write"), "use or write the record of verdicts"
    parser.addoption("--verdicts", choices=choices, default="all", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """The first process knows which verdicts are known; workers are told."""
    if config.getoption("verdicts") != "all" and config.getoption("impl") != "solutions":
        raise pytest.UsageError("--verdicts are those of the solutions: leave --impl out")
    in_part = config.getoption("one_each") or any("::" in name for name in config.args)
    if config.getoption("verdicts") == "write" and in_part:
        raise pytest.UsageError("a verdict is that of all tests of a file: name files")
    if config.getoption("verdicts") != "all":
        kind = Worker if hasattr(config, "workerinput") else Controller
        config.pluginmanager.register(kind(config), "verdicts")


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test; none if it has none."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return params


def subject_of(item: pytest.Item) -> str:
    """The exercise, the notebook or the file that a test with a verdict is about; empty for other
    tests."""
    params = params_of(item)
    if item.get_closest_marker("verdict") is None:
        check = item.get_closest_marker("exercise")
        return check.args[0] if check is not None and params.get("tier") in TIERS else ""
    if item.path.relative_to(root()).as_posix() not in WITH_SUBJECTS:
        return item.path.stem
    if "path" in params:
        return params["path"].stem
    named = params["mutant"].exercise if "mutant" in params else params["exercise"]
    return named if isinstance(named, str) else named.id


def key_of(item: pytest.Item) -> record.Key:
    """The place of a marked test's verdict in the record."""
    return item.path.relative_to(root()).as_posix(), subject_of(item)


def sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests with a known verdict those that run nevertheless, the same ones every time."""
    mutants = [item for item in items if "mutant" in params_of(item)]
    others = [item for item in items if "mutant" not in params_of(item)]
    drawn = [i for i in others if zlib.crc32(i.nodeid.encode()) % EVERY == 0]
    first = {item.path: item for item in reversed(others)}
    return [*suite.one_each(mutants), *first.values(), *drawn]


def chosen(items: list[pytest.Item], known: set[record.Key], *, writes: bool) -> list[pytest.Item]:
    """The tests that run, in their order."""
    marked = [item for item in items if subject_of(item)]
    left_out = {item for item in marked if key_of(item) in known}
    if writes:
        left_out |= {*items} - {*marked}
    else:
        left_out -= {*sample([item for item in marked if item in left_out])}
    return [item for item in items if item not in left_out]


class Worker:
    """A process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.writes = config.getoption("verdicts") == "write"
        self.left_out = self.asked = 0  # tests, verdicts
        told = getattr(config, "workerinput", {}).get("verdicts", ())
        self.known = {(file, subject) for file, subject in told}
        self.opened: Opened | None = None

    @pytest.hookimpl(tryfirst=True)  # before -k: a verdict is of all its tests
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Tests that are left out cost nothing; those of a verdict say how many there are."""
        total = Counter(key_of(item) for item in items if subject_of(item))
        kept = chosen(items, self.known, writes=self.writes)
        gone = {*items} - {*kept}
        self.left_out = sum(bool(subject_of(item)) for item in gone)
        self.asked = len({key_of(item) for item in kept if subject_of(item)})
        items[:] = kept
        for item in kept:
            if subject_of(item):
                item.user_properties.append(("verdict", [*key_of(item), total[key_of(item)]]))
        config.hook.pytest_deselected(items=[*gone])
        if hasattr(config, "workeroutput"):
            config.workeroutput["verdicts"] = [self.left_out, self.asked]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Look at files from here on."""
        if self.writes:
            self.opened = self.opened or Opened(root())
            self.opened.take()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Say what this test has opened; a grading opens files in processes of its own."""
        try:
            return (yield)
        finally:
            if self.opened:
                names = sorted(map(str, sources_of(self.opened.take())))
                item.user_properties.append(("opened", names))


class Controller(Worker):
    """The first process: it reads and writes the record, and says at the end what rests on it."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__(config)
        self.there = record.valid(RECORD)
        self.sources = Sources(root())
        if self.there or self.writes:
            self.now = {v.key: (v, v.digest(self.sources)) for v in verdicts(self.sources)}
        else:
            self.now = dict[record.Key, tuple[Verdict, str]]()
        self.known = {key for key, (_, digest) in self.now.items() if self.there.get(key) == digest}
        self.passed, self.bad = Counter[record.Key](), set[record.Key]()
        self.written, self.unknown = 0, set[str]()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """What workers are told."""
        node.workerinput["verdicts"] = sorted(self.known)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """What a worker tells."""
        told = getattr(node, "workeroutput", {}).get("verdicts")
        self.left_out, self.asked = told or (self.left_out, self.asked)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A verdict is recorded at once, so an interrupted run keeps what it has found."""
        told = dict(report.user_properties).get("verdict")
        if not told or not self.writes:
            return
        key, total = (told[0], told[1]), told[2]
        opened = {Path(name) for name in dict(report.user_properties).get("opened", ())}
        if not report.passed or self._left_out_of(self.now[key][0], opened):
            self.bad.add(key)
        self.passed[key] += report.when == "teardown"
        if self.passed[key] == total and key not in self.bad:
            self._record(key)

    def _left_out_of(self, verdict: Verdict, opened: set[Path]) -> set[Path]:
        """The files that a test has opened, and that the digest of its verdict leaves out."""
        if verdict.subject != Path(verdict.file).stem:  # a grading's are in other processes
            return set()
        own = {root() / name for name in IN_PARTS} | {*Path(__file__).parent.glob("*.py")}
        found = opened - verdict.paths - own
        self.unknown |= {path.relative_to(root()).as_posix() for path in found}
        return found

    def _record(self, key: record.Key) -> None:
        verdict, digest = self.now[key]
        if not self.sources.unchanged(verdict.paths):
            self.bad.add(key)
            return
        kept = {k: h for k, h in record.valid(RECORD).items() if k in self.now}
        record.write(RECORD, kept | {key: digest})
        self.written += 1

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """If everything is known, there is nothing to run, and nothing wrong."""
        if self.writes and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """One line."""
        name = RECORD.relative_to(root())
        if self.writes:
            left = self.asked - self.written
            names = ", ".join(f"{subject} of {file}" for file, subject in sorted(self.bad))
            why = f". A test did not pass, or a file has changed: {names}" if names else ""
            if self.unknown:
                why += f". Opened, but in no digest: {', '.join(sorted(self.unknown))}"
            line = f"{self.written:,} written into {name}, {left:,} left{why}"
        elif self.there:
            line = (
                f"{self.left_out:,} tests were left out: {name} has their results, and nothing "
                "that these rest on has changed. All tests: make test-all"
            )
        else:
            line = f"all were taken: {name} is of another torch, Python or system"
        terminalreporter.write_line(f"verdicts: {line}")
