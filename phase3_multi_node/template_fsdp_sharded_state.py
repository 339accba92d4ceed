# Exercises 3.28: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.28
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
from .template_fsdp_checkpoint import Optimizer, State, flats_of, parts_of, set_buffers


def sharded_state_dict(model: FSDP, optimizer: Optimizer = None) -> State:
    """What this rank holds: ``{"pieces": [...], "buffers": {...}}``. No communication.

    A piece: ``names`` and ``shape`` of the parameter, ``first``: the number of the first of its
    elements that are here, ``values``: these (n,), ``state``: the optimizer's for them, by key.
    """
    # Step 1: state that has the shard's shape is cut like the shard, other state goes along whole;
    #         copies, because training may go on before they are written
    raise NotImplementedError("exercise 3.28")


def load_sharded_state_dict(
    model: FSDP, saved: Iterable[State], optimizer: Optimizer = None
) -> None:
    """Take over this rank's part of ``saved``, the states of all ranks of any world size.

    They are read one after the other, so they may be loaded lazily. No communication. Raises
    ValueError if together they lack elements that this rank needs; then nothing has changed.
    """
    # Step 2: collect in new tensors: piece and part overlap in a range of the parameter's elements
    # Step 3: every element must have come; only then take over
    raise NotImplementedError("exercise 3.28")


def _take(found: State, piece: State, first: int, where: slice, shard: Tensor) -> int:
    """Copy what ``piece`` has of the elements ``first`` … that belong at ``where``; how many."""
    # Step 4: the overlap again, once counted in the shard and once in the piece
    raise NotImplementedError("exercise 3.28")


def merge(saved: Iterable[State]) -> dict[str, Tensor]:
    """The plain module's state dict from the sharded states of all ranks, without any rank.

    Raises ValueError if elements are missing.
    """
    # Step 5: write each piece where its numbering says, and count what has come
    raise NotImplementedError("exercise 3.28")


def _is_like(value: object, shard: Tensor) -> bool:
    """Whether an optimizer's value belongs to the elements one by one."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == shard.shape
