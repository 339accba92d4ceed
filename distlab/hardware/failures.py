"""Failures of GPUs, and the checkpoints that limit what they cost.

A job on W GPUs stops when one of them does: it runs for M = (hours of one GPU between failures) / W
on average. It saves after every τ seconds of work, and a save takes δ. A failure loses the work
since the last save; a restart takes R. Young's interval is the first term of Daly's:

    τ = sqrt(2δM)                                                       Young
    τ = sqrt(2δM) · (1 + sqrt(δ/2M)/3 + (δ/2M)/9) - δ,  M if δ ≥ 2M     Daly

Failures come at any moment, also in a save and in a restart, so the time between them has an
exponential distribution. *Goodput* is the share of all time that makes progress and is not lost:

    goodput = τ / (M · e^(R/M) · (e^((τ+δ)/M) - 1))

Sources: Young 1974 (CACM 17, 530-531); Daly 2006 (Future Generation Computer Systems 22, 303-312),
equations 20 and 37. ``published/failures.csv`` has observed failures.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "published" / "failures.csv"


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Interruptions of one job; ``gpu``: the first word of a GPU's name in a cluster's file."""

    gpu: str
    system: str
    gpus: int
    days: float
    interruptions: int
    kind: str
    source: str

    @property
    def hours(self) -> float:
        """Hours of one GPU between two failures."""
        return self.gpus * self.days * 24 / self.interruptions


@functools.cache
def all_observed() -> tuple[Observed, ...]:
    """The rows of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Observed(
                gpus=int(row.pop("gpus")),
                days=float(row.pop("days")),
                interruptions=int(row.pop("interruptions")),
                **row,
            )
            for row in csv.DictReader(file)
        )


def observed(gpu: str) -> Observed:
    """The row for a GPU with this name, or that with the most interruptions if there is none."""
    rows = all_observed()
    own = [row for row in rows if row.gpu == gpu.split()[0]]
    return max(own or rows, key=lambda row: row.interruptions)


def young(save: float, between: float) -> float:
    """Seconds of work between two saves; ``save`` seconds each, ``between`` two failures."""
    return math.sqrt(2 * save * between)


def daly(save: float, between: float) -> float:
    """The same by Daly's formula, for which saves may also be long."""
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return young(save, between) * (1 + math.sqrt(part) / 3 + part / 9) - save


def goodput(save: float, between: float, restart: float, interval: float) -> float:
    """The share of time that makes progress which is kept; all arguments in seconds."""
    lost = math.exp(restart / between) * math.expm1((interval + save) / between)
    return interval / (between * lost)
