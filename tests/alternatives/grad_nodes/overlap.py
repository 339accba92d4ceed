# for: 3.10
"""Written differently: hooks on autograd nodes, whole buckets at once, the order a step later."""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import expect_alike
from given.hooks import claim

from .buckets import Bucket, broadcast_tensors, order_of_first_rank, partition

MIB = 1 << 20


def call(known, k, *_):
    if known() is not None:
        known().arrived(k)


class BucketedDDP(nn.Module):
    def __init__(self, module, *, group=None, bucket_bytes=25 * MIB, first_bucket_bytes=MIB):
        super().__init__()
        if dist.get_rank(group) == -1:
            raise ValueError("this rank is not in the group")
        self.module, self.group = module, group
        self.params = [p for p in module.parameters() if p.requires_grad]
        if not self.params or len({p.device for p in self.params}) > 1:
            raise ValueError("DDP needs trainable parameters, on one device")
        if any(getattr(m, "sparse", False) for m in module.modules()):
            raise ValueError("sparse gradients can't be bucketed")
        claim(self.params, self)
        self.sizes = (bucket_bytes, first_bucket_bytes)
        self.arrange(self.params[::-1])
        everything = list(module.parameters()) + list(module.buffers())
        expect_alike(everything, group)
        broadcast_tensors(everything, max(bucket_bytes, 1 << 16), group)
        self.hook = lambda b: dist.all_reduce(b.buffer, group=group, async_op=True)
        self.seen, self.open, self.observed, self.learned = [], False, None, False
        self.nodes = []  # kept alive: a node that is collected loses its hook
        for k, p in enumerate(self.params):
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(functools.partial(call, weakref.ref(self), k))
            self.nodes.append(node)

    def arrange(self, params):
        """Buckets for this order; the gradients stay where they are until they are sent."""
        lists = partition(params, *self.sizes)
        self.buckets = [Bucket(n, [params[i] for i in each]) for n, each in enumerate(lists)]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def register_comm_hook(self, hook):
        if not callable(hook):
            raise TypeError(f"{hook!r} can't be called")
        self.hook = hook

    def arrived(self, k):
        if not self.open:
            self.start()
        self.seen.append(k)
        self.here.add(id(self.params[k]))
        while self.sent and all(id(p) in self.here for p in self.sent[0].parameters):
            self.send()

    def start(self):
        """A backward begins; the one before may have taught the order."""
        self.open = True
        torch.autograd.Variable._execution_engine.queue_callback(self.end)
        if self.observed is not None and not self.learned:
            known = order_of_first_rank(self.observed, self.params[0].device, self.group)
            self.arrange([self.params[k] for k in known])
            self.learned = True
        self.seen, self.here, self.work = [], set(), []
        self.sent = list(self.buckets)  # what is still to be sent

    def send(self):
        bucket = self.sent.pop(0)
        for place in range(len(bucket.parameters)):
            bucket.take(place)
        bucket.buffer /= dist.get_world_size(self.group)
        self.work.append(self.hook(bucket))

    def end(self):
        while self.sent:
            self.send()
        for work in self.work:
            if work:
                work.wait()
        self.work = []
        rest = [k for k in reversed(range(len(self.params))) if k not in self.seen]
        self.observed, self.open = self.seen + rest, False
