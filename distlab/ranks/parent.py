"""The parent's side of a run: start the ranks, follow their reports, end them, explain failures."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

from ..host import gpus, sockets
from ..host.processes import become_subreaper, children, end_strays, exit_status
from ..host.program_clock import EVERY, ProgramClock
from ..observe.log import Mismatch, SequenceCheck
from . import report as rank_report
from . import zygote
from .content import unpacked
from .member import Member
from .options import Options
from .process import group_timeout, rank_main
from .proof import Proof, look
from .results import RankFailure, RankResults, garbled
from .stacks import Stacks
from .start import fork_problem, memory_file, spawn, store_file

GRACE = 0.1  # seconds in which other ranks may still tell why they failed
PATIENCE = 5.0  # the same, while no rank has told why a connection broke
HOST_LINES = (
    "\nThe lines are where the host is. A GPU reaches a call later than its host: the call that it "
    "can't end may be an earlier one."
)
START_LIMIT = 120.0  # seconds until all ranks are ready, not counted in the run's own limit


class Parent:
    """One run of W ranks; leaves nothing behind when the context ends, whatever happened."""

    def __init__(
        self, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], options: Options
    ) -> None:
        self.fn, self.world_size, self.args, self.options = fn, world_size, args, options
        self.members: list[Member] = []
        self.sequence = SequenceCheck()
        self.mismatch: Mismatch | None = None
        self.selector = selectors.DefaultSelector()
        self.stacks = Stacks(self.members, self.selector, options.learner_files)
        self.proof = Proof(self.members, group_timeout(options).total_seconds())

    def __enter__(self) -> Parent:
        become_subreaper()
        self.children_before = children()
        self.store_fd, self.store = store_file()
        try:
            gpus.hide()
            problem = fork_problem(self.options.device)
            if problem and self.options.device == "cpu":
                warnings.warn(f"ranks are started as new processes: {problem}", stacklevel=3)
            for rank in range(self.world_size):
                self._start(rank, anew=bool(problem))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank: int, anew: bool) -> None:
        pipe, pipe_write = os.pipe()
        output, output_write = os.pipe()
        stack, looks = memory_file(), memory_file()
        fds = (stack, looks, pipe_write, output_write)
        task = (self.fn, self.args, self.options, os.getpid(), self.store, *fds)
        process = None
        needed, on_gpu = (*fds, self.store_fd), self.options.device == "cuda"
        pid = zygote.fork(needed, rank, self.world_size, *task) if anew and on_gpu else None
        if anew and pid is None:
            seen = gpus.environment() if on_gpu else None
            process = spawn(seen, output_write, needed, rank, self.world_size, *task)
            pid = process.pid
        elif pid is None:
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
        """Follow the ranks until all have returned; raise RankFailure if one fails."""
        clock, begun = ProgramClock(member.pid for member in self.members), 0.0
        while not all(m.result is not None for m in self.members):
            now = clock.read()
            if now < START_LIMIT and not all(m.ready for m in self.members):
                begun = now  # new processes import torch, GPUs are set up: not the body's time
            left = begun + self.options.timeout - now
            if left <= 0:
                raise self._hang()
            changed = self._read(min(max(left, EVERY), self.proof.pause))
            if any(m.error is not None or (m.closed and m.result is None) for m in self.members):
                self._settle()
                if not rank_report.error_known(self.members):
                    self._raise_if_mismatched()  # gloo ends a rank that gets other sizes
                raise rank_report.failure(self.members, self.options)
            if changed:
                self.proof.forget()
            self._raise_if_stuck()
        self._read(0.0)
        self._raise_if_mismatched()
        self._raise_if_invented()
        return self._results()

    def _read(self, wait: float) -> bool:
        """Take in the reports that have arrived; returns whether there was one."""
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
                    raise garbled(member.rank) from None
                if event and not self.mismatch:
                    self.mismatch = self.sequence.add(member.rank, event)
                changed = True
        return changed

    def _settle(self) -> None:
        """Give the other ranks a moment to tell what happened to them, and learn exit statuses.

        If only a broken connection is known, the rank that broke it will tell why. So this waits
        for the other ranks until they have told it, or until no report can come any more.
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

    def _raise_if_invented(self) -> None:
        """Fail if ranks report more received bytes than came through their connections."""
        own_network = self.options.enter is not None or self.options.device != "cpu"
        if own_network or not self.options.ledger or any(m.has_closed for m in self.members):
            return
        told = {m.pid: sum(e.received for e in m.events if e.end) for m in self.members}
        counted = sockets.received_by(told) if any(told.values()) else None
        if counted is None:
            return
        for member in self.members:
            if counted[member.pid] < told[member.pid]:
                numbers = told[member.pid], counted[member.pid]
                raise rank_report.invented(member, *numbers, self.members, self.options)

    def _raise_if_stuck(self) -> None:
        """Name a mismatch or a deadlock as soon as the reports prove it."""
        if not self.options.ledger:
            return
        self._raise_if_mismatched()
        if self.proof.holds(drain=lambda: self._read(0.0)):
            raise self._hang(proven=True)

    def _hang(self, proven: bool = False) -> RankFailure:
        """The call in which each rank waits, as far as its host tells."""
        found = rank_report.hang(self.members, self.stacks.take(), self.options, proven=proven)
        if self.options.device != "cpu":
            found.message += HOST_LINES
        return found

    def _results(self) -> RankResults:
        values = []
        for member in self.members:
            assert member.result is not None
            try:
                values.append(unpacked(member.result))
            except ValueError:
                raise garbled(member.rank) from None
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
