"""Make forks of this process cheap: graders fork hundreds of times from one that has torch.

A fork copies the table of the parent's pages, some 100,000 entries after ``import torch``, and
removes them at its end. That takes 25 ms, longer than most ranks compute. Joined into pages of 2
MiB, the same memory has a few hundred entries. This saves only time. Where the system can't do it
(Linux before 6.1, other systems, memory too scattered), nothing else is different.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import sys

HUGE = 2 << 20
_MADV_COLLAPSE = 25


def prepare_to_fork() -> None:
    """Call it as soon as everything that children share is imported and made.
    It takes half a second."""
    _read_metadata_once()
    gc.collect()
    gc.freeze()  # the collector writes to the objects that it visits: their pages would be copied
    if sys.platform == "linux":
        _join_pages()


def _read_metadata_once() -> None:
    """A process that makes a process group looks for backends in the metadata of all packages that
    are installed (torch 2.15): 20 ms per rank. A fork inherits what was found here."""
    found = functools.cache(importlib.metadata.entry_points)
    found(group="torch.distributed.backends")
    importlib.metadata.entry_points = found  # type: ignore[assignment]


def _join_pages() -> None:
    """Ask the kernel for huge pages under all private memory that belongs to no file."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    for addresses, access, _, _, _, *name in lines:
        if access != "rw-p" or (name and name != ["[heap]\n"]):
            continue
        first, last = (int(address, 16) for address in addresses.split("-"))
        begin, end = -(-first // HUGE) * HUGE, last // HUGE * HUGE
        if begin < end:
            madvise(begin, end - begin, _MADV_COLLAPSE)
