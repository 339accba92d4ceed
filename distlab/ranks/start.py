"""Start the process of a rank: a fork of this one, or a new Python where forking is not safe.

A rank on a GPU is forked from the zygote where this process can't fork it (``zygote.py``).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

from ..host import gpus, system


def spawn(
    environment: dict[str, str] | None,
    output_fd: int,
    fds: tuple[int, ...],
    rank: int,
    world_size: int,
    *task: Any,
) -> subprocess.Popen[bytes]:
    """Start a rank as a new Python; used where forking this process is not safe."""
    from .carried import carried  # start-up time: most ranks are forked

    # its own path first, because functions of modules are pickled by name
    code = f"import sys; sys.path[:] = {sys.path}; from distlab.ranks import process; "
    code += f"process.spawned_main({output_fd})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        pass_fds=fds,
        env=environment,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it has died, and tells why itself
        process.stdin.write(carried((rank, world_size, *task)))
    return process


def memory_file() -> int:
    """A file without a name on disk: nothing of it stays, however this process ends."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("distlab")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def store_file() -> tuple[int, str]:
    """The file through which ranks meet, and the path by which each opens it anew."""
    if hasattr(os, "memfd_create"):
        fd = memory_file()
        return fd, f"/proc/self/fd/{fd}"
    return tempfile.mkstemp(prefix="distlab-")


def fork_problem(device: str = "cpu") -> str:
    """Why forking ranks for this device is not safe in this process; empty when it is."""
    if torch.cuda.is_initialized():
        return "CUDA is already in use in this process"
    if device == "cuda" and gpus.count() and not gpus.reach_forks():
        return "CUDA has answered this process that it has no GPU"
    if any(name.startswith("pt_autograd") for name in system.threads()):
        return "autograd has threads in this process, which a forked one would miss"
    return system.fork_obstacle()
