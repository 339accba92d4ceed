"""The form of sinks, several sinks as one, and the sink for people: progress in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

Metrics = Mapping[str, float | None]


class Sink(Protocol):
    """Takes metrics."""

    def write(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step."""

    def close(self) -> None:
        """Nothing more will come."""


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = list(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        """Hand the metrics to each."""
        for sink in self.sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close each."""
        for sink in self.sinks:
            sink.close()


class Terminal:
    """Progress for people: one line that is written over, or where the output is no terminal, one
    line per record."""

    def __init__(self, total_steps: int, *, stream: TextIO | None = None) -> None:
        self.total, self.stream = total_steps, stream or sys.stdout
        self.began: tuple[float, int] | None = None

    def write(self, step: int, metrics: Metrics) -> None:
        """Show the step, the loss, the rate, and how long it will take."""
        now = time.monotonic()
        self.began = self.began or (now, step)
        begun, first = self.began
        left = (now - begun) / (step - first) * (self.total - 1 - step) if step > first else None
        parts = [
            f"step {step + 1}/{self.total}",
            f"loss {_text(metrics.get('loss'), '.4f')}",
            f"{_text(metrics.get('samples_per_second'), ',.0f')} samples/s",
            f"MFU {_text(metrics.get('mfu'), '.1%')}",
            f"GPU {_text(metrics.get('gpu_utilisation'), '.0%')}",
            f"{_text(left, ',.0f')} s left",
        ]
        line = "  ".join(parts)
        tty = self.stream.isatty()
        self.stream.write(f"\r{line:<100}" if tty else line + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Leave the line."""
        if self.stream.isatty():
            self.stream.write("\n")


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
