"""The layouts that a job can have: how its GPUs share model and batch, and how a plan runs one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .choices import pipeline_words
from .job import Job
from .plan import Plan

MICRO_BATCHES, CONTEXTS = (1, 2, 4, 8, 16), (1, 2, 4, 8)
STAGES, CHUNKS, NODES = (1, 2, 4, 8, 16, 32), (1, 2), (1, 2, 4, 8)
SHARDED = ("fsdp", "hybrid")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the GPUs share a step. ``batch``: sequences of a micro-batch; ``shards``: GPUs that share
    one copy of the state, if the strategy shards it."""

    gpus: int
    strategy: str
    shards: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"

    @property
    def model_ranks(self) -> int:
        """GPUs that share the layers of one copy."""
        return self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """How many copies work on sequences of their own."""
        return self.gpus // (self.model_ranks * self.context)

    @property
    def way(self) -> tuple[int | str, ...]:
        """What layouts share that differ in micro-batch, schedule or recomputation alone."""
        return self.gpus, self.strategy, self.shards, self.tensor, self.pipeline, self.context

    @property
    def how(self) -> str:
        """In a few words."""
        words = [f"tp{self.tensor}"] * (self.tensor > 1)
        words += [f"cp{self.context}"] * (self.context > 1)
        words += pipeline_words(self.pipeline, self.schedule, self.chunks)
        name = f"hybrid{self.shards}" if self.strategy == "hybrid" else self.strategy
        return " ".join([*words, f"{name} x{self.copies}" if self.copies > 1 else "alone"])

    @property
    def not_simulated(self) -> str:
        """Why a formula must do; empty if the simulator runs it."""
        if self.context > 1:
            return "context parallelism"
        if self.model_ranks > 1 and self.strategy != "ddp":
            return f"{self.strategy} beside tensor or pipeline parallelism"
        if self.strategy == "zero1" and self.micro_batches > 1:
            return "zero1 with several micro-batches"
        return ""


def plan_of(job: Job, layout: Layout) -> Plan:
    """How the simulator runs a layout that it can run."""
    fields: dict[str, Any] = {
        "cluster": job.cluster,
        "model": job.model,
        "gpus": (layout.gpus,),
        "length": job.length,
        "recompute": layout.recompute,
    }
    if layout.model_ranks > 1:
        fields |= {
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "chunks": layout.chunks,
            "schedule": layout.schedule,
            "sequence_parallel": layout.tensor > 1,
            "precision": "mixed",
            "copy_batch": layout.batch * layout.micro_batches,
            "micro_batches": layout.micro_batches,
            "free_outputs": True,
        }
        return Plan(**fields)
    fields |= {
        "strategy": "bucketed" if layout.strategy == "ddp" else layout.strategy,
        "precision": "mixed" if layout.strategy in SHARDED else "autocast",
        "batch": layout.batch,
        "accumulate": layout.micro_batches,
        "shards": layout.shards if layout.strategy == "hybrid" else 0,
    }
    return Plan(**fields)


def layouts(job: Job) -> Iterator[Layout]:
    """All layouts that divide GPUs, heads, layers, positions and batch."""
    heads, layers = job.sizes.heads, job.sizes.layers
    tensors = [t for t in (1, 2, 4, 8) if t <= job.machine.gpus_per_node and heads % t == 0]
    for tensor, pipeline, context in itertools.product(tensors, STAGES, CONTEXTS):
        ranks = tensor * pipeline * context
        fits = job.gpus % ranks == 0 and layers % pipeline == 0
        if not fits or (context > 1 and (pipeline > 1 or job.each % (2 * context))):
            continue
        for strategy, shards in sharings(job, tensor, pipeline, context):
            for batch in MICRO_BATCHES:
                if job.sequences % (job.gpus // ranks * batch):
                    continue
                yield from in_detail(
                    layers,
                    Layout(
                        gpus=job.gpus,
                        strategy=strategy,
                        shards=shards,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        batch=batch,
                        micro_batches=job.sequences // (job.gpus // ranks * batch),
                    ),
                )


def sharings(job: Job, tensor: int, pipeline: int, context: int) -> Iterator[tuple[str, int]]:
    """Strategies for the copies, and how many GPUs share one state."""
    alike = job.gpus // (tensor * pipeline)  # those of a context share the parameters, too
    if context == 1:
        yield "ddp", 1
        if alike > 1:
            yield "zero1", alike
    if pipeline == 1 and alike > 1:
        if tensor == context == 1:
            yield "zero2", alike
        yield "fsdp", alike
        nodes = [job.machine.gpus_per_node // tensor * count for count in NODES]
        yield from (("hybrid", size) for size in nodes if size < alike and alike % size == 0)


def in_detail(layers: int, base: Layout) -> Iterator[Layout]:
    """The layout with each recomputation and schedule that it can have."""
    split = base.model_ranks > 1
    for recompute in ("none", "full") if split else ("none", "selective", "full"):
        found = replace(base, recompute=recompute)
        yield found
        if base.pipeline == 1:
            continue
        if recompute == "none":  # a backward of inputs alone would recompute twice
            yield replace(found, schedule="zero-bubble")
        for chunks in CHUNKS[1:]:
            if layers % (base.pipeline * chunks) == base.micro_batches % base.pipeline == 0:
                yield replace(found, schedule="interleaved", chunks=chunks)
