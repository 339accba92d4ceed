"""A canonical workload, trained by the solutions on all ranks: a part of ``distlab record --all``.

    torchrun --nproc-per-node 8 -m benchmarks.training tiny_gpt --precision bfloat16

float32 runs without TF32, with the window of exercise 2.2 (one micro-batch per step); bfloat16 is
the mixed precision of exercise 2.5. Each rank takes every W-th sample of the global batch, so that
any world size trains on the same batches in the same order. Rank 0 prints one line of JSON: a
status, a message and the record. The status is "failed" if the losses leave those of one process in
float64 by more than the precision allows, over the first STEPS steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.reference import compare
from distlab.reference.provenance import peak_memory, provenance
from distlab.reference.sealed import digest
from distlab.reference.workloads import (
    WORKLOADS,
    Workload,
    build_model,
    build_optimizer,
    data_hash,
)
from given.launched import launched
from solutions.phase2_advanced.gradient_accumulation import train_window
from solutions.phase2_advanced.mixed_precision import MixedPrecision, mixed_step

from .common import failed, now

PRECISIONS = ("float32", "bfloat16")
# of the losses, beside one process in float64. bfloat16 keeps 8 bits: 2^-8 is 4e-3, and the errors
# of a step's many products partly cancel out
TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
STEPS = 20  # steps that are compared; later the rounding errors have grown with the training itself
WARM = 3  # steps that are not timed


def pieces(chosen: Workload, rank: int, world_size: int, device: torch.device) -> list[list[Any]]:
    """This rank's part of every global batch: [(inputs, targets)], on its device."""
    mine = slice(rank, None, world_size)
    return [
        [(inputs[mine].to(device), targets[mine].to(device).flatten())]
        for inputs, targets in compare.global_batches(chosen, chosen.epochs)
    ]


def trained(
    chosen: Workload, precision: str, device: torch.device
) -> tuple[list[float], list[float], float, nn.Module]:
    """(losses, gradient norms, samples per second, model) of a training over all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model: nn.Module = build_model(chosen.model, chosen.seed).to(device)
    if precision == "bfloat16":
        model = MixedPrecision(model, torch.bfloat16)
    step = mixed_step if precision == "bfloat16" else train_window
    optimizer = build_optimizer(chosen, model)
    batches = pieces(chosen, rank, world_size, device)
    losses, norms, begun = [], [], now(device)
    for number, window in enumerate(batches):
        if number == WARM:
            begun = now(device)
        loss, norm = step(model, optimizer, window)
        losses.append(loss)
        norms.append(norm)
    samples = chosen.global_batch_size * (len(batches) - WARM)
    return losses, norms, samples / (now(device) - begun), model


def record(chosen: Workload, precision: str, device: torch.device) -> dict[str, Any]:
    """Train, and describe the training like the reference runs of one process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    losses, norms, rate, model = trained(chosen, precision, device)
    peak = torch.tensor(float(peak_memory(device.type)), device=device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    configuration = asdict(chosen)
    return {
        "configuration": configuration,
        "configuration_hash": digest(configuration),
        "data_hash": data_hash(chosen.data),
        "losses": losses,
        "gradient_norms": norms,
        "parameters": {
            name: {"sum": total(p), "norm": p.detach().double().norm().item()}
            for name, p in model.named_parameters()
        },
        "dtype": precision,
        "tf32": False,
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "samples_per_second": rate,
        "peak_memory_bytes": int(peak.item()),  # of the rank that had most
    } | provenance(device.type)


def total(p: Tensor) -> float:
    """The sum of the elements, in float64."""
    return p.detach().double().sum().item()


def outcome(chosen: Workload, found: dict[str, Any]) -> dict[str, Any]:
    """Status, message and result: the losses against those of one process in float64."""
    want, _, _ = compare.train_alone(chosen, epochs=chosen.epochs, steps=STEPS)
    tolerance = TOLERANCES[found["dtype"]]
    problems = compare.compare({"losses": want}, found["losses"], tolerance)
    told = f"last loss {found['losses'][-1]:.4f}, {found['samples_per_second']:,.0f} samples/s"
    return {
        "status": "failed" if problems else "passed",
        "message": problems[0] if problems else told,
        "result": {"training": found},
    }


def main() -> int:
    """Train as the command line asks; the exit status is 1 if it failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    options = parser.parse_args()
    chosen = WORKLOADS[options.workload]
    try:
        torch.set_num_threads(1)
        with launched("training", options.device) as rank:
            found = record(chosen, options.precision, rank.device)
            if rank.rank:
                return 0
            told = outcome(chosen, found)
    except Exception as error:
        told = failed(error, f"rank {os.environ.get('RANK')}: ")
    print(json.dumps(told), flush=True)
    return 0 if told["status"] == "passed" else 1


if __name__ == "__main__":
    sys.exit(main())
