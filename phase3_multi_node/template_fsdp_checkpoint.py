# Exercises 3.20: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.20
"""Checkpoints of a sharded model, and a model that never exists in full.

*Full*: one dictionary with the names and shapes of the plain module, put together on one rank, unit
by unit. *Sharded*: every rank saves what it has, without communication. A piece says which elements
of which parameter it holds, in the parameter's own numbering; so any number of ranks can load what
any other number has saved, optimizer state included. With W ranks and 4Ψ bytes of parameters:

    full       rank 0 receives (W-1)/W·4Ψ bytes and writes 4Ψ; the others send their 4Ψ/W
    sharded    no message; each rank writes 12Ψ/W with Adam's moments

*Deferred initialisation*: built on meta, the module has shapes and no data; units are initialised
one at a time, and only the rank's chunk stays. Memory: the shards and the largest unit.

Everything is tensors, numbers, strings, lists and dictionaries: ``torch.save`` it, and load it with
``weights_only=True`` (``mmap=True`` reads only what is copied). Invariant: padding is in no file.

Sources: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277), section 3.1 (deferred initialisation);
Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .template_fsdp import FSDP, FlatParameter, Unit

Optimizer = torch.optim.Optimizer | None
State = dict[str, Any]


def parts_of(flat: FlatParameter) -> Iterator[tuple[list[str], torch.Size, int, slice]]:
    """What this rank holds: for each parameter with elements here its names, its shape, the number
    of its first element here, and where these are in the shard."""
    # Step 1: the overlap of two ranges of the unit's vector: the parameter's and the shard's
    raise NotImplementedError("exercise 3.20")


def flats_of(model: FSDP) -> list[FlatParameter]:
    """All flat parameters, the root's first."""
    return [flat for unit in model.units for flat in unit.flats]


def full_state_dict(model: FSDP) -> dict[str, Tensor]:
    """On rank 0 of the model's group the plain module's state dict, on the CPU; elsewhere {}.

    A collective call, and one gather per flat parameter: at no time has a rank more than one of
    them in full on its device. Parameters have the shards' dtype; tied ones appear under all names.
    """
    # Step 2: every rank gives its padded shard; rank 0 cuts the vector into parameters and leaves
    #         the padding out. What is left in the module's own state dict are buffers
    raise NotImplementedError("exercise 3.20")


def load_full_state_dict(model: FSDP, state: dict[str, Tensor]) -> None:
    """Take over the plain module's state dict, which every rank passes in. No communication.

    Reads only the elements of this rank's shards. Raises ValueError if names are missing or
    unknown, or a shape is wrong; then nothing has changed.
    """
    # Step 3: compare names and shapes of everything before the first copy
    # Step 4: each rank cuts its own parts
    raise NotImplementedError("exercise 3.20")


def set_buffers(model: FSDP, buffers: dict[str, Tensor]) -> None:
    """Give the module copies of its persistent buffers, on its device; those on meta as well."""
    device = flats_of(model)[0].full.device
    copies = {name: value.to(device, copy=True) for name, value in buffers.items()}
    model.module.load_state_dict(copies, assign=True)


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """What this rank holds: ``{"pieces": [...], "buffers": {...}}``. No communication.

    A piece: ``names`` and ``shape`` of the parameter, ``first``: the number of the first of its
    elements that are here, ``values``: these (n,), ``state``: the optimizer's for them, by key.
    """
    # Step 5: state that has the shard's shape is cut like the shard, other state goes along whole;
    #         copies, because training may go on before they are written
    raise NotImplementedError("exercise 3.20")


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    """Take over this rank's part of ``saved``, the states of all ranks of any world size.

    They are read one after the other, so they may be loaded lazily. No communication. Raises
    ValueError if together they lack elements that this rank needs; then nothing has changed.
    """
    # Step 6: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 7: every element must have come; only then take over
    raise NotImplementedError("exercise 3.20")


def _take(found: State, piece: State, first: int, where: slice, shard: Tensor) -> int:
    """Copy what ``piece`` has of the elements ``first`` … that belong at ``where``; how many."""
    # Step 8: the overlap again, once counted in the shard and once in the piece
    raise NotImplementedError("exercise 3.20")


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    Raises ValueError if elements are missing.
    """
    # Step 9: write each piece where its numbering says, and count what has come
    raise NotImplementedError("exercise 3.20")


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape


def materialise(model: FSDP, initialise: Callable[[nn.Module], None]) -> None:
    """Initialise the shards of a module that was on meta when it was wrapped, unit by unit.

    ``initialise(part)`` is called once for every submodule with parameters or buffers of its own,
    without autograd, and finds these in full on the model's device, to be written in place. The
    ranks must draw the same random numbers: seed them equally before. No communication.
    """
    # Step 10: room for the buffers that are on meta; then one unit after the other
    raise NotImplementedError("exercise 3.20")


@torch.no_grad()
def _initialise_unit(
    unit: Unit,
    parts: list[nn.Module],
    initialise: Callable[[nn.Module], None],
    device: torch.device,
) -> None:
    """Initialise one unit; its full vectors are gone on return."""
    # Step 11: vectors for one unit in full; their views stand in the modules' attributes, the
    #          rank's part of them is kept
    raise NotImplementedError("exercise 3.20")
