# for: 3.17
"""Written differently: every gradient is copied to its place in a vector of the wanted dtype."""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase3_multi_node.fsdp import FlatParameter


class MixedPrecisionFlat(FlatParameter):
    def __init__(
        self,
        parameters,
        group,
        device,
        *,
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
    ):
        if not (compute_dtype.is_floating_point and reduce_dtype.is_floating_point):
            raise ValueError("only floating-point dtypes")
        super().__init__(parameters, group, device)
        self.reduce_dtype = reduce_dtype if self.shard.is_floating_point() else self.shard.dtype
        if self.shard.is_floating_point():
            self.make_full(compute_dtype, device)

    def start_gather(self):
        storage = self.full.untyped_storage()
        if storage.nbytes():
            return
        storage.resize_(self.full.nbytes)
        mine = self.full.new_zeros(self.chunk)
        mine[: len(self.shard)] = self.shard.detach()
        pieces = list(self.full.data.split(self.chunk))
        self.gathering = dist.all_gather(pieces, mine, group=self.group, async_op=True)

    def start_reduce(self):
        grads = [leaf.grad for leaf in self.leaves]
        if grads.count(None) == len(grads):
            return
        vector = torch.zeros(self.full.numel(), dtype=self.reduce_dtype, device=self.full.device)
        begin = 0
        for leaf in self.leaves:
            if leaf.grad is not None:
                vector[begin : begin + leaf.numel()].view(leaf.shape).copy_(leaf.grad)
                leaf.grad = None
            begin += leaf.numel()
        mine = vector.new_empty(self.chunk)
        work = dist.reduce_scatter_tensor(mine, vector, group=self.group, async_op=True)
        self.reducing = work, mine, vector

    def finish_reduce(self):
        if self.reducing is None:
            return
        work, mine, _ = self.reducing
        work.wait()
        self.reducing = None
        mean = mine[: len(self.shard)].to(self.shard.dtype) / dist.get_world_size(self.group)
        if self.shard.grad is not None:
            mean = mean + self.shard.grad
        self.shard.grad = mean
