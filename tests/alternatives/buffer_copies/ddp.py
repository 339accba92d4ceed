# for: 3.11
"""Written differently: copies of the buffers are sent, NaN goes into the views."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.hooks import weakly

from .buckets import broadcast_tensors
from .overlap import MIB, BucketedDDP


class StepAborted(RuntimeError):
    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the group gave up this step")
        self.rank = rank


class DDP(BucketedDDP):
    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        agree: bool = False,
    ) -> None:
        super().__init__(
            module, group=group, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
        )
        self.agree = agree
        self.sync = True  # False inside no_sync
        self.given_up = False  # this rank has no gradient to offer for this step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() >= 0  # a checkpoint computes again
        if self.running and not in_backward:
            self.abort()
        if self.module.training and self.sync:
            self._share_buffers()
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            for output in {id(t): t for t in tensors_in(outputs)}.values():
                if output.requires_grad and not output.is_leaf:
                    output.register_hook(weakly(self._outermost))
        return outputs

    def _share_buffers(self) -> None:
        buffers = [*self.module.buffers()]
        if not buffers:
            return
        copies = [b.detach().clone() for b in buffers]
        broadcast_tensors(copies, self.limits[0], self.group)
        for b, sent in zip(buffers, copies, strict=True):
            b.data.copy_(sent)

    def _outermost(self, _: Tensor) -> None:
        if self.sync:
            self._begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "sync", self.sync)
            self.sync = False
            yield

    def _ready(self, index: int, p: nn.Parameter) -> None:
        has = p.grad is not None  # torch calls this for an undefined gradient, too
        if self.sync:
            self._begin()
            if has and index in self.arrived:
                raise RuntimeError(f"gradient {index} came twice in one backward")
            if has:
                self._take(index)
        elif has:
            for bucket in self.buckets:
                positions = [k for k, other in enumerate(bucket.parameters) if other is p]
                if positions:
                    bucket.take(positions[0])

    def _finish(self) -> None:
        failed = self.given_up
        world_size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        told = torch.zeros(len(self.trainable) + 1, dtype=torch.int32)
        for index, p in enumerate(self.trainable):
            told[index] = p.grad is not None
        told[-1] = world_size - rank if failed else 0  # the maximum is the first rank that failed
        self._flush()
        if self.agree:
            told = told.to(self.trainable[0].device)
            work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        try:
            super()._finish()
        finally:
            self.given_up = False
        if not self.agree:
            return
        work.wait()
        *used, code = told.tolist()
        for p, anyone in zip(self.trainable, used, strict=True):
            if code or not anyone:
                p.grad = None
        if code and not failed:
            raise StepAborted(world_size - code)

    def abort(self) -> None:
        if not (self.sync or self.running):
            return
        self.given_up = True
        for bucket in self.buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                index = next(i for i, other in enumerate(self.trainable) if other is p)
                if index not in self.arrived:
                    with torch.no_grad():
                        view.fill_(float("nan"))
                    p.grad = view
        self._finish()
        for p in self.trainable:
            p.grad = None


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_in(each)
