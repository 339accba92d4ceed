"""Wrong implementations of exercise 3.30: the faults of the given program, and more of their kind."""

from distlab.grading.wrong import Mutant

BATCH = """    ends = [
        dist.P2POp(dist.irecv, above, group=group, group_peer=before),
        dist.P2POp(dist.irecv, below, group=group, group_peer=after),
        dist.P2POp(dist.isend, bottom, group=group, group_peer=after),
        dist.P2POp(dist.isend, top, group=group, group_peer=before),
    ]
    for handle in dist.batch_isend_irecv(ends):
        handle.wait()
"""
RECEIVES = """    handles = [
        dist.irecv(above, group=group, group_src=before),
        dist.irecv(below, group=group, group_src=after),
"""
SENDS = """        dist.isend(bottom, group=group, group_dst=after),
        dist.isend(top, group=group, group_dst=before),
"""
WAITS = """    ]
    for handle in handles:
        handle.wait()
"""
TEAM = """    team = torch.tensor([0.0, samples], dtype=torch.float64, device=total.device)
    team[0] = total.detach()
"""
SUMS = """    handles = [
        dist.all_reduce(team, group=teams.own, async_op=True),
        dist.all_reduce(everyone, async_op=True),
    ]
    for handle in handles:
        handle.wait()
"""
LEADERS = "    leaders = dist.new_group(firsts)\n"
TEAMS = "    teams = [dist.new_group([*range(first, first + size)]) for first in firsts]\n"

EDGES = "test_edges_come_from_both_neighbours"
GROUPS = "test_teams_and_their_leaders"
MEANS = "test_means_of_team_and_world"

