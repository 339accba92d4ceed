# for: 3.18
"""Written differently: one staging buffer on the device for what travels in either direction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from solutions.phase3_multi_node.fsdp import FlatParameter


class OffloadFlat(FlatParameter):
    def __init__(self, parameters, group, device):
        super().__init__(parameters, group, device)
        host = torch.zeros(len(self.shard), dtype=self.shard.dtype)
        if torch.device(device).type == "cuda":
            host = host.pin_memory()
        values = [p.detach().cpu().reshape(-1) for p in parameters if not p.is_meta]
        if values:
            host.copy_(torch.cat(values)[self.start : self.start + len(host)])
        trainable = self.shard.requires_grad
        self.shard = nn.Parameter(host, requires_grad=trainable)

    def start_gather(self):
        if self.full.untyped_storage().nbytes() > 0:
            return
        self.full.untyped_storage().resize_(self.full.nbytes)
        staging = torch.zeros(self.chunk, dtype=self.full.dtype, device=self.full.device)
        staging[: len(self.shard)].copy_(self.shard.detach(), non_blocking=True)
        self.gathering = dist.all_gather_into_tensor(
            self.full, staging, group=self.group, async_op=True
        )

    def finish_reduce(self):
        if self.reducing is None:
            return
        work, staging, _ = self.reducing
        work.wait()
        self.reducing = None
        host = torch.empty(len(self.shard), dtype=self.shard.dtype)
        host.copy_(self.mean(staging)[: len(self.shard)])
        self.shard.grad = host if self.shard.grad is None else self.shard.grad.add_(host)
