"""Handles of operations in flight: ``VirtualWork`` and its future."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..observe.lines import learner_line, source_line
from ..observe.log import P2P, waited_twice
from .internals import at_end_of_backward, in_backward
from .machine import Machine
from .part import Part


class RankFuture(torch.futures.Future[Any]):
    """A future of an operation in flight: waiting for it hands the baton on."""

    def __init__(self, world: Machine) -> None:
        super().__init__()
        self.world = world

    def wait(self) -> Any:
        """The value, once the operation is complete."""
        self.world.fulfil(self)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> RankFuture:
        """The future of ``callback(self)``."""
        after = RankFuture(self.world)

        def call(done: torch.futures.Future[Any]) -> None:
            try:
                after.set_result(callback(done))
            except Exception as error:
                after.set_exception(error)

        self.add_done_callback(call)
        return after


class VirtualWork(dist.Work):
    """Handle of an operation in flight."""

    def __init__(self, world: Machine, part: Part, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.world, self.part, self.outputs = world, part, outputs
        self.future: RankFuture | None = None
        self.awaited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is complete; its clock moves to that moment.

        Raises CheckFailed at the second call for a message where gloo would wait for ever.
        """
        part = self.part
        if self.awaited and part.op in P2P and not self.world.rules.nccl:
            line = source_line(learner_line(sys._getframe(1), self.world.learner_files))
            raise waited_twice(part.describe(), part.rank.index, line)
        self.complete()
        self.awaited = True
        return True

    def complete(self) -> None:
        """Hand the baton on until the operation is complete."""
        part = self.part
        if self.world.measured:
            self.world.charge(self.world.states[part.rank.index])
        self.world.scheduler.wait(part.rank, part)
        self._done()
        if part.broken:
            raise RuntimeError(f"Connection closed by peer: rank {part.peer} is lost")

    def _done(self) -> None:
        self.part.acknowledge()
        self.world.settle(self)

    def is_completed(self) -> bool:
        """Whether it is complete by now."""
        done = self.world.scheduler.poll(self.part.rank, self.part)
        if done:
            self._done()
        return done

    def is_success(self) -> bool:
        """An operation either succeeds or ends the run."""
        return self.part.done

    def exception(self) -> None:
        """Failures end the run; none is kept in the handle."""

    def synchronize(self) -> None:
        """Virtual ranks have one stream: the same as waiting."""
        self.complete()

    def block_current_stream(self) -> None:
        """Virtual ranks have one stream: the same as waiting."""
        self.complete()

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        return list(self.outputs)

    def source_rank(self) -> int:
        """The rank in the group that a message came from."""
        return -1 if self.part.peer is None else self.part.group.index(self.part.peer)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future with the outputs.

        It is fulfilled on this rank's own thread. C++ code that waits for it at the end of backward
        (DistributedDataParallel) would block the baton, so backward itself waits first.
        """
        if self.future is None:
            self.future = RankFuture(self.world)
            self.world.expect(self)
            if in_backward():
                at_end_of_backward(self.wait)
        return self.future
