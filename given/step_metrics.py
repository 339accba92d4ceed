"""The records of a training's speed, of one step and of a window of steps, and the device's gauges.

Step metrics (4.10) fill the first, reports of all ranks (4.11) the second.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of one rank. Times in seconds, memory in bytes; None where nothing is known."""

    step: int
    loss: float
    samples: int
    tokens: int
    seconds: float
    phases: dict[str, float]  # without exposed communication inside
    exposed: float
    hidden: float
    flops: float
    peak_flops: float | None
    memory: int  # at most allocated in the step (CPU: resident since the process began)
    memory_capacity: int
    gpu_utilisation: float | None  # share of time in which the GPU ran anything: 0 … 1

    @property
    def own_seconds(self) -> float:
        """The time that the rank spent on its own work, not waiting for others."""
        return self.seconds - self.exposed

    def as_dict(self) -> dict[str, float | None]:
        """Flat, for sinks: rates instead of counts, a ``…_seconds`` for each phase."""
        mfu = self.flops / self.seconds / self.peak_flops if self.peak_flops else None
        return {
            "loss": self.loss,
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "mfu": mfu,
            "step_seconds": self.seconds,
            **{f"{name}_seconds": taken for name, taken in self.phases.items()},
            "exposed_communication_seconds": self.exposed,
            "hidden_communication_seconds": self.hidden,
            "memory_bytes": self.memory,
            "memory_share": self.memory / self.memory_capacity,
            "gpu_utilisation": self.gpu_utilisation,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMetrics:
    """One rank's report on a window of steps; times are per step. NaN: not known."""

    samples: float  # of the whole window, as tokens, FLOPs and seconds are
    tokens: float
    flops: float
    seconds: float
    loss: float  # the mean over the rank's samples
    own: float  # the median over the window's steps
    exposed: float
    hidden: float
    memory_share: float
    phases: tuple[float, ...]  # of PHASES

    def numbers(self) -> list[float]:
        """All of it, in order."""
        *facts, phases = vars(self).values()
        return [*facts, *phases]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> RankMetrics:
        """From ``numbers()``."""
        names = list(cls.__dataclass_fields__)[:-1]
        facts = dict(zip(names, numbers, strict=False))
        return cls(**facts, phases=tuple(numbers[len(names) :]))


class Gauges:
    """The device's own gauges."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.next_reading, self.reading = 0.0, None
        self.capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type == "cuda":
            self.capacity = torch.cuda.get_device_properties(device).total_memory

    def memory(self) -> tuple[int, int]:
        """Bytes: the most since the last call (CPU: since the process began), and the device's
        total."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return most, self.capacity
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, self.capacity

    def utilisation(self) -> float | None:
        """The GPU's by NVML, read once a second at most; None without a GPU or its NVML."""
        if self.device.type == "cuda" and time.monotonic() >= self.next_reading:
            self.next_reading = time.monotonic() + 1.0
            try:
                self.reading = torch.cuda.utilization(self.device) / 100
            except Exception:  # NVML missing or forbidden, in the words of three libraries
                self.reading = None
        return self.reading
