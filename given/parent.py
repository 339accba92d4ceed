"""A rank ends with the process that started it, in whatever way that one ended.

torchrun's agent tells its ranks to end when it is told itself. An agent that is killed (kill -9,
out of memory) tells no rank. Its ranks become orphans, train on, and write into the folder of the
run that is started in their place. So every rank asks to be ended as soon as its parent is gone:

    Linux       prctl(PR_SET_PDEATHSIG): the kernel sends SIGKILL, whatever the rank is doing
    elsewhere   a thread looks for another parent, five times a second; it needs the interpreter,
                so a rank that is stuck in a library's call ends when the call returns

The kernel forgets the request in children, so each process asks for itself (a loader's workers,
too). The kernel watches the *thread* that forked: agents and loaders start processes in their main
thread. It says nothing of a parent that died before the request, so look for the parent after it.

Source: Linux manual pages, prctl(2), "PR_SET_PDEATHSIG".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

AGENT = "RANKS_AGENT"  # in the environment of ranks: process id and pid namespace of their agent
INTERVAL = 0.2  # seconds between two looks, where the kernel does not tell
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def announce() -> None:
    """An agent calls it before it starts ranks: they learn which process must live as long as they.
    """
    os.environ[AGENT] = f"{os.getpid()} {_namespace()}"


def end_with_parent() -> None:
    """From now on this process is killed when its parent is gone; at once if it is gone already.

    Call it first in ``main``, in the main thread. A second call changes nothing.
    """
    parent = os.getppid()
    if not _kernel_tells():
        threading.Thread(target=_watch, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent or _agent_is_gone(parent):
        _end()


def _kernel_tells() -> bool:
    """Ask the kernel for SIGKILL at the parent's death; whether it has such a call."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (AttributeError, OSError, TypeError):
        return False
    return prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0) == 0


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    _end()


def _agent_is_gone(parent: int) -> bool:
    """Whether the agent died before this process could ask.

    A third process may stand between the two (a profiler). Then the agent is no parent, but it is
    there.
    """
    agent, _, namespace = os.environ.get(AGENT, "").partition(" ")
    if not agent or int(agent) == parent or namespace != _namespace():
        return False
    try:
        os.kill(int(agent), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _namespace() -> str:
    """The namespace of process ids here; empty where there is only one."""
    with contextlib.suppress(OSError):  # not on Linux
        return os.readlink("/proc/self/ns/pid")
    return ""


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
