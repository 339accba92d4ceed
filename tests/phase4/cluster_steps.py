"""Steps of ranks that never ran: metrics as exercise 4.10 gives them, with the times wanted."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any


def step_metrics(step: int, own: float, waits: float = 0.0, **more: Any) -> SimpleNamespace:
    """A step with ``own`` seconds of its rank, most of them in backward, and ``waits`` exposed."""
    parts = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
    default = {
        "loss": 1.0,
        "samples": 4,
        "tokens": 40,
        "hidden": 0.2,
        "flops": 4e9,
        "peak_flops": 1e10,
        "memory": 30,
        "memory_capacity": 100,
        "gpu_utilisation": None,
        "phases": {name: share * own for name, share in parts.items()},
    }
    times = {"step": step, "seconds": own + waits, "own_seconds": own, "exposed": waits}
    return SimpleNamespace(**(default | times | more))


def synchronous_steps(step: int, owns: list[float]) -> list[SimpleNamespace]:
    """A step of each rank: they wait for the slowest, so all take equally long."""
    return [step_metrics(step, own, max(owns) - own) for own in owns]


def usual_of(owns: list[float], rank: int) -> float:
    """The lower median of the other ranks' own times."""
    return statistics.median_low(owns[:rank] + owns[rank + 1 :])
