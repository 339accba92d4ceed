"""What this system can do. The system itself is asked; nothing is concluded from its name.

Linux has everything that is asked for here. On other systems each caller goes on without it, or
says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import socket
import time
from pathlib import Path

PROC = Path("/proc")
TRIAL_LIMIT = 20.0  # seconds


def prctl(option: int, value: int) -> bool:
    """Set a property of this process; whether the system knows such properties and took it."""
    call = getattr(ctypes.CDLL(None), "prctl", None)
    return call is not None and call(option, value, 0, 0, 0) == 0


def cores() -> int:
    """The cores that this process may use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def no_capabilities() -> None:
    """Give up Linux's capabilities, also those that a new program could inherit.

    See capset(2): a header with the third version and this process, and two times three sets.
    """
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None).capset(header, sets):
        raise OSError("capabilities can't be given up")


def loopback() -> str:
    """The network interface of this host alone: ``lo`` or ``lo0``."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


def tells_of_processes() -> bool:
    """Whether the system lists threads and children of processes in files."""
    return (PROC / "self" / "task").is_dir()


def threads() -> list[str]:
    """The names of this process's threads; empty where the system does not tell."""
    found = []
    for task in (PROC / "self" / "task").glob("*"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append((task / "comm").read_text(encoding="utf-8").strip())
    return found


@functools.cache
def fork_obstacle() -> str:
    """Why a forked copy of this process can't compute; empty when it can.

    Libraries with threads of their own may forbid it (Accelerate on macOS). Where the system lists
    the threads of a process, this function looks at them; elsewhere a copy tries.
    """
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if tells_of_processes():
        return ""
    import torch  # takes two seconds; a caller that only asks for prctl need not wait for it

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = int(float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()) != 64.0**3)
        finally:
            os._exit(status)
    end = time.monotonic() + TRIAL_LIMIT
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < end:
        time.sleep(0.001)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return "" if status == 0 else "a forked copy of this process can't compute on this system"
