"""A process that forks ranks keeps the GPUs out of its own sight.

The first backward of a process asks CUDA for its devices and starts one thread of autograd for each
GPU. It does so also where all tensors are on the CPU. No fork of such a process can use autograd or
CUDA. So GPUs are hidden before: the process and its forks compute as on a machine without GPUs. A
rank that uses a GPU sees them again. If CUDA has already answered "none", such a rank is forked
from a process that has not asked (``ranks/zygote.py``), or started as a new process.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_before: dict[str, str] | None = None  # the value of VISIBLE before GPUs were hidden
_found = 0
_counts: dict[tuple[object, str | None], int] = {}  # by the place asked, and the value of VISIBLE
_spent = False  # CUDA has told this process that it has no GPU


def count() -> int:
    """How many GPUs ranks may use."""
    return _counted() if _before is None else _found


def _counted() -> int:
    """torch asks NVML. Without NVML it asks CUDA, and then no fork could use
    a GPU: so a fork asks."""
    without_nvml = torch.backends.cuda.is_built() and torch.cuda._device_count_nvml() < 0
    if torch.cuda.is_initialized() or not without_nvml:
        return torch.cuda.device_count()
    asked = torch.cuda.device_count, os.environ.get(VISIBLE)
    if asked not in _counts:
        _counts[asked] = _in_a_fork(torch.cuda.device_count)
    return _counts[asked]


def _in_a_fork(question: Callable[[], int]) -> int:
    """The answer of a fork of this process, 0 to 254; 255 if it fails."""
    pid = os.fork()
    if pid == 0:
        answer = 255
        try:
            answer = question()
        finally:
            os._exit(answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def hide() -> None:
    """Hide the GPUs from this process and what it starts, unless it uses them already."""
    global _before, _found
    if _before is None and not torch.cuda.is_initialized() and (found := _counted()):
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
    """Whether a fork of this process can use a GPU. A fork tries, because nothing else tells."""
    global _spent

    def try_it() -> int:
        show()
        return 0 if torch.cuda.is_available() else 1

    if not _spent:
        _spent = _in_a_fork(try_it) != 0
    return not _spent
