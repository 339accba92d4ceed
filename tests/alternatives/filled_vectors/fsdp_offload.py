# for: 3.18
"""Written differently: the shard is made of the parameters anew; only its elements come back."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.fsdp_units import Parameters
from solutions.phase3_multi_node.fsdp import FlatParameter


class OffloadFlat(FlatParameter):
    def __init__(self, parameters: Parameters, group: Group, device: torch.device) -> None:
        super().__init__(parameters, group, device)
        values = [p.detach().reshape(-1) for p in parameters]
        if values[0].is_meta:
            host = torch.empty(self.shard.numel(), dtype=self.shard.dtype, device="cpu")
        else:
            begin = dist.get_rank(group) * self.chunk
            host = torch.cat(values)[begin : begin + self.shard.numel()].to("cpu", copy=True)
        if device.type == "cuda":
            host = host.pin_memory()
        self.shard = nn.Parameter(host, requires_grad=self.shard.requires_grad)

    def gather_input(self) -> Tensor:
        return super().gather_input().to(self.full.device, non_blocking=True)

    def mean(self, chunk: Tensor) -> Tensor:
        mean = super().mean(chunk)
        return mean if mean.device.type == "cpu" else mean[: self.shard.numel()].cpu()
