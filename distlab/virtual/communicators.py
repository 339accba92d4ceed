"""The communicators of NCCL's groups. A communicator is made when all its members have come.

The first rank to use one waits for the others (``initNCCLComm`` and ``ncclCommInitRank``; for a
split ``ncclCommSplit``; ``rules.py`` names the files).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..observe.lines import names
from ..observe.log import CREATION, Event
from .order import IssueOrder
from .scheduler import Scheduler, VirtualRank

Gpu = tuple[int, torch.device]


@dataclass(eq=False)
class Communicator:
    """The state that the members of a communicator share; compared by identity.

    ``devices``: the node and the GPU of each member that has come.
    """

    ranks: tuple[int, ...]
    what: str = ""
    devices: dict[int, Gpu] = field(default_factory=dict)
    waiting: list[VirtualRank] = field(default_factory=list)

    def come(self, scheduler: Scheduler, gpu: Gpu) -> None:
        """The calling rank uses the communicator: returns when it is made.

        Raises DistBackendError if two members have one GPU.
        """
        rank = scheduler.me
        if rank.index in self.devices:
            return  # a rank that goes on has seen it made
        self.devices[rank.index] = gpu
        if len(self.devices) < len(self.ranks):
            self.waiting.append(rank)
            scheduler.sleep(rank, self)
            return
        self._refuse_shared()
        latest = max((rank.clock, *(other.clock for other in self.waiting)))
        for other in (*self.waiting, rank):
            other.clock = latest
        for other in self.waiting:
            scheduler.make_ready(other)

    def _refuse_shared(self) -> None:
        users: dict[Gpu, list[int]] = {}
        for rank in sorted(self.devices):
            users.setdefault(self.devices[rank], []).append(rank)
        for (_, device), ranks in users.items():
            if len(ranks) > 1:
                raise torch.distributed.DistBackendError(
                    f"Duplicate GPU detected: {names(ranks)} are on {device}; each rank needs a "
                    "GPU of its own (torch.cuda.set_device(local_rank))"
                )

    def told(self) -> str:
        """Why a rank waits for other ranks here, and not under gloo."""
        absent = [rank for rank in self.ranks if rank not in self.devices]
        if not absent:
            return ""  # the last one was refused
        return (
            f"{names(absent)} never came to it. gloo forgives this, for it connects the ranks of a "
            "group without them. NCCL makes a communicator when all its ranks have come: at its "
            "first use, or in new_group where a device is bound"
        )

    def describe(self, line: str = "") -> Event:
        """A condition that has come true, so that a rank goes on."""
        return Event(CREATION, self.ranks, None, 0, self.what, 0, 0, 0, 0.0, line=line)


class Splits:
    """The splits of one communicator: the k-th of each rank are one."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.count: dict[int, int] = {}
        self.made: list[Communicator] = []

    def come(self, scheduler: Scheduler, gpu: Gpu) -> None:
        """The calling rank makes a group, or declares that it is not in it."""
        number = self.count.get(scheduler.me.index, 0)
        self.count[scheduler.me.index] = number + 1
        if number == len(self.made):
            what = "new_group, which splits the world's communicator: every rank must call it"
            self.made.append(Communicator(self.ranks, what))
        self.made[number].come(scheduler, gpu)


def forgiven(scheduler: Scheduler, order: IssueOrder) -> str:
    """Why gloo would go on where no rank can here; empty if it would not."""
    for rank in scheduler.ranks:
        if isinstance(rank.waiting, Communicator):
            return rank.waiting.told()
    return order.told()
