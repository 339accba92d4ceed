# for: 3.19
"""Written differently: subgroups by enumeration of a table; the node's vector is let go."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.fsdp_units import Parameters
from solutions.phase3_multi_node.fsdp import FlatParameter


def node_groups(node_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    world = dist.get_world_size()
    if node_size <= 0 or world % node_size != 0:
        raise ValueError(f"a world of {world} is not made of nodes of {node_size} ranks")
    table = torch.arange(world).view(-1, node_size)
    across, _ = dist.new_subgroups_by_enumeration(table.T.tolist())
    inside, _ = dist.new_subgroups_by_enumeration(table.tolist())
    return (inside, across)


class HybridFlat(FlatParameter):
    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        device: torch.device,
        *,
        replicas: dist.ProcessGroup,
    ) -> None:
        rank_in(replicas)
        both = {*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(replicas)}
        if len(both) != 1:
            raise ValueError(f"ranks {sorted(both)} would shard and replicate with each other")
        self.replicas = replicas
        super().__init__(parameters, group, device)

    def start_reduce(self) -> None:
        super().start_reduce()
        if self.reducing is not None:
            handle, chunk, _ = self.reducing
            handle.wait()
            self.reducing = None
            work = dist.all_reduce(chunk, dist.ReduceOp.SUM, group=self.replicas, async_op=True)
            self.reducing = (work, chunk, chunk.new_empty(0))

    def mean(self, chunk: Tensor) -> Tensor:
        return super().mean(chunk) / dist.get_world_size(self.replicas)
