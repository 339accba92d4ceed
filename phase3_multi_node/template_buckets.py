# Exercises 3.9: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.9
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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
    # Step 1: refuse limits that are not positive
    # Step 2: keep one open list per (dtype, device); close it when the next tensor does not fit
    # Step 3: order the lists by their last tensor
    raise NotImplementedError("exercise 3.9")


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
        # Step 4: one flat buffer, split into views without a copy; `laid_out_like` gives a part its
        #         shape
        raise NotImplementedError("exercise 3.9")

    def take(self, k: int, share: float = 1.0) -> None:
        """Let ``parameters[k].grad`` be its view, and hold ``share`` times its earlier values.

        No gradient (None) counts as zeros. If the gradient was another tensor, that tensor does not
        change. It takes one pass over the gradient, and none if that is its view already and
        ``share`` is 1. Raises ValueError for a sparse gradient.
        """
        # Step 5: scale while you copy; scale a gradient in place if it is its view already
        raise NotImplementedError("exercise 3.9")


def laid_out_like(p: Tensor, flat: Tensor) -> Tensor:
    """``flat`` (numel of ``p``,) as a view with the shape and the order of strides of ``p``."""
    dims = sorted(range(p.dim()), key=p.stride, reverse=True)  # outermost in memory first
    return flat.view([p.shape[d] for d in dims]).permute([dims.index(d) for d in range(p.dim())])


def make_buckets(parameters: Sequence[nn.Parameter], limit: int, first_limit: int) -> list[Bucket]:
    """Buckets for ``parameters``, which stand in the order in which their gradients are expected.

    Gradients that exist move into their views, with their values; None stays None. Raises
    ValueError as ``partition`` does, and then moves nothing.
    """
    # Step 6: a bucket per list of `partition`; take the gradients that are there
    raise NotImplementedError("exercise 3.9")


def order_of_first_rank(
    arrived: Sequence[int], device: torch.device | str, group: Group = None
) -> list[int]:
    """``arrived`` of the group's first rank, on every rank; all pass equally many numbers.

    One broadcast of at most 8 bytes per number, on ``device``. Raises ValueError on a rank that is
    no member of ``group``.
    """
    # Step 7: refuse a rank that is no member (`rank_in`): torch would only warn and do nothing
    # Step 8: broadcast int64 from the first rank of the *group*, whatever its global rank is
    raise NotImplementedError("exercise 3.9")


def broadcast_tensors(tensors: Sequence[Tensor], limit: int, group: Group = None) -> None:
    """Give every rank the values that the group's first rank has, in place, in few messages.

    Tensors may have any dtypes and strides, and may be empty. Autograd records nothing, and leaves
    stay leaves. At most one broadcast per list of ``partition``. Copies of at most two lists are
    alive at a time if the tensors are contiguous. All ranks pass the same shapes and dtypes. Raises
    ValueError, before anything is sent, on a rank that is no member, and as ``partition`` does.
    """
    # Step 9: refuse a rank that is no member. Then join the tensors of a list, broadcast once, and
    #         write the parts back into the tensors
    raise NotImplementedError("exercise 3.9")
