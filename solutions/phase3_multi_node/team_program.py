"""The same program on NCCL: three functions that are right on gloo, mended for GPUs.

``given/team_program.py`` has the program. It passes on gloo, where each message is matched by
itself, ranks connect without the rest of their group, and tensors may be anywhere. NCCL differs:

- What a rank issues on one communicator runs in the order of issue, and a message ends only
  together with its other end. Within a batch there is no order.
- A group is made from the world's communicator where a device is bound, by all ranks together.
  Without a bound device a communicator is made at its first use, when all its ranks have come.
- Tensors are on the rank's GPU. ``wait`` orders the GPU's stream, and the host goes on. A value
  that the host looks at costs a wait for all that was issued before.

Invariant: all ranks make the same groups and first use them in one order, members or not.

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

    All ranks of the group call it. The rank before the first one is the last one, so two ranks are
    each other's neighbours on both sides, and one rank alone gets its own two edges. All edges have
    one dtype that NCCL can send, and one shape; strides may be any. They are left alone: what
    comes back are new contiguous tensors on their device. Autograd records nothing. It runs by
    NCCL's rules, also as the group's first communication. Per rank two messages of one edge each,
    none for one rank alone; all of them have ended on return. Raises ValueError, and sends nothing,
    on a rank that is not in ``group``.
    """
    # --- exercise 3.30: start
    # Step 1: read given/team_program.py: what stands first in the queue of each rank, and what does
    #         its other end stand behind?
    # Step 2: mend it: nothing may stand behind anything else; two ranks have two messages for each
    #         other, which meet in the order of issue
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
    first of their team. All ranks of the world call it, with the same ``size``, and it returns by
    NCCL's rules, too. Nothing is sent. Raises ValueError, on every rank and before a group is
    made, unless ``size`` is positive and divides the world size.
    """
    # --- exercise 3.30: start
    # Step 3: which ranks come to each new_group, and which must come where a device is bound?
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"{world_size} ranks are no teams of {size}")
    firsts = [*range(0, world_size, size)]
    teams = [dist.new_group([*range(first, first + size)]) for first in firsts]
    leaders = dist.new_group(firsts)
    return Teams(teams[rank // size], None if rank % size else leaders)
    # --- exercise 3.30: end


def means(total: Tensor, samples: int, teams: Teams) -> tuple[Tensor, Tensor]:
    """Σ total / Σ samples over the ranks of the team, and over all ranks.

    ``total`` is a floating tensor without dimensions: what this rank has added up over so many
    ``samples``. It is left alone. All ranks of the world call it; each team has samples, a rank may
    have none. Both means are float64 tensors without dimensions, on the device of ``total``.
    Autograd records nothing. Two all-reduces of 16 bytes, both under way before one is waited for.
    It runs by NCCL's rules, also as the groups' first communication, and the host looks at no value
    of a GPU.
    """
    # --- exercise 3.30: start
    # Step 4: where must a tensor be that travels, and who waits for float() of a GPU's tensor?
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
