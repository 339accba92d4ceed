"""Buckets: many small gradients travel as few large messages, and stay in those messages' buffers.

A message of N bytes takes α + N·β seconds. K gradients of together N bytes, sent one by one, take
K·α + N·β seconds. In B buckets they take B·α + N·β. One bucket for all is cheapest, but it can
leave only when the last gradient exists, and then no backward is left to hide it behind. So a
bucket has a size limit, and parameters go into buckets in the order in which their gradients come.

That order is about the reverse of forward's, so the reverse of the order of registration is a first
guess. After the first backward the order is known. The order that the *first rank* has seen counts
for all, because every rank must send the same buckets.

``p.grad`` is a view into the bucket: a sum arrives where the optimizer reads it. So gradients and
buckets together hold N bytes, not 2N.

Per rank: the state at the start and the buffers take at least ⌈N / limit⌉ broadcasts, if no tensor
exceeds the limit. Tensors are not cut, so it may be twice as many, and each dtype has its own. The
order takes one broadcast of 8 bytes per parameter.
Source: Li et al. 2020 (arXiv 2006.15704), sections 3.2.2, 3.2.3 and 4.2.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group, rank_in


def partition(tensors: Sequence[Tensor], limit: int, first_limit: int) -> list[list[int]]:
    """Divide ``tensors`` into lists of one dtype and device and of at most ``limit`` bytes.

    Returns positions in ``tensors``. The tensors of each dtype and device fill one list after the
    other, in order. A list ends before the tensor that would take it beyond its limit, so only a
    single large tensor can exceed the limit. The first list of each kind has the limit
    ``first_limit``. The lists come in the order of their last tensors. If the tensors come one by
    one, the lists are complete in that order. Raises ValueError if a limit is not positive.
    """
    # --- exercise 3.9: start
    # Step 1: refuse limits that are not positive
    # Step 2: keep one open list per (dtype, device); close it when the next tensor does not fit
    # Step 3: order the lists by their last tensor
    if limit <= 0 or first_limit <= 0:
        raise ValueError(f"bucket sizes must be positive, got {limit} and {first_limit} bytes")
    lists: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int, int]] = {}  # list, bytes in it, its limit
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        current, size, most = filling.get(kind, ([], 0, first_limit))
        if current and size + tensor.nbytes > most:
            current, size, most = [], 0, limit
        if not current:
            lists.append(current)
        current.append(index)
        filling[kind] = current, size + tensor.nbytes, most
    return sorted(lists, key=lambda indices: indices[-1])
    # --- exercise 3.9: end


class Bucket:
    """The gradients of some parameters of one dtype and device, side by side in one flat buffer.

    ``index``: its position in the order in which buckets leave. ``parameters``: a list of its own.
    ``buffer`` (n,), n = Σ numel, of the parameters' dtype, uninitialised at first. ``views[k]``:
    the part of ``parameters[k]``, in its shape and with its order of strides. So optimizer and
    autograd find both in the same layout. The parts follow each other in the order of
    ``parameters``.
    """

    def __init__(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        self.index = index
        self.parameters = list(parameters)
        self.buffer: Tensor
        self.views: list[Tensor]
        # --- exercise 3.9: start
        # Step 4: one flat buffer, split into views without a copy; `laid_out_like` gives a part its
        #         shape
        sizes = [p.numel() for p in self.parameters]
        self.buffer = parameters[0].detach().new_empty(sum(sizes))
        parts = zip(self.buffer.split(sizes), self.parameters, strict=True)
        self.views = [laid_out_like(p, part) for part, p in parts]
        # --- exercise 3.9: end

    def take(self, k: int, share: float = 1.0) -> None:
        """Let ``parameters[k].grad`` be its view, and hold ``share`` times its earlier values.

        No gradient (None) counts as zeros. If the gradient was another tensor, that tensor does not
        change. It takes one pass over the gradient, and none if that is its view already and
        ``share`` is 1. Raises ValueError for a sparse gradient.
        """
        # --- exercise 3.9: start
        # Step 5: scale while you copy; scale a gradient in place if it is its view already
        p, view = self.parameters[k], self.views[k]
        if p.grad is None:
            view.zero_()
        elif p.grad.layout != torch.strided:
            raise ValueError(f"a sparse gradient (shape {tuple(p.shape)}) can't go into a bucket")
        elif p.grad is not view:
            torch.mul(p.grad, share, out=view)
        elif share != 1.0:
            view.mul_(share)
        p.grad = view
        # --- exercise 3.9: end


def laid_out_like(p: Tensor, flat: Tensor) -> Tensor:
    """``flat`` (numel of ``p``,) as a view with the shape and the order of strides of ``p``."""
    dims = sorted(range(p.dim()), key=p.stride, reverse=True)  # outermost in memory first
    return flat.view([p.shape[d] for d in dims]).permute([dims.index(d) for d in range(p.dim())])


def make_buckets(parameters: Sequence[nn.Parameter], limit: int, first_limit: int) -> list[Bucket]:
    """Buckets for ``parameters``, which stand in the order in which their gradients are expected.

    Gradients that exist move into their views, with their values; None stays None. Raises
    ValueError as ``partition`` does, and then moves nothing.
    """
    # --- exercise 3.9: start
    # Step 6: a bucket per list of `partition`; take the gradients that are there
    lists = partition(parameters, limit, first_limit)
    buckets = [Bucket(k, [parameters[i] for i in indices]) for k, indices in enumerate(lists)]
    for bucket in buckets:
        for k, p in enumerate(bucket.parameters):
            if p.grad is not None:
                bucket.take(k)
    return buckets
    # --- exercise 3.9: end


def order_of_first_rank(
    arrived: Sequence[int], device: torch.device | str, group: Group = None
) -> list[int]:
    """``arrived`` of the group's first rank, on every rank; all pass equally many numbers.

    One broadcast of at most 8 bytes per number, on ``device``. Raises ValueError on a rank that is
    no member of ``group``.
    """
    # --- exercise 3.9: start
    # Step 7: refuse a rank that is no member (`rank_in`): torch would only warn and do nothing
    # Step 8: broadcast int64 from the first rank of the *group*, whatever its global rank is
    rank_in(group)
    order = torch.tensor(arrived, dtype=torch.int64, device=device)
    dist.broadcast(order, group=group, group_src=0)
    return order.tolist()
    # --- exercise 3.9: end


def broadcast_tensors(tensors: Sequence[Tensor], limit: int, group: Group = None) -> None:
    """Give every rank the values that the group's first rank has, in place, in few messages.

    Tensors may have any dtypes and strides, and may be empty. Autograd records nothing, and leaves
    stay leaves. At most one broadcast per list of ``partition``. Copies of at most two lists are
    alive at a time if the tensors are contiguous. All ranks pass the same shapes and dtypes. Raises
    ValueError, before anything is sent, on a rank that is no member, and as ``partition`` does.
    """
    # --- exercise 3.9: start
    # Step 9: refuse a rank that is no member. Then join the tensors of a list, broadcast once, and
    #         write the parts back into the tensors
    rank = rank_in(group)
    with torch.no_grad():
        for indices in partition(tensors, limit, limit):
            chosen = [tensors[i] for i in indices]
            flat = torch.cat([t.flatten() for t in chosen])
            dist.broadcast(flat, group=group, group_src=0)
            if rank:
                parts = flat.split([t.numel() for t in chosen])
                for tensor, part in zip(chosen, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))
    # --- exercise 3.9: end
