# for: 3.10
"""Written from the docstrings alone."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import Group, expect_alike, rank_in
from given.bucket_hooks import Handle, Hook
from given.hooks import claim, weakly

from .buckets import broadcast_tensors, make_buckets, order_of_first_rank
from .comm_hooks import all_reduce

MIB = 1 << 20


class BucketedDDP(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
    ) -> None:
        super().__init__()
        self.trainable = trainable_parameters(module, group)
        claim(self.trainable, self)
        self.module, self.group = (module, group)
        self.limits = (bucket_bytes, first_bucket_bytes)
        self.share = 1 / dist.get_world_size(group)
        self.hook: Hook = functools.partial(all_reduce, group=group)
        self.order_known = False
        count = len(self.trainable)
        self._use_order([count - 1 - i for i in range(count)])
        everything = [*module.parameters(), *module.buffers()]
        layouts = []
        for tensor in everything:
            dims = [d for d in range(tensor.dim()) if tensor.size(d) > 1]
            dims.sort(key=lambda d: -tensor.stride(d))
            layouts.append(torch.empty([0, *[1 + d for d in dims]], dtype=torch.uint8))
        expect_alike(everything + layouts, group)
        broadcast_tensors(everything, bucket_bytes, group)
        call = weakly(self._ready)
        for index in range(count):
            self.trainable[index].register_post_accumulate_grad_hook(
                lambda p, index=index: call(index, p)
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def register_comm_hook(self, hook: Hook) -> None:
        if not callable(hook):
            raise TypeError(f"a communication hook is called with a bucket; got {hook!r}")
        if self.running:
            raise RuntimeError("a communication hook can't change while backward is running")
        self.hook = hook

    def bucket_order(self) -> list[int] | None:
        if not self.order_known:
            return None
        indices = {p: index for index, p in enumerate(self.trainable)}
        return [indices[p] for bucket in self.buckets for p in bucket.parameters]

    def set_bucket_order(self, order: Sequence[int] | None) -> None:
        if order is None:
            return
        if sorted(order) != [*range(len(self.trainable))]:
            raise ValueError(
                f"an order of {len(order)} parameters, but {len(self.trainable)} are trained"
            )
        self._use_order(order)
        self.order_known = True

    def _use_order(self, order: Iterable[int]) -> None:
        self.buckets = make_buckets([self.trainable[i] for i in order], *self.limits)
        owner = {id(p): b.index for b in self.buckets for p in b.parameters}
        self.bucket_of = [owner[id(p)] for p in self.trainable]
        self._reset()

    def _reset(self) -> None:
        self.running = False
        self.arrived: dict[int, None] = {}
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        self.handles: list[Handle | None] = []

    def _begin(self) -> None:
        if self.running:
            return
        self.running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _ready(self, index: int, p: nn.Parameter) -> None:
        self._begin()
        if index not in self.arrived:
            self._take(index)

    def _take(self, index: int) -> None:
        self.arrived[index] = None
        self.missing[self.bucket_of[index]] -= 1
        for bucket in self.buckets[len(self.handles) :]:
            if self.missing[bucket.index] > 0:
                break
            for k in range(len(bucket.parameters)):
                bucket.take(k, self.share)
            self.handles.append(self.hook(bucket))

    def _flush(self) -> None:
        expected = {id(p): i for i, p in enumerate(self.trainable)}
        for bucket in self.buckets:
            for p in bucket.parameters:
                if expected[id(p)] not in self.arrived:
                    self._take(expected[id(p)])

    def _finish(self) -> None:
        self._flush()
        while self.handles:
            handle = self.handles.pop(0)
            if handle is not None:
                handle.wait()
        if not self.order_known:
            order = order_of_first_rank([*self.arrived], self.trainable[0].device, self.group)
            self.order_known = True
            self._use_order(order)
            return
        self._reset()


def trainable_parameters(module: nn.Module, group: Group) -> list[nn.Parameter]:
    rank_in(group)
    found = [p for p in module.parameters() if p.requires_grad]
    if not found:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: nothing to reduce")
    devices = sorted({str(p.device) for p in found})
    if len(devices) > 1:
        raise ValueError(f"trainable parameters on {' and '.join(devices)}: one device per rank")
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ValueError(f"{name or 'the module'} has sparse gradients: use sparse=False")
    return found
