"""A sandbox: a place where ranks of untrusted code run, with the same contract as this machine's
own ranks.

The grader stays outside: checks, expected values and verdicts. A request goes in, with the body of
a check and everything that the body uses; results come out as plain data. If an agent dies, hangs
or sends a bad answer, its run fails, and the next run gets a new agent.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import load_course
from ..ranks.results import RankFailure, RankResults
from ..virtual import VirtualResults
from . import files, wire
from .limits import Limits
from .process import Agent, Lost
from .request import imported, pickled
from .walls import NAMES

MORE_TIME = 30.0  # seconds on the program's clock that a run may take above its own limit
LARGEST_FILE = 4 << 20  # bytes of a learner's file
Body = Callable[..., Any]


class Sandbox:
    """``run_ranks`` and ``run_worlds`` for the code of one ``submission``.

    ``submission``: a folder with the course's phase folders, or with the files of one phase. Their
    contents at the time when the sandbox is made are the code that runs. ``modules``: imported
    before the first run. ``shared``: a folder of the grader. Each run finds its files at the same
    path, and its changes to them stay. Raises ValueError if a file of the submission is no regular
    file, or too large.
    """

    def __init__(
        self,
        course: Path,
        submission: Path,
        limits: Limits | None = None,
        modules: Sequence[str] = (),
        shared: Path | None = None,
    ) -> None:
        self.course, self.submission = course.resolve(), submission.resolve()
        self.limits, self.modules = limits or Limits(), tuple(modules)
        self.shared = None if shared is None else shared.resolve()
        self._agent: Agent | None = None

    def __enter__(self) -> Sandbox:
        self._copy = tempfile.mkdtemp(prefix="distlab-sandbox-")
        try:
            self._shown = [*self._copies(Path(self._copy)), *_names(Path(self._copy))]
            self._agent = self._new()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        shutil.rmtree(self._copy, ignore_errors=True)

    def run_ranks(self, body: Body, world_size: int, *args: Any, **options: Any) -> RankResults:
        """``ranks.run_ranks``, inside."""
        return self._ask("ranks", body, (world_size,), args, options)[0]

    def run_worlds(
        self, body: Body, world_sizes: Sequence[int], *args: Any, **options: Any
    ) -> list[VirtualResults]:
        """``virtual.run_worlds``, inside."""
        found = self._ask("worlds", body, tuple(world_sizes), args, options)
        return [each for each in found if isinstance(each, VirtualResults)]

    # -- what is shown ----------------------------------------------------------------------------
    def _copies(self, to: Path) -> Iterator[tuple[Path, Path]]:
        """Copies of the submission's files, which nobody changes, and their paths inside."""
        names = [phase.folder for phase in load_course(self.course).phases]
        phases = [self.submission / name for name in names if (self.submission / name).is_dir()]
        for number, folder in enumerate(phases or [self.submission]):
            copy = to / str(number)
            copy.mkdir(mode=0o755)
            for path in sorted(folder.glob("*.py")):
                (copy / path.name).write_bytes(_content(path, self.submission))
                (copy / path.name).chmod(0o644)
            copy.chmod(0o755)
            yield copy, folder

    # -- what is asked ----------------------------------------------------------------------------
    def _new(self) -> Agent:
        """Start an agent, which gets ready while the caller does other things."""
        own = [] if self.shared is None else [self.shared]
        return Agent(self.course, self._shown, own, self.limits, self.modules)

    def _end(self) -> None:
        if self._agent is not None:
            self._agent.end()
        self._agent = None

    def _ask(
        self,
        kind: str,
        body: Body,
        sizes: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> list[RankResults]:
        task = imported(body, self.course), kind, body, sizes, args, options
        request = self._files_in() + pickled(task, self.course)
        if self._agent is None:
            self._agent = self._new()
        seconds = min(self.limits.seconds, options.get("timeout", self.limits.seconds))
        try:
            answer = self._agent.answer(request, seconds + MORE_TIME)
        except Lost as lost:
            self._end()
            raise RankFailure(lost.message, kind=lost.kind) from None
        except BaseException:
            self._end()
            raise
        if answer[:1] != b"\1":
            self._end()  # the agent could not tidy up
        try:
            left, answer = wire.parted(answer[1:])
            self._files_out(left)
            return self._reader(options).results(answer, sizes)
        except wire.Unreadable as error:
            self._end()
            message = f"what came out of the sandbox can't be read: {error}"
            raise RankFailure(message, kind="crash") from None

    def _reader(self, options: dict[str, Any]) -> wire.Reader:
        """The reader of answers: learners see lines of their own code, of
        checks and of the toolkit."""
        phases = [f"tests/phase{phase.number}" for phase in load_course(self.course).phases]
        folders = [str(self.course / name) + os.sep for name in (*phases, "given", "distlab")]
        shown = *options.get("learner_files", ()), *folders
        return wire.Reader(shown, self.limits.answer_bytes)

    def _files_in(self) -> bytes:
        """The shared folder, and what lies in it."""
        if self.shared is None:
            return wire.joined(b"", wire.joined(b""))
        there = files.packed(self.shared, self._not_shared())
        return wire.joined(os.fsencode(self.shared), wire.joined(there))

    def _files_out(self, left: bytes) -> None:
        if self.shared is None:
            return
        try:
            files.unpacked(left, self.shared, self._not_shared())
        except Exception as error:
            raise wire.Unreadable(str(error)) from None

    def _not_shared(self) -> set[Path]:
        """The grader's own files in that folder."""
        assert self.shared is not None
        return {Path(self._copy), *self.shared.glob("pytest-of-*")}


def _names(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The files with users, groups and hosts for the inside, and their paths there."""
    for name, text in NAMES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
        yield folder / name, Path("/etc") / name


def _content(path: Path, submission: Path) -> bytes:
    """The contents of a learner's file: it must be a regular file in the
    submission, and not too large."""
    real = path.resolve()
    if not real.is_relative_to(submission):
        raise ValueError(f"{path} is a link that leaves the submission")
    if not real.is_file():
        raise ValueError(f"{path} is no file")
    if real.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE:,} bytes")
    return real.read_bytes()
