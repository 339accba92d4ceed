# Exercises 3.28: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.28
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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

from .template_fsdp import FSDP
from .template_fsdp_checkpoint import Optimizer, State, flats_of, parts_of, set_buffers, shapes_of


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """What this rank holds: ``{"pieces": [...], "shapes": {...}, "buffers": {...}}``, all copies.

    No communication. A piece: ``names`` and ``shape`` (a list) of the parameter, ``first``: the
    number of the first of its elements that are here, ``values``: these (n,), ``state``: the
    optimizer's for them, by key. State that has the shard's shape is cut like the shard, other
    state goes along whole. ``shapes``: of all parameters of the model, by name, as lists.
    """
    # Step 1: cut the optimizer's state where the shard is cut; copies, because training may go on
    #         before they are written
    raise NotImplementedError("exercise 3.28")


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    """Take over this rank's part of ``saved``, the states of all ranks of any world size.

    The model may have other units than the one that was saved. The states are read once, one after
    the other, so they may be loaded lazily: none is kept when the next but one is read. No
    communication. Of the shards the optimizer has the saved state afterwards, in the dtypes in
    which it was saved, and no other; zeros for elements of which none was saved. Raises ValueError
    if the states are of a model with other names or shapes, lack its buffers, or together lack
    elements that this rank needs; then nothing has changed.
    """
    # Step 2: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 3: every element must have come, and be it twice; only then take over
    raise NotImplementedError("exercise 3.28")


def _nothing(shard: Tensor) -> State:
    """Room for a shard's ``values``, which of them have ``come``, and the optimizer's ``state``."""
    come = torch.zeros_like(shard, dtype=torch.bool, requires_grad=False)
    return {"values": torch.empty_like(shard, requires_grad=False), "come": come, "state": {}}


def _take(found: State, piece: State, first: int, where: slice) -> None:
    """Copy what ``piece`` has of the elements ``first`` … that belong at ``where`` of the shard."""
    # Step 4: the overlap again, once counted in the shard and once in the piece
    raise NotImplementedError("exercise 3.28")


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    Reads ``saved`` once. Raises ValueError if elements, or whole parameters, are missing, or if
    there is no state.
    """
    # Step 5: write each piece where its numbering says, and note what has come
    raise NotImplementedError("exercise 3.28")


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape
