"""The interface of the world for handles and groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from .network import Network
from .part import Part
from .rules import Rules
from .scheduler import Scheduler


class Machine(Protocol):
    """The world, as ``VirtualWork`` and ``VirtualGroup`` see it; ``World`` is the only one."""

    scheduler: Scheduler
    measured: bool
    network: Network
    rules: Rules

    @property
    def learner_files(self) -> Collection[str]:
        """Source files whose frames are named as the learner's line."""

    @property
    def states(self) -> Mapping[int, Any]:
        """The state of each rank that runs."""

    def post(self, part: Part, channel: Any) -> None:
        """Issue a part on a group."""

    def charge(self, state: Any) -> None:
        """Put the compute time since the last call on the rank's clock, where it is measured."""

    def settle(self, work: Any) -> None:
        """The operation is complete."""

    def expect(self, work: Any) -> None:
        """Fulfil the handle's future as soon as the operation is complete."""

    def fulfil(self, future: torch.futures.Future[Any]) -> None:
        """Wait for operations in flight until ``future`` is done."""
