"""The process of a sandbox, from outside: started, asked, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..host.processes import descendants, not_for_children
from ..host.program_clock import EVERY, ProgramClock
from . import wire
from .cgroups import Group
from .filter import open_filter
from .limits import Limits, nobody
from .memory import exceeds
from .walls import PRIVATE, command

START_LIMIT = 120.0  # seconds until an agent has imported torch
# a shell joins its control groups, whose files come before "--", and becomes the program
JOIN = """
while [ "$1" != -- ]; do echo 0 > "$1"; shift; done
shift
exec "$@"
"""


class Lost(Exception):
    """No answer will come: ``kind`` is that of a ``RankFailure``."""

    def __init__(self, message: str, kind: str = "crash") -> None:
        super().__init__(message)
        self.message, self.kind = message, kind


class NotStarted(OSError):
    """No sandbox came up: this says nothing about the code for it."""


class Agent:
    """One namespace with the agent in it. It gets ready while the caller does other things.

    ``shown``: files of the submission, (source, path inside). ``private``: folders to write to.
    """

    writable: tuple[str, ...] = PRIVATE

    def __init__(
        self,
        course: Path,
        shown: Sequence[tuple[Path, Path]],
        private: Sequence[Path],
        limits: Limits,
        modules: Sequence[str],
    ) -> None:
        self.limits, self.ready = limits, False
        filter_fd = open_filter()
        self.socket, theirs = socket.socketpair()
        task = {
            "socket": theirs.fileno(),
            "user": self.user(),
            "limits": vars(limits),
            "private": [*self.writable, *map(str, private)],
            "modules": list(modules),
        }
        self.group = Group(limits)
        walls, options = self.walls(course, shown, private, filter_fd)
        program = [sys.executable, "-m", "distlab.sandbox.agent", json.dumps(task)]
        with theirs:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", JOIN, "sh", *self.group.entrances, "--", *walls, *program],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno(), *([] if filter_fd is None else [filter_fd])],
                start_new_session=True,
                **options,
            )
        if filter_fd is not None:
            os.close(filter_fd)
        not_for_children.append(self.socket.fileno())

    def user(self) -> int | None:
        """The user id of ranks; None: that of the caller."""
        return nobody()

    def walls(
        self,
        course: Path,
        shown: Sequence[tuple[Path, Path]],
        private: Sequence[Path],
        filter_fd: int | None,
    ) -> tuple[list[str], dict[str, Any]]:
        """The part of the command line before the agent, and options for starting it."""
        # bubblewrap's first process inside keeps its environment, and all can read it
        return command(course, shown, private, self.limits, filter_fd), {"env": {}}

    def end(self) -> None:
        """Kill the namespace and all in it."""
        with contextlib.suppress(ValueError):
            not_for_children.remove(self.socket.fileno())
        self.socket.close()
        inside = descendants(self.process.pid)[:1]  # the agent: the others go with it
        for pid in (*inside, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pid in inside:  # it has become a child of this process, if this is a subreaper
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.group.remove()

    def answer(self, request: bytes, seconds: float) -> bytes:
        """The agent's answer. Raises Lost if no answer comes in time, and NotStarted with the error
        text of bubblewrap or Python."""
        self._wait_until_ready()
        clock = ProgramClock([self.process.pid])
        data, size = bytearray(), 0
        try:
            wire.send(self.socket, request)
            while len(data) < wire.HEAD or len(data) < size:
                if clock.read() > seconds:
                    raise Lost(f"no answer from the sandbox after {seconds:g} s", "hang")
                if not select.select([self.socket], [], [], EVERY)[0]:
                    self._watch_memory()
                    continue
                part = self.socket.recv(1 << 20)
                if not part:
                    raise ConnectionError
                data += part
                if len(data) >= wire.HEAD:
                    size = wire.HEAD + int.from_bytes(data[: wire.HEAD], "little")
                if size > self.limits.answer_bytes:
                    raise Lost(f"ranks returned more than {self.limits.answer_bytes:,} bytes")
        except ConnectionError:
            raise Lost(
                "the process that runs ranks in the sandbox has ended: the code killed it, or took "
                "more memory than it may"
            ) from None
        return bytes(data[wire.HEAD :])

    def _watch_memory(self) -> None:
        most = self.limits.memory_bytes
        if not self.group.limits_memory and exceeds(self.process.pid, most):
            raise Lost(f"the code took more than {most:,} bytes of memory")

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_LIMIT
        while not self.ready:
            if select.select([self.socket], [], [], 0.5)[0]:
                self.ready = wire.receive(self.socket) == b"ready"
            if not self.ready and (self.process.poll() is not None or time.monotonic() > end):
                self.process.kill()
                said = self.process.communicate()[1].decode(errors="replace").strip()
                last = (said.splitlines() or ["no message"])[-1]
                raise NotStarted(f"the sandbox did not start: {last}")
