"""The proof of a deadlock: no rank can go on by itself, and no message is on its way to any rank.

1. By the ranks' reports (``stuck``), every thread of every rank waits for a message or a collective
  that a partner has not issued. No such wait has a time limit of its own. So no rank can be the
  first to move, unless it gets news of a broken connection.
2. No such news is on its way (``look``). News goes from a closed socket over the other end's socket
  to gloo's threads there, and from these to the thread that waits. So every rank must live, both
  ends of each connection must be open with empty queues, and all threads must sleep.
3. The same holds again a moment later. No rank has reported anything, and no waiting thread has run
  in between, according to the kernel's counters of context switches.

gloo's threads wake up a hundred times a second, so their counters tell nothing. So ``look`` visits
the sockets and those threads three times in a row, in the direction of the news. To stay unseen,
news would have to move on between all of these looks, always from the place that is visited next to
the one just visited.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ..observe.log import P2P, Event, channel_of
from .member import Member, Wait

PROC = Path("/proc")
ROUNDS = 3
FUTEX = {"x86_64": "202", "aarch64": "98"}  # the system call that locks wait in
TABLES = ("tcp", "tcp6")
OTHER_TABLES = ("unix", "udp", "udp6", "netlink", "packet", "raw", "raw6")
ESTABLISHED, LISTEN = "01", "0A"
State = frozenset[tuple[str, str]]


class Proof:
    """Two looks at the same state. ``patience``: a wait that gives up earlier
    than this is no deadlock."""

    def __init__(self, members: list[Member], patience: float) -> None:
        self.members, self.patience = members, patience
        self.forget()

    def forget(self) -> None:
        """Something has changed."""
        self.seen: State | None = None
        self.seen_at = 0.0
        self.pause = 0.5

    def holds(self, drain: Callable[[], bool]) -> bool:
        """Whether a deadlock is proved now; ``drain``: whether a rank has reported something more.

        ``pause`` says after how many seconds another look pays.
        """
        if not stuck(self.members, self.patience):
            self.forget()
            return False
        state = look(self.members)
        between = 0.02 if _told() else 1.0
        if state is None or drain():
            # a state without a proof is looked at less and less often
            self.seen, self.pause = None, 0.02 if self.pause == 0.5 else min(2 * self.pause, 0.4)
            return False
        if state == self.seen and time.monotonic() - self.seen_at >= between:
            return True
        if state != self.seen:
            self.seen, self.seen_at = state, time.monotonic()
        self.pause = between
        return False


# -- what the ranks have reported ---------------------------------------------------------------
def stuck(members: list[Member], patience: float) -> bool:
    """Whether every thread waits for a rank that has not issued its part, or for
    another waiting thread."""
    open_ended = [m for m in members if not m.finished]
    return bool(open_ended) and all(
        (m.finished or 0 in m.waits)
        and all(_hopeless(m, wait, members, patience) for wait in m.waits.values())
        for m in members
    )


def _hopeless(member: Member, wait: Wait, members: list[Member], patience: float) -> bool:
    """Whether a partner of the communication that is waited for has not issued its part.

    When that holds for every thread, none can ever go on: the first thread to move would need a
    message from a rank that has not moved.
    """
    event = wait.event
    if event.op == "recv" and event.peer is None:
        return False
    if wait.patience is not None and wait.patience < patience:
        return False
    position = member.positions[event.index]
    if event.op not in P2P:
        return any(members[r].issued[channel_of(event)] <= position for r in event.group)
    if event.peer is None or event.peer == member.rank:
        return False
    theirs = members[event.peer].issued
    if event.op == "recv":
        return theirs[_part(event, "send", member.rank)] <= position
    return sum(theirs[_part(event, "recv", who)] for who in (member.rank, None)) <= position


def _part(event: Event, op: str, peer: int | None) -> tuple[object, ...]:
    """The sequence of a partner's messages that those like ``event`` belong to."""
    return channel_of(replace(event, op=op, peer=peer))


