# for: 3.25
"""Written differently: integers are found first, the outer step is written with new tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, expect_alike, rank_in


def mean_over_ranks(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    rank_in(group)
    if any(not (t.is_floating_point() or t.is_complex()) for t in tensors):
        raise ValueError("only real and complex numbers have a mean, not integers")
    share, results = dist.get_world_size(group), {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [k for k, t in enumerate(tensors) if t.dtype == dtype]
        size = sum(tensors[k].numel() for k in chosen)
        flat = torch.empty(size, dtype=dtype, device=tensors[chosen[0]].device)
        views = flat.split([tensors[k].numel() for k in chosen])
        for k, view in zip(chosen, views, strict=True):
            view.copy_(tensors[k].detach().flatten())
            view /= share
        dist.all_reduce(flat, group=group)
        for k, view in zip(chosen, views, strict=True):
            results[k] = view.reshape(tensors[k].shape).clone()
    return [results[k] for k in range(len(tensors))]


class LocalSGD:
    def __init__(self, model: nn.Module, *, every: int, group: Group = None) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        rank_in(group)
        self.every, self.group, self.done = every, group, 0
        parameters, self.buffers = list(model.parameters()), list(model.buffers())
        expect_alike(parameters + self.buffers, group)
        self._take_from_first(parameters + self.buffers)
        self.trainable = [p for p in parameters if p.requires_grad]

    def _take_from_first(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            sent.copy_(tensor.detach())
            dist.broadcast(sent.view(-1).view(torch.uint8), group_src=0, group=self.group)
            with torch.no_grad():
                tensor.copy_(sent)

    def step(self) -> bool:
        self.done += 1
        if self.done < self.every:
            return False
        return self.finish()

    def finish(self) -> bool:
        if not self.done:
            return False
        self.done = 0
        self._agree()
        real = [b for b in self.buffers if b.is_floating_point()]
        means = mean_over_ranks(real, self.group)
        for b, mean in zip(real, means, strict=True):
            b.detach().copy_(mean)
        self._take_from_first(b for b in self.buffers if not b.is_floating_point())
        return True

    def _agree(self) -> None:
        means = mean_over_ranks(self.trainable, self.group)
        for p, mean in zip(self.trainable, means, strict=True):
            p.detach().copy_(mean)


class DiLoCo(LocalSGD):
    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        group: Group = None,
    ) -> None:
        if not lr > 0 or not 0 <= momentum < 1:
            raise ValueError(f"lr must be positive and momentum in [0, 1), got {lr} and {momentum}")
        super().__init__(model, every=every, group=group)
        self.eta, self.mu = lr, momentum
        self.common = [torch.empty_like(p.detach()).copy_(p.detach()) for p in self.trainable]
        self.velocity = [torch.zeros_like(p.detach()) for p in self.trainable]

    def _agree(self) -> None:
        means = mean_over_ranks(
            [theta - p.detach() for theta, p in zip(self.common, self.trainable, strict=True)],
            self.group,
        )
        for k, delta in enumerate(means):
            self.velocity[k].copy_(self.mu * self.velocity[k] + delta)
            self.common[k].copy_(self.common[k] - self.eta * (delta + self.mu * self.velocity[k]))
            self.trainable[k].detach().copy_(self.common[k])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    rounds: LocalSGD,
) -> tuple[float, int]:
    first = next(model.parameters(), None)
    device = "cpu" if first is None else first.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        number = targets.shape[0]
        if number > 0:
            for p in model.parameters():
                p.grad = None
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            sums[0] += loss.detach().double() * number
            sums[1] += number
        rounds.step()
    rounds.finish()
    dist.all_reduce(sums, group=rounds.group)
    loss_sum, samples = sums.tolist()
    return (loss_sum / samples, int(samples)) if samples else (0.0, 0)
