"""Predictions of the virtual cluster beside published measurements; no row is tuned.

Every input is the source's or the cluster description's (each number there has its own source).
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
import torch._dynamo  # imported by torch.optim: once here
import torch.nn.functional as F

from distlab.hardware.collectives import collective_time
from distlab.ranks import RankContext
from distlab.simulate.llama import Llama
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import Answer, simulate
from distlab.simulate.recompute import compute_again
from distlab.virtual import load_cluster, run_virtual
from solutions.phase3_multi_node.fsdp import clip_by_global_norm
from solutions.phase3_multi_node.fsdp_precision import MixedPrecisionFlat
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP

from .common import Table
from .published_models import ShardedBlock

# 8 H200, all-reduce bus bandwidth in GB/s by payload: stas00/ml-engineering,
# network/benchmarks/results/all-reduce-8xH200.md (NCCL 2.27.7, 2026-08-04)
H200 = {
    2**20: 39.93,
    2**22: 107.16,
    2**24: 219.89,
    2**26: 346.51,
    2**28: 436.15,
    2**30: 463.58,
    2**34: 482.26,
}
H200_RING = 367.61  # the same at 16 GiB without the switch's own sums
# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1, FSDP without compilation
TITAN_RATE, TITAN_MEMORY = 5762, 82.4  # tokens/s per GPU, GiB
TITAN_BANDWIDTH = 0.9 * 2.4e12  # the same source; 90 % reached, as assumed for all clusters
MEGATRON = {1: (1536, 16, 40), 2: (1920, 20, 54), 4: (2304, 24, 64), 8: (3072, 32, 72)}
MEGATRON_EFFICIENCY = {1: 1.0, 2: 0.95, 4: 0.82, 8: 0.77}  # figure 5, model parallel
MEGATRON_FLOPS = 39e12  # sustained by the baseline on one V100, section 5


def bus_bandwidth() -> list[list[str]]:
    """All-reduce on one DGX H200."""
    cluster, group = load_cluster("dgx-h200"), tuple(range(8))
    rows = []
    for nbytes, published in H200.items():
        got = 1.75 * nbytes / collective_time("all_reduce", nbytes, group, cluster) / 1e9
        what = f"8×H200 all-reduce of {nbytes / 2**20:,.0f} MiB, bus bandwidth, GB/s"
        rows.append(_row(what, published, got, "{:.0f}"))
    ring = 1.75 * 2**34 / collective_time("all_reduce", 2**34, group, cluster, "ring") / 1e9
    return [*rows, _row("the same, 16 GiB, ring only", H200_RING, ring, "{:.0f}")]


def _answer(**fields: Any) -> list[Answer]:
    return list(simulate(Plan(**fields)))


def overlap_gain() -> list[str]:
    """DDP with buckets against one all-reduce after backward, ResNet-50 on 32 V100."""
    common = {"cluster": "ethernet-v100", "model": "resnet50", "gpus": (32,), "impl": "torch"}
    (buckets,) = _answer(**common)
    (whole,) = _answer(**common, bucket_mb=1e6)
    gain = 1 - buckets.step / whole.step
    what = "DDP's overlap, ResNet-50 on 32 V100, share of the step saved"
    return _row(what, 0.38, gain, "{:.0%}")


def large_batch() -> list[str]:
    """ResNet-50 from 8 to 256 P100, 32 images each."""
    eight, many = _answer(
        cluster="bigbasin-p100",
        model="resnet50",
        gpus=(8, 256),
        impl="torch",
        collective="hierarchical",
    )
    efficiency = many.rate / eight.rate / 32
    return _row("ResNet-50, 8 to 256 P100, efficiency", 0.90, efficiency, "{:.0%}")


def _megatron_step(ctx: RankContext) -> tuple[float, float]:
    """(seconds, FLOPs of all ranks) of forward and backward of batch 8, length 1024."""
    import time

    from distlab.virtual.isolation import entered

    width, heads, layers = MEGATRON[ctx.world_size]
    with torch.device("meta"):
        blocks = [ShardedBlock(width, heads, ctx.world_size).half() for _ in range(layers)]
        x = torch.empty(8, 1024, width, dtype=torch.float16, requires_grad=True)
    model = entered().mine.model
    begun, before, y = time.perf_counter(), model.flops, x
    for block in blocks:
        y = block(y)
    y.sum().backward()
    return time.perf_counter() - begun, (model.flops - before) * ctx.world_size


def megatron() -> list[list[str]]:
    """Weak scaling of model parallelism inside one DGX-2H."""
    base = load_cluster("dgx2h-v100")
    gpu = dataclasses.replace(
        base.gpu, flops={"float16": MEGATRON_FLOPS, "float32": MEGATRON_FLOPS}
    )
    cluster = dataclasses.replace(base, gpu=gpu)
    rates = {}
    for ranks in MEGATRON:
        seconds, flops = run_virtual(
            _megatron_step, ranks, cluster=cluster, compute="roofline", ledger=False, timeout=120
        )[0]
        rates[ranks] = flops / seconds / ranks
    return [
        _row(
            f"Megatron-LM, {ranks}-way model parallel, weak scaling",
            published,
            rates[ranks] / rates[1],
            "{:.0%}",
        )
        for ranks, published in MEGATRON_EFFICIENCY.items()
        if ranks > 1
    ]


def _titan_step(ctx: RankContext, layers: int) -> tuple[float, int]:
    """(seconds, most bytes) of a step of 2 sequences of 8,192 tokens."""
    import time

    from distlab.virtual.isolation import entered

    with torch.device("meta"):
        model = Llama(128_256, layers, 4096, 32, 8, 14_336)
        tokens = torch.empty(2, 8192, dtype=torch.int64)
    compute_again(list(model.layers), "selective", contextlib.nullcontext)
    sharded = PrefetchFSDP(model, list(model.layers), flat_type=MixedPrecisionFlat)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for p in sharded.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    memory = entered().mine.model.memory
    memory.peak, begun = memory.current, time.perf_counter()
    F.cross_entropy(sharded(tokens), tokens.flatten()).backward()
    clip_by_global_norm(sharded, 1.0)
    optimizer.step()
    return time.perf_counter() - begun, memory.peak


def torchtitan(layers: int = 32) -> list[list[str]]:
    """Llama 3.1 8B with FSDP on one node of 8 H100 with 2.4 TB/s."""
    base = load_cluster("dgx-h100")
    gpu = dataclasses.replace(base.gpu, bandwidth=TITAN_BANDWIDTH, memory=96e9)
    cluster = dataclasses.replace(base, gpu=gpu)
    results = run_virtual(
        _titan_step, 8, layers, cluster=cluster, compute="roofline", ledger=False, timeout=500
    )
    seconds, peak = (max(column) for column in zip(*results, strict=True))
    what = "Llama 3.1 8B, FSDP on 8 H100"
    return [
        _row(f"{what}, tokens/s per GPU", TITAN_RATE, 2 * 8192 / seconds, "{:,.0f}"),
        _row(f"{what}, memory, GiB", TITAN_MEMORY, peak / 2**30, "{:.1f}"),
    ]


def _row(what: str, published: float, predicted: float, form: str) -> list[str]:
    error = predicted / published - 1
    return [what, form.format(published), form.format(predicted), f"{error:+.0%}"]


SOURCES = (
    "Compute is the roofline here; docs/validation.md has predictions with measured kernels. "
    "Sources. All-reduce: stas00/ml-engineering (all-reduce-8xH200.md). Overlap: Li et al. 2020 "
    "(arXiv 2006.15704), section 5.1. It does not state the batch per GPU: 32 is taken. Large "
    "batch: Goyal et al. 2017 (arXiv 1706.02677). Megatron: Shoeybi et al. 2019 (arXiv "
    "1909.08053), table 1 and figure 5. The compute rate is the 39 TFLOP/s of its baseline. "
    "Llama: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1, FSDP "
    "without compilation. Each GPU has 2 sequences of 8,192 tokens (the length is from its "
    "train_configs/llama3_8b.toml), with selective checkpointing. The GPU is an H100 with 96 GB "
    "at 2.4 TB/s. Here the course's own FSDP runs, in bfloat16 with fp32 shards. torchtitan's "
    "GPUs ran at 500 W, while this cluster's compute rate was measured at 700 W. torchtitan's "
    "memory is the memory that the allocator had reserved. Here it is the memory of tensors that "
    "are alive."
)


def measure(repeats: int = 3) -> Table:
    """All rows. 256 GPUs and Llama take a minute each, and are left out if ``repeats`` is 1."""
    rows = [*bus_bandwidth(), overlap_gain(), *megatron()]
    if repeats > 1:
        rows += [large_batch(), *torchtitan()]
    header = ["what", "published", "predicted", "error"]
    return Table("Virtual clusters against published measurements", header, rows, SOURCES)


if __name__ == "__main__":
    print(measure().markdown())
