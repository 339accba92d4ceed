# Exercises 3.28: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.28
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_fsdp import FSDP
from .template_fsdp_checkpoint import Optimizer, State, flats_of, parts_of, set_buffers, shapes_of


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """This rank's part: ``{"pieces": [...], "shapes": {...}, "buffers": {...}}``, all copies.

    No communication. A piece has ``names`` and ``shape`` (a list) of the parameter. ``first`` is
    the number of its first element here, counted in the parameter. ``values`` (n,) are its elements
    here, and ``state`` is the optimizer's state for them, by key. State that has the shard's shape
    is cut like the shard. Other state is in each piece as a whole. ``shapes``: of all parameters of
    the model, by name, as lists.
    """
    # Step 1: cut the optimizer's state where the shard is cut. Make copies, because training may go
    #         on before they are written
    raise NotImplementedError("exercise 3.28")


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
    # Step 2: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 3: every element must have come, once or more often; only then copy into the model
    raise NotImplementedError("exercise 3.28")


def _nothing(shard: Tensor) -> State:
    """Room for a shard's ``values``, which of them have ``come``, and the optimizer's ``state``."""
    come = torch.zeros_like(shard, dtype=torch.bool, requires_grad=False)
    return {"values": torch.empty_like(shard, requires_grad=False), "come": come, "state": {}}


def _take(found: State, piece: State, first: int, where: slice) -> None:
    """Copy the elements of ``piece`` that belong at ``where`` of the shard, from ``first`` on."""
    # Step 4: the overlap again, once counted in the shard and once in the piece
    raise NotImplementedError("exercise 3.28")


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    It reads ``saved`` once. Raises ValueError if elements, or whole parameters, are missing, or if
    there is no state.
    """
    # Step 5: write each piece to the elements that it names, and note which have come
    raise NotImplementedError("exercise 3.28")


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape
