"""How much a sandbox may take. The limits that the kernel counts per process are set here."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

IDS = 1000  # how many graders can have an unused user id of their own
FILES = 1024  # that a process may have open
USER_IDS = "/proc/self/uid_map"
ENOUGH = 1 << 16  # user ids, of which some are nobody's


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of untrusted code on the machine.

    ``seconds``: of one run of ranks, on the clock of the ranks' own program; also the limit of a
    process's processor time. ``memory_bytes``: of each process, and of all together where a cgroup
    can be made. ``processes``: threads count. ``file_bytes``: of one file. ``tmp_bytes``: of all
    files. ``answer_bytes``: of what one run of ranks returns. ``container``: no namespaces are
    made, and ranks run as another user (``container.py``).
    """

    seconds: float = 120.0
    memory_bytes: int = 4 << 30
    processes: int = 512
    file_bytes: int = 256 << 20
    tmp_bytes: int = 512 << 20
    answer_bytes: int = 256 << 20
    container: bool = False

    def __post_init__(self) -> None:
        small = [k for k, value in vars(self).items() if value <= 0 and value is not False]
        if small:
            raise ValueError(f"{small[0]} of a sandbox must be positive")

    def hold(self) -> None:
        """Set the limits of this process and of all that it starts."""
        _set(resource.RLIMIT_NPROC, self.processes)
        _set(resource.RLIMIT_DATA, self.memory_bytes)
        _set(resource.RLIMIT_FSIZE, self.file_bytes)
        _set(resource.RLIMIT_NOFILE, FILES)
        _set(resource.RLIMIT_CORE, 0)
        _set(resource.RLIMIT_MEMLOCK, 0)
        _set(resource.RLIMIT_MSGQUEUE, 0)

    def hold_rank(self) -> None:
        """Set the limits of a rank; the process that forks ranks lives longer."""
        _set(resource.RLIMIT_CPU, int(self.seconds) + 1)


def _set(which: int, most: int) -> None:
    """Set both limits of the process; a lower limit stays."""
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def nobody() -> int | None:
    """An unused user id, for a sandbox that root makes. None if this process is not root, or knows
    no other ids (in a namespace of its own).

    Each sandbox has its own: the kernel counts processes by user.
    """
    if os.geteuid() != 0:
        return None
    with open(USER_IDS, encoding="ascii") as file:
        lines = [[*map(int, line.split())] for line in file]
    first, count = max((inside, count) for inside, _, count in lines)
    if count < ENOUGH:
        return None
    return min(first + count, 1 << 31) - 16 - os.getpid() % IDS


def become(user: int) -> None:
    """Take the id of nobody; all privileges go with that of root."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
