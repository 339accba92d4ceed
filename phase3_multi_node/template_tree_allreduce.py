# Exercises 3.5: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.5
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Binomial trees: reduce, broadcast and all-reduce in the fewest messages.

In a ring 2(W-1) messages follow one another, too many for a small tensor. In a tree all ranks take
part in ⌈log₂ W⌉ rounds. With N bytes, W ranks, α seconds per message and β per byte:

    reduce, broadcast    W-1 messages of all ranks       ⌈log₂ W⌉·(α + Nβ)
    all-reduce           2(W-1) messages of all ranks    2⌈log₂ W⌉·(α + Nβ)

Invariant: take a rank whose number, counted from the root, is divisible by 2^(k+1). After round k
it holds the parts of the 2^(k+1) ranks from itself on. Every element is combined in one order only,
so all ranks end with the same bits.

Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in
MPICH" (broadcast and reduce).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

from .template_ring_allreduce import (
    COMBINE,
    Op,
    check_arguments,
    flattened,
)


def tree_links(rank: int, root: int, world_size: int) -> tuple[int | None, list[int]]:
    """(parent, children) of ``rank`` in the binomial tree of ``root``; the root has no parent.

    Ranks are numbered from the root on: number = (rank - root) mod W. A number's parent is the
    number without its lowest bit that is 1. Its children are the number plus one lower bit, if they
    exist. Children come in the order in which a reduction receives from them, lowest bit first.
    """
    # Step 1: the lowest bit of a number is number & -number; the root, 0, has none: take all bits
    # Step 2: children that would be W or more don't exist; number + root mod W is the rank
    raise NotImplementedError("exercise 3.5")


def check_root(root: int, world_size: int) -> None:
    """Raise ValueError unless ``root`` is a rank of the group."""
    if not 0 <= root < world_size:
        raise ValueError(f"root {root} is not in the group of {world_size} ranks")


def climb(total: Tensor, root: int, op: str, group: Group) -> None:
    """Combine all ranks' ``total`` (flat, contiguous) into that of ``root``, a rank of ``group``.

    The others end as partial sums.
    """
    # Step 3: receive from each child in turn and combine, then send to the parent
    # Step 4: the root divides for the mean; an empty tensor is not sent
    raise NotImplementedError("exercise 3.5")


def tree_reduce(tensor: Tensor, root: int = 0, op: Op = "sum", group: Group = None) -> None:
    """Combine ``tensor`` over all ranks of ``group`` into that of ``root`` (a rank of the group).

    In place on the root; the other ranks' tensors keep their values. Any dtype, length, strides and
    W are allowed, as in ``ring_reduce_scatter``. Messages go up the tree of ``tree_links``: every
    rank but the root sends one of N bytes to its parent, ⌈log₂ W⌉·(α + Nβ). Copies are freed at the
    end. Raises ValueError, before anything is sent, as ``check_arguments`` does, and on every rank
    for a root outside the group.
    """
    # Step 5: a rank between the leaves and the root adds up in a copy: its tensor must not change
    raise NotImplementedError("exercise 3.5")


def tree_broadcast(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Copy the tensor of ``root`` (a rank of the group) into that of every rank of ``group``.

    In place, for any dtype, length, strides and W. Messages go down the tree of ``tree_links``: W-1
    of N bytes in all. A rank receives once. It sends to its children one after another, at most
    ⌈log₂ W⌉ times. Time: ⌈log₂ W⌉·(α + Nβ). No extra memory if ``tensor`` is contiguous. Raises
    ValueError, before anything is sent, if this rank is no member of ``group``, and on every rank
    for a root outside it.
    """
    # Step 6: receive from the parent, then send to the children. The farthest comes first: it has
    #         the largest part of the tree below it
    raise NotImplementedError("exercise 3.5")


def tree_all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine ``tensor`` over the ranks of ``group``, in place on every rank, bit for bit equal.

    Any dtype, length, strides and W are allowed. It is a reduction to one rank of the group and a
    broadcast from it: 2(W-1) messages of N bytes in all, 2⌈log₂ W⌉·(α + Nβ). One extra tensor of
    memory is enough. Copies are freed at the end. Raises ValueError as ``check_arguments`` does.
    """
    # Step 7: up the tree and down again on the same flat tensor; no copy, because the result
    #         replaces the partial sums
    raise NotImplementedError("exercise 3.5")
