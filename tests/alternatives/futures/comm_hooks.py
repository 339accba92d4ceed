# for: 3.12
"""Written differently: futures as handles, objects as hooks, an all-reduce inside the nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Handle = Any
Hook = Callable[[Any], Any]


def all_reduce(bucket, group=None):
    return dist.all_reduce(bucket.buffer, group=group, async_op=True)


class blocking:
    def __init__(self, reduce):
        self.reduce = reduce

    def __call__(self, bucket):
        self.reduce(bucket.buffer)
        done = torch.futures.Future()
        done.set_result(None)
        return done


def bf16_compress(bucket, group=None):
    if bucket.buffer.dtype.is_complex:
        raise ValueError("real gradients only")
    if dist.get_rank(group) == -1:
        raise ValueError("this rank is not in the group")
    small = bucket.buffer.bfloat16()
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda _: bucket.buffer.copy_(small))


def fp16_compress(bucket, group=None):
    if bucket.buffer.dtype.is_complex or dist.get_rank(group) == -1:
        raise ValueError("real gradients of members only")
    small = bucket.buffer.half()
    future = dist.all_reduce(small, group=group, async_op=True).get_future()
    return future.then(lambda _: bucket.buffer.copy_(small))


class two_level:
    def __init__(self, node, leaders):
        if dist.get_rank(node) == -1:
            raise ValueError("this rank is not in the node")
        self.node, self.leaders = node, leaders

    def __call__(self, bucket):
        return Levels(self, bucket, dist.all_reduce(bucket.buffer, group=self.node, async_op=True))


class Levels:
    def __init__(self, hook, bucket, work):
        self.hook, self.bucket, self.work = hook, bucket, work

    def wait(self):
        self.work.wait()
        if dist.get_rank(self.hook.leaders) != -1:
            dist.all_reduce(self.bucket.buffer, group=self.hook.leaders, async_op=True).wait()
        dist.broadcast(self.bucket.buffer, group=self.hook.node, group_src=0)
