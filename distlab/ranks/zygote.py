"""A process from which ranks of GPUs are forked, for a process that can no longer fork them.

Autograd's first backward asks CUDA how many GPUs there are, also where all tensors are on the CPU
(``torch/csrc/autograd/engine.cpp``, ``Engine::start_device_threads``). CUDA answers once in a
process: ``c10/cuda/CUDAFunctions.cpp`` keeps the number, and the driver remembers that none was
visible. A grader hides its GPUs and computes the expected values of checks. So after its first
backward no fork of it can use a GPU. New processes can, but each takes seconds to import torch
again.

The zygote is forked before that. It has the grader's imports, and has asked CUDA nothing
(``torch/cuda/__init__.py``, ``_lazy_init``, refuses only where the parent has started CUDA). It
gets a rank's task, as pickled for a new process, and its descriptors. It forks twice, so that the
rank becomes a child of the grader, which is a subreaper. It ends with the grader.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from ..host import gpus
from ..host.processes import become_subreaper, die_with_parent, not_for_children
from .process import rank_main

MOST = 16  # descriptors of one rank
ADOPTED = 10.0  # seconds until the grader has got the rank


class Zygote:
    """The grader's end. ``pid``: the zygote's process; ``by``: the process that has forked it."""

    def __init__(self) -> None:
        own, theirs = socket.socketpair()
        self.by, self.socket = os.getpid(), own
        self.pid = os.fork()
        if self.pid == 0:
            own.close()
            _serve(theirs, self.by)
        theirs.close()
        not_for_children.append(own.fileno())

    def start(self, fds: tuple[int, ...], rank: int, world_size: int, *task: Any) -> int:
        """Fork a rank with these descriptors; its pid. Raises OSError if the zygote is gone."""
        from .carried import carried  # start-up time: only ranks of GPUs and new processes need it

        told = carried((rank, world_size, *task))
        content = pickle.dumps((gpus.environment(), sys.path, fds, told))
        socket.send_fds(self.socket, [len(content).to_bytes(8, "little")], fds)
        self.socket.sendall(content)
        return int.from_bytes(_receive(self.socket, 8), "little")

    def end(self) -> None:
        """End the process."""
        not_for_children.remove(self.socket.fileno())
        self.socket.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _receive(work: socket.socket, count: int) -> bytes:
    """Exactly so many bytes. Raises OSError if they don't come."""
    found = bytearray()
    while len(found) < count:
        data = work.recv(count - len(found))
        if not data:
            raise ConnectionError("the process that forks ranks is gone")
        found += data
    return bytes(found)


_zygote: Zygote | None = None


def prepare() -> None:
    """Fork the zygote, where there are GPUs that forks of this process can still use."""
    global _zygote
    gpus.hide()
    if current() is None and gpus.count() and become_subreaper() and gpus.reach_forks():
        _zygote = Zygote()


def current() -> Zygote | None:
    """This process's zygote."""
    return _zygote if _zygote is not None and _zygote.by == os.getpid() else None


def fork(fds: tuple[int, ...], rank: int, world_size: int, *task: Any) -> int | None:
    """Fork a rank with these descriptors; its pid, None where there is no zygote (any more)."""
    found = current()
    try:
        return None if found is None else found.start(fds, rank, world_size, *task)
    except OSError:
        end()
        return None


def end() -> None:
    """End the zygote, if there is one."""
    global _zygote
    if (found := current()) is not None:
        found.end()
        _zygote = None


def _serve(work: socket.socket, grader: int) -> NoReturn:
    """Fork a rank for each task until the grader ends."""
    with contextlib.suppress(BaseException):
        die_with_parent(grader)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        while True:
            head, fds, _, _ = socket.recv_fds(work, 8, MOST)
            if len(head) < 8:
                break
            content = _receive(work, int.from_bytes(head, "little"))
            middle = os.fork()
            if middle == 0:
                pid = os.fork()
                if pid == 0:
                    _become(content, fds, work, grader)
                work.sendall(pid.to_bytes(8, "little"))
                os._exit(0)
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)
    os._exit(0)


def _become(content: bytes, fds: list[int], work: socket.socket, grader: int) -> NoReturn:
    """Be the rank: its descriptors get the numbers that its task names."""
    try:
        end = time.monotonic() + ADOPTED
        while os.getppid() != grader and time.monotonic() < end:
            time.sleep(1e-4)
        environ, path, numbers, task = pickle.loads(content)
        above = max(*numbers, *fds) + 1
        kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
        work.close()
        for fd in fds:
            os.close(fd)
        for fd, number in zip(kept, numbers, strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = path
        rank_main(*pickle.loads(task))
    finally:
        os._exit(1)
