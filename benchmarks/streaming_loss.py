"""Bytes per step, waiting and loss of Streaming DiLoCo: ``python -m benchmarks.streaming_loss``.

The tiny GPT is trained on four virtual ranks on two nodes, with a link of 20 Mbit/s between them:
with DDP, with DiLoCo, and with Streaming DiLoCo, which sends 32 or 4 bits per number. Three seeds
each. A step of compute has a given time, so the virtual seconds depend on the messages alone. The
numbers go to ``benchmarks/streaming_loss.json``, from which the guidelines' picture is drawn.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F

from distlab.hardware.clusters import Link, load_cluster
from distlab.ranks import RankContext
from distlab.reference.workloads import GPT, build_model, build_optimizer, text, workload
from distlab.virtual import run_virtual
from solutions.phase3_multi_node.local_sgd import DiLoCo, LocalSGD
from solutions.phase3_multi_node.overlap import BucketedDDP
from solutions.phase3_multi_node.streaming_diloco import StreamingDiLoCo, strided

FILE = Path(__file__).with_name("streaming_loss.json")
RANKS, STEPS, STEP, EVERY, FRAGMENTS, DELAY, SEEDS, TESTED = 4, 120, 0.05, 12, 4, 2, 3, 64
LINK = Link(alpha=1e-3, bandwidth=2.5e6)  # 20 Mbit/s, as of `make nodes`
OUTER = {"lr": 0.7, "momentum": 0.5}  # few rounds need less momentum than the paper's
CLUSTER = dataclasses.replace(load_cluster("ethernet-v100"), gpus_per_node=RANKS // 2, between=LINK)


def streaming(model: GPT, bits: int) -> LocalSGD:
    """Its blocks are dealt out, and what is in no block is one unit more."""
    parts = strided([*model.blocks, model], FRAGMENTS)
    return StreamingDiLoCo(model, parts, every=EVERY, delay=DELAY, bits=bits, **OUTER)


KINDS: dict[str, Callable[[GPT], LocalSGD | None]] = {
    "DDP": lambda _: None,
    "DiLoCo": lambda model: DiLoCo(model, every=EVERY, **OUTER),
    "streaming, 32 bits": lambda model: streaming(model, 32),
    "streaming, 4 bits": lambda model: streaming(model, 4),
}


def train(ctx: RankContext, kind: str, seed: int, steps: int) -> tuple[float, list[float], float]:
    """Virtual seconds of the steps, the loss of each, and the final model's on test data."""
    chosen = workload("tiny_gpt")
    model = build_model("tiny_gpt", seed)
    assert isinstance(model, GPT)
    optimizer, rounds = build_optimizer(chosen, model), KINDS[kind](model)
    wrapped = BucketedDDP(model) if rounds is None else model
    inputs, targets = text()[:]
    each = chosen.global_batch_size // RANKS
    generator = torch.Generator().manual_seed(seed * RANKS + ctx.rank)
    begin, losses = time.monotonic(), list[float]()
    for step in range(steps):
        rows = torch.randint(len(inputs), (each,), generator=generator)
        time.sleep(STEP)
        optimizer.zero_grad()
        with ctx.region(f"step {step}"):
            loss = F.cross_entropy(wrapped(inputs[rows]), targets[rows].flatten())
            loss.backward()
            optimizer.step()
            if rounds is not None:
                rounds.step()
        losses.append(loss.item())
    seconds = time.monotonic() - begin
    with ctx.region("end"):
        if rounds is not None:
            rounds.finish()
    tested, wanted = text(False)[:TESTED]
    with torch.no_grad():
        return seconds, losses, F.cross_entropy(model(tested), wanted.flatten()).item()


def measure(steps: int = STEPS, seeds: int = SEEDS) -> dict[str, Any]:
    """For each kind: bytes that a rank sends in each step, waiting per step, and losses.

    ``curve``: of the steps of each round, the mean over ranks and seeds. ``losses``: at the end, on
    test data, of each seed.
    """
    text(), text(False)
    kinds = {}
    for kind in KINDS:
        runs = [
            run_virtual(train, RANKS, kind, seed, steps, cluster=CLUSTER, timeout=600.0)
            for seed in range(seeds)
        ]
        log = runs[0].logs[0]
        sent = [log.select(region=f"step {step}").sent for step in range(steps)]
        waited = max(seconds for seconds, *_ in runs[0]) - steps * STEP
        every = torch.tensor([[losses for _, losses, _ in run] for run in runs]).mean((0, 1))
        rounds = every[: steps // EVERY * EVERY].view(-1, EVERY).mean(1)
        kinds[kind] = {
            "sent": sent,
            "at the end": log.select(region="end").sent,
            "waited": round(waited / steps, 5),
            "curve": [round(loss, 4) for loss in rounds.tolist()],
            "losses": [round(run[0][2], 4) for run in runs],
        }
    settings = {"ranks": RANKS, "steps": steps, "step": STEP, "every": EVERY, "delay": DELAY}
    return {"torch": torch.__version__, **settings, "fragments": FRAGMENTS, "kinds": kinds}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
