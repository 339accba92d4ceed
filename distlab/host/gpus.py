"""A process that forks ranks keeps the GPUs out of its own sight.

The first backward of a process starts one thread of autograd for each GPU, also where all tensors
are on the CPU, and asks CUDA for its devices. No fork of such a process can use autograd or CUDA.
So GPUs are hidden before: the process and its forks compute as on a machine without GPUs. A rank
that is to use a GPU sees them again; where CUDA has answered already, with none, such a rank is
started as a new process.
"""

from __future__ import annotations

import os

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_before: dict[str, str] | None = None  # what VISIBLE was, while GPUs are hidden
_found = 0
_spent = False  # CUDA has told this process that it has no GPU


def count() -> int:
    """How many GPUs ranks may use; asked through NVML, which leaves the process forkable."""
    return torch.cuda.device_count() if _before is None else _found


def hide() -> None:
    """Hide the GPUs from this process and what it starts, unless it uses them already."""
    global _before, _found
    if _before is None and not torch.cuda.is_initialized() and (found := torch.cuda.device_count()):
        _before, _found = {k: v for k, v in os.environ.items() if k == VISIBLE}, found
        os.environ[VISIBLE] = ""


def environment() -> dict[str, str]:
    """The environment of a new process that sees the GPUs."""
    if _before is None:
        return dict(os.environ)
    return {key: value for key, value in os.environ.items() if key != VISIBLE} | _before


def show() -> None:
    """Let this fork see the GPUs again."""
    global _before
    restored = environment()
    if VISIBLE in os.environ and VISIBLE not in restored:
        del os.environ[VISIBLE]
    os.environ.update(restored)
    _before = None


def reach_forks() -> bool:
    """Whether a fork of this process can use a GPU: one tries, as nothing else tells."""
    global _spent
    if not _spent:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                show()
                status = 0 if torch.cuda.is_available() else 1
            finally:
                os._exit(status)
        _spent = os.waitpid(pid, 0)[1] != 0
    return not _spent
