"""An all-reduce that crosses the slow link between nodes as seldom as possible.

A ring through all ranks doesn't know which links are slow. For a tensor of n bytes 2(W-1)/W·n leave
every node, and more if ring neighbours are rarely on one node. This all-reduce has three stages.
With L ranks on each of M nodes:

========================  ================================  ====================
stage                     between                           bytes sent per rank
========================  ================================  ====================
reduce-scatter            the L ranks of a node             (L-1)/L·n
all-reduce of the shard   the M ranks with one local rank   2(M-1)/M·n/L
all-gather                the L ranks of a node             (L-1)/L·n
========================  ================================  ====================

Only the middle stage leaves the node. It sends 2(M-1)/M·n bytes per node, the least for any
all-reduce. All L ranks send a part of them, so all network cards work.
Invariant: after the first stage a rank holds its node's sum of one shard, after the second the sum
over all ranks. Where nodes have different numbers of ranks the shards don't match. One leader per
node then speaks for it: the same bytes pass between the nodes, but through one rank.

Sources: Mikami et al. 2018 (arXiv 1811.05233), 2D-torus all-reduce: these three stages. Jia et al.
2018 (arXiv 1807.11205), hierarchical all-reduce: through one leader per group.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import expect_alike
from given.devices import CHOICES
from given.launched import launched
from given.parent import end_with_parent

from .topology import (
    NodeGroups,
    Topology,
    exchange_places,
    make_groups,
    own_place,
    topology_of,
)

Op = Literal["sum", "mean", "max"]
REDUCE = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def check_op(tensor: Tensor, op: str) -> None:
    """Raise ValueError for an unknown ``op``, or the mean of integers, before anything is sent."""
    if op not in REDUCE:
        raise ValueError(f"op must be one of {', '.join(REDUCE)}, not {op!r}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")


def all_reduce_hierarchical(
    tensor: Tensor, groups: NodeGroups, op: Op = "sum", *, check: bool = False
) -> None:
    """Combine ``tensor`` over all ranks of the topology, in place on every rank.

    ``tensor`` may be empty or non-contiguous, and of any real dtype. Its shape and dtype are the
    same on all ranks. A leaf that requires gradients stays one. On nodes of equal size each rank
    sends 2(L-1)/L·n bytes inside its node and 2(M-1)/M·n/L between nodes (n rounded up to L
    elements). On other nodes only the leaders send between nodes, 2(M-1)/M·n each. Nothing is in
    flight at the end. All ranks end with the same bits. Raises ValueError on every rank, before
    anything is sent, for an unknown ``op`` or the mean of integers. ``check`` costs an all-reduce
    of 48 bytes, and raises ValueError for tensors that differ, too. Without it such ranks end or
    hang.
    """
    # --- exercise 3.8: start
    # Step 1: refuse bad arguments, alike on all ranks, and with ``check`` tensors that differ
    #         (`expect_alike`). For an empty tensor there is nothing to do
    # Step 2: by shards if all nodes have equally many ranks, else through the leaders
    # Step 3: write the result into the caller's tensor, also when it is a strided view
    check_op(tensor, op)
    if check:
        expect_alike([tensor])
    if not tensor.numel():
        return
    flat = tensor.detach().reshape(-1)
    reduce = reduce_by_shards if groups.topology.even else reduce_through_leaders
    tensor.detach().copy_(reduce(flat, groups, op).view_as(tensor))
    # --- exercise 3.8: end


def reduce_by_shards(flat: Tensor, groups: NodeGroups, op: Op) -> Tensor:
    """The combination of all ranks' ``flat`` (n,), for nodes with equally many ranks.

    Reduce-scatter in the node, all-reduce of the own shard across nodes, all-gather in the node.
    ``flat`` is not changed.
    """
    # --- exercise 3.8: start
    # Step 4: pad to L shards of equal length. Send them inside the node, so that each rank gets all
    #         L versions of one shard. Combine the versions
    # Step 5: all-reduce the shard across the nodes with the same operator
    # Step 6: for the mean divide the shard once, by the number of all ranks
    # Step 7: gather the shards inside the node, drop the padding
    local_size = dist.get_world_size(groups.node)
    shard = -(-flat.numel() // local_size)
    padded = torch.nn.functional.pad(flat, (0, local_size * shard - flat.numel()))
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=groups.node)
    versions = received.view(local_size, shard)
    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)
    dist.all_reduce(own, REDUCE[op], group=groups.across)
    if op == "mean":
        own /= groups.topology.world_size
    dist.all_gather_into_tensor(received, own, group=groups.node)
    return received[: flat.numel()]
    # --- exercise 3.8: end


def reduce_through_leaders(flat: Tensor, groups: NodeGroups, op: Op) -> Tensor:
    """The same for nodes of any size: reduce to the leader, all-reduce of the leaders, broadcast.

    The leader is local rank 0 of a node. ``flat`` is not changed.
    """
    # --- exercise 3.8: start
    # Step 8: reduce to the leader. The leaders alone all-reduce and divide for the mean. Then
    #         broadcast
    result = flat.clone()
    dist.reduce(result, op=REDUCE[op], group=groups.node, group_dst=0)
    if dist.get_rank(groups.node) == 0:
        dist.all_reduce(result, REDUCE[op], group=groups.across)
        if op == "mean":
            result /= groups.topology.world_size
    dist.broadcast(result, group=groups.node, group_src=0)
    return result
    # --- exercise 3.8: end


def bytes_leaving_a_node(topology: Topology, nbytes: float, algorithm: str) -> float:
    """Bytes that the busiest node sends to others for an all-reduce of ``nbytes``.

    ``"ring"``: a ring 0 → 1 → … → W-1 → 0 through all ranks. ``"hierarchical"``: this module's, on
    nodes of any size. Raises ValueError for another algorithm.
    """
    # --- exercise 3.8: start
    # Step 9: in the ring every rank sends 2(W-1)/W n to the next rank: count for each node the next
    #         ranks that are on another node. Hierarchical: an all-reduce over the nodes
    w, n = topology.world_size, len(topology.nodes)
    if algorithm == "hierarchical":
        return 2 * (n - 1) / n * nbytes
    if algorithm != "ring":
        raise ValueError(f"algorithm must be ring or hierarchical, not {algorithm!r}")
    leaving = [sum((r + 1) % w not in ranks for r in ranks) for ranks in topology.nodes]
    return max(leaving) * 2 * (w - 1) / w * nbytes
    # --- exercise 3.8: end


def seconds_of(all_reduce: Callable[[Tensor], object], tensor: Tensor) -> float:
    """The fastest of three all-reduces by this rank's clock, after one that opens connections."""
    seconds = []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def compare(topology: Topology, rank: int, device: torch.device) -> None:
    """The backend's all-reduce and the hierarchical one: seconds, and bytes that leave a node."""
    groups = make_groups(topology)
    if rank == 0:
        print(f"ranks by node: {topology.nodes}")
    for nbytes in (10**5, 10**6, 10**7):
        tensor = torch.ones(nbytes // 4, device=device)
        flat = seconds_of(dist.all_reduce, tensor)
        ours = seconds_of(lambda t: all_reduce_hierarchical(t, groups), tensor)
        leaving = [bytes_leaving_a_node(topology, nbytes, a) for a in ("ring", "hierarchical")]
        if rank == 0:
            print(
                f"{nbytes:10,} B: backend {flat * 1e3:.1f} ms, hierarchical {ours * 1e3:.1f} "
                f"ms; leave a node: {leaving[0]:,.0f} B and {leaving[1]:,.0f} B"
            )


def main() -> None:
    """Under a launcher: say which ranks share a node, then compare with the backend's
    all-reduce."""
    end_with_parent()
    parser = argparse.ArgumentParser(description="Compare all-reduces on several nodes.")
    parser.add_argument("--device", default="auto", choices=CHOICES)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with torchrun, or: distlab cluster run -- python -m <this module>")
    with launched("hierarchical_allreduce", options.device) as at:
        own = own_place(os.environ, socket.gethostname())
        topology = topology_of(exchange_places(own, at.store, at.rank, at.world_size))
        compare(topology, at.rank, at.device)


if __name__ == "__main__":
    main()
