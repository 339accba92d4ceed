"""The files of a profiled run, for an own training loop:

    with profiled("runs/mine") as profiler:
        for batch in loader:
            …
            profiler.step()

writes ``trace.json.gz``, and on a GPU ``memory.pickle`` beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import profile, schedule

WARMUP = 2  # steps that are not in the trace: caches fill, and the profiler starts


@contextlib.contextmanager
def profiled(folder: str | Path, steps: int = 4) -> Iterator[profile]:
    """Profile ``steps`` steps after ``WARMUP`` others; call ``step()`` at the end of each step.

    Later steps are not in the trace. Raises ValueError at the end if there were too few.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.memory._record_memory_history(stacks="python")
    with profile(
        schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
        profile_memory=True,
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / "trace.json.gz")),
    ) as profiler:
        yield profiler
    if gpu:
        torch.cuda.memory._dump_snapshot(str(folder / "memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    if profiler.step_num < WARMUP + steps:
        raise ValueError(
            f"{profiler.step_num} steps were made, and the profile needs {WARMUP} + {steps}"
        )