MUTANTS = [
    Mutant(
        id="edges-as-given",
        exercise="3.30",
        mistake="both ends of each exchange queue their receive before their send",
        text=BATCH,
        becomes=RECEIVES + SENDS + WAITS,
        caught_by=EDGES,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="edges-sends-first",
        exercise="3.30",
        mistake="sends are queued first on both ends, which is the same fault the other way round",
        text=BATCH,
        becomes="    handles = [\n" + SENDS + RECEIVES.partition("\n")[2] + WAITS,
        caught_by=EDGES,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="edges-a-batch-each",
        exercise="3.30",
        mistake="each message is a batch of its own: they stand behind each other again",
        text="    for handle in dist.batch_isend_irecv(ends):\n",
        becomes="    for handle in [work for end in ends for work in dist.batch_isend_irecv([end])]:\n",
        caught_by=EDGES,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="edges-two-batches",
        exercise="3.30",
        mistake="receives are one batch and sends another",
        text="    for handle in dist.batch_isend_irecv(ends):\n",
        becomes="    parts = ends[:2], ends[2:]\n"
        "    for handle in [work for part in parts for work in dist.batch_isend_irecv(part)]:\n",
        caught_by=EDGES,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="edges-told-apart-by-tags",
        exercise="3.30",
        mistake="tags tell a rank's two messages apart, and NCCL ignores tags",
        text=BATCH,
        becomes=BATCH.replace("above, group=group", "above, group=group, tag=1").replace(
            "bottom, group=group",
            "bottom, group=group, tag=1",
        ),
        caught_by=EDGES,
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="edges-of-a-column-with-gaps",
        exercise="3.30",
        mistake="a column of a field is sent as it is, with gaps between its elements",
        text="    top, bottom = top.detach().contiguous(), bottom.detach().contiguous()\n",
        becomes="    top, bottom = top.detach(), bottom.detach()\n",
        caught_by="test_edges_of_any_strides",
        told_as="exception",
    ),
    Mutant(
        id="edges-over-the-host",
        exercise="3.30",
        mistake="edges are copied to the host to be sent from there",
        text="    before, after = (rank - 1) % world_size, (rank + 1) % world_size\n",
        becomes="    before, after = (rank - 1) % world_size, (rank + 1) % world_size\n"
        "    top, bottom = top.cpu(), bottom.cpu()\n",
        caught_by=EDGES,
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="edges-first-handle-only",
        exercise="3.30",
        mistake="only the first handle is waited for: with gloo a batch has one for each message",
        text="    for handle in dist.batch_isend_irecv(ends):\n        handle.wait()\n",
        becomes="    dist.batch_isend_irecv(ends)[0].wait()\n",
        caught_by="test_two_messages_per_rank",
        told_as="never-waited",
    ),
    Mutant(
        id="edges-not-waited-for",
        exercise="3.30",
        mistake="what arrives is given back before it has arrived",
        text="    for handle in dist.batch_isend_irecv(ends):\n        handle.wait()\n",
        becomes="    dist.batch_isend_irecv(ends)\n",
        caught_by="test_two_messages_per_rank",
        told_as="never-waited",
    ),
    Mutant(
        id="edges-swapped-for-two",
        exercise="3.30",
        mistake="the top is sent first: two ranks take each other's edges for the wrong ones",
        text=BATCH,
        becomes=BATCH.replace(
            "        dist.P2POp(dist.isend, bottom, group=group, group_peer=after),\n",
            "",
        ).replace(
            "group_peer=before),\n    ]\n",
            "group_peer=before),\n        dist.P2POp(dist.isend, bottom.detach().contiguous(), "
            "group=group, group_peer=after),\n    ]\n",
        ),
        caught_by=EDGES,
        told_as="wrong",
    ),
    Mutant(
        id="teams-as-given",
        exercise="3.30",
        mistake="a group is made by its members only: the others never come to the split",
        text=TEAMS + LEADERS,
        becomes="    own = rank - rank % size\n"
        "    team = dist.new_group([*range(own, own + size)], use_local_synchronization=True)\n"
        "    teams, leaders = [team] * world_size, None\n"
        "    if rank == own:\n"
        "        leaders = dist.new_group(firsts, use_local_synchronization=True)\n",
        caught_by=GROUPS,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="teams-leaders-alone",
        exercise="3.30",
        mistake="all ranks make the teams, but only leaders make the leaders' group",
        text=LEADERS,
        becomes="    leaders = None\n"
        "    if rank in firsts:\n"
        "        leaders = dist.new_group(firsts, use_local_synchronization=True)\n",
        caught_by=GROUPS,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="teams-leaders-of-gloo",
        exercise="3.30",
        mistake="the leaders' group is gloo's beside NCCL: it passes no messages of a GPU",
        text=LEADERS,
        becomes='    leaders = dist.new_group(firsts, backend="gloo")\n',
        caught_by=GROUPS,
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="teams-own-first",
        exercise="3.30",
        mistake="each rank makes its own team first: ranks make groups in different orders",
        text=TEAMS,
        becomes="    order = sorted(firsts, key=lambda first: rank // size != first // size)\n"
        "    made = {f: dist.new_group([*range(f, f + size)]) for f in order}\n"
        "    teams = [made[first] for first in firsts]\n",
        caught_by=GROUPS,
        told_as="mismatch",
    ),
    Mutant(
        id="means-as-given",
        exercise="3.30",
        mistake="the sums are made on the CPU, and NCCL moves GPU memory only",
        text=TEAM,
        becomes="    team = torch.tensor([float(total), samples], dtype=torch.float64)\n",
        caught_by=MEANS,
        told_as="exception",
        tier="nccl",
    ),
    Mutant(
        id="means-item",
        exercise="3.30",
        mistake="the total comes to the host and goes back to the GPU",
        text=TEAM,
        becomes="    values = [total.item(), samples]\n"
        "    team = torch.tensor(values, dtype=torch.float64, device=total.device)\n",
        caught_by="test_means_cost_two_sums_and_no_look",
        told_as="host",
        tier="nccl",
    ),
    Mutant(
        id="means-group-after-group",
        exercise="3.30",
        mistake="leaders begin with the world and the others with their team: where communicators "
        "are made at first use, each waits in another one",
        text=SUMS,
        becomes="    sums = [(team, teams.own), (everyone, None)][:: -1 if teams.leaders else 1]\n"
        "    handles = [dist.all_reduce(t, group=g, async_op=True) for t, g in sums]\n"
        "    for handle in handles:\n"
        "        handle.wait()\n",
        caught_by=MEANS,
        told_as="hang",
        tier="nccl",
    ),
    Mutant(
        id="means-read-before-the-wait",
        exercise="3.30",
        mistake="the means are computed while the sums are under way",
        text=SUMS + "    return team[0] / team[1], everyone[0] / everyone[1]\n",
        becomes=SUMS.partition("    for")[0]
        + "    found = team[0] / team[1], everyone[0] / everyone[1]\n"
        "    for handle in handles:\n"
        "        handle.wait()\n"
        "    return found\n",
        caught_by=MEANS,
        told_as="wrong",
    ),
    Mutant(
        id="means-sent-on-before-the-wait",
        exercise="3.30",
        mistake="what the first sum uses is copied for the second while it is under way",
        text="    everyone = team.clone()\n",
        becomes="",
        more=[
            (
                SUMS,
                "    handles = [dist.all_reduce(team, group=teams.own, async_op=True)]\n"
                "    everyone = team.clone()\n"
                "    handles.append(dist.all_reduce(everyone, async_op=True))\n"
                "    for handle in handles:\n"
                "        handle.wait()\n",
            )
        ],
        caught_by=MEANS,
        told_as="read-in-flight",
        tier="nccl",
    ),
    Mutant(
        id="means-one-by-one",
        exercise="3.30",
        mistake="the second sum begins when the first has ended",
        text=SUMS,
        becomes="    dist.all_reduce(team, group=teams.own)\n    dist.all_reduce(everyone)\n",
        caught_by="test_both_sums_are_under_way",
        told_as="one-by-one",
    ),
    Mutant(
        id="means-of-means",
        exercise="3.30",
        mistake="the world's mean is the mean of the teams' means",
        text="    return team[0] / team[1], everyone[0] / everyone[1]\n",
        becomes="    mean = team[0] / team[1]\n"
        "    everyone = mean.clone()\n"
        "    dist.all_reduce(everyone)\n"
        "    return mean, everyone / dist.get_world_size()\n",
        caught_by=MEANS,
        told_as="wrong",
    ),
]
