# for: 3.11
"""Written differently: an object per backward, whole buckets at once, all flags gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from .buckets import broadcast_tensors, make_buckets, order_of_first_rank


class StepAborted(RuntimeError):
    def __init__(self, rank):
        super().__init__("a rank gave up")
        self.rank = rank


class Pass:
    """One backward: which gradients have come, which buckets have left."""

    def __init__(self, ddp):
        self.ddp, self.order, self.work = ddp, [], []

    def come(self, k):
        if k in self.order:
            raise RuntimeError(f"parameter {k} is complete for the second time")
        self.order.append(k)
        ids = {id(self.ddp.params[i]) for i in self.order}
        for bucket in self.ddp.buckets[len(self.work) :]:
            if not all(id(p) in ids for p in bucket.parameters):
                break
            self.leave(bucket)

    def leave(self, bucket):
        for place in range(len(bucket.parameters)):
            bucket.take(place, 1 / self.ddp.world_size)
        work = dist.all_reduce(bucket.buffer, group=self.ddp.group, async_op=True)
        self.work.append(work)

    def close(self, failed):
        ddp = self.ddp
        mine = [failed, *(p.grad is not None for p in ddp.params)]
        for bucket in ddp.buckets[len(self.work) :]:
            self.leave(bucket)
        every = None
        if ddp.agree:
            flags = torch.tensor(mine, dtype=torch.uint8, device=ddp.params[0].device)
            every = [torch.empty_like(flags) for _ in range(ddp.world_size)]
            dist.all_gather(every, flags, group=ddp.group)
        for work in self.work:
            work.wait()
        ddp.open = None
        if not ddp.learned:
            rest = [k for k in reversed(range(len(ddp.params))) if k not in self.order]
            known = order_of_first_rank(self.order + rest, ddp.params[0].device, ddp.group)
            ddp.buckets = make_buckets([ddp.params[k] for k in known], *ddp.sizes)
            ddp.learned = True
        if every is None:
            return
        table = torch.stack(every).tolist()
        quitters = [rank for rank, (quit, *_) in enumerate(table) if quit]
        for k, p in enumerate(ddp.params, 1):
            if quitters or not any(row[k] for row in table):
                p.grad = None
        if quitters:
            raise StepAborted(quitters[-1])


class DDP(nn.Module):
    def __init__(
        self, module, *, group=None, bucket_bytes=1 << 24, first_bucket_bytes=1 << 20, agree=False
    ):
        super().__init__()
        self.module, self.group, self.agree = module, group, agree
        self.world_size = dist.get_world_size(group)
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.sizes = bucket_bytes, first_bucket_bytes
        self.buckets = make_buckets(self.params[::-1], *self.sizes)
        broadcast_tensors([*module.parameters(), *module.buffers()], bucket_bytes, group)
        self.open, self.learned, self.quiet = None, False, 0
        for k, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda p, k=k: self.come(k, p))

    def come(self, k, p):
        if p.grad is None:
            return
        if self.quiet:
            for bucket in self.buckets:
                for place, q in enumerate(bucket.parameters):
                    if q is p:
                        bucket.take(place)
        else:
            self.start()
            self.open.come(k)

    def start(self, *_):
        if self.open is None and not self.quiet:
            self.open = Pass(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.open.close(False))

    def forward(self, *args, **kwargs):
        if self.open is not None:
            self.abort()
        if self.module.training and not self.quiet:
            hidden = [b.data for b in self.module.buffers()]
            broadcast_tensors(hidden, self.sizes[0], self.group)
        out = self.module(*args, **kwargs)
        waiting = [out]
        while waiting:
            item = waiting.pop()
            if isinstance(item, torch.Tensor):
                item.requires_grad and item.register_hook(self.start)
            elif isinstance(item, Mapping):
                waiting += item.values()
            elif isinstance(item, (list, tuple)):
                waiting += item
        return out

    @contextlib.contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def abort(self):
        current = self.open or Pass(self)
        for k, p in enumerate(self.params):
            if k not in current.order:
                p.grad = p.detach() * float("nan")
        with contextlib.suppress(StepAborted):
            current.close(True)
        self.zero_grad(set_to_none=True)
