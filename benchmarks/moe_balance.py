"""How busy experts are, with and without balancing: ``python -m benchmarks.moe_balance``.

A classifier of handwritten digits with eight experts, of which one computes each image, is trained
three times from the same weights: without balancing, with the balance loss, and with the bias. The
numbers go to ``benchmarks/moe_balance.json``, from which the guidelines' picture is drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.expert_parallel import ExpertParallel
from solutions.phase2_advanced.mixture_of_experts import Router, choose, keep_first

FILE = Path(__file__).with_name("moe_balance.json")
WIDTH, INNER, EXPERTS, BATCH, STEPS = 32, 32, 8, 256, 300
LOSS, RATE = 0.02, 0.005  # what the balance loss counts for; how far the bias moves in a step
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
KINDS = ("none", "loss", "bias")


class Classifier(nn.Module):
    """Pixels to ten classes, with a mixture of experts beside the way straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        up, down = (
            torch.randn(EXPERTS, n, m) / n**0.5 for n, m in ((WIDTH, INNER), (INNER, WIDTH))
        )
        router = Router(WIDTH, EXPERTS, seed=1)
        self.experts = ExpertParallel(router, up.requires_grad_(), down.requires_grad_())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, balance loss, and load."""
        x = self.begin(x)
        y, routing = self.experts(x)
        return self.end(x + y), routing.loss, routing.load_E


def dropped(model: Classifier, x: Tensor) -> list[float]:
    """The share of choices that find no room, for each capacity factor."""
    router = model.experts.router
    with torch.no_grad():
        probabilities = F.linear(model.begin(x), router.weight).softmax(-1)
    experts, _ = choose(probabilities, router.bias_E, router.top_k)
    rooms = [-(-int(factor * 4 * len(x)) // (4 * EXPERTS)) for factor in FACTORS]
    return [1 - keep_first(experts, EXPERTS, room).float().mean().item() for room in rooms]


def train(kind: str, steps: int = STEPS) -> dict[str, Any]:
    """One training: load of the busiest expert by step, shares dropped at the end, accuracy."""
    torch.manual_seed(0)
    digits = load_digits()
    x, targets = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    model, busiest = Classifier(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.randint(len(x), (BATCH,))
        logits, loss, load = model(x[rows])
        busiest.append(load.max().item() * EXPERTS / BATCH)
        optimizer.zero_grad()
        (F.cross_entropy(logits, targets[rows]) + (kind == "loss") * LOSS * loss).backward()
        optimizer.step()
        if kind == "bias":
            model.experts.router.update_bias(RATE)
    model.eval()
    right = (model(x)[0].argmax(-1) == targets).float().mean().item()
    return {"busiest": busiest, "dropped": dropped(model, x), "accuracy": right}


def measure(steps: int = STEPS) -> dict[str, Any]:
    """All three trainings, on one rank."""

    def body(ctx: RankContext) -> dict[str, Any]:
        return {kind: train(kind, steps) for kind in KINDS}

    results: dict[str, Any] = run_ranks(body, 1, ledger=False, timeout=600)[0]
    settings = {"experts": EXPERTS, "batch": BATCH, "steps": steps, "loss": LOSS, "rate": RATE}
    return {"torch": torch.__version__, **settings, "factors": FACTORS, "kinds": results}


def rounded(value: Any) -> Any:
    """Four digits: what a picture shows."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    FILE.write_text(json.dumps(rounded(measure())) + "\n", encoding="utf-8")
