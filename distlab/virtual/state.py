"""The state of one virtual rank, and of a group."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..observe.log import Event
from ..observe.looks import Looks
from ..observe.notices import Notice
from . import internals
from .scheduler import VirtualRank
from .work import VirtualWork


@dataclass(eq=False)
class Channel:
    """The state that the members of a group share; compared by identity, which is fast."""

    name: str
    shared: dict[Any, Any] = field(default_factory=dict)


class VirtualLedger:
    """A rank's recorder with the methods that ``RankContext`` needs; the process group fills it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.raw_spans: list[tuple[str, float, float]] = []
        self.picture_from = 0.0
        self.region = ""
        self.depth = 0
        self.phase = ""
        self.named = ""
        self.gpu = None  # no device whose clock could be asked

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what is computed inside by this name."""
        self.named = name
        try:
            yield
        finally:
            self.named = ""


@dataclass(eq=False, slots=True)
class RankState:
    """The state of one rank."""

    rank: VirtualRank
    environ: dict[Any, Any]
    torch_state: torch.Tensor
    numpy_state: Any
    random: random.Random
    groups: internals.GroupTable = field(default_factory=internals.GroupTable)
    ledger: VirtualLedger = field(default_factory=VirtualLedger)
    output: list[str] = field(default_factory=list)
    printed: int = 0
    works: dict[int, VirtualWork] = field(default_factory=dict)
    expecting: list[VirtualWork] = field(default_factory=list)
    communications: int = 0
    inits: int = 0  # how often the rank has made its default group
    backend: str = ""  # of the group that it makes
    default_backend: str = ""  # of its default group
    device: torch.device | None = None  # that the program has bound to its default group
    compute_since: float = 0.0
    looks: Looks = field(default_factory=Looks)  # taken where it sleeps for long
    model: Any = None
    journal: Any = None  # of what the rank does now
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    notices: dict[str, Notice] = field(default_factory=dict)
    reads: list[tuple[str, str, str]] = field(default_factory=list)  # its host waited for its GPU:
    # the operator, the line, the region
