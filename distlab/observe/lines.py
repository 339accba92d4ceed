"""The learner's line that is running: the innermost frame in the learner's files."""

from __future__ import annotations

import importlib.util
import linecache
import os
from collections.abc import Collection, Sequence
from types import FrameType

TOOLKIT = os.path.dirname(os.path.dirname(__file__))
TORCH = str(getattr(importlib.util.find_spec("torch"), "origin", "")).removesuffix("/__init__.py")


def learner_line(frame: FrameType | None, learner_files: Collection[str]) -> str:
    """``"/x/trainer.py:12"`` of the innermost learner frame from ``frame`` outwards.

    If there is none, the innermost frame outside torch and the toolkit; empty without any.
    """
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name in learner_files:
            return f"{name}:{frame.f_lineno}"
        if not fallback and not name.startswith((TOOLKIT, TORCH, "<")):
            fallback = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


def source_line(line: str) -> str:
    """``"/x/trainer.py:12"`` as ``"trainer.py:12: loss.backward()"``."""
    path, _, number = line.rpartition(":")
    if not path:
        return line
    text = linecache.getline(path, int(number)).strip()
    return f"{os.path.basename(path)}:{number}" + (f": {text}" if text else "")


def names(ranks: Sequence[int]) -> str:
    """``"rank 2"``, ``"ranks 0 and 3"``, ``"ranks 0, 1 and 3"``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
