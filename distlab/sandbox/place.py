"""A sandbox: a place where ranks of untrusted code run, with the contract of this machine's own.

The grader stays outside: checks, expected values and verdicts. A request goes in, with the body of
a check and what it uses; results come out as plain data. An agent that dies, hangs or answers
something else fails the run that it was asked for, and the next run gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import load_course
from ..host.processes import descendants, not_for_children
from ..host.program_clock import EVERY, ProgramClock
from ..ranks.results import RankFailure, RankResults
from ..virtual import VirtualResults
from . import files, wire
from .cgroups import Group
from .filter import open_filter
from .limits import Limits, nobody
from .request import imported, pickled
from .walls import NAMES, PRIVATE, command

START_LIMIT = 120.0  # seconds until an agent has imported torch
MORE_TIME = 30.0  # seconds on the program's clock that a run may take beside its own limit
LARGEST_FILE = 4 << 20  # bytes of a learner's file
# a shell joins its control groups, whose files come before "--", and becomes the program
JOIN = """
while [ "$1" != -- ]; do echo 0 > "$1"; shift; done
shift
exec "$@"
"""
Body = Callable[..., Any]


class Sandbox:
    """``run_ranks`` and ``run_worlds`` for the code of one ``submission``.

    ``submission``: a folder with the course's phase folders, or with the files of one phase; what
    is in them when the sandbox is made is what runs. ``modules``: imported before the first run.
    Raises ValueError if a file of the submission is none, or too large.
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
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False

    def __enter__(self) -> Sandbox:
        self._copy = tempfile.mkdtemp(prefix="distlab-sandbox-")
        try:
            self._shown = [*self._copies(Path(self._copy)), *_names(Path(self._copy))]
            self._start()
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
        """Copies of the submission's files, which nobody changes, and where they are inside."""
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

    # -- the agent --------------------------------------------------------------------------------
    def _start(self) -> None:
        """Start an agent; it gets ready while the caller does other things."""
        ours, theirs = socket.socketpair()
        filter_fd, own = open_filter(), [] if self.shared is None else [self.shared]
        inherited = [theirs.fileno(), *([] if filter_fd is None else [filter_fd])]
        task = {
            "socket": theirs.fileno(),
            "user": nobody(),
            "limits": vars(self.limits),
            "private": [*PRIVATE, *map(str, own)],
            "modules": self.modules,
        }
        walls = command(self.course, self._shown, own, self.limits, filter_fd)
        self._group = Group(self.limits)
        with theirs:
            self._process = subprocess.Popen(
                [
                    "/bin/sh",
                    "-c",
                    JOIN,
                    "sh",
                    *self._group.entrances,
                    "--",
                    *walls,
                    sys.executable,
                    "-m",
                    "distlab.sandbox.agent",
                    json.dumps(task),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=inherited,
                start_new_session=True,
            )
        if filter_fd is not None:
            os.close(filter_fd)
        self._socket, self._ready = ours, False
        not_for_children.append(ours.fileno())

    def _end(self) -> None:
        """Kill the namespace and all in it."""
        if self._socket is not None:
            with contextlib.suppress(ValueError):
                not_for_children.remove(self._socket.fileno())
            self._socket.close()
        if self._process is not None:
            inside = descendants(self._process.pid)[:1]  # the agent: the others go with it
            for pid in (*inside, self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            for pid in inside:  # it has come here, if this process is a subreaper
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            assert self._process.stderr is not None
            self._process.stderr.close()
            self._group.remove()
        self._socket = self._process = None

    def _wait_until_ready(self) -> None:
        """Raises OSError with what bubblewrap or Python said if no agent comes up."""
        assert self._process is not None
        assert self._socket is not None
        end = time.monotonic() + START_LIMIT
        while not self._ready:
            if select.select([self._socket], [], [], 0.5)[0]:
                self._ready = wire.receive(self._socket) == b"ready"
            if not self._ready and (self._process.poll() is not None or time.monotonic() > end):
                self._process.kill()
                said = self._process.communicate()[1].decode(errors="replace").strip()
                self._end()
                last = (said.splitlines() or ["no message"])[-1]
                raise OSError(f"the sandbox did not start: {last}")

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
        if self._process is None:
            self._start()
        if not self._ready:
            self._wait_until_ready()
        seconds = min(self.limits.seconds, options.get("timeout", self.limits.seconds))
        answer = self._exchange(request, seconds + MORE_TIME)
        if answer[:1] != b"\1":
            self._end()  # the agent could not tidy up
        try:
            left, answer = wire.parted(answer[1:])
            self._files_out(left)
            return self._reader(options).results(answer, sizes)
        except wire.Unreadable as error:
            self._end()
            raise _lost(f"what came out of the sandbox can't be read: {error}") from None

    def _reader(self, options: dict[str, Any]) -> wire.Reader:
        """For an answer: learners see lines of their own code, of checks and of the toolkit."""
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
        except (ValueError, LookupError, TypeError, OSError) as error:
            raise wire.Unreadable(str(error)) from None

    def _not_shared(self) -> set[Path]:
        """What the grader itself has in that folder."""
        assert self.shared is not None
        return {Path(self._copy), *self.shared.glob("pytest-of-*")}

    def _exchange(self, request: bytes, seconds: float) -> bytes:
        """The answer to the request; raises RankFailure if none comes in time."""
        assert self._process is not None
        assert self._socket is not None
        clock = ProgramClock([self._process.pid])
        data, size = bytearray(), 0
        try:
            wire.send(self._socket, request)
            while len(data) < wire.HEAD or len(data) < size:
                if clock.read() > seconds:
                    self._end()
                    raise _lost(f"no answer from the sandbox after {seconds:g} s", "hang")
                if not select.select([self._socket], [], [], EVERY)[0]:
                    continue
                part = self._socket.recv(1 << 20)
                if not part:
                    raise ConnectionError
                data += part
                if len(data) >= wire.HEAD:
                    size = wire.HEAD + int.from_bytes(data[: wire.HEAD], "little")
                    if size > self.limits.answer_bytes:
                        self._end()
                        raise _lost(f"ranks returned more than {self.limits.answer_bytes:,} bytes")
        except ConnectionError:
            self._end()
            raise _lost(
                "the process that runs ranks in the sandbox has ended: the code killed it, or took "
                "more memory than it may"
            ) from None
        return bytes(data[wire.HEAD :])


def _names(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Files that say who is who inside, and where they are there."""
    for name, text in NAMES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o644)
        yield folder / name, Path("/etc") / name


def _lost(message: str, kind: str = "crash") -> RankFailure:
    return RankFailure(message, kind=kind)


def _content(path: Path, submission: Path) -> bytes:
    """What is in a learner's file: a regular one, that is in the submission, and no giant."""
    real = path.resolve()
    if not real.is_relative_to(submission):
        raise ValueError(f"{path} is a link that leaves the submission")
    if not real.is_file():
        raise ValueError(f"{path} is no file")
    if real.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{path} has more than {LARGEST_FILE:,} bytes")
    return real.read_bytes()
