"""The plan of a simulation: a cluster, a model, a strategy, and their options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo

from ..course.catalogue import has_solutions, need_solutions
from ..hardware import load_cluster
from ..virtual.fusion import RULES
from .choices import (
    ACCUMULATE,
    ALIKE,
    ATTENTION,
    COLLECTIVES,
    FUSED,
    IMPLS,
    PRECISIONS,
    RECOMPUTED,
    STRATEGIES,
    pipeline_words,
)
from .eight_bits import EIGHT
from .models import ModelSpec, model_spec


def _option(default: Any, help: str, metavar: str | None = None) -> Any:
    """A field with its help on the command line."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a simulation. ``batch`` per GPU and ``dtype`` are the model's usual ones if 0 and
    "".

    ``staleness``: the limit of a parameter server without rounds, infinity for no limit; None for
    rounds. ``every_rank``: also ranks run that do the same as another one (``roles.py``).
    """

    cluster: str = _option("dgx-h100", "name in clusters/, or a YAML file")
    gpus: tuple[int, ...] = _option((1, 2, 4, 8, 16), "numbers of GPUs", metavar="N")
    model: str = _option("resnet50", "resnet50, vgg16, vit_b16, gpt-1b, gpt-7b or mlp")
    strategy: str = _option("ddp", "ddp; phase 3: bucketed, ring, zero1, fsdp …")
    impl: str = _option(IMPLS[0] if has_solutions() else IMPLS[1], "solutions, mine or torch")
    collective: str = _option("backend", "backend, ring, tree or hierarchical")
    batch: int = _option(0, "samples per GPU")
    dtype: str = _option("", "of weights and activations")
    length: int = _option(0, "tokens of a sequence; default: the model's")
    layers: int = _option(0, "of a language model; default: the model's")
    precision: str = _option("", f"instead of one dtype: {', '.join(PRECISIONS)}")
    fp8: bool = _option(False, "linear layers of the blocks multiply in 8 bits (one model rank)")
    recompute: str = _option("none", f"of each block: {', '.join(RECOMPUTED)}")
    attention: str = _option("fused", "fused, or written as products and softmax (GPTs)")
    dropout: float = _option(0.0, "share of the activations (GPTs)")
    accumulate: int = _option(1, "batches before each optimizer step")
    fused: tuple[str, ...] = _option((), f"into one kernel: {', '.join(FUSED)}", metavar="WHAT")
    roofline: bool = _option(False, "kernels at the rates of the cluster's file, none measured")
    bucket_mb: float = _option(25.0, "of a bucket, MiB")
    every: int = _option(8, "steps in local-sgd's round", metavar="H")
    servers: int = _option(1, "of parameter-server")
    staleness: float | None = _option(None, "parameter-server without rounds; or inf", metavar="S")
    shards: int = _option(0, "GPUs that share a copy with hybrid; default: those of a node")
    tensor: int = _option(1, "GPUs that share every layer")
    pipeline: int = _option(1, "GPUs that share the layers")
    chunks: int = _option(1, "stages per GPU, interleaved")
    copy_batch: int = _option(0, "samples per copy of the model; default: batch x its GPUs")
    micro_batches: int = _option(0, "per step; default: up to 4 per stage")
    schedule: str = _option("1f1b", "gpipe, 1f1b, interleaved or zero-bubble")
    sequence_parallel: bool = _option(False, "split what is between tensor parallel layers, too")
    free_outputs: bool = _option(False, "free a stage's output when it is sent, as Megatron")
    every_rank: bool = _option(False, "run also GPUs that do the same as another one: slow")
    every_micro_batch: bool = _option(False, "run also micro-batches that do the same as another")
    timeout: float = _option(1800.0, "seconds that one number of GPUs may take")

    def __post_init__(self) -> None:
        cluster = load_cluster(self.cluster)
        model_spec(self.model)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"no strategy {self.strategy!r}: there is {', '.join(STRATEGIES)}")
        for name, value, known in (
            ("impl", self.impl, IMPLS),
            ("collective", self.collective, COLLECTIVES),
            ("precision", self.precision, ("", *PRECISIONS)),
            ("recompute", self.recompute, RECOMPUTED),
            ("attention", self.attention, ATTENTION),
            *(("fused", name, FUSED) for name in self.fused),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.impl == "solutions":
            need_solutions("impl solutions")
        if self.impl == "torch" and not STRATEGIES[self.strategy].of_torch:
            raise ValueError(f"strategy {self.strategy} is simulated with solutions or mine")
        if not self.gpus or min(self.gpus) < 1:
            raise ValueError(f"numbers of GPUs must be positive, got {list(self.gpus)}")
        if why_not := cluster.why_not(max(self.gpus)):
            raise ValueError(why_not)
        if self.batch < 0 or self.bucket_mb <= 0 or self.every < 1:
            raise ValueError("batch, bucket size and steps in a round must be positive")
        self._check_servers()
        self._check_step()
        if self.dtype and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be one of torch's, for example bfloat16: {self.dtype!r}")
        self._check_layout()

    def _check_servers(self) -> None:
        if self.strategy != "parameter-server":
            return
        if not 0 < self.servers < min(self.gpus):
            raise ValueError(
                f"{self.servers} servers need more than {self.servers} GPUs, and at least one is "
                f"needed; got {min(self.gpus)} GPUs"
            )
        if self.staleness is not None and not self.staleness >= 0:
            raise ValueError(f"the staleness must be at least 0, got {self.staleness}")

    def _check_step(self) -> None:
        sharded = self.strategy in ("fsdp", "hybrid")
        if self.precision == "mixed" and not sharded and self.model_ranks == 1:
            raise ValueError(
                "precision mixed needs --strategy fsdp or hybrid, or tensor or pipeline parallelism"
            )
        served = self.strategy == "parameter-server"
        if self.precision == "autocast" and (served or self.model_ranks > 1):
            raise ValueError(f"{self.how} has no autocast")
        if self.fp8:
            self._check_fp8()
        if served and self.recompute != "none":
            raise ValueError(f"{self.how} has no recomputation")
        self._check_transformer()
        if self.shards < 0 or (self.shards and self.strategy != "hybrid"):
            raise ValueError("shards are the GPUs that share a copy with --strategy hybrid")
        odd = [gpus for gpus in self.gpus if self.shards and gpus % self.shards]
        if odd:
            raise ValueError(f"{odd[0]} GPUs are no multiple of {self.shards} shards")
        if self.accumulate < 1 or min(self.length, self.layers) < 0:
            raise ValueError("accumulate, length and layers must be positive")
        if self.accumulate > 1 and self.strategy not in ACCUMULATE:
            raise ValueError(f"accumulate goes with {', '.join(ACCUMULATE)}, not {self.strategy}")

    def _check_fp8(self) -> None:
        if self.spec.unit != "tokens" or self.model_ranks > 1:
            raise ValueError("fp8 is for language models without tensor or pipeline parallelism")
        gpu = load_cluster(self.cluster).gpu
        if EIGHT not in gpu.flops:
            raise ValueError(f"{gpu.name} has no rate of fp8 in the file of {self.cluster}")

    def _check_transformer(self) -> None:
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if (self.attention != "fused" or self.dropout) and not self.is_gpt:
            raise ValueError(f"written attention and dropout are for the GPTs, not {self.model}")
        if self.model_ranks > 1 and self.recompute == "selective" and self.attention == "fused":
            raise ValueError(
                "with tensor or pipeline parallelism selective recomputation is that of written "
                "attention: --attention written (fused attention keeps no scores)"
            )

    def _check_layout(self) -> None:
        if min(self.tensor, self.pipeline, self.chunks) < 1 or self.micro_batches < 0:
            raise ValueError("tensor, pipeline, chunks and micro-batches must be positive")
        if self.model_ranks == 1:
            if self.copy_batch or self.free_outputs:
                raise ValueError("copy_batch and free_outputs need --tensor or --pipeline")
            return
        if self.impl == "torch" or self.strategy != "ddp":
            raise ValueError(
                "tensor and pipeline parallelism go with --strategy ddp and the "
                "implementations solutions and mine"
            )
        if not self.is_gpt and not self.is_llama:
            raise ValueError(
                f"tensor and pipeline parallelism are for the GPTs and Llamas, not {self.model}"
            )
        odd = [gpus for gpus in self.gpus if gpus % self.model_ranks]
        if odd:
            raise ValueError(
                f"{odd[0]} GPUs are no multiple of tensor {self.tensor} x pipeline {self.pipeline}"
            )

    @property
    def steps(self) -> int:
        """The number of timed steps: a whole round, or ``every`` where servers have no rounds."""
        no_rounds = self.strategy == "parameter-server" and self.staleness is not None
        return self.every if no_rounds or self.strategy == "local-sgd" else 1

    @property
    def calls(self) -> int:
        """The number of timed calls of the strategy's step; a parameter server does
        all steps in one call."""
        return 1 if self.strategy == "parameter-server" else self.steps

    @property
    def spec(self) -> ModelSpec:
        """The model, with the plan's length and layers."""
        return model_spec(self.model, self.length, self.layers)

    @property
    def arithmetic(self) -> str:
        """The dtype of products: an old GPU without bfloat16 casts to float16."""
        if self.precision == "tf32":
            return "tfloat32"
        if self.precision:
            has = load_cluster(self.cluster).gpu.flops
            return "bfloat16" if "bfloat16" in has else "float16"
        return self.dtype or self.spec.dtype

    @property
    def is_gpt(self) -> bool:
        """Whether the model is made of the course's own blocks."""
        return self.model.startswith(("gpt", "mpt"))

    @property
    def is_llama(self) -> bool:
        """Whether the model is one of ``llama``."""
        return self.model.startswith("llama")

    @property
    def masters(self) -> bool:
        """Whether the optimizer has float32 copies of 16-bit weights (``Masters``)."""
        return self.precision == "mixed" and self.model_ranks > 1

    @property
    def model_ranks(self) -> int:
        """The GPUs that share one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def fused_chains(self) -> tuple[str, ...]:
        """The rules by which operators of the model are one kernel."""
        return tuple(name for name in self.fused if name in RULES)

    def meeting(self, gpus: int) -> int:
        """The GPUs that wait for each other in every layer. Stages and copies of the model meet
        less often."""
        return self.tensor if self.model_ranks > 1 else gpus

    @property
    def folds(self) -> bool:
        """Whether one rank can run for all that do the same: torch's ZeRO-1 gives each rank other
        parameters, and in a ring, a tree or around a server ranks differ."""
        return self.strategy in ALIKE and (self.strategy, self.impl) != ("zero1", "torch")

    @property
    def repeats(self) -> bool:
        """Whether equal micro-batches need not run (``repeat.py``). A learner's interpreter may do
        anything with its stages, zero bubble takes them apart, and a CPU's own time is in no
        journal."""
        plain = self.impl == "solutions" and self.schedule != "zero-bubble"
        return plain and not self.every_micro_batch and not load_cluster(self.cluster).processors

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the parameters."""
        wide = self.precision and not self.masters
        found = torch.float32 if wide else getattr(torch, self.dtype or self.spec.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def workers(self, gpus: int) -> range:
        """The ranks that train."""
        return range(self.servers if self.strategy == "parameter-server" else 0, gpus)

    @property
    def how(self) -> str:
        """The strategy in a few words: "ddp", or "tp8 sp pp4 1f1b" and what else there is."""
        words = [f"tp{self.tensor}"] * (self.tensor > 1) + ["sp"] * self.sequence_parallel
        words += pipeline_words(self.pipeline, self.schedule, self.chunks)
        if self.strategy == "parameter-server" and self.staleness is not None:
            return f"{self.strategy} staleness {self.staleness:g}"
        return " ".join(words) if self.model_ranks > 1 else self.strategy

    @property
    def samples(self) -> int:
        """Samples per step of one copy of the model."""
        return self.copy_batch or (self.batch or self.spec.batch) * self.model_ranks
