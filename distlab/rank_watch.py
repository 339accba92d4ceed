"""The parent's side of a run: start the ranks, follow their reports, end them, explain failures."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import rank_report
from .ledger import Event, Log, Mismatch, SequenceCheck, channel_of
from .program_clock import EVERY, ProgramClock
from .rank_process import group_timeout, make_folder, rank_main
from .rank_proof import Proof, look
from .ranks import Options, RankResults, fork_problem

GRACE = 0.1  # seconds in which other ranks may still tell why they failed
PATIENCE = 5.0  # the same, while nobody has told why a connection broke
KEPT_OUTPUT = 64 * 1024
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Wait:
    """What a thread of a rank waits for, where, and for how many seconds at most."""

    event: Event
    line: str
    patience: float | None


@dataclass
class Member:
    """What the parent knows of one rank."""

    rank: int
    pid: int
    pipe: int
    output_fd: int
    process: subprocess.Popen[bytes] | None = None
    buffer: bytearray = field(default_factory=bytearray)
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    events: list[Event] = field(default_factory=list)
    issued: Counter[tuple[object, ...]] = field(default_factory=Counter)
    places: list[int] = field(default_factory=list)
    spans: dict[str, Any] = field(default_factory=dict)
    waits: dict[int, Wait] = field(default_factory=dict)  # by thread, 0 is the main one
    threads: dict[int, int | None] = field(default_factory=dict)  # others that run, and their ids
    has_closed: bool = False  # a group, or all of them
    result: bytes | None = None
    error: dict[str, Any] | None = None
    status: int | None = None
    closed: bool = False

    @property
    def finished(self) -> bool:
        """Returned, raised or died."""
        return self.result is not None or self.error is not None or self.closed

    @property
    def waiting(self) -> Event | None:
        """What the rank waits for, its main thread first."""
        return self.waits[min(self.waits)].event if self.waits else None

    @property
    def waiting_line(self) -> str:
        """The line of that wait."""
        return self.waits[min(self.waits)].line if self.waits else ""

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
        else:
            self._note(data[0], data[1])
        return None

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "wait":
            event = self.events[fields["index"]]
            self.waits[fields["thread"]] = Wait(event, fields["line"], fields["patience"])
        elif kind == "end":
            event = self.events[fields["index"]]
            event.end, event.overwritten = fields["end"], fields["overwritten"]
            self.waits = {t: w for t, w in self.waits.items() if w.event is not event}
        elif kind == "thread":
            self.threads[fields["number"]] = fields["id"]
        elif kind == "thread end":
            del self.threads[fields["number"]]
        else:
            self.has_closed = True

    def began(self, fields: dict[str, Any]) -> Event:
        """Note a communication that the rank has issued."""
        event = Event(**fields | {"group": tuple(fields["group"])})
        self.events.append(event)
        self.places.append(self.issued[channel_of(event)])
        self.issued[channel_of(event)] += 1
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
        self.proof = Proof(self.members, group_timeout(options).total_seconds())

    def __enter__(self) -> Watch:
        become_subreaper()
        self.children_before = children()
        self.folder = make_folder()
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
        task = (self.fn, self.args, self.options, self.folder.name, pipe_write, output_write)
        process = None
        if spawn:
            process = _spawn(rank, self.world_size, *task)
            pid = process.pid
        else:
            pid = os.fork()
            if pid == 0:
                for fd in [pipe, output, *(m.pipe for m in self.members)]:
                    os.close(fd)
                for member in self.members:
                    os.close(member.output_fd)
                rank_main(rank, self.world_size, *task)
        os.close(pipe_write)
        os.close(output_write)
        member = Member(rank, pid, pipe, output, process)
        self.members.append(member)
        os.set_blocking(pipe, False)
        os.set_blocking(output, False)
        self.selector.register(pipe, selectors.EVENT_READ, (member, True))
        self.selector.register(output, selectors.EVENT_READ, (member, False))

    def run(self) -> RankResults:
        """Follow the ranks until all returned; raise RankFailure else."""
        clock = ProgramClock(member.pid for member in self.members)
        while not all(m.result is not None for m in self.members):
            left = self.options.timeout - clock.read()
            if left <= 0:
                raise rank_report.hang(self.members, self._stacks(), self.options)
            changed = self._read(min(max(left, EVERY), self.proof.pause))
            if any(m.error is not None or (m.closed and m.result is None) for m in self.members):
                self._settle()
                raise rank_report.failure(self.members, self.options)
            if changed:
                self.proof.forget()
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
                event = member.take(kind, content)
                if event and not self.mismatch:
                    self.mismatch = self.sequence.add(member.rank, event)
                changed = True
        return changed

    def _settle(self) -> None:
        """Give the other ranks a moment to tell what happened to them; learn exit statuses.

        Where all that is known is a connection that broke, who broke it will tell why: the others
        are waited for until they have, or until nothing can come from them any more.
        """
        begun, seen = time.monotonic(), None
        while not all(m.finished for m in self.members):
            known = rank_report.cause_known(self.members)
            if time.monotonic() - begun > (GRACE if known else PATIENCE):
                break
            changed = self._read(0.02)
            state = None if known or changed else look(self.members)
            if state is not None and state == seen:
                break
            seen = state
        self._read(0.0)
        for member in self.members:
            if member.closed and member.status is None:
                with contextlib.suppress(ChildProcessError):
                    _, member.status = os.waitpid(member.pid, 0)

    def _raise_if_mismatched(self) -> None:
        if self.mismatch:
            raise rank_report.mismatch(self.members, self.mismatch, self.options)

    def _raise_if_stuck(self) -> None:
        """Name a mismatch or a deadlock as soon as the reports prove it."""
        if not self.options.ledger:
            return
        self._raise_if_mismatched()
        if self.proof.holds(drain=lambda: self._read(0.0)):
            raise rank_report.hang(self.members, self._stacks(), self.options, proven=True)

    def _stacks(self) -> dict[int, str]:
        """The Python stack of every rank that still runs."""
        running = [m for m in self.members if not m.finished]
        for member in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        end, stacks = time.monotonic() + 2.0, dict[int, str]()
        while time.monotonic() < end:  # on a busy machine it takes them a while to write
            time.sleep(0.05)
            before = stacks
            stacks = {m.rank: _read_text(f"{self.folder.name}/stack{m.rank}") for m in running}
            if stacks == before and all(stacks.values()):
                break
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
            os.close(member.pipe)
            os.close(member.output_fd)
        self.selector.close()
        for pid in children() - self.children_before:  # forked by a rank, left to this process
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.folder.cleanup()


def _read_text(path: str) -> str:
    """What is in the file; nothing if it is not there (yet)."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""


def _spawn(rank: int, world_size: int, *task: Any) -> subprocess.Popen[bytes]:
    """Start a rank as a new Python; used where forking this process is not safe."""
    import cloudpickle

    process = subprocess.Popen(
        [sys.executable, "-c", "from distlab.rank_process import spawned_main; spawned_main()"],
        stdin=subprocess.PIPE,
        pass_fds=task[-2:],
    )
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps((rank, world_size, *task)))
    process.stdin.close()
    return process


def become_subreaper() -> None:
    """What the children of this process leave behind comes to this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """The children of this process; empty where the system does not tell."""
    listing = f"/proc/self/task/{os.getpid()}/children"
    if not os.path.exists(listing):
        return set()
    with open(listing) as file:
        return {int(pid) for pid in file.read().split()}
