"""A GPT on a mesh: data, shard, tensor, pipeline, context and expert axis in any combination.

Each axis brings one strategy, and cuts one thing:

    data       the batch                            gradients are averaged
    shard      the batch, and rows of parameters    gathered unit by unit (3.32)
    expert     the batch, and the experts           tokens travel (2.25)
    context    the positions of a sequence          keys and values travel (2.22)
    tensor     matrices                             activations are summed (2.15)
    pipeline   the layers                           activations travel (2.10)

The layers come from ``mesh_layers.py``, and the interpreter of a schedule from phase 2. What
happens to a gradient is in no layer: it follows from the specs of ``mesh_specs.py`` (3.33).

Invariant: loss, norm and parameters are those of one process with the whole batch.
Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 3; Liang et al. 2024 (TorchTitan,
arXiv 2410.06511), section 2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solutions.phase2_advanced.model_parallel import Embed, Head
from solutions.phase2_advanced.parallel_gpt import ParallelGPT
from solutions.phase2_advanced.pipeline_parallel import Pipeline

from .mesh import Grid, Mesh
from .mesh_layers import MeshBlock, MeshEmbed, MeshGroups, SequenceMeshBlock, positions_of
from .mesh_specs import BATCH, SAMPLES, MeshLayout, bounds_of, named, prefix_of, refuse, specs_of
from .mixture_gpt import update_biases
from .per_parameter_sharding import PerParameterFSDP


class MeshGPT(ParallelGPT):
    """This rank's share of ``gpt``, which is the same on all ranks, on its device, and not kept.

    A collective call: it makes all groups. ``grid``: the layout's axes in another order. Raises
    ValueError, the same on all ranks, for another number of ranks, and for what can't be cut or
    can't be put together.
    """

    groups: MeshGroups
    layout: MeshLayout

    def __init__(self, gpt: Any, layout: MeshLayout, grid: Grid | None = None) -> None:
        refuse(gpt, layout)
        mesh = Mesh(grid or layout.grid(), specs_of(gpt, layout), joined=[BATCH])
        group = mesh.group
        pipeline = group("pipeline")
        super().__init__(
            gpt,
            layout,
            MeshGroups(
                tensor=group("tensor"),
                pipeline=pipeline,
                data=group(*BATCH),
                tied=pipeline,  # not used: the mesh sums the tied matrix
                context=group("context"),
                expert=group("expert"),
            ),
        )
        self.mesh, self.bounds = mesh, bounds_of(gpt, layout)
        if layout.shard > 1:
            self.chunks = nn.ModuleList(map(self._sharded, self.chunks))

    def _shard(self, layer: nn.Module) -> nn.Module:
        if isinstance(layer, Embed):
            embed = MeshEmbed(layer, self.groups, self.layout.sequence_parallel)
            self.tokens = embed.tokens
            return embed
        if isinstance(layer, Head):
            return super()._shard(layer)
        kind = SequenceMeshBlock if self.layout.sequence_parallel else MeshBlock
        return kind(layer, self.groups)

    def _sharded(self, chunk: nn.Module) -> PerParameterFSDP:
        blocks = [layer for layer in chunk.children() if isinstance(layer, MeshBlock)]
        return PerParameterFSDP(chunk, blocks, group=self.mesh.group("shard"))

    def wrappers(self) -> Iterator[PerParameterFSDP]:
        """The chunks whose rows are sharded; none without a shard axis."""
        return (chunk for chunk in self.chunks if isinstance(chunk, PerParameterFSDP))

    def state(self) -> dict[str, Tensor]:
        """What this rank holds of parameters and routers' biases, by the whole model's names."""
        found: dict[str, Tensor] = {}
        for number, chunk in enumerate(self.chunks):
            layers = chunk.module if isinstance(chunk, PerParameterFSDP) else chunk
            stage = self.groups.pipeline.rank() + number * self.layout.pipeline
            for index, layer in enumerate(layers, self.bounds[stage]):
                prefix = prefix_of(index, self.bounds[-1])
                found |= {prefix + name: value for name, value in named(layer)}
        return found

    def trained(self) -> dict[str, nn.Parameter]:
        """Those of ``state`` that are parameters."""
        return {n: p for n, p in self.state().items() if isinstance(p, nn.Parameter)}

    def own(self, tokens_BT: Tensor) -> Tensor:
        """This rank's sequences of a whole batch, and of those its positions.

        Raises ValueError if the ranks don't divide the batch.
        """
        sizes, here = self.mesh.grid.sizes, self.mesh.grid.coordinates(self.mesh.rank)
        parts, part = 1, 0
        for axis in SAMPLES:
            parts, part = parts * sizes[axis], part * sizes[axis] + here[axis]
        if len(tokens_BT) % parts:
            raise ValueError(f"a batch of {len(tokens_BT)} does not divide by {parts} pipelines")
        positions_T = positions_of(tokens_BT.shape[1], self.groups.context)
        return tokens_BT.chunk(parts)[part][:, positions_T]

    def pipeline(self, batch: int, length: int) -> Pipeline:
        """The interpreter of the schedule, for a whole batch of ``batch`` sequences of ``length``.

        Raises ValueError, the same on all ranks, if they don't divide by the ranks.
        """
        layout = self.layout
        parts = layout.data * layout.shard * layout.experts
        if batch % parts:
            raise ValueError(f"a batch of {batch} does not divide by {parts} pipelines")
        if layout.context > 1 and length % (2 * layout.context):
            raise ValueError(
                f"{length} tokens don't divide into {2 * layout.context} chunks: two for each of "
                f"{layout.context} context ranks"
            )
        return super().pipeline(batch // parts, length // layout.context)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Micro-batches add up here: shards are not reduced until ``reduce_gradients``."""
        with contextlib.ExitStack() as stack:
            for wrapper in self.wrappers():
                stack.enter_context(wrapper.no_sync())
            yield

    def reduce_gradients(self) -> None:
        """Complete all gradients: the shards' first, which the mesh sums over the other axes."""
        for wrapper in self.wrappers():
            for unit in wrapper.units:
                unit.start_reduce()
                unit.finish_reduce()
        self.mesh.reduce_gradients(self.trained())

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that the whole model's norm is at most ``max_norm``.

        Returns the norm before, the same on every rank. One all-reduce of 8 bytes.
        """
        return self.mesh.clip(self.trained(), max_norm)

    def mean_loss(self, loss: float) -> float:
        """The mean over the batch of the ranks' ``loss``. One all-reduce of 8 bytes."""
        total = torch.tensor(loss, dtype=torch.float64, device=next(self.parameters()).device)
        dist.all_reduce(total, group=self.groups.data)
        return total.item() / self.groups.data.size()


def train_step(
    model: MeshGPT,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    *,
    max_norm: float = 1.0,
) -> tuple[float, float]:
    """One optimizer step on this rank's part of the batch (``own``), clipped by the global norm.

    Equals the step of one process on the whole batch. Returns (mean loss over the batch, norm
    before clipping), the same on every rank.
    """
    optimizer.zero_grad(set_to_none=True)
    with model.accumulating():
        loss = pipeline.step(tokens_BT, targets_BT)
    model.reduce_gradients()
    norm = model.clip(max_norm)
    optimizer.step()
    update_biases(model)
    return model.mean_loss(loss), norm


def evaluate(model: MeshGPT, pipeline: Pipeline, tokens_BT: Tensor, targets_BT: Tensor) -> float:
    """The mean loss of a batch without a step, the same on every rank; changes nothing."""
    before = model.training
    model.eval()
    with torch.no_grad():
        loss = pipeline.step(tokens_BT, targets_BT)
    model.train(before)
    return model.mean_loss(loss)
