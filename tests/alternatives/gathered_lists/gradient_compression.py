# for: 4.6, 4.7
"""Written differently: lists of all ranks' tensors are gathered, positions come from a sort
(random ones from the largest of random keys), and the buffer is filled from a sum of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

State = dict[str, Any]  # nested dicts and lists of tensors and numbers


class PerParameter:
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parts = {p: p.detach().new_zeros(p.numel()) for p in parameters if p.requires_grad}

    def beside(self, bucket: Bucket) -> Tensor:
        try:
            parts = [self.parts[p] for p in bucket.parameters]
        except KeyError:
            raise ValueError("this bucket has a parameter that is none of the hook's") from None
        flat = torch.empty_like(bucket.buffer, memory_format=torch.contiguous_format)
        begin = 0
        for p, old in zip(bucket.parameters, parts, strict=True):
            mine = flat.narrow(0, begin, old.numel())
            mine.copy_(old)
            self.parts[p] = mine
            begin += old.numel()
        return flat

    def state_dict(self) -> list[Tensor]:
        return [torch.empty_like(part).copy_(part) for part in list(self.parts.values())]

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        mine = tuple(self.parts.values())
        check_sizes(state, mine)
        with torch.no_grad():
            for k, part in enumerate(mine):
                part.copy_(state[k].detach().view(-1))


def check_sizes(saved: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    sizes, wanted = ([t.numel() for t in tensors] for tensors in (saved, here))
    if sizes != wanted:
        raise ValueError(f"saved for parameters of {sizes} elements, but there are {wanted}")


def count_for(ratio: float, numel: int) -> int:
    return min(numel, max(1, round(ratio * numel)))


def check_ratio(ratio: float) -> None:
    if not 0 < ratio <= 1:
        raise ValueError(f"the ratio of entries to send must be in (0, 1], got {ratio}")


class TopK:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ratio: float = 0.01,
        momentum: float = 0.0,
        group: Group = None,
    ) -> None:
        check_ratio(ratio)
        if not 0 <= momentum < 1:
            raise ValueError(f"the momentum must be in [0, 1), got {momentum}")
        self.ratio, self.momentum, self.group = ratio, momentum, group
        parameters = [*parameters]
        self.residual = PerParameter(parameters)
        self.velocity = PerParameter(parameters if momentum else [])

    def __call__(self, bucket: Bucket) -> Handle | None:
        owed = self.residual.beside(bucket)
        velocity = self.velocity.beside(bucket) if self.momentum else None
        count = owed.numel()
        if count == 0:
            return None
        if velocity is None:
            owed += bucket.buffer
        else:
            velocity *= self.momentum
            velocity += bucket.buffer
            owed += velocity
        k = count_for(self.ratio, count)
        order = torch.argsort(owed.abs(), descending=True, stable=True)[:k].sort().values
        numbers = order.to(torch.int32)
        values = owed.index_select(0, order)
        for memory in (owed, velocity):
            if memory is not None:
                memory.index_fill_(0, order, 0.0)
        size = dist.get_world_size(self.group)
        where = [torch.empty_like(numbers) for _ in range(size)]
        what = [torch.empty_like(values) for _ in range(size)]
        works = [
            dist.all_gather(where, numbers, group=self.group, async_op=True),
            dist.all_gather(what, values, group=self.group, async_op=True),
        ]

        def after() -> None:
            works[1].wait()
            total = torch.zeros_like(bucket.buffer)
            for positions, entries in zip(where, what, strict=True):
                total[positions.long()] += entries  # distinct within one rank
            bucket.buffer.copy_(total)

        return Then(works[0], after)

    def state_dict(self) -> State:
        state: State = {"residual": self.residual.state_dict()}
        if self.momentum:
            state["velocity"] = self.velocity.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        if ("velocity" in state) != bool(self.momentum):
            raise ValueError("only one of the two hooks, the saved one and this one, has momentum")
        memories = {"residual": self.residual}
        if self.momentum:
            memories["velocity"] = self.velocity
        for name, memory in memories.items():
            check_sizes(state[name], list(memory.parts.values()))
        for name, memory in memories.items():
            memory.load_state_dict(state[name])


class RandomK:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ratio: float = 0.01,
        seed: int = 0,
        group: Group = None,
    ) -> None:
        check_ratio(ratio)
        self.ratio, self.group = ratio, group
        self.generator = torch.Generator().manual_seed(seed)
        self.residual = PerParameter(parameters)

    def __call__(self, bucket: Bucket) -> Handle | None:
        owed = self.residual.beside(bucket).add_(bucket.buffer)
        n = owed.numel()
        if n == 0:
            return None
        keys = torch.rand(n, generator=self.generator, dtype=torch.float64)
        drawn = keys.topk(count_for(self.ratio, n)).indices.sort().values.to(owed.device)
        values = torch.gather(owed, 0, drawn)
        owed.index_fill_(0, drawn, 0)

        def fill_in() -> None:
            bucket.buffer.fill_(0)
            bucket.buffer.index_copy_(0, drawn, values)

        return Then(dist.all_reduce(values, dist.ReduceOp.SUM, self.group, True), fill_in)

    def state_dict(self) -> State:
        return {
            "generator": self.generator.get_state().clone(),
            "residual": self.residual.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        check_sizes(state["residual"], list(self.residual.parts.values()))
        self.generator.set_state(state["generator"].clone())
        self.residual.load_state_dict(state["residual"])
