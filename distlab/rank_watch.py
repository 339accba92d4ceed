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
from pathlib import Path
from typing import Any

import torch

from . import gpus, rank_report
from .defaults import Change, note
from .ledger import Event, Log, Mismatch, SequenceCheck, channel_of
from .looks import PAUSES, endless_loop
from .processes import become_subreaper, children, end_strays, exit_status
from .program_clock import EVERY, ProgramClock
from .rank_process import MAX_FRAME, group_timeout, rank_main
from .rank_proof import Proof, look
from .ranks import Options, RankResults, fork_problem

GRACE = 0.1  # seconds in which other ranks may still tell why they failed
PATIENCE = 5.0  # the same, while nobody has told why a connection broke
ANSWER = 1.0  # seconds that a rank may take to show its stack
BUSY = 30.0  # the same, as long as other programs have the processors
SETTLE = 0.005  # seconds after which one that sleeps sleeps again
START_LIMIT = 120.0  # seconds until all ranks are ready, beside the limit of what they do then
KEPT_OUTPUT = 64 * 1024
KEPT_STACKS = 1 << 24
KINDS = b"EFRSVX"


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
    stack_fd: int = -1
    looks_fd: int = -1
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
    loop: str = ""
    ready: bool = False  # its group is made, the body begins
    idle: bool = False  # a virtual rank that can go on, while another runs
    result: bytes | None = None
    error: dict[str, Any] | None = None
    status: int | None = None
    defaults: dict[str, Change] = field(default_factory=dict)
    closed: bool = False

    @property
    def files(self) -> tuple[int, ...]:
        """The parent's ends of what it shares with the rank."""
        return self.pipe, self.output_fd, self.stack_fd, self.looks_fd

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
        elif kind == "ready":
            self.ready = True
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
        self.mute: set[int] = set()  # ranks that did not answer a look: they run no Python code
        self.selector = selectors.DefaultSelector()
        self.proof = Proof(self.members, group_timeout(options).total_seconds())

    def __enter__(self) -> Watch:
        become_subreaper()
        self.children_before = children()
        self.store_fd, self.store = _store_file()
        try:
            gpus.hide()
            problem = fork_problem(self.options.device)
            if problem and self.options.device == "cpu":
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
        stack, looks = memory_file(), memory_file()
        fds = (stack, looks, pipe_write, output_write)
        task = (self.fn, self.args, self.options, os.getpid(), self.store, *fds)
        process = None
        if spawn:
            seen = gpus.environment() if self.options.device == "cuda" else None
            needed = (*fds, self.store_fd)
            process = _spawn(seen, output_write, needed, rank, self.world_size, *task)
            pid = process.pid
        else:
            pid = os.fork()
            if pid == 0:
                others = [fd for m in self.members for fd in m.files]
                for fd in (pipe, output, *others):
                    os.close(fd)
                rank_main(rank, self.world_size, *task)
        os.close(pipe_write)
        os.close(output_write)
        member = Member(rank, pid, pipe, output, stack, looks, process)
        self.members.append(member)
        os.set_blocking(pipe, False)
        os.set_blocking(output, False)
        self.selector.register(pipe, selectors.EVENT_READ, (member, True))
        self.selector.register(output, selectors.EVENT_READ, (member, False))

    def run(self) -> RankResults:
        """Follow the ranks until all returned; raise RankFailure else."""
        clock, begun = ProgramClock(member.pid for member in self.members), 0.0
        while not all(m.result is not None for m in self.members):
            now = clock.read()
            if now < START_LIMIT and not all(m.ready for m in self.members):
                begun = now  # new processes import torch, GPUs are set up: not the body's time
            left = begun + self.options.timeout - now
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
                try:
                    event = member.take(kind, content)
                except (ValueError, LookupError, TypeError):
                    raise rank_report.garbled(member.rank) from None
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
            all_wait = all(m.finished or m.waiting for m in self.members)
            state = look(self.members) if all_wait and not (known or changed) else None
            if state is not None and state == seen:
                break
            seen = state
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
        if self.proof.holds(drain=lambda: self._read(0.0)):
            raise rank_report.hang(self.members, self._stacks(), self.options, proven=True)

    def _stacks(self) -> dict[int, str]:
        """The Python stack of every rank that still runs; notes which are in an endless loop."""
        running = [m for m in self.members if not m.finished]
        windows: Counter[int] = Counter()  # pauses in which a rank has run: it does not just sleep
        stacks = self._look(running)
        for pause in PAUSES:
            time.sleep(SETTLE)
            before = {m.rank: _time_on_processor(m.pid) for m in running}
            self._drain(pause)
            for member in running:
                windows[member.rank] += _has_run(member.pid, before[member.rank])
            if all(m.waiting and not windows[m.rank] for m in running):
                break  # nothing runs that could be in a loop
            stacks = self._look(running)
        for member in running:
            told = self._told("looks", member).splitlines()
            if windows[member.rank] > 1 and told:
                looks = json.loads(told[-1])
                member.loop = endless_loop(**looks, learner_files=self.options.learner_files)
        return stacks

    def _look(self, running: list[Member]) -> dict[int, str]:
        """Ask ranks for their stacks; what they are in a moment later."""
        shown = {m.rank: len(self._told("stack", m)) for m in running}
        # one that is in an operator, or waits in a communication, can show its stack only
        asked = {m.rank: "stack" if m.waiting or m.rank in self.mute else "looks" for m in running}
        told = {m.rank: len(self._told(asked[m.rank], m)) for m in running}
        for member in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR1)
        begun, left = time.monotonic(), running
        had = {m.rank: _time_on_processor(m.pid) for m in running}
        while left:
            time.sleep(0.002)
            left = [m for m in left if len(self._told(asked[m.rank], m)) == told[m.rank]]
            waited = time.monotonic() - begun
            if waited > ANSWER and not any(
                waited < BUSY and _waits_for_processor(m.pid, had[m.rank]) for m in left
            ):
                break
        self.mute |= {m.rank for m in left}
        return {m.rank: self._told("stack", m)[shown[m.rank] :] for m in running}

    def _told(self, name: str, member: Member) -> str:
        """What a rank has written to one of its files; whole lines only."""
        fd = member.stack_fd if name == "stack" else member.looks_fd
        text = os.pread(fd, KEPT_STACKS, 0).decode(errors="replace")
        return text[: text.rfind("\n") + 1]

    def _drain(self, seconds: float) -> None:
        """Let time go by without taking in what ranks report; a rank whose pipe is full stops."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not self.selector.get_map():
                time.sleep(left)
            for key, _ in self.selector.select(left):
                with contextlib.suppress(BlockingIOError):
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        self.selector.unregister(key.fd)
                    elif key.data[1]:
                        key.data[0].buffer += data
                    else:
                        key.data[0].printed(data)

    def _results(self) -> RankResults:
        values = []
        for member in self.members:
            assert member.result is not None
            content = io.BytesIO(member.result)  # of GPUs, which this process does not see
            values.append(torch.load(content, weights_only=True, map_location="cpu"))
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
            for fd in member.files:
                os.close(fd)
        self.selector.close()
        end_strays(self.children_before)
        os.close(self.store_fd)
        if not self.store.startswith("/proc/"):
            os.unlink(self.store)


def _time_on_processor(pid: int) -> int | None:
    """Nanoseconds that the main thread of a process has run; None where the system can't tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[0])
    except (OSError, IndexError, ValueError):
        return None


def _can_run(pid: int) -> bool:
    """Whether the process runs, or would if other programs left it a processor."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0] == "R"
    except (OSError, IndexError):
        return False


def _has_run(pid: int, before: int | None) -> bool:
    """Whether it has run since, or is about to; taken for granted where the system can't tell."""
    now = _time_on_processor(pid)
    return now is None or now != before or _can_run(pid)


def _waits_for_processor(pid: int, before: int | None) -> bool:
    """Whether it has had too little time since to answer, because other programs had it."""
    now = _time_on_processor(pid)
    return now is not None and now - (before or 0) < ANSWER / 4 * 1e9 and _can_run(pid)


def _spawn(
    environment: dict[str, str] | None,
    output_fd: int,
    fds: tuple[int, ...],
    rank: int,
    world_size: int,
    *task: Any,
) -> subprocess.Popen[bytes]:
    """Start a rank as a new Python; used where forking this process is not safe."""
    import cloudpickle

    # its own path first: functions of modules come by name
    code = f"import sys; sys.path[:] = {sys.path}; from distlab import rank_process as process; "
    code += f"process.spawned_main({output_fd})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        pass_fds=fds,
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it has died: it tells why itself
        cloudpickle.dump((rank, world_size, *task), process.stdin)
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
