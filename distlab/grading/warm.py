"""Grade many implementations by the same checks: one process collects the checks, and waits.

pytest takes longer to start, to collect and to end than most checks take to fail. A ``WarmGrader``
pays that once per phase. Each grading is forked from the waiting process, so nothing of a run stays
there.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Sequence
from typing import NoReturn, TextIO

import pytest

from ..course.catalogue import load_course
from ..host.processes import children, die_with_parent, end_strays
from ..sandbox import Limits
from ..virtual import reap_children
from .choice import plan
from .implementation import protect_this_process
from .lifetime import contained
from .plugin import pytest_collection_modifyitems
from .run import Carrier, call_pytest, walled
from .session import SESSION, Request, Session
from .verdicts import Report, dumped, loaded


class WarmGrader:
    """``grade(phase, request)`` as ``distlab.grading.grade``, for many requests in a row.

    ``files``: checks that stand for those of the course, with ``plugins`` of pytest; whoever wrote
    them has ``limit`` seconds of its processor to be collected and for each grading, and then there
    is no report.
    """

    def __init__(
        self, files: Sequence[str] = (), plugins: Sequence[object] = (), limit: int = 0
    ) -> None:
        self._files, self._plugins, self._limit = tuple(files), tuple(plugins), limit
        self._collected: tuple[object, ...] = ()
        self._pid = 0
        self._requests: TextIO | None = None
        self._reports: TextIO | None = None

    def __enter__(self) -> WarmGrader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def grade(self, phase: int, request: Request) -> Report:
        """The report on this request; the checks are collected if the last request
        was for another phase."""
        collected = (phase, request.device, request.tier)
        if collected != self._collected:
            self._end()
            self._start(phase, request)
            self._collected = collected
        assert self._requests is not None
        assert self._reports is not None
        fields = vars(request) | {"known": sorted(request.known)}
        fields["sandbox"] = request.sandbox and vars(request.sandbox)
        self._requests.write(json.dumps([phase, fields]) + "\n")
        self._requests.flush()
        text = self._reports.readline().strip()
        if not text:
            raise RuntimeError("the grader's child ended without a report")
        return loaded(text)

    def _start(self, phase: int, request: Request) -> None:
        asked, asking = os.pipe()
        told, telling = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            die_with_parent(parent)
            os.close(asking)
            os.close(told)
            self._wait_for_requests(phase, request, asked, telling)
        os.close(asked)
        os.close(telling)
        self._requests, self._reports = os.fdopen(asking, "w"), os.fdopen(told)

    def _end(self) -> None:
        """The waiting process ends when nobody can ask any more."""
        if self._requests is None or self._reports is None:
            return
        self._requests.close()
        self._reports.close()
        os.waitpid(self._pid, 0)
        self._requests = self._reports = None
        self._collected = ()

    def _wait_for_requests(
        self, phase: int, request: Request, asked: int, telling: int
    ) -> NoReturn:
        """The waiting process: collects all checks, and grades as long as it is asked."""
        try:
            everything = Request(device=request.device, tier=request.tier)
            files = self._files or plan(load_course().phase(phase), everything).files
            carrier = Carrier(Session(everything))
            loop = _Loop(asked, telling, carrier, own=bool(self._files), limit=self._limit)
            _limit_this_process(self._limit)
            with contained():
                call_pytest(files, [carrier, *self._plugins, loop])
        finally:
            os._exit(0)


def _limit_this_process(seconds: int) -> None:
    """End it after so many seconds of its own processor time, or ten times as long asleep: other
    programs that keep the machine busy take nothing of it. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(10 * seconds)


class _Loop:
    """Takes the place of pytest's own loop over the collected checks.

    ``own``: all that was collected counts, wherever it is from.
    """

    def __init__(
        self, asked: int, telling: int, carrier: Carrier, *, own: bool, limit: int
    ) -> None:
        self.asked, self.telling, self.carrier = asked, telling, carrier
        self.own, self.limit = own, limit

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _limit_this_process(0)
        own, parent = children(), os.getpid()
        with os.fdopen(self.asked) as requests:
            for line in requests:
                pid = os.fork()
                if pid == 0:
                    die_with_parent(parent)
                    self._grade(session, line)
                os.waitpid(pid, 0)
                end_strays(own)
                os.write(self.telling, b"\n")
        return True

    def _grade(self, session: pytest.Session, line: str) -> NoReturn:
        """One grading, in a process of its own."""
        try:
            _limit_this_process(self.limit)
            protect_this_process()
            phase, fields = json.loads(line)
            fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
            fields["sandbox"] = fields["sandbox"] and Limits(**fields["sandbox"])
            request = Request(**fields | {"known": frozenset(fields["known"])})
            chosen = plan(load_course().phase(phase), request)
            state = session.config.stash[SESSION] = chosen.session()
            items = [i for i in session.items if self.own or str(i.path) in chosen.files]
            pytest_collection_modifyitems(session.config, items)
            with walled(state):
                for item, following in zip(items, [*items[1:], None], strict=False):
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            text = dumped(chosen.report(state, self.carrier.problems)).encode()
            with os.fdopen(self.telling, "wb") as reports:
                reports.write(text)
        except BaseException:
            traceback.print_exc()
        finally:
            reap_children()
            os._exit(0)
