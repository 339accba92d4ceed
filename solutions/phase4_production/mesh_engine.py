"""A GPT on a mesh (exercise 3.33) as an engine of the trainer: ``strategy: mesh``.

The configuration gives the number of ranks of the axes shard, tensor, pipeline and context. The
data axis takes what is left of the ranks. Ranks that differ on tensor, pipeline and context alone
have the same samples. A checkpoint says of each block where it lies in the whole model. So a run
can go on under another mesh, and with another number of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from solutions.phase2_advanced.gradient_accumulation import IGNORED
from solutions.phase3_multi_node.mesh_checkpoint import load, saved
from solutions.phase3_multi_node.mesh_gpt import MeshGPT
from solutions.phase3_multi_node.mesh_layers import positions_of
from solutions.phase3_multi_node.mesh_specs import SAMPLES, MeshLayout
from solutions.phase3_multi_node.mesh_traffic import best_grid

from .engine import Engine, OptimizerClass, Place, State
from .monitoring import StepMonitor
from .task import Part, Task
from .trainer_config import AXES, Config, ConfigError


def layout_of(config: Config, world_size: int) -> MeshLayout:
    """The layout of ``world_size`` ranks; ConfigError if they, or the batch, don't divide."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    layout = MeshLayout(
        **sizes, schedule=config.schedule, sequence_parallel=config.sequence_parallel
    )
    if world_size % layout.ranks:
        told = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(f"{world_size} ranks are no multiple of {told}")
    replicas = world_size // layout.ranks * layout.shard
    own_batch, rest = divmod(config.global_batch, replicas)
    if rest:
        raise ConfigError(
            f"a global batch of {config.global_batch} does not divide by {replicas} replicas"
        )
    if config.micro_batch == "auto":  # the bubble is below a third then
        least = min(2 * layout.pipeline, own_batch) if layout.pipeline > 1 else 1
        count = next(m for m in range(least, own_batch + 1) if not own_batch % m)
    else:
        count, rest = divmod(own_batch, config.micro_batch)
        if rest or not count:
            raise ConfigError(
                f"{own_batch} sequences of a replica don't divide into micro-batches of "
                f"{config.micro_batch}"
            )
    return replace(layout, data=world_size // layout.ranks, micro_batches=count)


class WeighedGPT(MeshGPT):
    """This rank's share of a GPT; ``factor`` multiplies the mean loss of a micro-batch."""

    factor: float | Tensor = 1.0

    def loss(self, logits_BTv: Tensor, targets_BT: Tensor) -> Tensor:
        return super().loss(logits_BTv, targets_BT) * self.factor


class MeshEngine(Engine):
    """This rank's share of a GPT and of its optimizer's state.

    ``rows``: the sequences of a replica in a step, all of ``length`` tokens. A step with fewer gets
    blank ones, because the stages agree on shapes before. The axes are put in the order for which
    the fewest bytes leave a node of ``node_size`` ranks.
    """

    layout = "mesh"

    def __init__(
        self,
        gpt: nn.Module,
        layout: MeshLayout,
        optimizer_class: OptimizerClass,
        options: dict[str, Any],
        *,
        rows: int,
        length: int,
        node_size: int,
        monitor: StepMonitor,
    ) -> None:
        self.rows, self.length = rows, length
        grid = None  # on one node every order of the axes will do
        if node_size < layout.ranks:
            batch = rows * layout.data * layout.shard
            grid = best_grid(gpt, layout, batch, length, node_size)
        self.module = self.net = self.model = model = WeighedGPT(gpt, layout, grid)
        self.optimizer = optimizer_class(model.parameters(), **options)
        here = model.mesh.grid.coordinates(model.mesh.rank)
        self.counts = not any(place for axis, place in here.items() if axis not in SAMPLES)
        self.positions_T = positions_of(length, model.groups.context)
        self.pipeline = model.pipeline(rows * self.place["world_size"], length)
        for name in ("forward", "backward"):
            self._measure(name, functools.partial(monitor.phase, name))
        self._measure("arrived", monitor.communication)  # a stage waits for its neighbour

    @property
    def place(self) -> Place:
        grid, part, parts = self.model.mesh.grid, 0, 1
        here = grid.coordinates(self.model.mesh.rank)
        for axis in SAMPLES:
            part, parts = part * grid.sizes[axis] + here[axis], parts * grid.sizes[axis]
        return {"rank": part, "world_size": parts}

    def _measure(self, method: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Let calls of a method of the pipeline run inside ``context()``."""
        call = getattr(self.pipeline, method)

        def measured(*args: Any) -> Any:
            with context():
                return call(*args)

        setattr(self.pipeline, method, measured)

    def train(
        self,
        parts: Iterable[Part],
        count: int,
        weight: Callable[[], Tensor],
        *,
        monitor: StepMonitor,
        surroundings: AbstractContextManager[object],
    ) -> Tensor:
        """The micro-batches of a step go through the pipeline as one batch of ``rows`` rows."""
        tokens_BT, targets_BT = self.own(parts)
        with monitor.communication():
            # the mean over the rows of all replicas becomes the mean over the tokens that count
            self.model.factor = weight() * (self.rows * self.length)
        with surroundings, self.model.accumulating():
            loss = self.pipeline.step(tokens_BT, targets_BT)
        with monitor.communication():
            self.model.reduce_gradients()
        return self.summed(loss / self.model.factor)

    def own(self, parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of all rows of the parts, and blank ones; this rank's positions."""
        inputs, targets, _ = zip(*parts, strict=True)
        tokens_BT, targets_BT = torch.cat(inputs), torch.cat(targets)
        missing = (0, 0, 0, self.rows - len(tokens_BT))
        positions_T = self.positions_T.to(tokens_BT.device)
        return (
            F.pad(tokens_BT, missing)[:, positions_T],
            F.pad(targets_BT, missing, value=IGNORED)[:, positions_T],
        )

    def summed(self, mean: float | Tensor) -> Tensor:
        """The sum of the losses of this replica's tokens, from the ``mean`` over own positions."""
        loss = torch.as_tensor(mean, device=self.optimizer.param_groups[0]["params"][0].device)
        loss = loss.double() * (self.rows * len(self.positions_T))
        if self.model.layout.context > 1:
            dist.all_reduce(loss, group=self.model.groups.context)
        return loss

    def sums(
        self, part: Part, task: Task, surroundings: AbstractContextManager[object]
    ) -> Tensor:
        """Summed cross-entropy and tokens, as ``TextTask.sums``; zeros on ranks that don't count.
        """
        self.model.factor = 1.0
        with surroundings:
            loss = self.summed(self.pipeline.step(*self.own([part])))
        return torch.stack([loss, (part.targets != IGNORED).sum()]) * self.counts

    def clip(self, max_norm: float) -> float:
        return self.model.clip(max_norm)

    def weights(self) -> tuple[State, State]:
        return {"shapes": self.shapes}, {"pieces": self.model.mesh.pieces(self.model.state())}

    def load_weights(self, shared: State, owns: Iterable[State]) -> None:
        self.expect_shapes(shared)
        pieces = (piece for own in owns for piece in own["pieces"])
        self.model.mesh.load(self.model.state(), pieces)

    def state(self) -> tuple[State, State]:
        return {"shapes": self.shapes}, saved(self.model, self.optimizer)

    def load(self, shared: State, owns: Iterable[State]) -> None:
        self.expect_shapes(shared)
        load(self.model, self.optimizer, [*owns])

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of all parameters of the whole model."""
        return {name: [*spec.shape] for name, spec in self.model.mesh.layout.items()}

    def expect_shapes(self, shared: State) -> None:
        """ValueError if a checkpoint is of a model with other parameters."""
        if shared["shapes"] != self.shapes:
            raise ValueError("the checkpoint is of a model with other layers or another width")
