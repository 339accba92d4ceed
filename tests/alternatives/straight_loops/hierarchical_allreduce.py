# for: 3.8
"""Written from the docstrings alone."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import expect_alike

from .topology import (
    NodeGroups,
    Topology,
)

Op = Literal["sum", "mean", "max"]
REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def check_op(tensor: Tensor, op: str) -> None:
    if op not in REDUCE:
        raise ValueError(f"op must be one of {', '.join(REDUCE)}, not {op!r}")
    if op == "mean" and (not tensor.is_floating_point()):
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")


def all_reduce_hierarchical(
    tensor: Tensor, groups: NodeGroups, op: Op = "sum", *, check: bool = False
) -> None:
    if not check:
        check_op(tensor, op)
    else:
        expect_alike([tensor])
        check_op(tensor, op)
    if tensor.numel():
        flat = tensor.detach().contiguous().view(-1)
        even = len(set(map(len, groups.topology.nodes))) == 1
        result = (reduce_by_shards if even else reduce_through_leaders)(flat, groups, op)
        with torch.no_grad():
            tensor.copy_(result.reshape(tensor.shape))


def reduce_by_shards(flat: Tensor, groups: NodeGroups, op: Op) -> Tensor:
    size = dist.get_world_size(groups.node)
    length = (flat.numel() + size - 1) // size
    row = torch.cat([flat, flat[:1].expand(size * length - flat.numel())])
    dist.all_to_all_single((joined := torch.empty_like(row)), row, group=groups.node)
    came = joined.view(size, length)
    if op == "max":
        own = came.amax(0)
    else:
        own = came[0].clone()
        for k in range(1, size):
            own.add_(came[k])
    dist.all_reduce(own, op=REDUCE[op], group=groups.across)
    if op == "mean":
        own.div_(groups.topology.world_size)
    dist.all_gather_into_tensor(joined, own, group=groups.node)
    return joined.narrow(0, 0, flat.numel())


def reduce_through_leaders(flat: Tensor, groups: NodeGroups, op: Op) -> Tensor:
    total = torch.empty_like(flat).copy_(flat)
    index, local = groups.topology.locate(dist.get_rank())
    leader = groups.topology.nodes[index][0]
    dist.reduce(total, dst=leader, op=REDUCE[op], group=groups.node)
    if local == 0:
        dist.all_reduce(total, op=REDUCE[op], group=groups.across)
        if op == "mean":
            total.div_(groups.topology.world_size)
    dist.broadcast(total, src=leader, group=groups.node)
    return total


def bytes_leaving_a_node(topology: Topology, nbytes: float, algorithm: str) -> float:
    if algorithm == "hierarchical":
        count = len(topology.nodes)
        return 2 * (count - 1) / count * nbytes
    if algorithm != "ring":
        raise ValueError(f"algorithm must be ring or hierarchical, not {algorithm!r}")
    size = topology.world_size
    crossings = [0] * len(topology.nodes)
    for rank in range(size):
        here, there = (topology.locate(rank)[0], topology.locate((rank + 1) % size)[0])
        crossings[here] += here != there
    busiest = max(crossings)
    return 2 * (size - 1) / size * nbytes * busiest
