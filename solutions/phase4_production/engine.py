"""One interface to every strategy, so that the training loop is written once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solutions.phase2_advanced import gradient_accumulation
from solutions.phase3_multi_node.buckets import broadcast_tensors
from solutions.phase3_multi_node.overlap import MIB

from .monitoring import StepMonitor
from .task import Part, Task

State = dict[str, Any]
OptimizerClass = type[torch.optim.Optimizer]


class Place(TypedDict):
    """Part ``rank`` of the ``world_size`` parts of a batch, as samplers call them."""

    rank: int
    world_size: int


class Engine:
    """A model and its optimizer, trained by all ranks together.

    ``net`` is called; ``module`` has the buffers; the ``param_groups`` of ``optimizer`` take the
    learning rate; ``parameters`` are those that it steps on this rank.
    """

    net: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    compressor: Any = None  # a hook that keeps the part that it has not sent
    counts = True  # its samples are counted; False: a rank that has the same samples counts them
    layout = "whole"  # how a checkpoint holds the state: engines of one layout can swap it

    @property
    def place(self) -> Place:
        """The part of each batch that this rank has."""
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank's optimizer steps, with gradients after backward."""
        return [*self.net.parameters()]

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Forward and backward of one micro-batch happen inside; ``last`` of its step."""
        return contextlib.nullcontext()

    def train(
        self,
        parts: Iterable[Part],
        count: int,
        weight: Callable[[], Tensor],
        *,
        monitor: StepMonitor,
        surroundings: AbstractContextManager[object],
    ) -> Tensor:
        """Forward and backward of the ``count`` micro-batches of a step; the sum of their losses.

        ``weight()`` is the factor of the gradients. It waits for a message that travels beside the
        first forward. The model runs inside ``surroundings``.
        """
        losses = []
        for number, part in enumerate(parts):
            with self.micro_batch(last=number == count - 1):
                with monitor.phase("forward"):
                    with surroundings:
                        logits = self.net(part.inputs)
                    loss = part.loss(logits)
                if number == 0:
                    with monitor.communication():
                        factor = weight()
                with monitor.phase("backward"):
                    loss.backward(factor)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def sums(
        self, part: Part, task: Task, surroundings: AbstractContextManager[object]
    ) -> Tensor:
        """What an evaluation adds up of a micro-batch."""
        with surroundings:
            logits = self.net(part.inputs)
        return task.sums(logits, part.targets)

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> float:
        """Limit the norm of the whole gradient; returns it as it was."""
        return gradient_accumulation.clip_by_global_norm(self.parameters, max_norm)

    def share_buffers(self) -> None:
        """Give every rank the running statistics of rank 0, before they are used or saved."""
        broadcast_tensors([*self.module.buffers()], 25 * MIB)

    @property
    def averaged(self) -> list[Tensor]:
        """The tensors of this rank of which a running average is kept."""
        return [*self.parameters, *self.module.buffers()]

    def weights(self) -> tuple[State, State]:
        """(shared, own) of the weights, where only rank 0 has the shared part; collective."""
        return {"model": self.module.state_dict()}, {}

    def load_weights(self, shared: State, owns: Iterable[State]) -> None:
        """Take them over; ``owns``: the own parts that the ranks wrote, at any world size."""
        self.module.load_state_dict(shared["model"])

    def state(self) -> tuple[State, State]:
        """As ``weights``, with the optimizer's state."""
        shared, own = self.weights()
        return {**shared, "optimizer": self.optimizer.state_dict()}, own

    def load(self, shared: State, owns: Iterable[State]) -> None:
        """The opposite of ``state``."""
        self.load_weights(shared, owns)
        self.optimizer.load_state_dict(shared["optimizer"])
