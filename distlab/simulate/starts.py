"""Ranks whose times are taken: several fresh starts, which keep the memory that they free.

Placement, memory and sockets stay the same for a whole start, so that the median of starts counts.
The C library gives freed memory back to the system in some starts and not in others. Then each call
pays for new pages: 16 ms instead of 3 ms were seen for an exchange of 4 MB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ..ranks import RankContext, run_ranks

STARTS = 9
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt, in glibc's malloc.h
MOST = 2**31 - 1


def starts(
    fn: Callable[..., Any], ranks: int, *args: Any, count: int = STARTS, **options: Any
) -> list[Any]:
    """Rank 0's results of ``fn(ctx, *args)``, from so many fresh starts of the ranks."""

    def body(ctx: RankContext) -> Any:
        keep_memory()
        return fn(ctx, *args)

    return [run_ranks(body, ranks, ledger=False, **options)[0] for _ in range(count)]


def keep_memory() -> None:
    """Ask the C library to keep what this process frees; nothing where it is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(TRIM_THRESHOLD, MOST)
    mallopt(MMAP_MAX, 0)
