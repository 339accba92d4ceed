"""Sharded checkpoints: every rank saves its own part, and any number of ranks loads the parts.

A piece says which elements of which parameter it holds. They are numbered in the model's parameter,
not in the unit's vector. So any number of ranks can load the pieces of any other number, with the
optimizer's state:

    saved by 3 ranks     r0: w 0…3 | r1: w 4…7 | r2: b 0…2
    loaded by 2 ranks    r0: w 0…5         | r1: w 6…7, b 0…2

No message. With W ranks and 4Ψ bytes of parameters each rank writes 12Ψ/W bytes with Adam's
moments. Everything is tensors, numbers, strings, lists and dictionaries: ``torch.save`` it, and
load it with ``weights_only=True``. (``mmap=True`` reads only the bytes that are copied.)
Invariant: every element is in exactly one piece, and padding is in none.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .fsdp import FSDP
from .fsdp_checkpoint import Optimizer, State, flats_of, parts_of, set_buffers, shapes_of


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """This rank's part: ``{"pieces": [...], "shapes": {...}, "buffers": {...}}``, all copies.

    No communication. A piece has ``names`` and ``shape`` (a list) of the parameter. ``first`` is
    the number of its first element here, counted in the parameter. ``values`` (n,) are its elements
    here, and ``state`` is the optimizer's state for them, by key. State that has the shard's shape
    is cut like the shard. Other state is in each piece as a whole. ``shapes``: of all parameters of
    the model, by name, as lists.
    """
    # --- exercise 3.28: start
    # Step 1: cut the optimizer's state where the shard is cut. Make copies, because training may go
    #         on before they are written
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
    shapes = {name: list(shape) for name, shape in shapes_of(model).items()}
    return {"pieces": pieces, "shapes": shapes, "buffers": buffers}
    # --- exercise 3.28: end


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    """Take over this rank's part of ``saved``, the states of all ranks of any world size.

    The model may have other units than the model that was saved. The states are read once, one
    after the other, so they may be loaded lazily: none is kept when the next but one is read. No
    communication. Afterwards the optimizer has the saved state of the shards, and no other, in the
    dtypes in which it was saved. Elements without saved state get zeros. Raises ValueError, before
    anything changes, if the states are of a model with other names or shapes or lack its buffers.
    It does so, too, if together they lack elements that this rank needs.
    """
    # --- exercise 3.28: start
    # Step 2: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 3: every element must have come, once or more often; only then copy into the model
    flats = flats_of(model)
    fresh = [_nothing(flat.shard) for flat in flats]
    shapes = {name: list(shape) for name, shape in shapes_of(model).items()}
    buffers: dict[str, Tensor] = {}
    for saved_state in saved:
        if saved_state["shapes"] != shapes:
            raise ValueError("the states are of a model with other parameters")
        buffers = saved_state["buffers"]
        pieces = {piece["names"][0]: piece for piece in saved_state["pieces"]}
        for flat, found in zip(flats, fresh, strict=True):
            for names, _, first, where in parts_of(flat):
                if names[0] in pieces:
                    _take(found, pieces[names[0]], first, where)
    lacking = sum(int((~found["come"]).sum()) for found in fresh)
    if lacking or buffers.keys() != model.module.state_dict().keys():
        raise ValueError(f"{lacking} elements of this rank's shards are in none of the states")
    for flat, found in zip(flats, fresh, strict=True):
        flat.shard.detach().copy_(found["values"])
        if optimizer is not None:
            optimizer.state.pop(flat.shard, None)
            if found["state"]:
                optimizer.state[flat.shard] = found["state"]
    set_buffers(model, buffers)
    # --- exercise 3.28: end


def _nothing(shard: Tensor) -> State:
    """Room for a shard's ``values``, which of them have ``come``, and the optimizer's ``state``."""
    come = torch.zeros_like(shard, dtype=torch.bool, requires_grad=False)
    return {"values": torch.empty_like(shard, requires_grad=False), "come": come, "state": {}}


def _take(found: State, piece: State, first: int, where: slice) -> None:
    """Copy the elements of ``piece`` that belong at ``where`` of the shard, from ``first`` on."""
    # --- exercise 3.28: start
    # Step 4: the overlap again, once counted in the shard and once in the piece
    length = len(piece["values"])
    low = max(first, piece["first"])
    high = min(first + where.stop - where.start, piece["first"] + length)
    if low >= high:
        return
    here = slice(where.start + low - first, where.start + high - first)
    there = slice(low - piece["first"], high - piece["first"])
    found["values"][here] = piece["values"][there]
    found["come"][here] = True
    for key, value in piece["state"].items():
        if _is_like(value, piece["values"]):
            room = torch.zeros_like(found["values"], dtype=value.dtype)
            found["state"].setdefault(key, room)[here] = value[there]
        else:
            found["state"][key] = value.clone() if isinstance(value, Tensor) else value
    # --- exercise 3.28: end


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    It reads ``saved`` once. Raises ValueError if elements, or whole parameters, are missing, or if
    there is no state.
    """
    # --- exercise 3.28: start
    # Step 5: write each piece to the elements that it names, and note which have come
    whole: dict[str, Tensor] = {}
    come: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    names: set[str] = set()
    for state in saved:
        buffers, names = state["buffers"], names | state["shapes"].keys()
        for piece in state["pieces"]:
            name, values, shape = piece["names"][0], piece["values"], torch.Size(piece["shape"])
            if name not in whole:
                whole |= dict.fromkeys(piece["names"], values.new_empty(shape))
                come[name] = torch.zeros(shape.numel(), dtype=torch.bool)
            where = slice(piece["first"], piece["first"] + len(values))
            whole[name].view(-1)[where] = values
            come[name][where] = True
    wrong = (names - whole.keys()) | {name for name, there in come.items() if not there.all()}
    if wrong or not names:
        raise ValueError(f"elements of {sorted(wrong)} are missing")
    return whole | buffers
    # --- exercise 3.28: end


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape
