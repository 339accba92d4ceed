# for: 3.12
"""Written differently: a callable object, handles that are emptied by their first wait."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.bucket_hooks import Bucket, Handle, Hook, Then


def all_reduce(bucket: Bucket, group: Group = None) -> Handle | None:
    rank_in(group)
    return dist.all_reduce(bucket.buffer, group=group, async_op=True)


def blocking(reduce: Callable[[Tensor], object]) -> Hook:
    class Blocking:
        def __call__(self, bucket: Bucket) -> None:
            reduce(bucket.buffer)

    return Blocking()


def bf16_compress(bucket: Bucket, group: Group = None) -> Handle | None:
    return compress_to(torch.bfloat16, bucket, group)


def fp16_compress(bucket: Bucket, group: Group = None) -> Handle | None:
    return compress_to(torch.float16, bucket, group)


def compress_to(dtype: torch.dtype, bucket: Bucket, group: Group = None) -> Handle | None:
    if bucket.buffer.is_complex():
        raise ValueError("complex numbers have no 16-bit form")
    rank_in(group)
    buffer = bucket.buffer
    copies = [buffer.to(dtype)]
    works = [dist.all_reduce(copies[0], op=dist.ReduceOp.SUM, group=group, async_op=True)]

    class First:
        def wait(self) -> None:
            while works:
                works.pop().wait()

    def back() -> None:
        while copies:
            buffer.copy_(copies.pop())

    return Then(First(), back)


def two_level(node: dist.ProcessGroup, leaders: dist.ProcessGroup | int) -> Hook:
    rank_in(node)

    def hook(bucket: Bucket) -> Handle | None:
        work = dist.reduce(bucket.buffer, group_dst=0, group=node, async_op=True)

        def rest() -> None:
            if not isinstance(leaders, int) and dist.get_rank(leaders) >= 0:
                dist.all_reduce(bucket.buffer, group=leaders, async_op=True).wait()
            dist.broadcast(bucket.buffer, group_src=0, group=node, async_op=True).wait()

        return Then(work, rest)

    return hook
