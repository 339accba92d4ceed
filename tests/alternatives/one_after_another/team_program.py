# for: 3.30
"""Written differently: no batch, but blocking messages in an order that closes no circle."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.team_program import Teams


def _shift(edge: Tensor, to: int, source: int, receive_first: bool, group: Group) -> Tensor:
    outgoing, incoming = edge.detach().contiguous(), torch.empty_like(edge.detach().contiguous())
    if receive_first:
        dist.recv(incoming, group=group, group_src=source)
        dist.send(outgoing, group=group, group_dst=to)
    else:
        dist.send(outgoing, group=group, group_dst=to)
        dist.recv(incoming, group=group, group_src=source)
    return incoming


def swap_edges(top: Tensor, bottom: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    rank, size = rank_in(group), dist.get_world_size(group)
    if size == 1:
        return tuple(
            edge.detach().clone(memory_format=torch.contiguous_format) for edge in (bottom, top)
        )
    before, after = (rank + size - 1) % size, (rank + 1) % size
    above = _shift(bottom, after, before, rank == 0, group)
    return above, _shift(top, before, after, rank == 0, group)


def make_teams(size: int) -> Teams:
    world = [*range(dist.get_world_size())]
    if size not in [n for n in range(1, len(world) + 1) if len(world) % n == 0]:
        raise ValueError(f"no teams of {size}")
    leaders = dist.new_group(world[::size])
    own = None
    while world:
        team, world = world[:size], world[size:]
        group = dist.new_group(team)
        if dist.get_rank() in team:
            own = group
    return Teams(own, leaders if dist.get_rank() % size == 0 else None)


def means(total: Tensor, samples: int, teams: Teams) -> tuple[Tensor, Tensor]:
    count = torch.full_like(total, samples, dtype=torch.float64)
    pairs = [torch.stack([total.detach().double(), count]) for _ in range(2)]
    futures = [
        dist.all_reduce(pair, group=group, async_op=True)
        for pair, group in zip(pairs, (None, teams.own), strict=True)
    ]
    for future in futures:
        future.wait()
    everyone, team = [pair[0] / pair[1] for pair in pairs]
    return team, everyone
