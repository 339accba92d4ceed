# Exercises 3.12: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.12
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Communication hooks: a function reduces a bucket, and the rest of DDP does not know how.

    hook(bucket) -> handle        bucket.buffer: this rank's gradients, divided by W
    handle.wait()                 bucket.buffer: their sum over the ranks, which is the mean

The hook begins the sum and does not wait, so that backward goes on meanwhile. Any way to sum can be
a hook: a ring, a tree, a sum first in the nodes and then between them, a sum in fewer bits. The
mean costs no pass of its own: the gradients were divided when they were copied into the bucket.

Bytes that a rank sends for a bucket of N bytes: an all-reduce takes 2(W-1)/W·N, and in 16 bits half
of that (from float32). In two levels the first rank of each of M nodes sends 2(M-1)/M·N between
nodes, the others nothing.
Invariant: all ranks end with the same bits, also where precision was lost on the way.
Sources: Li et al. 2020 (arXiv 2006.15704), section 6.2.3; Kalamkar et al. 2019 (arXiv 1905.12322)
for bfloat16; Goyal et al. 2017 (arXiv 1706.02677) for two levels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.bucket_hooks import Bucket, Handle, Hook, Then


def all_reduce(bucket: Bucket, group: Group = None) -> Handle | None:
    """The default hook: it begins one all-reduce of the buffer, in place.

    Raises ValueError on a rank that is no member of ``group``.
    """
    rank_in(group)
    return dist.all_reduce(bucket.buffer, group=group, async_op=True)


def blocking(reduce: Callable[[Tensor], object]) -> Hook:
    """A hook from a function that sums a flat tensor over the ranks, in place, before it returns.

    That is any all-reduce written from messages (ring, tree, …). Backward waits while it runs: the
    sum is right, and nothing is hidden. The hook gives ``bucket.buffer`` itself to ``reduce``, and
    ignores its result. Nothing is left to wait for.
    """

    # Step 1: the buffer is reduced when the hook returns, so there is nothing to wait for
    raise NotImplementedError("exercise 3.12")


def bf16_compress(bucket: Bucket, group: Group = None) -> Handle | None:
    """A hook that sends bfloat16: half of float32's bytes, 8 bits of precision, its whole range."""
    return compress_to(torch.bfloat16, bucket, group)


def fp16_compress(bucket: Bucket, group: Group = None) -> Handle | None:
    """A hook that sends float16: 11 bits of precision, but a range from 6e-8 to 65504.

    Smaller numbers become 0, larger sums infinite.
    """
    return compress_to(torch.float16, bucket, group)


def compress_to(dtype: torch.dtype, bucket: Bucket, group: Group = None) -> Handle | None:
    """Begin to sum the bucket over ``group`` in ``dtype``, of at most as many bits as its own.

    One all-reduce in ``dtype``. The call returns at once. When ``wait()`` of the handle returns,
    ``bucket.buffer`` itself holds the sum, in its own dtype and with the same bits on all ranks.
    Several buckets may be on their way. It holds a copy in ``dtype`` until the sum has arrived, and
    nothing once the handle is dropped. Raises ValueError, before anything is sent, for a bucket of
    complex numbers, and on a rank that is no member of ``group``.
    """
    # Step 2: refuse complex numbers, and a rank that is no member (`rank_in`). Begin to reduce a
    #         copy in `dtype`, and write it back once it has arrived (`Then`)
    raise NotImplementedError("exercise 3.12")


def two_level(node: dist.ProcessGroup, leaders: dist.ProcessGroup | int) -> Hook:
    """A hook that sums in each node first, then between the nodes, and broadcasts the sum.

    ``node``: the group of this rank's node. ``leaders``: the group of the first ranks of all nodes;
    on another rank what ``new_group`` returned there. Only the leaders send between nodes,
    2(M-1)/M·N bytes each for M nodes. The first step begins at once, and the other two happen in
    ``wait``. Then ``bucket.buffer`` itself holds the sum, with the same bits on all ranks. Several
    buckets may be on their way. Wait for them in the order in which they began. Raises ValueError
    on a rank that is no member of ``node``, before there is a hook.
    """

    # Step 3: refuse a rank that is no member of the node; begin to reduce to the node's first rank
    # Step 4: then all-reduce on the leaders alone; then broadcast in each node from its first rank
    raise NotImplementedError("exercise 3.12")
