"""Plans that can't be simulated, each with one line that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hardware import load_cluster
from .eight_bits import EIGHT

if TYPE_CHECKING:
    from .plan import Plan

ACCUMULATE = ("bucketed", "zero2", "fsdp", "hybrid")


def refuse(plan: Plan) -> None:
    """Raise ValueError if parts of the plan don't go together."""
    _check_servers(plan)
    _check_step(plan)
    _check_layout(plan)


def _check_servers(plan: Plan) -> None:
    if plan.strategy != "parameter-server":
        return
    if not 0 < plan.servers < min(plan.gpus):
        raise ValueError(
            f"{plan.servers} servers need more than {plan.servers} GPUs, and at least one is "
            f"needed; got {min(plan.gpus)} GPUs"
        )
    if plan.staleness is not None and not plan.staleness >= 0:
        raise ValueError(f"the staleness must be at least 0, got {plan.staleness}")


def _check_step(plan: Plan) -> None:
    sharded = plan.strategy in ("fsdp", "hybrid")
    if plan.precision == "mixed" and not sharded and plan.model_ranks == 1:
        raise ValueError(
            "precision mixed needs --strategy fsdp or hybrid, or tensor or pipeline parallelism"
        )
    served = plan.strategy == "parameter-server"
    if plan.precision == "autocast" and (served or plan.model_ranks > 1):
        raise ValueError(f"{plan.how} has no autocast")
    if plan.fp8:
        _check_fp8(plan)
    if served and plan.recompute != "none":
        raise ValueError(f"{plan.how} has no recomputation")
    _check_transformer(plan)
    if plan.shards < 0 or (plan.shards and plan.strategy != "hybrid"):
        raise ValueError("shards are the GPUs that share a copy with --strategy hybrid")
    odd = [gpus for gpus in plan.gpus if plan.shards and gpus % plan.shards]
    if odd:
        raise ValueError(f"{odd[0]} GPUs are no multiple of {plan.shards} shards")
    if plan.accumulate < 1 or min(plan.length, plan.layers) < 0:
        raise ValueError("accumulate, length and layers must be positive")
    if plan.accumulate > 1 and plan.strategy not in ACCUMULATE:
        raise ValueError(f"accumulate goes with {', '.join(ACCUMULATE)}, not {plan.strategy}")


def _check_fp8(plan: Plan) -> None:
    if plan.spec.unit != "tokens" or plan.model_ranks > 1:
        raise ValueError("fp8 is for language models without tensor or pipeline parallelism")
    gpu = load_cluster(plan.cluster).gpu
    if EIGHT not in gpu.flops:
        raise ValueError(f"{gpu.name} has no rate of fp8 in the file of {plan.cluster}")


def _check_transformer(plan: Plan) -> None:
    if not 0 <= plan.dropout < 1:
        raise ValueError(f"dropout must be in [0, 1), got {plan.dropout}")
    if (plan.attention != "fused" or plan.dropout) and not plan.is_gpt:
        raise ValueError(f"written attention and dropout are for the GPTs, not {plan.model}")
    if plan.model_ranks > 1 and plan.recompute == "selective" and plan.attention == "fused":
        raise ValueError(
            "with tensor or pipeline parallelism selective recomputation is that of written "
            "attention: --attention written (fused attention keeps no scores)"
        )


def _check_layout(plan: Plan) -> None:
    if min(plan.tensor, plan.pipeline, plan.chunks) < 1 or plan.micro_batches < 0:
        raise ValueError("tensor, pipeline, chunks and micro-batches must be positive")
    if plan.model_ranks == 1:
        if plan.copy_batch or plan.free_outputs:
            raise ValueError("copy_batch and free_outputs need --tensor or --pipeline")
        return
    if plan.impl == "torch" or plan.strategy != "ddp":
        raise ValueError(
            "tensor and pipeline parallelism go with --strategy ddp and the "
            "implementations solutions and mine"
        )
    if not plan.is_gpt and not plan.is_llama:
        raise ValueError(
            f"tensor and pipeline parallelism are for the GPTs and Llamas, not {plan.model}"
        )
    odd = [gpus for gpus in plan.gpus if gpus % plan.model_ranks]
    if odd:
        raise ValueError(
            f"{odd[0]} GPUs are no multiple of tensor {plan.tensor} x pipeline {plan.pipeline}"
        )
