"""Ask the ranks that still run for their Python stacks: where each is, and
whether it is in a loop."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from ..observe.looks import PAUSES, endless_loop
from .member import Member

ANSWER = 1.0  # seconds in which a rank must show its stack
BUSY = 30.0  # the same, as long as other programs have the processors
SETTLE = 0.005  # seconds after which a sleeping rank sleeps again
KEPT_STACKS = 1 << 24


class Stacks:
    """The stacks of ``members``, whose pipes ``selector`` reads."""

    def __init__(
        self,
        members: list[Member],
        selector: selectors.BaseSelector,
        learner_files: Collection[str],
    ) -> None:
        self.members, self.selector, self.learner_files = members, selector, learner_files
        self.mute: set[int] = set()  # ranks that did not answer a look: they run no Python code

    def take(self) -> dict[int, str]:
        """The Python stack of every rank that still runs; notes the ranks in an endless loop."""
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
                break  # no rank runs, so none can be in a loop
            stacks = self._look(running)
        for member in running:
            told = self._told("looks", member).splitlines()
            if windows[member.rank] > 1 and told:
                looks = json.loads(told[-1])
                member.loop = endless_loop(**looks, learner_files=self.learner_files)
        return stacks

    def _look(self, running: list[Member]) -> dict[int, str]:
        """Ask ranks for their stacks; returns their stacks a moment later."""
        shown = {m.rank: len(self._told("stack", m)) for m in running}
        # a rank in an operator or in a communication can show its stack only
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
        """The text that a rank has written to one of its files; whole lines only."""
        fd = member.stack_fd if name == "stack" else member.looks_fd
        text = os.pread(fd, KEPT_STACKS, 0).decode(errors="replace")
        return text[: text.rfind("\n") + 1]

    def _drain(self, seconds: float) -> None:
        """Let time go by without reading the ranks' reports; a rank whose pipe is full stops."""
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
    """Whether it has run since, or is about to; True where the system can't tell."""
    now = _time_on_processor(pid)
    return now is None or now != before or _can_run(pid)


def _waits_for_processor(pid: int, before: int | None) -> bool:
    """Whether it has had too little processor time since to answer, because
    other programs had it."""
    now = _time_on_processor(pid)
    return now is not None and now - (before or 0) < ANSWER / 4 * 1e9 and _can_run(pid)
