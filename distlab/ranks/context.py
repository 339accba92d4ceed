"""The context that a rank's body gets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..observe.recorder import Ledger


@dataclass
class RankContext:
    """The context that a rank's body gets: its rank, its device, and its recorder."""

    rank: int
    world_size: int
    device: torch.device
    seed: int
    ledger: Ledger | None = None

    def generator(self, salt: int = 0) -> torch.Generator:
        """A CPU generator that differs by seed, rank and ``salt``."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + self.rank) * 1009 + salt)

    def start_picture(self) -> None:
        """Leave everything before this call out of timelines: set-up, imports, warm-up."""
        if self.ledger is not None:
            if self.ledger.gpu is not None:
                self.ledger.gpu.settle()
            self.ledger.picture_from = time.monotonic()

    def steps(self, count: int) -> Iterator[int]:
        """The numbers 0 … count - 1 of steps. The first step warms up, and no picture shows it."""
        for number in range(count):
            if number == 1:
                self.start_picture()
            yield number

    @contextlib.contextmanager
    def span(self, name: str, label: str = "") -> Iterator[None]:
        """Show the compute inside as one ``name`` in timelines, with ``label`` written on it.

        Time spent asleep counts; single operators inside are not shown. ``name``: one word.
        """
        if self.ledger is None:
            yield
            return
        with self.ledger.span(f"{name} {label}".strip()):
            yield

    @contextlib.contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Mark the communication issued inside with ``name`` (see ``Log.select``)."""
        if self.ledger is None:
            yield
            return
        before, self.ledger.region = self.ledger.region, name
        try:
            yield
        finally:
            self.ledger.region = before
