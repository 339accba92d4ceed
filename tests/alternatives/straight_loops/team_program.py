# for: 3.30
"""Written differently: a batch for each direction, groups in a dictionary, sums of two rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group
from given.team_program import Teams


def swap_edges(top: Tensor, bottom: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError("not in this group")
    found = []
    for edge, step in ((bottom, 1), (top, -1)):
        outgoing = edge.detach().clone(memory_format=torch.contiguous_format)
        incoming = torch.zeros_like(outgoing)
        if len(ranks) == 1:
            incoming = outgoing
        else:
            place = ranks.index(me)
            to, source = ranks[(place + step) % len(ranks)], ranks[(place - step) % len(ranks)]
            send = dist.P2POp(dist.isend, outgoing, to, group)
            receive = dist.P2POp(dist.irecv, incoming, source, group)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
        found.append(incoming)
    return found[0], found[1]


def make_teams(size: int) -> Teams:
    world_size = dist.get_world_size()
    if size <= 0 or world_size % size != 0:
        raise ValueError(f"{size} does not divide {world_size}")
    groups = {}
    for k in range(world_size // size):
        groups[k] = dist.new_group(list(range(k * size, (k + 1) * size)))
    groups["leaders"] = dist.new_group(list(range(0, world_size, size)))
    rank = dist.get_rank()
    if rank % size == 0:
        return Teams(groups[rank // size], groups["leaders"])
    return Teams(groups[rank // size], None)


def means(total: Tensor, samples: int, teams: Teams) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(2, 2, dtype=torch.float64, device=total.device)
    sums[:, 0] += total.detach()
    sums[:, 1] += samples
    first = dist.all_reduce(sums[0], group=teams.own, async_op=True)
    second = dist.all_reduce(sums[1], async_op=True)
    second.wait()
    first.wait()
    ratios = sums[:, 0] / sums[:, 1]
    return ratios[0].clone(), ratios[1].clone()
