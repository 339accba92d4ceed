# for: 3.28
"""Written differently: a table by name says who wants what; pieces are looked up in it."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

import torch
from torch import Tensor

from solutions.phase3_multi_node.fsdp import FSDP
from solutions.phase3_multi_node.fsdp_checkpoint import (
    Optimizer,
    State,
    flats_of,
    parts_of,
    set_buffers,
    shapes_of,
)


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    pieces: list[State] = []
    with torch.no_grad():
        for flat in flats_of(model):
            kept: State = {}
            if optimizer is not None and flat.shard in optimizer.state:
                kept = dict(optimizer.state[flat.shard])
            for names, shape, first, where in parts_of(flat):
                piece: State = {
                    "names": list(names),
                    "shape": [*shape],
                    "first": first,
                    "state": {},
                }
                piece["values"] = flat.shard[where].clone().detach()
                for key, value in kept.items():
                    if _is_like(value, flat.shard):
                        value = value[where]
                    piece["state"][key] = deepcopy(
                        value.detach().clone() if isinstance(value, Tensor) else value
                    )
                pieces.append(piece)
    buffers = {k: b.detach().clone() for k, b in model.module.state_dict().items()}
    shapes = {name: [*shape] for name, shape in shapes_of(model).items()}
    return {"pieces": pieces, "shapes": shapes, "buffers": buffers}


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    wanted: dict[str, list[tuple[State, int, slice]]] = {}
    flats = flats_of(model)
    founds = []
    for flat in flats:
        found = _nothing(flat.shard)
        founds.append(found)
        for names, _, first, where in parts_of(flat):
            for name in names:
                wanted.setdefault(name, []).append((found, first, where))
    shapes = {name: tuple(shape) for name, shape in shapes_of(model).items()}
    own = model.module.state_dict()
    buffers: dict[str, Tensor] = {}
    read = 0
    for state in saved:
        read += 1
        if {name: tuple(shape) for name, shape in state["shapes"].items()} != shapes:
            raise ValueError(f"state {read} has other names or shapes of parameters")
        theirs = state["buffers"]
        if theirs.keys() != own.keys() or any(own[n].shape != theirs[n].shape for n in own):
            raise ValueError(f"state {read} has other names or shapes of buffers")
        buffers = {name: value.detach().clone() for name, value in theirs.items()}
        for piece in state["pieces"]:
            targets: dict[tuple[int, int], tuple[State, int, slice]] = {}
            for name in piece["names"]:
                for found, first, where in wanted.get(name, ()):
                    targets[id(found), where.start] = (found, first, where)
            for found, first, where in targets.values():
                _take(found, piece, first, where)
        piece = state = theirs = None
    if not read:
        raise ValueError("no state was given")
    lacking = [n for n, t in wanted.items() if not all((bool(f["come"][w].all()) for f, _, w in t))]
    if lacking:
        raise ValueError(f"elements of {', '.join(lacking)} are in none of the states")
    with torch.no_grad():
        for flat, found in zip(flats, founds, strict=True):
            flat.shard.copy_(found["values"])
            if optimizer is not None:
                optimizer.state.pop(flat.shard, None)
                if found["state"]:
                    optimizer.state[flat.shard] = found["state"]
    set_buffers(model, buffers)


def _nothing(shard: Tensor) -> State:
    come = torch.zeros_like(shard, dtype=torch.bool, requires_grad=False)
    return {"values": torch.empty_like(shard, requires_grad=False), "come": come, "state": {}}


def _take(found: State, piece: State, first: int, where: slice) -> None:
    shift = piece["first"] - first + where.start
    begin = max(where.start, shift)
    end = min(where.stop, shift + len(piece["values"]))
    if end <= begin:
        return
    found["values"][begin:end] = piece["values"][begin - shift : end - shift].to(found["values"])
    found["come"][begin:end] = True
    for key, value in piece["state"].items():
        if not _is_like(value, piece["values"]):
            found["state"][key] = value.clone() if isinstance(value, Tensor) else deepcopy(value)
            continue
        if key not in found["state"]:
            like = found["values"]
            found["state"][key] = torch.zeros(like.shape, dtype=value.dtype, device=like.device)
        found["state"][key][begin:end] = value[begin - shift : end - shift].to(
            found["values"].device
        )


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    shapes: dict[str, list[int]] = {}
    buffers: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    come: dict[str, Tensor] = {}
    read = 0
    for state in saved:
        read += 1
        shapes.update(state["shapes"])
        buffers = {name: value.clone() for name, value in state["buffers"].items()}
        for piece in state["pieces"]:
            part = piece["values"]
            for name in piece["names"]:
                if name not in values:
                    size = torch.Size(shapes[name])
                    values[name] = part.new_zeros(size.numel())
                    come[name] = torch.zeros(size.numel(), dtype=torch.bool)
                end = piece["first"] + len(part)
                values[name][piece["first"] : end] = part
                come[name][piece["first"] : end] = True
    if not read:
        raise ValueError("no state was given")
    for name in shapes:
        if name not in values or not bool(come[name].all()):
            raise ValueError(f"elements of {name} are missing")
    return {**{name: values[name].reshape(shapes[name]) for name in shapes}, **buffers}


def _is_like(value: object, shard: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1 and (value.shape == shard.shape)
