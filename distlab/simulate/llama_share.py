"""A rank's share of a Llama with tensor and pipeline parallelism, from phase 2's layers.

Queries, keys and values are one column-parallel layer, and so are gate and up; what follows each is
row-parallel. So a layer needs the messages of exercises 2.17 and 2.18. Rank r has 1/T of the heads
of queries and of those of keys and values. Stages have equal numbers of layers; the first also has
the embedding, the last one norm and head. Sources: Shoeybi et al. 2019 (arXiv 1909.08053), section
3; Narayanan et al. 2021 (arXiv 2104.04473), section 2.2, for equal stages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import Llama, LlamaBlock, attend


def joined(layers: Sequence[nn.Linear], ranks: int) -> nn.Linear:
    """Layers of one input as one, whose r-th of ``ranks`` blocks of rows has the r-th of each."""
    rows = [block for r in range(ranks) for block in (w.weight.chunk(ranks)[r] for w in layers)]
    whole = nn.Linear(1, 1, bias=False, device="meta")
    whole.weight = nn.Parameter(torch.cat(rows).detach())
    whole.out_features, whole.in_features = whole.weight.shape
    return whole


class LlamaShare(nn.Module):
    """This rank's part of a block; ``column`` and ``row`` are phase 2's parallel layers."""

    def __init__(self, block: LlamaBlock, group: Any, column: Any, row: Any) -> None:
        super().__init__()
        ranks = group.size()
        if block.pairs % ranks:
            raise ValueError(
                f"{block.pairs} heads of keys and values don't divide by {ranks} tensor ranks"
            )
        self.size, self.norms = block.size, copy.deepcopy(block.norms)
        self.narrow = block.pairs // ranks * block.size
        self.qkv = column(joined((block.q, block.k, block.v), ranks), group)
        self.up = column(joined((block.gate, block.up), ranks), group)
        self.out, self.down = row(block.out, group), row(block.down, group)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same; with sequence parallelism T are this rank's positions."""
        q, k, v = self.qkv(self.norms[0](x_BTD)).tensor_split((-2 * self.narrow, -self.narrow), -1)
        x_BTD = x_BTD + self.out(attend(q, k, v, self.size))
        gate, up = self.up(self.norms[1](x_BTD)).chunk(2, -1)
        return x_BTD + self.down(F.silu(gate) * up)


def share_of(parts: Any, model: Llama, layout: Any, groups: Any) -> Any:
    """A rank's share of ``model``, which is not kept; ``parts``: the module of ``ParallelGPT``."""
    tensor, sequence = groups.tensor, layout.sequence_parallel
    blocks = parts.SequenceParallelBlock if sequence else parts.ParallelBlock

    class Embed(parts.ParallelEmbed):
        """Tokens to their embeddings: positions have no parameters."""

        def __init__(self, tokens: nn.Embedding) -> None:
            nn.Module.__init__(self)
            self.tokens = parts.VocabParallelEmbedding(tokens, tensor)

        def forward(self, tokens_BT: Tensor) -> Tensor:
            x_BTD: Tensor = self.tokens(tokens_BT)
            return parts.split_to_ranks(x_BTD, parts.TIME, tensor) if sequence else x_BTD

    class Share(parts.ParallelGPT):
        def __init__(self, model: Llama) -> None:
            nn.Module.__init__(self)
            self.layout, self.groups = layout, groups
            self.ties: list[tuple[Tensor, Any]] = []  # embedding and head are two matrices
            self.vocabulary, self.width = model.tokens.weight.shape
            stages = layout.pipeline * layout.chunks
            per_stage, left = divmod(len(model.layers), stages)
            if left:
                raise ValueError(f"{len(model.layers)} layers don't divide into {stages} stages")
            self.chunks = nn.ModuleList(
                nn.Sequential(*self.stage(model, number, per_stage, number == stages - 1))
                for number in range(groups.pipeline.rank(), stages, layout.pipeline)
            )

        def stage(self, model: Llama, number: int, layers: int, last: bool) -> Iterator[nn.Module]:
            if number == 0:
                yield Embed(model.tokens)
            for layer in model.layers[number * layers : (number + 1) * layers]:
                yield LlamaShare(layer, tensor, blocks.column, blocks.row)
            if last:
                rows = nn.Embedding.from_pretrained(model.head.weight.detach(), freeze=False)
                words = parts.VocabParallelEmbedding(rows, tensor)
                yield parts.ParallelHead(model, words, tensor, sequence)

        def partial(self) -> Iterator[nn.Parameter]:
            norms = (module for module in self.modules() if isinstance(module, nn.RMSNorm))
            return (p for norm in norms for p in norm.parameters())

    return Share(model)
