"""A training to plan: a language model, a machine, and how many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..hardware.clusters import Cluster, load_cluster
from .models import MODELS, ModelSpec, blocks_of, model_spec

# tokens of a step by parameters: Brown et al. 2020 (arXiv 2005.14165), table 2.1
BATCHES = ((0.8e9, 0.5e6), (5e9, 1e6), (15e9, 2e6), (float("inf"), 3.2e6))
LLAMA_BATCH = 4e6  # Touvron et al. 2023 (arXiv 2307.09288), section 2.2


@dataclass(frozen=True)
class Sizes:
    """Parameters of one layer and of all else; features of an activation and of a key; the heads
    that tensor ranks must divide; layers."""

    layer: int
    rest: int
    width: int
    narrow: int
    heads: int
    layers: int

    @property
    def all(self) -> int:
        """All parameters."""
        return self.all_of(self.layers)

    def all_of(self, layers: int) -> int:
        """All parameters with so many layers."""
        return self.layer * layers + self.rest


@dataclass(frozen=True, kw_only=True)
class Job:
    """``batch``: tokens of a step on all GPUs; ``length``: tokens of a sequence; 0 for the usual.

    Raises ValueError for what can't be planned.
    """

    model: str
    cluster: str
    gpus: int
    tokens: float
    batch: float = 0.0
    length: int = 0

    def __post_init__(self) -> None:
        load_cluster(self.cluster)
        if model_spec(self.model).unit != "tokens":
            known = ", ".join(name for name, spec in MODELS.items() if spec.unit == "tokens")
            raise ValueError(f"{self.model} is no language model; there are {known}")
        if self.gpus < 1 or not self.tokens > 0 or self.batch < 0 or self.length < 0:
            raise ValueError("--gpus and --tokens must be positive, and so must --batch, --length")
        if self.sequences < 1:
            raise ValueError(
                f"a batch of {self.batch:,.0f} tokens has no sequence of {self.each:,} tokens: "
                "give a larger --batch or a shorter --length"
            )

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return model_spec(self.model, self.length)

    @cached_property
    def machine(self) -> Cluster:
        """The cluster."""
        return load_cluster(self.cluster)

    @property
    def each(self) -> int:
        """Tokens of a sequence."""
        return self.spec.per_sample

    @cached_property
    def sizes(self) -> Sizes:
        """The sizes of the model."""
        with torch.device("meta"):
            model: Any = model_spec(self.model, self.length, layers=1).build()
        (block,) = blocks_of(model)
        layer = sum(p.numel() for p in block.parameters())
        return Sizes(
            layer=layer,
            rest=sum(p.numel() for p in model.parameters()) - layer,
            width=model.tokens.embedding_dim,
            narrow=block.k.out_features if hasattr(block, "k") else model.tokens.embedding_dim,
            heads=getattr(block, "pairs", block.heads),
            layers=self.spec.layers,
        )

    @property
    def sequences(self) -> int:
        """Sequences of a step. The usual batch is rounded to a power of two."""
        if self.batch:
            return int(self.batch // self.each)
        usual = next(tokens for most, tokens in BATCHES if self.sizes.all < most)
        if self.model.startswith("llama"):
            usual = LLAMA_BATCH
        return int(2 ** round(math.log2(max(1.0, usual / self.each))))
