"""What the checks of exercises 3.21 and 3.27 train, and what that needs and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes as unfollowed

from distlab.grading import fail
from distlab.observe.memory import PeakMemory, held_by, storage_bytes
from distlab.ranks import RankContext
from given.step_profile import Profile, profile

NAMES = ("ddp", "zero1", "zero2", "fsdp", "hybrid", "offload")
NODES, LOCAL = 2, 2
WIDTH = 64
BUCKET = 20_000  # bytes: a block and a bit
LEEWAY = 0.1
# strategy and samples: mostly weights, then mostly activations
CASES = [*((name, 2) for name in NAMES), ("ddp", 256), ("fsdp", 256)]


class Tower(nn.Module):
    """Four units between a small first and last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 10)
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.outside(x)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def batch_of(seed: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.zeros(size, dtype=torch.int64)


def host_flat(impl: Any) -> type:
    """``OffloadFlat`` whose gradients are, on a machine without GPU, not followed as device's."""

    class HostFlat(impl.solution(3, "fsdp_offload").OffloadFlat):
        def mean(self, chunk: Tensor) -> Tensor:
            chunk = super().mean(chunk)
            with unfollowed():
                return chunk.clone()

    return HostFlat


def built(
    impl: Any, name: str
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], list[Tensor | None]]]:
    """(model to call, optimizer, tensors of the gradients after backward) of the course's own.

    Not the learner's: a right one may need other memory than the estimate is held against.
    """
    model = Tower()
    if name in ("ddp", "zero1"):
        wrapped = impl.solution(3, "ddp").DDP(model, bucket_bytes=BUCKET)
        make = impl.solution(3, "zero").ZeroOptimizer
        make = partial(make, optimizer_class=torch.optim.AdamW, bucket_bytes=BUCKET)
        optimizer = make(model.parameters()) if name == "zero1" else adam(model.parameters())
        return wrapped, optimizer, lambda: [p.grad for p in model.parameters()]
    if name == "zero2":
        make = impl.solution(3, "zero_gradients").Zero2Optimizer
        optimizer = make(model.parameters(), torch.optim.AdamW, bucket_bytes=BUCKET)
        return model, optimizer, lambda: [v.gradient for v in optimizer.vectors]
    options = {"flat_type": host_flat(impl)} if name == "offload" else {}
    if name == "hybrid":
        hybrid = impl.solution(3, "fsdp_hybrid")
        group, replicas = hybrid.node_groups(LOCAL)
        options = {"group": group, "flat_type": partial(hybrid.HybridFlat, replicas=replicas)}
    wrapped = impl.solution(3, "fsdp_prefetch").PrefetchFSDP(model, list(model.blocks), **options)
    return wrapped, adam(wrapped.parameters()), lambda: [p.grad for p in wrapped.parameters()]


def measured(impl: Any, ctx: RankContext, name: str, seed: int, size: int) -> dict[str, int]:
    """Bytes that a rank holds after backward, and the most at any moment of two steps.

    Nothing of it is the learner's (see ``built``): it is the reference of what they estimate.
    """
    inputs, targets = batch_of(seed, size)
    with PeakMemory() as memory:
        wrapped, optimizer, gradients = built(impl, name)
        memory.peak = memory.current  # building it may have taken more
        host = memory.current if name == "offload" else 0
        for step in range(2):
            optimizer.zero_grad()
            with ctx.region(f"{name} {step}"):
                F.cross_entropy(wrapped(inputs), targets).backward()
            left = storage_bytes(gradients())
            with ctx.region(f"{name} {step}"), unfollowed() if host else nullcontext():
                optimizer.step()
    held = held_by(wrapped, optimizer)
    kept = {
        "parameters": held.parameters,
        "gradients": left,
        "optimizer": held.optimizer,
    }
    if host:
        kept = {"parameters": 0, "gradients": 0, "optimizer": 0, "host": sum(kept.values())}
    return kept | {"peak": memory.peak - host}


def profiles(seed: int, cases: Iterable[tuple[str, int]]) -> dict[int, Profile]:
    """The profile of a step for each batch size of ``cases``."""
    model = Tower()
    return {
        size: profile(model, batch_of(seed, size), adam, units=list(model.blocks))
        for size in {size for _, size in cases}
    }


def expect_near(what: str, said: float, got: float, cause: str) -> None:
    if abs(said - got) > LEEWAY * got + 500:  # counters, padding
        fail(
            f"{NODES} x {LOCAL} ranks, {what}: estimated {said:,.0f} B, measured {got:,.0f} B: "
            "more than 10 % apart",
            cause=cause,
        )
