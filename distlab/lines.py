"""Which line of the learner's is running: the innermost frame in the learner's files."""

from __future__ import annotations

import os
from collections.abc import Collection
from types import FrameType

import torch

_TOOLKIT = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)


def learner_line(frame: FrameType | None, learner_files: Collection[str]) -> str:
    """``"/x/trainer.py:12"`` of the innermost learner frame from ``frame`` outwards.

    If there is none, the innermost frame outside torch and the toolkit; empty without any.
    """
    fallback = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name in learner_files:
            return f"{name}:{frame.f_lineno}"
        if not fallback and not name.startswith((_TOOLKIT, _TORCH, "<")):
            fallback = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback
