"""A GPT on T·P·D ranks: tensor, pipeline and data parallelism put together.

Each of the three divides something else, and each needs another network:

=========  =====================  ===================================================  ==========
ranks      share                  communicate, per step and rank                       group
=========  =====================  ===================================================  ==========
T tensor   every matrix           4 all-reduces of the activations per layer and       neighbours
                                  micro-batch: the most bytes, and on the critical
                                  path; sequence parallelism hides some in backward
D data     the batch              one all-reduce of this rank's gradients              further
P pipe     the layers             the activations of a micro-batch per boundary        furthest
=========  =====================  ===================================================  ==========

So rank = (p·D + d)·T + t: the T ranks that send most are neighbours in one node. The parts come
from the other files of this phase. This file joins them: it says which rank is in which group,
what is replicated, and over which ranks each gradient is summed before the optimizer steps.

After backward a rank's gradients are not complete yet. Three reductions complete them, in this
order, once per step. Parameters that a rank uses on its own positions only (sequence parallelism):
sum over the tensor group. The tied embedding of first and last stage: sum over these two stages.
All parameters: mean over the data group.
Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 3; Korthikanti et al. 2022
(arXiv 2205.05198), section 4.2.2.

Shapes: B batch, T time, t this rank's positions, D width, v this rank's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group
from solutions.phase1_data_parallel.trainer import average_gradients

from .model_parallel import Embed, Head, layers_of, reduce_ties
from .parallel_transformer import ParallelBlock
from .pipeline_parallel import Pipeline, make_schedule
from .pipeline_schedules import with_messages
from .sequence_parallel import (
    TIME,
    SequenceParallelBlock,
    gather_sequence,
    sum_replicated_gradients,
)
from .stage_bounds import partition
from .tensor_parallel import RowParallelLinear, split_to_ranks
from .vocabulary_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from .zero_bubble import ZeroBubblePipeline, zero_bubble

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How tensor · pipeline · data ranks share a GPT; ``chunks`` stages per rank (interleaved)."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    chunks: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        counts = (self.tensor, self.pipeline, self.data, self.chunks, self.micro_batches)
        if min(counts) < 1:
            raise ValueError(f"tensor, pipeline, data, chunks, micro-batches: {counts}: all >= 1")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"the schedule must be one of {SCHEDULES}, not {self.schedule!r}")
        if self.chunks > 1 and self.schedule != "interleaved":
            raise ValueError(f"{self.chunks} chunks per rank need the interleaved schedule")

    @property
    def ranks(self) -> int:
        """How many ranks it takes."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class Groups:
    """This rank's groups; ``tied``: this rank and the other end of its pipeline, or it alone."""

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    tied: dist.ProcessGroup


def make_groups(layout: Layout) -> Groups:
    """The groups of this rank; every rank makes all of them, in the same order.

    Raises ValueError if the layout is for another number of ranks.
    """
    if layout.ranks != dist.get_world_size():
        raise ValueError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} takes "
            f"{layout.ranks} ranks, there are {dist.get_world_size()}"
        )
    grid_PDT = torch.arange(layout.ranks).view(layout.pipeline, layout.data, layout.tensor)
    pipes = grid_PDT.flatten(1).T
    inner = grid_PDT[1:-1].flatten()[:, None].tolist()
    ends = pipes[:, [0, -1]].tolist() if layout.pipeline > 1 else pipes.tolist()
    lines = [
        grid_PDT.flatten(0, 1).tolist(),
        pipes.tolist(),
        grid_PDT.transpose(1, 2).flatten(0, 1).tolist(),
        [*ends, *inner],
    ]
    return Groups(*(dist.new_subgroups_by_enumeration(line)[0] for line in lines))


class ParallelEmbed(nn.Module):
    """First layer: tokens (B, T) to (B, T, D), or to this rank's positions (B, t, D)."""

    def __init__(self, embed: Embed, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        self.tokens, self.places = VocabParallelEmbedding(embed.tokens, group), embed.places
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Each token's embedding plus that of its position."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.places(places_T)
        return split_to_ranks(x_BTD, TIME, self.group) if self.sequence_parallel else x_BTD


class ParallelHead(nn.Module):
    """Last layer: (B, T, D) or this rank's positions (B, t, D) to its words' logits (B, T, v)."""

    def __init__(
        self, head: Head, tokens: VocabParallelEmbedding, group: Group, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.norm, self.tokens = head.norm, tokens
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Norm and tied output layer."""
        x_BTD = self.norm(x_BTD)
        if not self.sequence_parallel:
            return self.tokens.logits(x_BTD)
        return F.linear(gather_sequence(x_BTD, self.group), self.tokens.weight)


def matrix_elements(layers: Sequence[nn.Module]) -> list[int]:
    """Costs that balance the stages: elements of a layer's matrices; a lookup costs nothing."""
    return [
        0 if isinstance(layer, Embed) else sum(p.numel() for p in layer.parameters())
        for layer in layers
    ]


class ParallelGPT(nn.Module):
    """This rank's share of ``gpt``, which is the same on all ranks and is not kept.

    ``chunks``: this rank's stages, in rising order; ``ties``: its copy of the tied embedding and
    the group of both copies, if another rank has one too. Raises ValueError, the same on all ranks,
    for heads, widths or words that don't divide, or for more stages than layers.
    """

    def __init__(self, gpt: Any, layout: Layout, groups: Groups) -> None:
        super().__init__()
        self.layout, self.groups = layout, groups
        self.vocabulary, self.width = gpt.tokens.weight.shape
        layers, count = layers_of(gpt), layout.pipeline * layout.chunks
        bounds = partition(matrix_elements(layers), count)
        mine = range(groups.pipeline.rank(), count, layout.pipeline)
        stages = [layers[begin:end] for begin, end in pairwise(bounds)]
        self.tokens: VocabParallelEmbedding | None = None
        self.chunks = nn.ModuleList(
            nn.Sequential(*map(self._shard, stages[stage])) for stage in mine
        )
        self.ties: list[tuple[Tensor, dist.ProcessGroup]] = []
        if self.tokens is not None and layout.pipeline > 1:
            self.ties = [(self.tokens.weight, groups.tied)]

    def _shard(self, layer: nn.Module) -> nn.Module:
        group, sequence_parallel = self.groups.tensor, self.layout.sequence_parallel
        if isinstance(layer, Embed):
            embed = ParallelEmbed(layer, group, sequence_parallel)
            self.tokens = embed.tokens
            return embed
        if isinstance(layer, Head):
            if self.tokens is None:  # the embedding is on another rank: a copy of its own
                self.tokens = VocabParallelEmbedding(
                    nn.Embedding.from_pretrained(layer.head.weight.detach(), freeze=False), group
                )
            return ParallelHead(layer, self.tokens, group, sequence_parallel)
        return (SequenceParallelBlock if sequence_parallel else ParallelBlock)(layer, group)

    def loss(self, logits_BTv: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross-entropy of a micro-batch, equal on the ranks of the tensor group."""
        words, group = self.vocabulary, self.groups.tensor
        return vocab_parallel_cross_entropy(logits_BTv, targets_BT, words, group=group).mean()

    def pipeline(self, batch: int, length: int) -> Pipeline:
        """The interpreter of the layout's schedule, for (``batch``, ``length``) tokens per step.

        ``batch``: sequences of this rank's pipeline. Raises ValueError if it does not divide into
        the micro-batches; with sequence parallelism also if the tensor ranks don't divide
        ``length``.
        """
        layout = self.layout
        parts = layout.tensor if layout.sequence_parallel else 1
        if batch % layout.micro_batches or length % parts:
            raise ValueError(
                f"{batch} sequences of {length} tokens don't divide into {layout.micro_batches} "
                f"micro-batches and {parts} part(s) of each sequence: take multiples of both"
            )
        p = next(self.parameters())
        boundary = torch.empty(
            batch // layout.micro_batches, length // parts, self.width, dtype=p.dtype, device="meta"
        )
        boundaries = [boundary] * (layout.pipeline * layout.chunks - 1)
        if layout.schedule == "zero-bubble":
            schedule = with_messages(zero_bubble(layout.pipeline, layout.micro_batches))
            kind: type[Pipeline] = ZeroBubblePipeline
        else:
            schedule = make_schedule(
                layout.schedule, layout.pipeline, layout.micro_batches, layout.chunks
            )
            kind = Pipeline
        return kind(list(self.chunks), schedule, self.loss, boundaries, group=self.groups.pipeline)

    def partial(self) -> Iterator[nn.Parameter]:
        """Parameters that all ranks of the tensor group hold, but use on their own positions."""
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                yield from module.parameters()
            elif isinstance(module, RowParallelLinear) and module.bias is not None:
                yield module.bias

    def reduce_gradients(self) -> None:
        """Complete all gradients after backward by the three reductions (see the module)."""
        if self.layout.sequence_parallel:
            sum_replicated_gradients(self.partial(), self.groups.tensor)
        reduce_ties(self)
        if self.layout.data > 1:
            average_gradients(self.parameters(), 1, self.groups.data)

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that the whole model's norm is at most ``max_norm``.

        Returns the norm before, the same on every rank. Each element of the model counts once: a
        replicated parameter on the group's first rank only, the tied copy on the first stage only.
        One all-reduce of a number in the tensor group and one in the pipeline group.
        """
        replicated = {*self.partial(), *(p for n, p in self.named_parameters() if "places" in n)}
        elsewhere = replicated if self.groups.tensor.rank() else set()
        if self.groups.pipeline.rank():
            elsewhere |= {p for p, _ in self.ties}
        trained = [p for p in self.parameters() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=trained[0].device)
        for p in trained:
            if p not in elsewhere:
                squares += torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.groups.tensor)
        dist.all_reduce(squares, group=self.groups.pipeline)
        norm = squares.sqrt().item()
        if norm > max_norm:
            for p in trained:
                p.grad.mul_(max_norm / norm)
        return norm


def train_step(
    model: ParallelGPT,
    pipeline: Pipeline,
    optimizer: torch.optim.Optimizer,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    *,
    max_norm: float = 1.0,
) -> tuple[float, float]:
    """One optimizer step on this pipeline's share of the batch, clipped by the global norm.

    Equals the step of one process on all shares, which are equally large. Returns (mean loss over
    all shares, norm before clipping), the same on every rank.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = torch.tensor(
        pipeline.step(tokens_BT, targets_BT), dtype=torch.float64, device=tokens_BT.device
    )
    pending = dist.all_reduce(loss, group=model.groups.data, async_op=True)
    model.reduce_gradients()
    norm = model.clip(max_norm)
    optimizer.step()
    pending.wait()
    return loss.item() / model.layout.data, norm
