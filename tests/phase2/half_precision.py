"""What the checks of mixed precision and of loss scaling share: a model and uneven windows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FEATURES, CLASSES = 6, 3
BF16, FP16 = torch.bfloat16, torch.float16
# (samples, without target) per micro-batch, per rank
RANKS = [[(2, 0), (9, 2), (3, 0)], [(4, 1)], [], [(2, 2), (5, 0)]]


def seeded(seed: int, make: Any) -> nn.Module:
    """What ``make()`` gives after ``manual_seed(seed)``; the global generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def net(seed: int) -> nn.Module:
    """A model whose gradient does not depend on how the batch is cut."""
    return seeded(
        seed,
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, CLASSES)
        ),
    )


def window_of(seed: int, rank: int, shape: list[tuple[int, int]], device: Any = "cpu") -> list:
    """A rank's micro-batches: (inputs, targets) for each (samples, without target)."""
    found = []
    for k, (n, ignored) in enumerate(shape):
        generator = torch.Generator().manual_seed(seed * 100 + rank * 10 + k)
        inputs = torch.randn(n, FEATURES, generator=generator)
        targets = torch.randint(0, CLASSES, (n,), generator=generator)
        targets[n - ignored :] = -100
        found.append((inputs.to(device), targets.to(device)))
    return found