# -- what the kernel says -----------------------------------------------------------------------
def look(members: list[Member]) -> State | None:
    """How often each waiting thread has run so far; None if news can still arrive."""
    if not _told():
        known = all(not m.threads and not m.has_closed for m in members)
        return frozenset() if known else None
    living = [m for m in members if not m.closed]
    try:
        for _ in range(ROUNDS):
            if not _quiet(_sockets(living)) or not _all_asleep(living):
                return None
        return frozenset(_waiters(living))
    except (OSError, _Awake):  # a process or a thread ended, or can't be looked into
        return None


def _told() -> bool:
    """Whether this system tells the state of its processes."""
    return (PROC / "self/net/tcp").exists()


class _Awake(Exception):
    """A thread that could go on."""


def _all_asleep(members: list[Member]) -> bool:
    return all(
        _text(task / "stat").rpartition(")")[2].split()[0] == "S"
        for member in members
        for task in (PROC / str(member.pid) / "task").iterdir()
    )


def _waiters(members: list[Member]) -> Iterator[tuple[str, str]]:
    """The threads that run Python, and how often each was given a processor."""
    for member in members:
        yield str(member.pid), _switches(member.pid, member.pid)
        for thread in member.threads.values():
            if thread is None:
                raise _Awake  # it is only starting
            if thread not in member.waits and not _waits_for_a_thread(member.pid, thread):
                raise _Awake
            yield str(thread), _switches(member.pid, thread)


def _switches(pid: int, thread: int) -> str:
    status = _text(PROC / str(pid) / "task" / str(thread) / "status")
    if "\nState:\tS" not in status:
        raise _Awake
    return status[status.index("voluntary_ctxt_switches") :]


def _waits_for_a_thread(pid: int, thread: int) -> bool:
    """Whether the thread waits for a lock without a time limit: another one must release it."""
    call, *rest = _text(PROC / str(pid) / "task" / str(thread) / "syscall").split()
    return call == FUTEX.get(platform.machine()) and rest[3] == "0x0"


class _Socket:
    """A line of the kernel's table of TCP connections."""

    def __init__(self, line: str) -> None:
        _, self.local, self.remote, self.state, queues, *rest = line.split()
        self.inode, self.empty = rest[4], queues == "00000000:00000000"


def _sockets(members: list[Member]) -> list[tuple[set[str], list[_Socket], set[str]]]:
    """Per rank: the sockets it has made, the TCP table of its network, sockets of other kinds."""
    inherited = _inodes(PROC / "self")  # this process's own, inherited by forks
    tables: dict[str, tuple[list[_Socket], set[str]]] = {}
    found = []
    for member in members:
        home = PROC / str(member.pid)
        own = _inodes(home) - inherited
        network = os.readlink(home / "ns/net")
        if network not in tables:
            lines = [line for name in TABLES for line in _rows(home / "net" / name)]
            others = [row.split() for name in OTHER_TABLES for row in _rows(home / "net" / name)]
            tables[network] = [_Socket(x) for x in lines], {word for row in others for word in row}
        found.append((own, *tables[network]))
    return found


def _inodes(home: Path) -> set[str]:
    """The sockets of a process."""
    found = set()
    for fd in (home / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed just now; for /proc/self, the listing
            link = os.readlink(fd)
            if link.startswith("socket:["):
                found.add(link[8:-1])
    return found


def _quiet(ranks: list[tuple[set[str], list[_Socket], set[str]]]) -> bool:
    """Whether nothing travels on the ranks' connections, and both ends of each are open."""
    table = [socket for lines in {id(t): t for _, t, _ in ranks}.values() for socket in lines]
    ends = {(s.local, s.remote): s.state for s in table}
    here = {s.local.partition(":")[0] for s in table}
    for own, lines, others in ranks:
        mine = [s for s in lines if s.inode in own]
        if not own <= {s.inode for s in mine} | others:
            return False  # a connection that broke is in no table any more
        for socket in mine:
            if not socket.empty or socket.state not in (ESTABLISHED, LISTEN):
                return False
            inside = socket.remote.partition(":")[0] in here
            other = ends.get((socket.remote, socket.local), "")
            if socket.state == ESTABLISHED and inside and other != ESTABLISHED:
                return False
    return True


def _rows(path: Path) -> list[str]:
    return _text(path).splitlines()[1:] if path.exists() else []


def _text(path: Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
