# for: 3.28
"""Written differently: every element has a number, and index tensors say who holds which."""

from __future__ import annotations

import copy

import torch

from .fsdp_checkpoint import _flats, _table

KEYS = ("names", "shape", "first", "values", "state")


def sharded_state_dict(model, optimizer=None):
    pieces = []
    for flat in _flats(model):
        state = {} if optimizer is None else optimizer.state.get(flat.shard, {})
        for names, shape, begin in _table(flat):
            low = max(begin - flat.start, 0)
            high = min(begin + shape.numel() - flat.start, len(flat.shard))
            if high <= low and shape.numel():
                continue
            kept = {}
            for key, value in state.items():
                like = torch.is_tensor(value) and value.shape == flat.shard.shape
                kept[key] = value[low:high].clone() if like else copy.deepcopy(value)
            first = flat.start + low - begin if shape.numel() else 0
            values = flat.shard.data[low:high].clone()
            pieces.append(dict(zip(KEYS, (names, list(shape), first, values, kept), strict=True)))
    buffers = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"pieces": pieces, "shapes": _shapes(model), "buffers": buffers}


def _shapes(model):
    flats = _flats(model)
    return {n: list(shape) for flat in flats for names, shape, _ in _table(flat) for n in names}


def load_sharded_state_dict(model, saved, optimizer=None):
    todo, buffers = [], None
    for flat in _flats(model):
        come = torch.zeros(len(flat.shard), dtype=torch.bool)
        todo.append((flat, flat.shard.detach().clone(), come, {}))
    for part in saved:
        if part["shapes"] != _shapes(model):
            raise ValueError("another model")
        buffers = {name: value.clone() for name, value in part["buffers"].items()}
        for flat, new, come, state in todo:
            numbers = torch.arange(flat.start, flat.start + len(flat.shard))
            begins = {names[0]: begin for names, _, begin in _table(flat)}
            for piece in part["pieces"]:
                if piece["names"][0] not in begins:
                    continue
                low = begins[piece["names"][0]] + piece["first"]
                mine = (numbers >= low) & (numbers < low + len(piece["values"]))
                if not mine.any():
                    continue
                come |= mine
                new[mine] = piece["values"][numbers[mine] - low].to(new)
                for key, value in piece["state"].items():
                    if torch.is_tensor(value) and value.shape == piece["values"].shape:
                        zeros = torch.zeros(len(new), dtype=value.dtype)
                        state.setdefault(key, zeros)[mine] = value[numbers[mine] - low]
                    else:
                        state[key] = value.clone() if torch.is_tensor(value) else value
    own = model.module.state_dict()
    there = all(come.all() for _, _, come, _ in todo)
    if buffers is None or buffers.keys() != own.keys() or not there:
        raise ValueError("elements are missing")
    for flat, new, _, state in todo:
        flat.shard.data.copy_(new)
        if optimizer is not None:
            optimizer.state.pop(flat.shard, None)
            optimizer.state.update({flat.shard: state} if state else {})
    for name, buffer in own.items():
        buffer.copy_(buffers[name])


def merge(saved):
    pieces, buffers, wanted = {}, {}, set()
    for part in saved:
        buffers, wanted = part["buffers"], set(part["shapes"])
        for piece in part["pieces"]:
            pieces.setdefault(tuple(piece["names"]), {})[piece["first"]] = piece
    out = {}
    for names, parts in pieces.items():
        parts = [parts[first] for first in sorted(parts)]
        ends = [0, *(piece["first"] + len(piece["values"]) for piece in parts)]
        if parts[0]["values"].numel() and [piece["first"] for piece in parts] != ends[:-1]:
            raise ValueError(f"{names[0]} has a hole")
        whole = torch.cat([piece["values"] for piece in parts])
        if whole.numel() != torch.Size(parts[0]["shape"]).numel():
            raise ValueError(f"{names[0]} is not complete")
        out.update((name, whole.view(parts[0]["shape"])) for name in names)
    if not out or wanted != set(out):
        raise ValueError("parameters are missing")
    return {**out, **buffers}
