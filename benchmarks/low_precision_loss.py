"""Loss with 8-bit products beside bfloat16: ``python -m benchmarks.low_precision_loss``.

A classifier of handwritten digits is trained from the same weights with the products of bfloat16
(``torch.autocast``), with delayed scaling, with block scaling, and with 8 bits whose scales are
always 1. Three seeds each. The loss is divided by 4096 before backward, and the learning rate is
multiplied: gradients are as small as if the mean were over 4096 times as many samples. The numbers
go to ``benchmarks/low_precision_loss.json``, from which the guidelines' picture is drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import digits
from solutions.phase2_advanced.low_precision import Float8Linear, update_scales

FILE = Path(__file__).with_name("low_precision_loss.json")
WIDTH, BATCH, RATE, STEPS, EVERY, SEEDS, BLOCK = 256, 128, 0.1, 120, 5, 3, 32
SMALL = 2.0**-12  # exact: without 8 bits nothing changes
KINDS = ("bfloat16", "delayed", "blocks", "unscaled")


def layer_of(kind: str, linear: nn.Linear) -> nn.Module:
    """``linear`` as it is trained in this kind."""
    if kind == "bfloat16":
        return linear
    layer = Float8Linear(linear, block=BLOCK if kind == "blocks" else None)
    if kind == "unscaled":
        layer.scale_T.fill_(1.0)
    return layer


def train(kind: str, seed: int, steps: int = STEPS) -> list[float]:
    """The loss over all training images, at the beginning and after every few steps."""
    torch.manual_seed(seed)
    images, targets = digits().tensors
    images = images.flatten(1)
    layers = [layer_of(kind, nn.Linear(n, m)) for n, m in ((64, WIDTH), (WIDTH, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE / SMALL)
    order = torch.randperm(len(images))

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "bfloat16"):
            logits = model(images[rows])
        return F.cross_entropy(logits.float(), targets[rows])

    def measured() -> float:
        model.eval()
        with torch.no_grad():
            value = loss(order).item()
        model.train()
        return value

    found = [measured()]
    for step in range(steps):
        optimizer.zero_grad()
        rows = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        (loss(rows) * SMALL).backward()
        if kind == "unscaled" or update_scales(model):
            optimizer.step()
        if (step + 1) % EVERY == 0:
            found.append(measured())
    return found


def measure(steps: int = STEPS) -> dict[str, Any]:
    """All trainings, on one rank: for each kind the curve of each seed."""

    def body(ctx: RankContext) -> dict[str, Any]:
        return {kind: [train(kind, seed, steps) for seed in range(SEEDS)] for kind in KINDS}

    results: dict[str, Any] = run_ranks(body, 1, ledger=False, timeout=600)[0]
    settings = {"width": WIDTH, "batch": BATCH, "rate": RATE, "steps": steps, "every": EVERY}
    curves = {k: [[round(v, 5) for v in c] for c in each] for k, each in results.items()}
    return {"torch": torch.__version__, **settings, "block": BLOCK, "kinds": curves}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
