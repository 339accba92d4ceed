"""Run the grader: from the command line (``main``) and from other code (``grade``)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from .. import sandbox
from ..course.catalogue import Phase, root
from ..host.processes import (
    become_subreaper,
    children,
    die_with_parent,
    end_strays,
    forget_descriptors,
    not_for_children,
    terminable,
)
from ..host.system import fork_obstacle
from . import implementation
from .choice import plan
from .lifetime import contained
from .live import View
from .session import SESSION, Request, Session
from .side_by_side import SideBySide
from .sources import phase_of
from .verdicts import Report, dumped, loaded


class Carrier:
    """Hands the session to the pytest plugin before its own configuration runs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.problems: list[str] = []
        self.interrupt: BaseException | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SESSION] = self.session
        config.option.tbstyle = "line"  # the plugin writes the failures; tracebacks cost time

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(str(report.longrepr).strip().splitlines()[-1])

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not isinstance(excinfo.value, pytest.Session.Interrupted):  # left by a failed collection
            self.interrupt = excinfo.value


def call_pytest(files: Iterable[str], plugins: list[object], *options: str) -> None:
    """pytest on these check files, silently and without the parts that a grader does not use.

    To be called within ``contained``.
    """
    arguments = [
        *files,
        *("-p", "no:terminal", "-p", "no:cacheprovider", "-p", "distlab.grading.plugin"),
        *("-c", str(root() / "pyproject.toml"), "--rootdir", str(root()), "-o", "addopts="),
        "--assert=plain",  # checks explain failures themselves
        *("-p", "no:unraisableexception", "-p", "no:threadexception", "-p", "no:logging"),
        *options,
    ]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins cost time
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):  # a person's own habits with pytest
        os.environ.pop(name, None)
    gc.freeze()  # torch is no garbage: a search through it takes half a second each time
    pytest.main(arguments, plugins=plugins)
    gc.unfreeze()


@contextlib.contextmanager
def walled(session: Session) -> Iterator[None]:
    """Inside, ranks run in a sandbox if the request asks for one. It shares the grader's
    temporary files. Raises ValueError if no sandbox can be made here, or if the submission
    can't be put into one."""
    limits = session.request.sandbox
    if limits is None:
        yield
        return
    impl = session.request.impl
    named = {"solutions": root() / "solutions", "templates": root()}.get(impl, Path(impl))
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        place = place_for(named, limits, [implementation.__name__], Path(folder))
        try:
            with place as session.place:
                tempfile.tempdir = folder
                yield
        finally:
            tempfile.tempdir = before


def place_for(
    submission: Path, limits: sandbox.Limits, modules: Sequence[str], shared: Path
) -> sandbox.Sandbox:
    """A sandbox within these limits; ValueError if none can be made here."""
    why = sandbox.container.obstacle(root()) if limits.container else sandbox.obstacle()
    if why:
        raise ValueError(f"no sandbox can be made here: {why}")
    kind = sandbox.Container if limits.container else sandbox.Sandbox
    return kind(root(), submission, limits, modules, shared)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, what libraries print to the standard streams goes nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    not_for_children.extend(kept)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    try:
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)
            not_for_children.remove(before)


def run_session(
    phase: Phase,
    request: Request,
    keyword: str = "",
    junitxml: str = "",
    view: View | None = None,
) -> Report:
    """Grade in this process: pytest on the phase's check files; returns the report.

    Only ``view`` prints, as checks end.
    """
    chosen = plan(phase, request)
    carrier = Carrier(chosen.session(view))
    options = [*(("-k", keyword) if keyword else ())]
    options += [f"--junitxml={junitxml}"] if junitxml else []
    plugins: list[object] = [carrier]
    with contained(), walled(carrier.session), contextlib.ExitStack() as stack:
        if request.jobs > 1 and not request.sandbox and not fork_obstacle():
            stack.enter_context(_silent())
            options += ["--capture=sys"]  # several processes can't share a file of output
            plugins += [SideBySide(request.jobs)]
        call_pytest(chosen.files, plugins, *options)
    if carrier.interrupt is not None:
        raise carrier.interrupt
    return chosen.report(carrier.session, carrier.problems, whole=not keyword)


def grade(phase: int, request: Request) -> Report:
    """Grade in a forked child, so that nothing of the run stays in this process."""
    chosen = phase_of(phase)
    reading, writing = os.pipe()
    become_subreaper()
    before, parent = children(), os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        status = 1
        try:
            not_for_children.append(writing)
            forget_descriptors({writing})
            with terminable():
                die_with_parent(parent, signal.SIGTERM)
                report = run_session(chosen, request)
            with os.fdopen(writing, "w") as pipe:
                pipe.write(dumped(report))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    end_strays(before)  # if the child was killed
    if not text:
        raise RuntimeError("the grader's child ended without a report")
    return loaded(text)
