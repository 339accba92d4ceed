"""Whether CUDA computes here: a fork of this process tries, so that this one never starts CUDA."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from . import gpus

LIMIT = 20.0  # seconds; a first context takes two on a machine with eight GPUs


@dataclass(frozen=True)
class Trial:
    """The names of the GPUs that CUDA shows to ranks, and why it can't compute on one of them, if
    it can't."""

    names: Sequence[str] = ()
    obstacle: str = ""


def trial(limit: float = LIMIT) -> Trial:
    """Compute on each GPU that CUDA shows, in a fork that is ended after ``limit`` seconds."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(asdict(_computed())).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        return _answer(reading, limit)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _answer(fd: int, limit: float) -> Trial:
    end, text = time.monotonic() + limit, b""
    while select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(fd, 1 << 16)
        if not data:
            return Trial(**json.loads(text)) if text else Trial(obstacle="CUDA ended the process")
        text += data
    return Trial(obstacle=f"CUDA did not answer within {limit:g} s")


def _computed() -> Trial:
    """In the fork: one sum on each GPU."""
    gpus.show()
    names: list[str] = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            names.append(torch.cuda.get_device_name(device))
            total = torch.ones(3, device=device).sum().item()
        except Exception as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            return Trial(names, f"GPU {index}: {said[0]}")
        if total != 3:
            return Trial(names, f"GPU {index} adds three ones up to {total}")
    return Trial(names)
