"""Sharded checkpoints: every rank saves what it has, any number of ranks loads it.

A piece says which elements of which parameter it holds, in the parameter's own numbering. So any
number of ranks can load what any other number has saved, optimizer state included:

    saved by 3 ranks     r0: w 0…3 | r1: w 4…7 | r2: b 0…2
    loaded by 2 ranks    r0: w 0…5         | r1: w 6…7, b 0…2

No message. With W ranks and 4Ψ bytes of parameters each rank writes 12Ψ/W bytes with Adam's
moments. Everything is tensors, numbers, strings, lists and dictionaries: ``torch.save`` it, and
load it with ``weights_only=True`` (``mmap=True`` reads only what is copied). Invariant: every
element is in exactly one piece, padding in none.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .fsdp import FSDP
from .fsdp_checkpoint import Optimizer, State, flats_of, parts_of, set_buffers


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """What this rank holds: ``{"pieces": [...], "buffers": {...}}``. No communication.

    A piece: ``names`` and ``shape`` of the parameter, ``first``: the number of the first of its
    elements that are here, ``values``: these (n,), ``state``: the optimizer's for them, by key.
    """
    # --- exercise 3.28: start
    # Step 1: state that has the shard's shape is cut like the shard, other state goes along whole;
    #         copies, because training may go on before they are written
    pieces = []
    for flat in flats_of(model):
        kept = optimizer.state.get(flat.shard, {}) if optimizer is not None else {}
        for names, shape, first, where in parts_of(flat):
            state = {
                key: value[where] if _is_like(value, flat.shard) else value
                for key, value in kept.items()
            }
            state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            values = flat.shard.detach()[where].clone()
            piece = {"names": names, "shape": list(shape), "first": first}
            pieces.append(piece | {"values": values, "state": state})
    buffers = {name: value.clone() for name, value in model.module.state_dict().items()}
    return {"pieces": pieces, "buffers": buffers}
    # --- exercise 3.28: end


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    """Take over this rank's part of ``saved``, the states of all ranks of any world size.

    They are read one after the other, so they may be loaded lazily. No communication. Raises
    ValueError if together they lack elements that this rank needs; then nothing has changed.
    """
    # --- exercise 3.28: start
    # Step 2: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 3: every element must have come; only then take over
    flats = flats_of(model)
    fresh: list[State] = [{"values": torch.empty_like(flat.shard)} for flat in flats]
    needed = sum(flat.shard.numel() for flat in flats)
    buffers: dict[str, Tensor] = {}
    for state in saved:
        buffers = state["buffers"]
        pieces = {piece["names"][0]: piece for piece in state["pieces"]}
        for flat, found in zip(flats, fresh, strict=True):
            for names, _, first, where in parts_of(flat):
                if names[0] in pieces:
                    needed -= _take(found, pieces[names[0]], first, where, flat.shard)
    if needed:
        raise ValueError(f"{needed} elements of this rank's shards are in none of the states")
    with torch.no_grad():
        for flat, found in zip(flats, fresh, strict=True):
            flat.shard.copy_(found.pop("values"))
            if optimizer is not None and found:
                optimizer.state[flat.shard] = found
    set_buffers(model, buffers)
    # --- exercise 3.28: end


def _take(found: State, piece: State, first: int, where: slice, shard: Tensor) -> int:
    """Copy what ``piece`` has of the elements ``first`` … that belong at ``where``; how many."""
    # --- exercise 3.28: start
    # Step 4: the overlap again, once counted in the shard and once in the piece
    length = len(piece["values"])
    low = max(first, piece["first"])
    high = min(first + where.stop - where.start, piece["first"] + length)
    if low >= high:
        return 0
    here = slice(where.start + low - first, where.start + high - first)
    there = slice(low - piece["first"], high - piece["first"])
    for key, value in (("values", piece["values"]), *piece["state"].items()):
        if _is_like(value, piece["values"]):
            found.setdefault(key, torch.empty_like(shard, requires_grad=False))[here] = value[there]
        else:
            found[key] = value.clone() if isinstance(value, Tensor) else value
    return high - low
    # --- exercise 3.28: end


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    Raises ValueError if elements are missing.
    """
    # --- exercise 3.28: start
    # Step 5: write each piece where its numbering says, and count what has come
    whole: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    buffers: dict[str, Tensor] = {}
    for state in saved:
        buffers = state["buffers"]
        for piece in state["pieces"]:
            name, values, shape = piece["names"][0], piece["values"], torch.Size(piece["shape"])
            if name not in whole:
                missing[name] = shape.numel()
                whole |= dict.fromkeys(piece["names"], values.new_empty(shape))
            whole[name].view(-1)[piece["first"] : piece["first"] + len(values)] = values
            missing[name] -= len(values)
    if any(missing.values()):
        raise ValueError(f"elements are missing: { {n: k for n, k in missing.items() if k} }")
    return whole | buffers
    # --- exercise 3.28: end


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape
