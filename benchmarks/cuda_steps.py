"""Training steps of the solutions under torch's own watch, as torchrun starts them on GPUs.

    torchrun --nproc-per-node 8 -m benchmarks.cuda_steps ddp

A strategy takes some steps, then one more with ``torch.cuda.set_sync_debug_mode("warn")``. In that
step torch warns wherever the host waits for the GPU (operators of torch.distributed do not warn). A
step that never waits keeps the GPU busy. With TORCH_CUDA_SANITIZER=1 in the environment torch looks
for data that two streams touch without an order between them. If it finds any, it ends the program.
(The graders can't run under it: it starts CUDA at the first operator, and no process can fork ranks
after that.) Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.course.catalogue import root
from distlab.ranks import RankContext
from given.process_group import process_group
from solutions.phase3_multi_node.ddp import DDP

from . import ddp, fsdp, pipeline, tensor_parallel
from .common import failed
from .tensor_parallel import KINDS

WARM = 3
SYNC = "synchronizing CUDA operation"  # of torch's warning, c10/cuda/CUDAFunctions.cpp
Step = Callable[[], object]


def of_ddp(ctx: RankContext) -> Step:
    """A step of the tiny GPT under DDP."""
    model = "GPT, 4 layers"
    inputs, targets = (t.to(ctx.device) for t in ddp.batch(model, ctx.rank))
    net = ddp.wrapped(model, DDP, ctx.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()

    return step


def of_fsdp(ctx: RankContext) -> Step:
    """A step of the tiny GPT under FSDP; it reads its loss, which is one wait of the host."""
    return fsdp.ours("tiny GPT", ctx.device)


def of_pipeline(ctx: RankContext) -> Step:
    """A step of the 1F1B schedule; it reads its loss, which is one wait of the host."""
    generator = torch.Generator().manual_seed(0)
    shape = pipeline.MICRO_BATCHES * pipeline.SIZE, pipeline.WIDTH
    inputs, targets = (torch.randn(shape, generator=generator).to(ctx.device) for _ in range(2))
    mine = [part.to(ctx.device) for part in pipeline.stages(ctx.world_size)[ctx.rank :][:1]]
    return pipeline.our_step(mine, "1f1b", ctx.world_size, (inputs, targets))


def of_tensor_parallel(ctx: RankContext) -> Step:
    """A step of a transformer block whose heads are divided over the ranks."""
    x, weight = (t.to(ctx.device) for t in tensor_parallel.data(KINDS[1], ctx.rank, ctx.world_size))
    side = tensor_parallel.solution(KINDS[1], ctx.device)
    return lambda: tensor_parallel.step(side, x, weight)


STRATEGIES: dict[str, Callable[[RankContext], Step]] = {
    "ddp": of_ddp,
    "fsdp": of_fsdp,
    "pipeline": of_pipeline,
    "tensor-parallel": of_tensor_parallel,
}


def waits(step: Step, device: torch.device) -> Counter[str]:
    """Where the host waits for the GPU in one step: how often, by line of the program."""
    for _ in range(WARM):
        step()
    if device.type != "cuda":
        return Counter()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(_line(w) for w in caught if SYNC in str(w.message))


def _line(warning: warnings.WarningMessage) -> str:
    path = Path(warning.filename)
    name = path.relative_to(root()) if path.is_relative_to(root()) else path.name
    return f"{name}:{warning.lineno}"


def context(device: str) -> RankContext:
    """This rank's number and device, from torchrun's environment."""
    rank, local = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK"))
    where = torch.device("cuda", local) if device == "cuda" else torch.device("cpu")
    return RankContext(rank, int(os.environ["WORLD_SIZE"]), where, seed=0)


def watched(strategy: str, ctx: RankContext) -> dict[str, Any]:
    """Take the steps of a strategy, and report torch's warnings."""
    backend = type(dist.distributed_c10d._get_default_group()._get_backend(ctx.device)).__name__
    where = waits(STRATEGIES[strategy](ctx), ctx.device)
    dist.barrier()
    sanitizer = "TORCH_CUDA_SANITIZER" in os.environ
    message = "no data race" if sanitizer else f"the host waits {where.total()} times in a step"
    rows = [[line, str(count)] for line, count in where.most_common()]
    return {
        "status": "passed",
        "message": f"{message}, world size {ctx.world_size} on {backend}",
        "result": {"header": ["line of rank 0", "waits in a step"], "table": rows} if rows else {},
    }


def main() -> int:
    """Take the steps. Rank 0 prints the outcome, and a failing rank prints the reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    try:
        ctx = context(options.device)
        settings: dict[str, Any] = {}
        if ctx.device.type == "cuda":
            torch.cuda.set_device(ctx.device)
            settings["device_id"] = ctx.device
        torch.set_num_threads(1)
        with process_group("nccl" if settings else "gloo", **settings):
            found = watched(options.strategy, ctx)
    except Exception as error:
        print(json.dumps(failed(error, f"rank {os.environ['RANK']}: ")), flush=True)
        return 1
    if not ctx.rank:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
