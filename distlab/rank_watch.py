"""The parent's side of a run: start the ranks, follow their reports, end them, explain failures."""

from __future__ import annotations

import contextlib
import io
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import rank_report
from .defaults import Change, note
from .ledger import P2P, Event, Log, Mismatch, SequenceCheck
from .processes import become_subreaper, children, end_strays, exit_status
from .rank_process import MAX_FRAME, rank_main
from .ranks import Options, RankResults, fork_problem

GRACE = 0.1  # seconds in which other ranks may still tell why they failed
KEPT_OUTPUT = 64 * 1024
KINDS = b"EFRSVX"


@dataclass
class Member:
    """What the parent knows of one rank."""

    rank: int
    pid: int
    pipe: int
    output_fd: int
    stack_fd: int = -1
    process: subprocess.Popen[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    events: list[Event] = field(default_factory=list)
    issued: Counter[tuple[object, ...]] = field(default_factory=Counter)
    places: list[int] = field(default_factory=list)
    spans: dict[str, Any] = field(default_factory=dict)
    waiting: Event | None = None
    waiting_line: str = ""
    result: bytes | None = None
    error: dict[str, Any] | None = None
    status: int | None = None
    defaults: dict[str, Change] = field(default_factory=dict)
    closed: bool = False

    @property
    def finished(self) -> bool:
        """Returned, raised or died."""
        return self.result is not None or self.error is not None or self.closed

    @property
    def output(self) -> str:
        """What the rank printed: the beginning and the end, if it was a lot."""
        text = bytes(self.head).decode(errors="replace")
        if self.tail:
            text += "\n[…]\n" + bytes(self.tail).decode(errors="replace")
        return text

    def printed(self, data: bytes) -> None:
        """Keep the first and the last part of what the rank prints."""
        room = KEPT_OUTPUT - len(self.head)
        self.head += data[:room]
        self.tail += data[room:] if room < len(data) else b""
        del self.tail[:-KEPT_OUTPUT]

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """The complete frames received so far."""
        while len(self.buffer) >= 5:
            size = int.from_bytes(self.buffer[:4], "little")
            if size >= MAX_FRAME or self.buffer[4] not in KINDS:
                raise rank_report.garbled(self.rank)
            if len(self.buffer) < size + 5:
                return
            kind, content = bytes(self.buffer[4:5]), bytes(self.buffer[5 : 5 + size])
            del self.buffer[: size + 5]
            yield kind, content

    def take(self, kind: bytes, content: bytes) -> Event | None:
        """Note one frame; the event if one began."""
        if kind == b"R":
            self.result = content
            return None
        data = json.loads(content)
        if kind == b"X":
            self.error = data
        elif kind == b"S":
            self.spans = data
        elif data[0] == "begin":
            return self.began(data[1])
        elif data[0] == "default":
            note(self.defaults, data[1]["what"], tuple(data[1]["change"]))
        elif data[0] == "wait":
            self.waiting = self.events[data[1]["index"]]
            self.waiting_line = data[1]["line"]
        else:
            event = self.events[data[1]["index"]]
            event.end, event.overwritten = data[1]["end"], data[1]["overwritten"]
            self.waiting = None
        return None

    def began(self, fields: dict[str, Any]) -> Event:
        """Note a communication that the rank has issued."""
        event = Event(**fields | {"group": tuple(fields["group"])})
        self.events.append(event)
        self.places.append(self.issued[_channel(event)])
        self.issued[_channel(event)] += 1
        return event

    def log(self) -> Log:
        """What the rank communicated and computed."""
        spans = [(name, start, end) for name, start, end in self.spans.get("spans", [])]
        return Log(self.rank, self.events, spans, self.spans.get("picture_from", 0.0))


class Watch:
    """One run of W ranks; leaves nothing behind when the context ends, whatever happened."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], options: Options
    ) -> None:
        self.fn, self.world_size, self.args, self.options = fn, world_size, args, options
        self.members: list[Member] = []
        self.sequence = SequenceCheck()
        self.mismatch: Mismatch | None = None
        self.selector = selectors.DefaultSelector()

    def __enter__(self) -> Watch:
        become_subreaper()
        self.children_before = children()
        self.store_fd, self.store = _store_file()
        try:
            problem = fork_problem()
            if problem:
                warnings.warn(f"ranks are started as new processes: {problem}", stacklevel=3)
            for rank in range(self.world_size):
                self._start(rank, spawn=bool(problem))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank: int, spawn: bool) -> None:
        pipe, pipe_write = os.pipe()
        output, output_write = os.pipe()
        stack = memory_file()
        fds = (stack, pipe_write, output_write)
        task = (self.fn, self.args, self.options, os.getpid(), self.store, *fds)
        process = None
        if spawn:
            process = _spawn((*fds, self.store_fd), rank, self.world_size, *task)
            pid = process.pid
        else:
            pid = os.fork()
            if pid == 0:
                others = [fd for m in self.members for fd in (m.pipe, m.output_fd, m.stack_fd)]
                for fd in (pipe, output, *others):
                    os.close(fd)
                rank_main(rank, self.world_size, *task)
        os.close(pipe_write)
        os.close(output_write)
        member = Member(rank, pid, pipe, output, stack, process)
        self.members.append(member)
        os.set_blocking(pipe, False)
        os.set_blocking(output, False)
        self.selector.register(pipe, selectors.EVENT_READ, (member, True))
        self.selector.register(output, selectors.EVENT_READ, (member, False))

    def run(self) -> RankResults:
        """Follow the ranks until all returned; raise RankFailure else."""
        deadline = time.monotonic() + self.options.timeout
        while not all(m.result is not None for m in self.members):
            left = deadline - time.monotonic()
            if left <= 0:
                raise rank_report.hang(self.members, self._stacks(), self.options)
            changed = self._read(min(left, 0.5))
            if any(m.error is not None or (m.closed and m.result is None) for m in self.members):
                self._settle()
                raise rank_report.failure(self.members, self.options)
            if changed:
                self._raise_if_stuck()
        self._read(0.0)
        self._raise_if_mismatched()
        return self._results()

    def _read(self, wait: float) -> bool:
        """Take in what has arrived; whether a rank reported something."""
        changed = False
        for key, _ in self.selector.select(wait):
            member, is_pipe = key.data
            try:
                data = os.read(key.fd, 1 << 20)
            except BlockingIOError:
                continue
            if not data:
                self.selector.unregister(key.fd)
                if is_pipe:
                    member.closed, changed = True, True
                continue
            if not is_pipe:
                member.printed(data)
                continue
            member.buffer += data
            for kind, content in member.frames():
                try:
                    event = member.take(kind, content)
                except (ValueError, LookupError, TypeError):
                    raise rank_report.garbled(member.rank) from None
                if event and not self.mismatch:
                    self.mismatch = self.sequence.add(member.rank, event)
                changed = True
        return changed

    def _settle(self) -> None:
        """Give the other ranks a moment to tell what happened to them; learn exit statuses."""
        end = time.monotonic() + GRACE
        while time.monotonic() < end and not all(m.finished for m in self.members):
            self._read(0.02)
        self._read(0.0)
        for member in self.members:
            if member.closed and member.status is None:
                member.status = exit_status(member.pid)

    def _raise_if_mismatched(self) -> None:
        if self.mismatch:
            raise rank_report.mismatch(self.members, self.mismatch, self.options)

    def _raise_if_stuck(self) -> None:
        """Name a mismatch or a deadlock as soon as the reports prove it."""
        if not self.options.ledger:
            return
        self._raise_if_mismatched()
        unfinished = [m for m in self.members if not m.finished]
        if unfinished and all(m.waiting and self._hopeless(m) for m in unfinished):
            raise rank_report.hang(self.members, self._stacks(), self.options, proven=True)

    def _hopeless(self, member: Member) -> bool:
        """Whether a partner of the communication this rank waits in has not issued its part.

        When that holds for every unfinished rank, none can ever go on: the first one to move
        would need a message from a rank that has not moved.
        """
        event = member.waiting
        if event is None or (event.op == "recv" and event.peer is None):
            return False
        place, group = member.places[event.index], event.group
        if event.op not in P2P:
            return any(self.members[r].issued["collective", group] <= place for r in group)
        if event.peer is None or event.peer == member.rank:
            return False
        theirs = self.members[event.peer].issued
        if event.op == "recv":
            return theirs["send", member.rank, event.tag, group] <= place
        asked = (theirs["recv", who, event.tag, group] for who in (member.rank, None))
        return sum(asked) <= place

    def _stacks(self) -> dict[int, str]:
        """The Python stack of every rank that still runs."""
        running = [m for m in self.members if not m.finished]
        for member in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        time.sleep(0.05)
        stacks = {}
        for member in running:
            stacks[member.rank] = os.pread(member.stack_fd, 1 << 20, 0).decode(errors="replace")
        return stacks

    def _results(self) -> RankResults:
        values = []
        for member in self.members:
            assert member.result is not None
            values.append(torch.load(io.BytesIO(member.result), weights_only=True))
        members = self.members
        return RankResults(values, [m.log() for m in members], [m.output for m in members])

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(member.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)  # if it had no session of its own yet
        for member in self.members:
            if member.process is not None:
                member.process.wait()
            elif member.status is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(member.pid, 0)
            for fd in (member.pipe, member.output_fd, member.stack_fd):
                os.close(fd)
        self.selector.close()
        end_strays(self.children_before)
        os.close(self.store_fd)
        if not self.store.startswith("/proc/"):
            os.unlink(self.store)


def _channel(event: Event) -> tuple[object, ...]:
    """The sequence that this event has a place in, on its rank."""
    if event.op in P2P:
        return event.op, event.peer, event.tag, event.group
    return "collective", event.group


def _spawn(
    fds: tuple[int, ...], rank: int, world_size: int, *task: Any
) -> subprocess.Popen[bytes]:
    """Start a rank as a new Python; used where forking this process is not safe."""
    import cloudpickle

    process = subprocess.Popen(
        [sys.executable, "-c", "from distlab.rank_process import spawned_main; spawned_main()"],
        stdin=subprocess.PIPE,
        pass_fds=fds,
    )
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps((rank, world_size, *task)))
    process.stdin.close()
    return process


def memory_file() -> int:
    """A file without a place on disk: nothing stays of it, however this process ends."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("distlab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _store_file() -> tuple[int, str]:
    """The file that ranks meet in, and the path by which each opens it anew."""
    if hasattr(os, "memfd_create"):
        fd = memory_file()
        return fd, f"/proc/self/fd/{fd}"
    return tempfile.mkstemp(prefix="distlab-")
