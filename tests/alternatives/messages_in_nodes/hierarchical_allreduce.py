# for: 3.8
"""Written differently: messages inside nodes, unequal shards."""

from __future__ import annotations

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum}


def exchange(sends, receives, group):
    """Post all messages at once, {group rank: tensor}, and wait for them."""
    ends = [(dist.irecv, t, r) for r, t in receives.items()]
    ends += [(dist.isend, t, r) for r, t in sends.items()]
    batch = [dist.P2POp(f, t, group=group, group_peer=r) for f, t, r in ends]
    for handle in dist.batch_isend_irecv(batch) if batch else []:
        handle.wait()


def all_reduce_by_messages(buffer, op, group):
    """Every rank combines one (unequal) part and gives it to all, by messages alone."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = list(buffer.tensor_split(size))
    others = [r for r in range(size) if r != rank]
    got = {r: torch.empty_like(parts[rank]) for r in others}
    exchange({r: parts[r] for r in others if len(parts[r])},
             {r: t for r, t in got.items() if len(t)}, group)  # fmt: skip
    total = None
    for r in range(size):
        version = parts[rank] if r == rank else got[r]
        total = version.clone() if total is None else COMBINE[op](total, version)
    parts[rank].copy_(total)
    yield parts[rank]
    exchange({r: parts[rank] for r in others if len(total)},
             {r: parts[r] for r in others if len(parts[r])}, group)  # fmt: skip


def all_reduce_hierarchical(tensor, groups, op="sum", *, check=False):
    if op not in COMBINE:
        raise ValueError(f"no operator {op!r}")
    if op == "mean" and not tensor.dtype.is_floating_point:
        raise ValueError(f"no mean of {tensor.dtype}")
    if check:
        own = torch.tensor([tensor.numel(), DTYPES.index(tensor.dtype)], device=tensor.device)
        every = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(every, own)
        if any(not torch.equal(own, other) for other in every):
            raise ValueError(f"length and number of dtype by rank: {every}")
    way = reduce_by_shards if groups.topology.even else reduce_through_leaders
    flat = tensor.detach().contiguous().view(-1)
    tensor.detach().copy_(way(flat, groups, op).view(tensor.shape))


def reduce_by_shards(flat, groups, op):
    return _reduce(flat.clone(), groups, op, True)


def reduce_through_leaders(flat, groups, op):
    return _reduce(flat.clone(), groups, op, False)


def _reduce(buffer, groups, op, by_shards):
    if by_shards:
        for own in all_reduce_by_messages(buffer, op, groups.node):
            for _ in all_reduce_by_messages(own, op, groups.across):
                pass
    else:
        local, size = dist.get_rank(groups.node), dist.get_world_size(groups.node)
        for r in range(1, size):
            if local == r:
                dist.send(buffer, group=groups.node, group_dst=0)
            elif local == 0:
                version = torch.empty_like(buffer)
                dist.recv(version, group=groups.node, group_src=r)
                buffer = COMBINE[op](buffer, version)
        if local == 0:
            for _ in all_reduce_by_messages(buffer, op, groups.across):
                pass
        dist.broadcast(buffer, group=groups.node, group_src=0)
    if op == "mean":
        buffer /= groups.topology.world_size
    return buffer


def bytes_leaving_a_node(topology, nbytes, algorithm):
    ranks, nodes = topology.world_size, len(topology.nodes)
    if algorithm == "hierarchical":
        return nbytes * 2 * (1 - 1 / nodes)
    if algorithm == "ring":
        busiest = 0
        for node in range(nodes):
            hops = [r for r in topology.nodes[node] if topology.locate((r + 1) % ranks)[0] != node]
            busiest = max(busiest, len(hops))
        return busiest * nbytes * 2 * (1 - 1 / ranks)
    raise ValueError(f"no algorithm {algorithm!r}")
