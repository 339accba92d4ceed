"""Hybrid sharding: shard inside a node, replicate across nodes.

Full sharding sends every parameter through the slowest link, twice per step. If a model's state
fits into one node, shard it over the L ranks of the node, which have fast links. Keep one replica
per node. Only gradients cross the network, and only each rank's shard of them:

    node 0   r0 [shard 0]  r1 [shard 1]      inside: all-gather, all-gather, reduce-scatter
                 ║             ║             across: all-reduce of a shard with the same shard's
    node 1   r2 [shard 0]  r3 [shard 1]              owners on the other nodes

For P bytes of parameters and M nodes a rank sends per step 3(L-1)/L·P bytes inside the node, and
2(M-1)/M·P/L across. Full sharding sends 3(W-1)/W·P, most of it across. Memory: 16Ψ/L bytes.
Messages: one more per unit.
Invariant: ranks with the same local rank hold equal shards at all times.

Source: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277), section 3.2.2 (hybrid sharding).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.fsdp_units import Parameters

from .fsdp import FlatParameter


def node_groups(node_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(inside, across): this rank's node, to shard, and its peers on other nodes, to replicate.

    Ranks are numbered node by node, ``node_size`` on each. Peers have the same local rank in their
    nodes. All ranks of the world must call it. Raises ValueError, before any communication and
    before a group is made, if the world does not divide into nodes of that size.
    """
    # --- exercise 3.19: start
    # Step 1: every rank makes *every* group, in the same order, also those that it is not in
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if node_size < 1 or world_size % node_size:
        raise ValueError(f"{world_size} ranks don't divide into nodes of {node_size}")
    nodes = [range(first, first + node_size) for first in range(0, world_size, node_size)]
    peers = [range(first, world_size, node_size) for first in range(node_size)]
    inside = [dist.new_group(list(node)) for node in nodes]
    across = [dist.new_group(list(ranks)) for ranks in peers]
    return inside[rank // node_size], across[rank % node_size]
    # --- exercise 3.19: end


class HybridFlat(FlatParameter):
    """A flat parameter sharded over ``group`` and replicated over ``replicas``.

    Use it as ``FSDP(…, group=inside, flat_type=partial(HybridFlat, replicas=across))``. Gradients
    are the mean over all ranks of both, equal on all replicas. The norm for clipping needs
    ``group`` only, since replicas have equal shards. Raises ValueError, before anything is sent, if
    this rank is no member of ``replicas``, or if the two groups share another rank, too.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        device: torch.device,
        *,
        replicas: dist.ProcessGroup,
    ) -> None:
        """As ``FlatParameter``."""
        rank_in(replicas)
        both = {*dist.get_process_group_ranks(group)} & {*dist.get_process_group_ranks(replicas)}
        if len(both) != 1:
            raise ValueError(f"ranks {sorted(both)} are in both groups: only this rank may be")
        self.replicas = replicas
        super().__init__(parameters, group, device)

    def start_reduce(self) -> None:
        """Reduce-scatter inside the node, then issue the sum of the chunks across.

        This waits for the fast reduce-scatter, but not for the sum across: that travels beside the
        next unit's backward. Across, a rank sends 2(M-1)/M·chunk elements, zeros too. Without
        gradients nothing is sent. On a GPU the wait delays the compute's stream, not the host, as
        long as the fast links take. The sum across is started in this stream, after the sum that it
        needs. A stream of its own for each of them, as in PyTorch's FSDP, would not delay the
        compute.
        """
        # --- exercise 3.19: start
        # Step 2: reduce-scatter first, then all-reduce: only 1/L of the bytes leave the node
        super().start_reduce()
        if self.reducing is None:
            return
        work, chunk, _ = self.reducing
        work.wait()
        across = dist.all_reduce(chunk, group=self.replicas, async_op=True)
        self.reducing = across, chunk, chunk
        # --- exercise 3.19: end

    def mean(self, chunk: Tensor) -> Tensor:
        """The mean over the ranks of all replicas."""
        # --- exercise 3.19: start
        # Step 3: the sum now has W = L·M terms
        return super().mean(chunk).div_(dist.get_world_size(self.replicas))
        # --- exercise 3.19: end
