# for: 3.28
"""Written differently: every element has a number, and index tensors say who holds which."""

from __future__ import annotations

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
            if high <= low:
                continue
            kept = {}
            for key, value in state.items():
                whole = torch.as_tensor(value)
                kept[key] = whole[low:high].clone() if whole.dim() else whole.clone()
            first = flat.start + low - begin
            values = flat.shard.data[low:high].clone()
            pieces.append(dict(zip(KEYS, (names, list(shape), first, values, kept), strict=True)))
    buffers = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"pieces": pieces, "buffers": buffers}


def load_sharded_state_dict(model, saved, optimizer=None):
    saved = list(saved)
    todo = []
    for flat in _flats(model):
        numbers = torch.arange(flat.start, flat.start + len(flat.shard))
        come = torch.zeros(len(numbers), dtype=torch.bool)
        new, state = flat.shard.detach().clone(), {}
        begins = {names[0]: begin for names, _, begin in _table(flat)}
        for piece in (piece for part in saved for piece in part["pieces"]):
            if piece["names"][0] not in begins:
                continue
            low = begins[piece["names"][0]] + piece["first"]
            mine = (numbers >= low) & (numbers < low + len(piece["values"]))
            if not mine.any():
                continue
            come |= mine
            new[mine] = piece["values"][numbers[mine] - low]
            for key, value in piece["state"].items():
                if value.dim():
                    state.setdefault(key, torch.zeros_like(new))[mine] = value[numbers[mine] - low]
                else:
                    state[key] = value.clone()
        if not come.all():
            raise ValueError(f"{int((~come).sum())} elements are missing")
        todo.append((flat, new, state))
    for flat, new, state in todo:
        flat.shard.data.copy_(new)
        if optimizer is not None:
            optimizer.state[flat.shard].update(state)
    for name, buffer in model.module.state_dict().items():
        buffer.copy_(saved[0]["buffers"][name])


def merge(saved):
    pieces, buffers = {}, {}
    for part in saved:
        buffers = part["buffers"]
        for piece in part["pieces"]:
            pieces.setdefault(tuple(piece["names"]), []).append(piece)
    if len({tuple(p) for p in pieces}) == 0:
        raise ValueError("nothing to merge")
    out = {}
    for names, parts in pieces.items():
        parts.sort(key=lambda piece: piece["first"])
        ends = [0, *(piece["first"] + len(piece["values"]) for piece in parts)]
        if [piece["first"] for piece in parts] != ends[:-1]:
            raise ValueError(f"{names[0]} has a hole")
        whole = torch.cat([piece["values"] for piece in parts])
        if whole.numel() != torch.Size(parts[0]["shape"]).numel():
            raise ValueError(f"{names[0]} is not complete")
        out.update((name, whole.view(parts[0]["shape"])) for name in names)
    return {**out, **buffers}
