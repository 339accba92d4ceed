# for: 3.15
"""Written differently: what nobody tells to be done ends when another unit begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, device_in
from given.fsdp_units import FlatUnit, HookedUnits, Parameters, owned_parameters


class FlatParameter:
    gathering: dist.Work | None = None
    reducing: tuple[dist.Work, Tensor, Tensor] | None = None

    def __init__(self, parameters: Parameters, group: Group, device: torch.device) -> None:
        self.group, self.places = (group, list(parameters.values()))
        self.shapes = [p.shape for p in parameters]
        self.numel = sum(p.numel() for p in parameters)
        first = next(iter(parameters))
        self.chunk = (self.numel + dist.get_world_size(group) - 1) // dist.get_world_size(group)
        with torch.no_grad():
            if first.is_meta:
                whole = torch.empty(self.numel, dtype=first.dtype, device=device)
            else:
                whole = torch.cat([p.contiguous().view(-1) for p in parameters]).to(device)
            mine = whole[dist.get_rank(group) * self.chunk :][: self.chunk].clone()
        del whole
        self.shard = nn.Parameter(mine, requires_grad=first.requires_grad)
        self.make_full(first.dtype, device)

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        size = self.chunk * dist.get_world_size(self.group)
        self.full = torch.empty(size, dtype=dtype, device=device)
        storage, offset = self.full.untyped_storage(), 0
        self.leaves = []
        for shape in self.shapes:
            strides = torch.empty(shape, device="meta").stride()
            leaf = torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, strides)
            leaf.requires_grad = self.shard.requires_grad
            self.leaves.append(leaf)
            offset += shape.numel()
        storage.resize_(0)
        self.put([None for _ in self.places])

    def gather_input(self) -> Tensor:
        missing = self.chunk - self.shard.numel()
        shard = self.shard.detach()
        return F.pad(shard, (0, missing)) if missing else shard

    def start_gather(self) -> None:
        if self.gathering is None and self.full.untyped_storage().nbytes() < self.full.nbytes:
            message = self.gather_input()
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.gathering = dist.all_gather_into_tensor(
                self.full, message, group=self.group, async_op=True
            )

    def finish_gather(self) -> None:
        handle, self.gathering = self.gathering, None
        if handle is not None:
            handle.wait()
        self.put(self.leaves)

    def free(self) -> None:
        self.finish_gather()
        self.put([None for _ in self.places])
        self.full.untyped_storage().resize_(0)

    def put(self, values: Sequence[Tensor | None]) -> None:
        for value, attributes in zip(values, self.places, strict=True):
            for module, name, _ in attributes:
                setattr(module, name, value)

    def reduce_input(self) -> Tensor:
        joined = torch.zeros(self.full.shape, dtype=self.full.dtype, device=self.full.device)
        offset = 0
        for leaf in self.leaves:
            if leaf.grad is not None:
                joined[offset : offset + leaf.numel()].view(leaf.shape).copy_(leaf.grad.detach())
            offset += leaf.numel()
        return joined

    def start_reduce(self) -> None:
        if not any(leaf.grad is not None for leaf in self.leaves):
            return
        message = self.reduce_input()
        for leaf in self.leaves:
            leaf.grad = None
        chunk = torch.empty(self.chunk, dtype=message.dtype, device=message.device)
        work = dist.reduce_scatter_tensor(
            chunk, message, op=dist.ReduceOp.SUM, group=self.group, async_op=True
        )
        self.reducing = (work, chunk, message)

    def finish_reduce(self) -> None:
        under_way, self.reducing = self.reducing, None
        if under_way is not None:
            under_way[0].wait()
            with torch.no_grad():
                mean = self.mean(under_way[1])[: self.shard.numel()]
                old = self.shard.grad
                self.shard.grad = mean.clone() if old is None else old + mean

    def mean(self, chunk: Tensor) -> Tensor:
        return chunk.div_(dist.get_world_size(self.group))


Unit = FlatUnit[FlatParameter]


class FSDP(HookedUnits[FlatParameter]):
    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module] = (),
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        flat_type: Callable[[Parameters, Group, torch.device], FlatParameter] = FlatParameter,
    ) -> None:
        super().__init__()
        owned = owned_parameters(module, units, group)
        first = next(iter(p for kinds in owned for same in kinds for p in same))
        where = first.device if device is None else torch.device(device)
        self.module, self.group = module, group
        for owner, kinds in zip((module, *units), owned, strict=True):
            flats = [flat_type(same, group, where) for same in kinds]
            self.units.append(Unit(owner, flats))
        self.shards = nn.ParameterList(f.shard for unit in self.units for f in unit.flats)
        self.watch_units()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def before_forward(self, unit: Unit) -> None:
        if unit.module is self.module:
            for other in self.units:
                other.reset()
        unit.start_gather()
        for flat in unit.flats:
            flat.finish_gather()

    def after_forward(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.free()

    def before_backward(self, unit: Unit) -> None:
        for other in self.units[1:]:
            if other is not unit and any(
                leaf.grad is not None for f in other.flats for leaf in f.leaves
            ):
                self.after_backward(other)
        unit.gather()

    def after_backward(self, unit: Unit) -> None:
        for flat in unit.flats:
            flat.free()
        for flat in unit.flats:
            flat.start_reduce()
            flat.finish_reduce()

    def end_backward(self) -> None:
        for unit in self.units:
            self.after_backward(unit)


def clip_by_global_norm(model: FSDP, max_norm: float) -> float:
    if not max_norm > 0.0:
        raise ValueError(f"the largest norm must be positive, not {max_norm!r}")
    flats = [flat for unit in model.units for flat in unit.flats]
    message = torch.zeros(1, dtype=torch.float64, device=device_in(model.group))
    for flat in flats:
        if flat.shard.grad is not None:
            square = torch.linalg.vector_norm(flat.shard.grad, dtype=torch.float64) ** 2
            message += square.to(message.device)
    dist.all_reduce(message, op=dist.ReduceOp.SUM, group=model.group)
    norm = float(message.item() ** 0.5)
    if norm != norm or norm == float("inf") or norm <= max_norm:
        return norm
    for flat in flats:
        if flat.shard.grad is not None:
            flat.shard.grad.detach().copy_(flat.shard.grad.detach() * (max_norm / norm))
    return norm
