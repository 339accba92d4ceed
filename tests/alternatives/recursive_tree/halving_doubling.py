# for: 3.6
"""Written differently: recursion for the halving."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .ring_allreduce import check_arguments
from .tree_allreduce import _combined


def halving_doubling_all_reduce(tensor, op="sum", group=None):
    rank, w = check_arguments(tensor, op, group)
    flat = tensor.detach().contiguous().view(-1)
    core = 2 ** int(math.log2(w))
    if flat.numel() and rank >= core:
        dist.isend(flat, group=group, group_dst=rank % core).wait()
        dist.irecv(flat, group=group, group_src=rank % core).wait()
    elif flat.numel():
        extra = rank + core if rank + core < w else None
        if extra:
            room = torch.empty_like(flat)
            dist.irecv(room, group=group, group_src=extra).wait()
            flat.copy_(_combined(flat, room, op))
            del room
        _halve(flat, rank, core // 2, w, op, group)
        if extra:
            dist.isend(flat, group=group, group_dst=extra).wait()
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view_as(tensor))


def _halve(piece, rank, distance, w, op, group):
    """All-reduce ``piece`` over the ranks that differ from ``rank`` in lower bits only."""
    if not distance:
        if op == "mean":
            piece /= w
        return
    partner, middle = rank ^ distance, (piece.numel() + 1) // 2
    mine, other = piece[:middle], piece[middle:]
    if rank > partner:
        mine, other = other, mine
    room = torch.empty_like(mine)
    _swap(other, room, partner, group)
    if op == "max":
        torch.maximum(mine, room, out=mine)
    else:
        mine += room
    del room
    _halve(mine, rank, distance // 2, w, op, group)
    _swap(mine, other, partner, group)


def _swap(outgoing, incoming, partner, group):
    ends = [(dist.isend, outgoing), (dist.irecv, incoming)]
    ends = [dist.P2POp(f, t, None, group, 0, partner) for f, t in ends if t.numel()]
    for handle in dist.batch_isend_irecv(ends) if ends else ():
        handle.wait()
