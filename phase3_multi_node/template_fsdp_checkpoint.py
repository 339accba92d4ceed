# Exercises 3.20: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.20
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_fsdp import FSDP, FlatParameter, Unit

Optimizer = torch.optim.Optimizer | None
State = dict[str, Any]


def parts_of(flat: FlatParameter) -> Iterator[tuple[list[str], torch.Size, int, slice]]:
    """(names, shape, first, where) of each parameter with elements here, in the vector's order.

    ``first`` is the number of its first element here, counted in the parameter. ``where`` is the
    slice of the shard that holds its elements. A parameter without any element is on every rank,
    with an empty slice.
    """
    # Step 1: the overlap of two ranges of the unit's vector: the parameter's and the shard's
    raise NotImplementedError("exercise 3.20")


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
    # Step 2: every rank gives its padded shard. Rank 0 splits the vector into parameters and leaves
    #         the padding out. The module's own state dict now has only buffers
    raise NotImplementedError("exercise 3.20")


def load_full_state_dict(model: FSDP, state: dict[str, Tensor]) -> None:
    """Take over the plain module's state dict, which every rank passes in. No communication.

    It copies only the elements of this rank's shards and the buffers, converted to the model's
    dtypes. The shards stay the same tensors. Raises ValueError, before anything changes, if names
    are missing or unknown, or a shape is wrong.
    """
    # Step 3: compare names and shapes of everything before the first copy
    # Step 4: each rank takes its own parts
    raise NotImplementedError("exercise 3.20")


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
    # Step 5: room for the buffers that are on meta; then one unit after the other
    raise NotImplementedError("exercise 3.20")


@torch.no_grad()
def _initialise_unit(
    unit: Unit,
    parts: list[nn.Module],
    initialise: Callable[[nn.Module], None],
    device: torch.device,
) -> None:
    """Initialise one unit; its full vectors are gone on return."""
    # Step 6: make vectors for one unit in full. The modules' attributes hold their views, and the
    #         shard keeps the rank's part
    raise NotImplementedError("exercise 3.20")
