"""The full checkpoint of a sharded model, and a model that never exists in full.

*Full state*: one dictionary with the names and shapes of the plain module. One rank joins it, unit
by unit, and every rank can load its part of it. With W ranks and 4Ψ bytes of parameters rank 0
receives (W-1)/W·4Ψ bytes and writes 4Ψ. The others send 4Ψ/W each. ``fsdp_sharded_state`` saves
shards, without a message.

*Deferred initialisation*: a module that is built on meta has shapes and no data. Units are
initialised one at a time, and only the rank's shard stays. Memory: the shards and the largest unit.

Everything is tensors: ``torch.save`` it, and load it with ``weights_only=True``. Invariant: padding
is in no file.

Sources: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277), section 3.1 (deferred initialisation).
Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .fsdp import FSDP, FlatParameter, Unit

Optimizer = torch.optim.Optimizer | None
State = dict[str, Any]


def parts_of(flat: FlatParameter) -> Iterator[tuple[list[str], torch.Size, int, slice]]:
    """(names, shape, first, where) of each parameter with elements here, in the vector's order.

    ``first`` is the number of its first element here, counted in the parameter. ``where`` is the
    slice of the shard that holds its elements. A parameter without any element is on every rank,
    with an empty slice.
    """
    # --- exercise 3.20: start
    # Step 1: the overlap of two ranges of the unit's vector: the parameter's and the shard's
    begin, stop = 0, flat.start + flat.shard.numel()
    for shape, attributes in zip(flat.shapes, flat.places, strict=True):
        low, high = max(begin, flat.start), min(begin + shape.numel(), stop)
        if low < high or not shape.numel():
            names = [name for _, _, name in attributes]
            yield names, shape, low - begin, slice(low - flat.start, max(low, high) - flat.start)
        begin += shape.numel()
    # --- exercise 3.20: end


def flats_of(model: FSDP) -> list[FlatParameter]:
    """All flat parameters, the root's first."""
    return [flat for unit in model.units for flat in unit.flats]


def shapes_of(model: FSDP) -> dict[str, torch.Size]:
    """The shapes of all parameters by name; tied ones have several names."""
    return {
        name: shape
        for flat in flats_of(model)
        for shape, attributes in zip(flat.shapes, flat.places, strict=True)
        for _, _, name in attributes
    }


def full_state_dict(model: FSDP) -> dict[str, Tensor]:
    """On rank 0 of the model's group the plain module's state dict, on the CPU; elsewhere {}.

    A collective call, with one gather per flat parameter. A rank never has more than one of them in
    full on its device. Parameters have the shards' dtype. Tied ones appear under all names. The
    tensors are copies, and the model does not change.
    """
    # --- exercise 3.20: start
    # Step 2: every rank gives its padded shard. Rank 0 splits the vector into parameters and leaves
    #         the padding out. The module's own state dict now has only buffers
    group = model.group
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    state: dict[str, Tensor] = {}
    for flat in flats_of(model):
        own = F.pad(flat.shard.detach(), (0, flat.chunk - flat.shard.numel()))
        own = own.to(flat.full.device)
        shards = [torch.empty_like(own) for _ in range(world_size)] if rank == 0 else None
        dist.gather(own, shards, group=group, group_dst=0)
        if shards is None:
            continue
        vector = torch.cat(shards)[: flat.numel].cpu()
        parts = vector.split([shape.numel() for shape in flat.shapes])
        for part, shape, attributes in zip(parts, flat.shapes, flat.places, strict=True):
            state |= {name: part.view(shape).clone() for _, _, name in attributes}
    if rank:
        return {}
    buffers = model.module.state_dict()
    return state | {name: value.to("cpu", copy=True) for name, value in buffers.items()}
    # --- exercise 3.20: end


def load_full_state_dict(model: FSDP, state: dict[str, Tensor]) -> None:
    """Take over the plain module's state dict, which every rank passes in. No communication.

    It copies only the elements of this rank's shards and the buffers, converted to the model's
    dtypes. The shards stay the same tensors. Raises ValueError, before anything changes, if names
    are missing or unknown, or a shape is wrong.
    """
    # --- exercise 3.20: start
    # Step 3: compare names and shapes of everything before the first copy
    # Step 4: each rank takes its own parts
    buffers = model.module.state_dict()
    shapes = shapes_of(model) | {name: value.shape for name, value in buffers.items()}
    wrong = {n for n in shapes.keys() & state.keys() if state[n].shape != shapes[n]}
    if wrong or shapes.keys() != state.keys():
        missing, unknown = shapes.keys() - state.keys(), state.keys() - shapes.keys()
        raise ValueError(
            f"the state dict does not fit: missing {sorted(missing)}, unknown {sorted(unknown)}, "
            f"of another shape {sorted(wrong)}"
        )
    with torch.no_grad():
        for flat in flats_of(model):
            for names, _, first, where in parts_of(flat):
                values = state[names[0]].flatten()
                flat.shard[where] = values[first : first + where.stop - where.start]
    set_buffers(model, {name: state[name] for name in buffers})
    # --- exercise 3.20: end


def set_buffers(model: FSDP, buffers: dict[str, Tensor]) -> None:
    """Give the module copies of its persistent buffers, on its device, also of those on meta."""
    device = flats_of(model)[0].full.device
    kinds = {name: buffer.dtype for name, buffer in model.module.state_dict().items()}
    copies = {name: value.to(device, kinds[name], copy=True) for name, value in buffers.items()}
    model.module.load_state_dict(copies, assign=True)


def materialise(model: FSDP, initialise: Callable[[nn.Module], None]) -> None:
    """Initialise the shards of a module that was on meta when it was wrapped, unit by unit.

    ``initialise(part)`` is called once for every submodule with parameters or buffers of its own,
    and for no other. The order is the same on every rank. It runs without autograd. It finds these
    tensors in full on the model's device, in the shards' dtype, and writes them in place. They are
    attributes, which ``parameters()`` need not list. Buffers that were not on meta stay where they
    are. The ranks must draw the same random numbers: seed them equally before. No communication.
    """
    # --- exercise 3.20: start
    # Step 5: room for the buffers that are on meta; then one unit after the other
    home = {
        part: unit
        for unit in model.units
        for flat in unit.flats
        for attributes in flat.places
        for part, _, _ in attributes
    }
    device = flats_of(model)[0].full.device
    for part in model.module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                home.setdefault(part, model.units[0])
                on_device = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
                part._buffers[name] = on_device
    for unit in model.units:
        parts = [part for part, owner in home.items() if owner is unit]
        _initialise_unit(unit, parts, initialise, device)
    # --- exercise 3.20: end


@torch.no_grad()
def _initialise_unit(
    unit: Unit,
    parts: list[nn.Module],
    initialise: Callable[[nn.Module], None],
    device: torch.device,
) -> None:
    """Initialise one unit; its full vectors are gone on return."""
    # --- exercise 3.20: start
    # Step 6: make vectors for one unit in full. The modules' attributes hold their views, and the
    #         shard keeps the rank's part
    vectors = [torch.empty(f.numel, dtype=f.shard.dtype, device=device) for f in unit.flats]
    for flat, vector in zip(unit.flats, vectors, strict=True):
        views = vector.split([shape.numel() for shape in flat.shapes])
        flat.put([v.view(shape) for v, shape in zip(views, flat.shapes, strict=True)])
    for part in parts:
        initialise(part)
    for flat, vector in zip(unit.flats, vectors, strict=True):
        flat.shard.copy_(vector[flat.start : flat.start + flat.shard.numel()])
        flat.put([None] * len(flat.places))
    # --- exercise 3.20: end
