"""Start the process of a rank: a fork of this one, or a new Python where forking is not safe."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from ..host import system


def spawn(fds: tuple[int, ...], rank: int, world_size: int, *task: Any) -> subprocess.Popen[bytes]:
    """Start a rank as a new Python; used where forking this process is not safe."""
    import cloudpickle

    process = subprocess.Popen(
        [sys.executable, "-c", "from distlab.ranks.process import spawned_main; spawned_main()"],
        stdin=subprocess.PIPE,
        pass_fds=fds,
    )
    assert process.stdin is not None
    process.stdin.write(cloudpickle.dumps((rank, world_size, *task)))
    process.stdin.close()
    return process


def memory_file() -> int:
    """A file without a name on disk: nothing stays of it, however this process ends."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("distlab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def store_file() -> tuple[int, str]:
    """The file that ranks meet in, and the path by which each opens it anew."""
    if hasattr(os, "memfd_create"):
        fd = memory_file()
        return fd, f"/proc/self/fd/{fd}"
    return tempfile.mkstemp(prefix="distlab-")


def fork_problem() -> str:
    """Why forking ranks from this process is not safe; empty when it is."""
    if torch.cuda.is_initialized():
        return "CUDA is already in use in this process"
    if any(name.startswith("pt_autograd") for name in system.threads()):
        return "autograd has threads in this process, which a forked one would miss"
    return system.fork_obstacle()
