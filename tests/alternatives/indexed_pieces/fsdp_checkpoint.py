# for: 3.20
"""Written differently: every element has a number, and index tensors say who holds which."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _flats(model):
    for unit in model.units:
        yield from unit.flats


def _table(flat):
    """(names, shape, begin) of each parameter in the unit's vector."""
    begin = 0
    for shape, places in zip(flat.shapes, flat.places, strict=True):
        yield [name for _, _, name in places], shape, begin
        begin += shape.numel()


def parts_of(flat):
    inside = list(range(flat.start, flat.start + len(flat.shard)))
    for names, shape, begin in _table(flat):
        mine = [number for number in inside if begin <= number < begin + shape.numel()]
        if mine or shape.numel() == 0:
            low = mine[0] if mine else flat.start
            where = slice(low - flat.start, low - flat.start + len(mine))
            yield names, shape, low - begin if mine else 0, where


def full_state_dict(model):
    first = dist.get_rank(model.group) == 0
    out = {}
    for flat in _flats(model):
        mine = flat.shard.new_zeros(flat.chunk, requires_grad=False)
        mine[: len(flat.shard)] = flat.shard.detach()
        if first:
            vector = mine.new_empty(dist.get_world_size(model.group) * flat.chunk)
            dist.gather(mine, list(vector.split(flat.chunk)), group=model.group, group_dst=0)
            for names, shape, begin in _table(flat):
                for name in names:
                    out[name] = vector[begin : begin + shape.numel()].clone().reshape(shape).cpu()
        else:
            dist.gather(mine, None, group=model.group, group_dst=0)
    if not first:
        return {}
    for name, value in model.module.state_dict().items():
        out[name] = value.detach().clone().cpu()
    return out


def load_full_state_dict(model, state):
    buffers = model.module.state_dict()
    expected = {name: tuple(value.shape) for name, value in buffers.items()}
    for flat in _flats(model):
        for names, shape, _ in _table(flat):
            expected.update((name, tuple(shape)) for name in names)
    if {name: tuple(value.shape) for name, value in state.items()} != expected:
        raise ValueError("names or shapes do not fit")
    for flat in _flats(model):
        numbers = torch.arange(flat.start, flat.start + len(flat.shard))
        for names, shape, begin in _table(flat):
            mine = (numbers >= begin) & (numbers < begin + shape.numel())
            values = state[names[0]].reshape(-1)[numbers[mine] - begin]
            flat.shard.data[mine] = values.to(flat.shard)
    for name, value in buffers.items():
        value.copy_(state[name])


@torch.no_grad()
def materialise(model, initialise):
    device = next(_flats(model)).full.device
    done = set()
    for part in model.module.modules():
        for name, value in list(part._buffers.items()):
            if value is not None and value.is_meta:
                part._buffers[name] = torch.zeros_like(value, device=device)
    for unit in reversed(model.units):
        whole = []
        for flat in unit.flats:
            tensors = [torch.empty(s, dtype=flat.shard.dtype, device=device) for s in flat.shapes]
            flat.put(tensors)
            whole.append(tensors)
        holders = {part for flat in unit.flats for places in flat.places for part, _, _ in places}
        for part in unit.module.modules():
            free = unit is model.units[0] and any(True for _ in part.buffers(recurse=False))
            if part not in done and (part in holders or free):
                done.add(part)
                initialise(part)
        while whole:
            tensors = whole.pop()
            flat = unit.flats[len(whole)]
            begin = -flat.start
            for tensor in tensors:
                end = begin + tensor.numel()
                low, high = max(begin, 0), min(end, len(flat.shard))
                if low < high:
                    flat.shard[low:high] = tensor.flatten()[low - begin : high - begin]
                begin = end
            flat.put([None] * len(tensors))
            del tensors, tensor
