# for: 3.20
"""Written differently: parameters are registered while they are initialised, root last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from solutions.phase3_multi_node.fsdp import FSDP, FlatParameter, Unit

Optimizer = torch.optim.Optimizer | None
State = dict[str, Any]


def parts_of(flat: FlatParameter) -> Iterator[tuple[list[str], torch.Size, int, slice]]:
    before = dist.get_rank(flat.group) * flat.chunk
    position = -before
    for shape, attributes in zip(flat.shapes, flat.places, strict=True):
        names, count = [full for _, _, full in attributes], shape.numel()
        if count == 0:
            yield (names, shape, 0, slice(0, 0))
        begin = min(max(position, 0), flat.shard.numel())
        end = min(max(position + count, 0), flat.shard.numel())
        if begin < end:
            yield (names, shape, begin - position, slice(begin, end))
        position += count


def flats_of(model: FSDP) -> list[FlatParameter]:
    return [flat for unit in model.units for flat in unit.flats]


def shapes_of(model: FSDP) -> dict[str, torch.Size]:
    return {
        name: shape
        for flat in flats_of(model)
        for shape, attributes in zip(flat.shapes, flat.places, strict=True)
        for _, _, name in attributes
    }


def full_state_dict(model: FSDP) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    here = dist.get_rank(model.group) == 0
    if here:
        for name, buffer in model.module.state_dict().items():
            result[name] = buffer.detach().cpu().clone()
    for flat in flats_of(model):
        result.update(_collect(flat, here))
    return result


def _collect(flat: FlatParameter, here: bool) -> list[tuple[str, Tensor]]:
    message = flat.shard.new_zeros(flat.chunk, requires_grad=False, device=flat.full.device)
    message[: flat.shard.numel()].copy_(flat.shard.detach())
    if not here:
        dist.gather(message, None, group=flat.group, group_dst=0)
        return []
    room = message.new_empty(dist.get_world_size(flat.group), flat.chunk)
    dist.gather(message, list(room), group=flat.group, group_dst=0)
    host = room.cpu().flatten()
    found, begin = [], 0
    for shape, attributes in zip(flat.shapes, flat.places, strict=True):
        for _, _, name in attributes:
            found.append((name, host[begin : begin + shape.numel()].reshape(shape).clone()))
        begin += shape.numel()
    return found


def load_full_state_dict(model: FSDP, state: dict[str, Tensor]) -> None:
    problems = []
    known = shapes_of(model)
    buffers = model.module.state_dict()
    known.update({name: buffer.shape for name, buffer in buffers.items()})
    for name in sorted({*known, *state}):
        if name not in state:
            problems.append(f"{name} is missing")
        elif name not in known:
            problems.append(f"{name} is unknown")
        elif state[name].shape != known[name]:
            problems.append(f"{name} is {list(state[name].shape)}, not {list(known[name])}")
    if problems:
        raise ValueError("; ".join(problems))
    with torch.no_grad():
        for flat in flats_of(model):
            for names, _, first, where in parts_of(flat):
                for name in names:
                    whole = state[name].flatten()
                    flat.shard[where] = whole.narrow(0, first, where.stop - where.start).to(
                        flat.shard
                    )
    set_buffers(model, {name: state[name] for name in buffers})


def set_buffers(model: FSDP, buffers: dict[str, Tensor]) -> None:
    device = flats_of(model)[0].full.device
    kinds = {name: buffer.dtype for name, buffer in model.module.state_dict().items()}
    copies = {name: value.to(device, kinds[name], copy=True) for name, value in buffers.items()}
    model.module.load_state_dict(copies, assign=True)


def materialise(model: FSDP, initialise: Callable[[nn.Module], None]) -> None:
    device = flats_of(model)[0].full.device
    room: dict[int, Tensor] = {}
    unit_of = {
        id(part): k for k, unit in enumerate(model.units) if k for part in unit.module.modules()
    }
    own: list[list[nn.Module]] = [[] for _ in model.units]
    having = {id(owner) for flat in flats_of(model) for same in flat.places for owner, _, _ in same}
    for part in model.module.modules():
        found = False
        for name, buffer in [*part._buffers.items()]:
            if buffer is None:
                continue
            found = True
            if buffer.device.type == "meta":
                if id(buffer) not in room:
                    room[id(buffer)] = torch.zeros_like(buffer, device=device)
                part._buffers[name] = room[id(buffer)]
        if found or id(part) in having:
            own[unit_of.get(id(part), 0)].append(part)
    for unit, parts in reversed([*zip(model.units, own, strict=True)]):
        _initialise_unit(unit, parts, initialise, device)


@torch.no_grad()
def _initialise_unit(
    unit: Unit,
    parts: list[nn.Module],
    initialise: Callable[[nn.Module], None],
    device: torch.device,
) -> None:
    kept = []
    for flat in unit.flats:
        vector = torch.zeros(flat.numel, dtype=flat.shard.dtype, device=device)
        begin = 0
        for shape, attributes in zip(flat.shapes, flat.places, strict=True):
            view = vector[begin : begin + shape.numel()].view(shape)
            parameter = nn.Parameter(view, requires_grad=flat.shard.requires_grad)
            for module, name, _ in attributes:
                delattr(module, name)
                module.register_parameter(name, parameter)
            begin += shape.numel()
        kept.append((flat, vector))
    try:
        for part in parts:
            initialise(part)
        for flat, vector in kept:
            begin = dist.get_rank(flat.group) * flat.chunk
            flat.shard.copy_(vector[begin : begin + flat.shard.numel()])
    finally:
        for flat, _ in kept:
            for attributes in flat.places:
                for module, name, _ in attributes:
                    module._parameters.pop(name, None)
            flat.put([None for _ in flat.places])
