"""The same program on NCCL: three functions that are right on gloo, mended for GPUs.

``given/team_program.py`` has the program. It passes on gloo: there each message is matched by
itself, two ranks connect without the rest of their group, and tensors may be anywhere. NCCL
differs:

- The operations that a rank issues on one communicator run in the order of issue. A message ends
  only together with its other end. Within a batch there is no order.
- Where a device is bound, all ranks together make a group from the world's communicator. Without a
  bound device a communicator is made at its first use, when all its ranks have come.
- Tensors are on the rank's GPU. ``wait`` orders the GPU's stream, and the host goes on. To read a
  value the host waits for all that was issued before.

Invariant: all ranks make the same groups, members or not. All ranks first use their groups in one
order.

Sources: NVIDIA's NCCL user guide, "Group calls" and "Using multiple NCCL communicators
concurrently"; PyTorch's documentation of ``batch_isend_irecv`` and ``new_group``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in
from given.team_program import Teams


def swap_edges(top: Tensor, bottom: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """(bottom edge of the rank before, top edge of the rank after) in the ring of ``group``.

    All ranks of the group call it. The rank before the first one is the last one. So two ranks are
    each other's neighbours on both sides, and one rank alone gets its own two edges. All edges have
    one dtype that NCCL can send, and one shape. Strides may be any. The edges do not change: the
    results are new contiguous tensors on their device. Autograd records nothing. It runs by NCCL's
    rules, also as the group's first communication. Each rank sends two messages of one edge each,
    and one rank alone sends none. All messages have ended on return. Raises ValueError, and sends
    nothing, on a rank that is not in ``group``.
    """
    # --- exercise 3.30: start
    # Step 1: read given/team_program.py: which message is first in the queue of each rank, and
    #         behind which message does its other end wait?
    # Step 2: mend it: no message may wait behind another one. Two ranks have two messages for each
    #         other, and these meet in the order of issue
    rank, world_size = rank_in(group), dist.get_world_size(group)
    top, bottom = top.detach().contiguous(), bottom.detach().contiguous()
    if world_size == 1:
        return bottom.clone(), top.clone()
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    above, below = torch.empty_like(bottom), torch.empty_like(top)
    ends = [
        dist.P2POp(dist.irecv, above, group=group, group_peer=before),
        dist.P2POp(dist.irecv, below, group=group, group_peer=after),
        dist.P2POp(dist.isend, bottom, group=group, group_peer=after),
        dist.P2POp(dist.isend, top, group=group, group_peer=before),
    ]
    for handle in dist.batch_isend_irecv(ends):
        handle.wait()
    return above, below
    # --- exercise 3.30: end


def make_teams(size: int) -> Teams:
    """The group of this rank's team of ``size`` neighbours, and that of all teams' first ranks.

    Team k has the ranks k·size to (k+1)·size - 1. ``leaders`` is None on ranks that are not the
    first of their team. All ranks of the world call it, with the same ``size``. It runs by NCCL's
    rules, too. Nothing is sent. Raises ValueError, on every rank and before a group is made, unless
    ``size`` is positive and divides the world size.
    """
    # --- exercise 3.30: start
    # Step 3: which ranks come to each new_group, and which must come where a device is bound?
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"{world_size} ranks don't divide into teams of {size}")
    firsts = [*range(0, world_size, size)]
    teams = [dist.new_group([*range(first, first + size)]) for first in firsts]
    leaders = dist.new_group(firsts)
    return Teams(teams[rank // size], None if rank % size else leaders)
    # --- exercise 3.30: end


def means(total: Tensor, samples: int, teams: Teams) -> tuple[Tensor, Tensor]:
    """Σ total / Σ samples over the ranks of the team, and over all ranks.

    ``total`` is a floating-point tensor without dimensions: what this rank has added up over so
    many ``samples``. It does not change. All ranks of the world call it. Each team has samples, a
    rank may have none. Both means are float64 tensors without dimensions, on the device of
    ``total``. Autograd records nothing. It issues two all-reduces of 16 bytes, both before it waits
    for one. It runs by NCCL's rules, also as the groups' first communication. The host reads no
    value of a GPU.
    """
    # --- exercise 3.30: start
    # Step 4: on which device must a tensor be that travels, and what waits for float() of it?
    # Step 5: both all-reduces, on all ranks in one order; read no result before its wait
    team = torch.tensor([0.0, samples], dtype=torch.float64, device=total.device)
    team[0] = total.detach()
    everyone = team.clone()
    handles = [
        dist.all_reduce(team, group=teams.own, async_op=True),
        dist.all_reduce(everyone, async_op=True),
    ]
    for handle in handles:
        handle.wait()
    return team[0] / team[1], everyone[0] / everyone[1]
    # --- exercise 3.30: end
