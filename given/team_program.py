"""A program that is right on gloo. By NCCL's rules each of its three functions has one fault.

Ranks hold strips of a field, one below the other, and work in teams. ``swap_edges`` brings the
edges of the neighbours' strips, and ``make_teams`` makes the groups. ``means`` gives the means of
the team and of all ranks. Exercise 3.30 mends it. To see why it can't run on NCCL:

    python test_phase3.py 3.30 --impl given
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Group, rank_in


class Teams(NamedTuple):
    """``own``: the group of this rank's team. ``leaders``: that of the teams' first ranks, or
    None."""

    own: dist.ProcessGroup
    leaders: dist.ProcessGroup | None


def swap_edges(top: Tensor, bottom: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """(bottom edge of the rank before, top edge of the rank after) in the ring of ``group``."""
    rank, world_size = rank_in(group), dist.get_world_size(group)
    top, bottom = top.detach().contiguous(), bottom.detach().contiguous()
    if world_size == 1:
        return bottom.clone(), top.clone()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    above, below = torch.empty_like(bottom), torch.empty_like(top)
    handles = [
        dist.irecv(above, group=group, group_src=before),
        dist.irecv(below, group=group, group_src=after),
        dist.isend(bottom, group=group, group_dst=after),
        dist.isend(top, group=group, group_dst=before),
    ]
    for handle in handles:
        handle.wait()
    return above, below


def make_teams(size: int) -> Teams:
    """The group of this rank's team of ``size`` neighbours, and that of all teams' first ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"{world_size} ranks don't divide into teams of {size}")
    first = rank - rank % size
    own = dist.new_group([*range(first, first + size)], use_local_synchronization=True)
    leaders = None
    if rank == first:
        leaders = dist.new_group([*range(0, world_size, size)], use_local_synchronization=True)
    return Teams(own, leaders)


def means(total: Tensor, samples: int, teams: Teams) -> tuple[Tensor, Tensor]:
    """Σ total / Σ samples over the ranks of the team, and over all ranks."""
    team = torch.tensor([float(total), samples], dtype=torch.float64)
    everyone = team.clone()
    handles = [
        dist.all_reduce(team, group=teams.own, async_op=True),
        dist.all_reduce(everyone, async_op=True),
    ]
    for handle in handles:
        handle.wait()
    return (team[0] / team[1]).to(total.device), (everyone[0] / everyone[1]).to(total.device)
