"""How much memory all processes of a sandbox have together, where no control group limits it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..host.processes import descendants

_PSS = re.compile(r"^Pss_Anon: +(\d+) kB", re.M)


def exceeds(pid: int, most: int) -> bool:
    """Whether ``pid`` and all below it have more than so many bytes of their own.

    Pages that forks share are counted once. That count takes long, so it is made only if the sum is
    too large when shared pages count for each fork.
    """
    every = [pid, *descendants(pid)]
    return sum(map(_resident, every)) > most and sum(map(_proportional, every)) > most


def _resident(pid: int) -> int:
    """Bytes that belong to no file."""
    pages = _text(pid, "statm").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _proportional(pid: int) -> int:
    """The same, but of a page that several processes share only a part."""
    found = _PSS.search(_text(pid, "smaps_rollup"))
    return int(found[1]) * 1024 if found else 0


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return ""
