"""A small run with everything that a step of training can depend on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
from torch import nn

from distlab.ranks import RankContext
from given.safe_format import Tree, pack

EPOCHS, SAMPLES, BATCH = 2, 22, 4  # six batches per epoch, the last one padded


class Augmented(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """(index, features): with noise from all three libraries."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = torch.rand(6) + np.random.rand() + random.random()
        return index, (index / SAMPLES + noise).float()


class Average:
    """A moving average of the weights: any object with a state."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for value, p in zip(self.values, model.parameters(), strict=True):
            value.lerp_(p.detach(), 1 / (1 + self.updates))

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for value, saved in zip(self.values, state["values"], strict=True):
            value.copy_(saved)
        self.updates = state["updates"]


class Wrapped(nn.Module):
    """What DDP does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 1))


def network_of(seed: int) -> nn.Module:
    """The network with weights that follow from the seed."""
    draw, model = torch.Generator().manual_seed(seed), network()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw)
    return model


class Training:
    """A small run with everything that a step can depend on."""

    def __init__(
        self, impl: Any, ctx: RankContext, seed: int, own: Sequence[str] = (), workers: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.model = Wrapped(network().to(ctx.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = impl.solution(2, "loss_scaling").LossScaler(scale=64.0, growth_interval=4)
        self.average, self.mixup = Average(self.model), torch.Generator().manual_seed(seed)
        self.loader = impl.solution(1, "data_loader").build_loader(
            impl.module("sample_seeds").SampleSeeds(Augmented(), 7),
            rank=ctx.rank,
            world_size=ctx.world_size,
            global_batch_size=BATCH,
            num_workers=workers,
        )
        self.state = impl.TrainingState(
            sampler=self.loader.batch_sampler,
            device=ctx.device,
            own=own,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            scaler=self.scaler,
            average=self.average,
            mixup=self.mixup,
        )
        seed_streams(100 * seed + ctx.rank)
        self.impl, self.device = impl, ctx.device
        self.log: list[list[Any]] = []

    def step(self, features: torch.Tensor, number: int) -> float:
        features = features.to(self.device)
        weight = torch.rand((), generator=self.mixup).item() + random.random() + np.random.rand()
        loss = self.model(features).square().mean() * weight
        self.optimizer.zero_grad()
        (loss * self.scaler.scale).backward()
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        if number == 3:
            gradients[:] = torch.inf  # an overflow: the scale goes down, no step
        dist.all_reduce(gradients)
        nn.utils.vector_to_parameters(gradients, self.gradients())
        if self.scaler.unscale(self.model.parameters()):
            self.optimizer.step()
            self.schedule.step()
        self.scaler.update()
        self.average.update(self.model)
        return loss.item()

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters()]

    def train(self, position: Any, until: int = 10**9) -> None:
        """Train from ``position`` to the end, or until that many steps are done."""
        if position.step >= until:
            return
        for indices, features in self.impl.batches(self.loader, position, EPOCHS):
            loss = self.step(features, position.step)
            self.log.append([position.step, indices.tolist(), loss])
            if position.step >= until:
                return

    def summary(self) -> dict[str, Any]:
        """What it has come to."""
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()]).cpu()
        numbers = [self.scaler.scale, self.schedule.get_last_lr()[0], self.average.updates]
        return {"log": self.log, "weights": weights, "numbers": numbers}


def seed_streams(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def next_draws(device: torch.device) -> dict[str, list[float]]:
    """What each stream gives next; they are moved by it."""
    draws = {
        "torch": torch.rand(2).tolist(),
        "numpy": np.random.randn(3).tolist(),  # an odd number: one normal value is kept back
        "random": [random.random(), random.gauss(0, 1)],
    }
    if device.type == "cuda":
        draws["CUDA"] = torch.rand(2, device=device).tolist()
    return draws


def raw_bits() -> dict[str, list[int]]:
    """Four words of 31 bits of each library, as its generator gives them; they are moved by it."""
    mask = 0x7FFFFFFF  # torch gives as many of 32
    words = np.random.randint(0, 1 << 32, 4, dtype=np.uint32)
    return {
        "torch": torch.empty(4, dtype=torch.int32).random_().tolist(),
        "numpy": [int(word) & mask for word in words],
        "random": [random.getrandbits(32) & mask for _ in range(4)],
    }


def first_draws(seed: int) -> dict[str, list[float]]:
    """What the CPU's streams give first after ``seed_streams``; this process's own stay."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed_streams(seed)
    draws = next_draws(torch.device("cpu"))
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])
    return draws


def facts(training: Training) -> dict[str, str]:
    """Every part's state, to be compared."""
    parts = ("model", "optimizer", "schedule", "scaler", "average")
    found = {name: digest(getattr(training, name).state_dict()) for name in parts}
    return found | {"generator": digest({"mixup": training.mixup.get_state()})}


def digest(state: Tree) -> str:
    """Different for different states."""
    data, tensors = pack(state)
    values = [[name, t.tolist()] for name, t in sorted(tensors.items())]
    return hashlib.sha256(repr([data, values]).encode()).hexdigest()
