"""Wrong implementations of exercises 3.7 and 3.8."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="place-rank-is-local",
        exercise="3.7",
        mistake="RANK is taken where LOCAL_RANK is needed",
        text='    node, local_rank = environ.get("GROUP_RANK"), environ.get("LOCAL_RANK")\n',
        becomes='    node, local_rank = environ.get("GROUP_RANK"), environ.get("RANK")\n',
        caught_by="test_place_comes_from_the_launcher",
        told_as="local-rank",
    ),
    Mutant(
        id="place-node-by-division",
        exercise="3.7",
        mistake=(
            "the node is RANK divided by LOCAL_WORLD_SIZE: wrong unless ranks fill node after node"
        ),
        text='    node, local_rank = environ.get("GROUP_RANK"), environ.get("LOCAL_RANK")\n',
        becomes="""    local_rank = environ.get("LOCAL_RANK")
    size = int(environ.get("LOCAL_WORLD_SIZE", 1))
    node = str(int(environ["RANK"]) // size) if "GROUP_RANK" in environ else None
""",
        caught_by="test_place_comes_from_the_launcher",
        told_as="launchers-node",
    ),
    Mutant(
        id="place-default-zero",
        exercise="3.7",
        mistake="a launcher that says nothing puts everybody on node 0",
        text='    node, local_rank = environ.get("GROUP_RANK"), environ.get("LOCAL_RANK")\n',
        becomes=(
            '    node, local_rank = environ.get("GROUP_RANK", 0), environ.get("LOCAL_RANK", 0)\n'
        ),
        caught_by="test_place_comes_from_the_launcher",
        told_as="launchers-node",
    ),
    Mutant(
        id="exchange-one-key",
        exercise="3.7",
        mistake="all ranks publish under one key: the last one wins",
        text="""    store.set(f"place/{rank}", json.dumps(asdict(place)))
    texts = [store.get(f"place/{other}") for other in range(world_size)]
""",
        becomes="""    store.set("place", json.dumps(asdict(place)))
    texts = [store.get("place") for _ in range(world_size)]
""",
        caught_by="test_all_ranks_get_the_same_list",
        told_as="other-list",
    ),
    Mutant(
        id="exchange-does-not-wait",
        exercise="3.7",
        mistake="who is late is left out",
        text='    texts = [store.get(f"place/{other}") for other in range(world_size)]\n',
        becomes="""    keys = [f"place/{other}" for other in range(world_size)]
    texts = [store.get(key) for key in keys if store.check([key])]
""",
        caught_by="test_all_ranks_get_the_same_list",
        told_as="other-list",
    ),
    Mutant(
        id="exchange-by-collective",
        exercise="3.7",
        mistake="needs a process group to find out what the process group needs",
        text='    texts = [store.get(f"place/{other}") for other in range(world_size)]\n',
        becomes="""    texts = [None] * world_size
    dist.all_gather_object(texts, json.dumps(asdict(place)))
""",
        caught_by="test_all_ranks_get_the_same_list",
        told_as="not-the-store",
    ),
    Mutant(
        id="exchange-root-keeps-it",
        exercise="3.7",
        mistake="only rank 0 reads the places, the others know their own",
        text='    texts = [store.get(f"place/{other}") for other in range(world_size)]\n',
        becomes=(
            "    texts = [store.get(f'place/{k if rank == 0 else rank}') for k in "
            "range(world_size)]\n"
        ),
        caught_by="test_all_ranks_get_the_same_list",
        told_as="other-list",
    ),
    Mutant(
        id="topology-by-division",
        exercise="3.7",
        mistake="node = rank // ranks of the first node, whatever the placement",
        text="    return Topology(tuple(map(tuple, by_host.values())))\n",
        becomes="""    size = len(next(iter(by_host.values())))
    starts = range(0, len(places), size)
    return Topology(tuple(tuple(range(s, min(s + size, len(places)))) for s in starts))
""",
        caught_by="test_hosts_make_nodes",
        told_as="wrong-nodes",
    ),
    Mutant(
        id="topology-sorted-by-host",
        exercise="3.7",
        mistake="nodes in the order of their names, so that rank 0 need not be on the first",
        text="    return Topology(tuple(map(tuple, by_host.values())))\n",
        becomes="    return Topology(tuple(tuple(by_host[host]) for host in sorted(by_host)))\n",
        caught_by="test_hosts_make_nodes",
        told_as="wrong-nodes",
    ),
    Mutant(
        id="topology-trusts-launcher",
        exercise="3.7",
        mistake="one host with two of the launcher's nodes is accepted",
        text="        if places[other].node != place.node:\n",
        becomes="        if False:\n",
        caught_by="test_contradictions_are_refused_everywhere",
        told_as="accepted",
    ),
    Mutant(
        id="topology-trusts-hosts",
        exercise="3.7",
        mistake="one of the launcher's nodes with two hosts is accepted",
        text="        if places[other].host != place.host:\n",
        becomes="        if False:\n",
        caught_by="test_contradictions_are_refused_everywhere",
        told_as="accepted",
    ),
    Mutant(
        id="topology-half-told",
        exercise="3.7",
        mistake="some ranks know their node and some don't: accepted",
        text="        if (place.node is None) != (places[0].node is None):\n",
        becomes="        if False:\n",
        caught_by="test_contradictions_are_refused_everywhere",
        told_as="accepted",
    ),
    Mutant(
        id="topology-local-ranks-unchecked",
        exercise="3.7",
        mistake="two ranks with one local rank, and so one GPU, are accepted",
        text="        if local_ranks not in ([*range(len(ranks))], [None] * len(ranks)):\n",
        becomes="        if False:\n",
        caught_by="test_contradictions_are_refused_everywhere",
        told_as="accepted",
    ),
    Mutant(
        id="topology-local-ranks-sorted",
        exercise="3.7",
        mistake="local ranks against the order of the ranks: groups and shards won't match",
        text="        if local_ranks not in ([*range(len(ranks))], [None] * len(ranks)):\n",
        becomes="""        if sorted(map(str, local_ranks)) not in (
            [*map(str, range(len(ranks)))], ['None'] * len(ranks)
        ):
""",
        caught_by="test_contradictions_are_refused_everywhere",
        told_as="accepted",
    ),
    Mutant(
        id="device-by-rank",
        exercise="3.7",
        mistake="the global rank chooses the GPU",
        text='    return torch.device("cuda", local_rank) if gpus',
        becomes='    return torch.device("cuda", rank) if gpus',
        caught_by="test_local_rank_chooses_the_device",
        told_as="device",
    ),
    Mutant(
        id="device-by-remainder",
        exercise="3.7",
        mistake="rank mod GPUs: right on full nodes only",
        text='    return torch.device("cuda", local_rank) if gpus',
        becomes='    return torch.device("cuda", rank % gpus) if gpus',
        caught_by="test_local_rank_chooses_the_device",
        told_as="device",
    ),
    Mutant(
        id="device-shared",
        exercise="3.7",
        mistake="more ranks than GPUs is accepted",
        text="    if 0 < gpus < len(topology.nodes[node]):\n",
        becomes="    if False:\n",
        caught_by="test_local_rank_chooses_the_device",
        told_as="not-refused",
    ),
    Mutant(
        id="groups-own-first",
        exercise="3.7",
        mistake="every rank makes the groups that it is in first: another order on every rank",
        text="    of_nodes = [dist.new_group(list(ranks)) for ranks in topology.nodes]\n",
        becomes="""    order = sorted(range(len(topology.nodes)), key=lambda k: k != node)
    made = {k: dist.new_group(list(topology.nodes[k])) for k in order}
    of_nodes = [made[k] for k in range(len(order))]
""",
        caught_by="test_groups_join_nodes_and_local_ranks",
        told_as="mismatch",
    ),
    Mutant(
        id="groups-own-only",
        exercise="3.7",
        mistake="every rank makes only the groups that it is in",
        text="""    of_nodes = [dist.new_group(list(ranks)) for ranks in topology.nodes]
    of_local_ranks = [dist.new_group(ranks) for ranks in columns]
    return NodeGroups(topology, of_nodes[node], of_local_ranks[local_rank])
""",
        becomes="""    mine = dist.new_group(list(topology.nodes[node]))
    return NodeGroups(topology, mine, dist.new_group(columns[local_rank]))
""",
        caught_by="test_groups_join_nodes_and_local_ranks",
        told_as="mismatch",
    ),
    Mutant(
        id="groups-smallest-node",
        exercise="3.7",
        mistake="local ranks beyond the smallest node have no group",
        text="    largest = max(map(len, topology.nodes))\n",
        becomes="    largest = min(map(len, topology.nodes))\n",
        caught_by="test_groups_join_nodes_and_local_ranks",
        told_as="exception",
    ),
    Mutant(
        id="groups-across-by-stride",
        exercise="3.7",
        mistake="the group across is every L-th rank: right only if ranks fill node after node",
        text=(
            "    columns = [[r[k] for r in topology.nodes if k < len(r)] for k in range(largest)]\n"
        ),
        becomes="""    size = len(topology.nodes[0])
    columns = [[*range(k, topology.world_size, size)] for k in range(largest)]
""",
        caught_by="test_groups_join_nodes_and_local_ranks",
        told_as="hang",
    ),
    Mutant(
        id="shards-whole-tensor-across",
        exercise="3.8",
        mistake="an all-reduce inside and one across, of the whole tensor on every rank",
        text="    local_size = dist.get_world_size(groups.node)\n",
        becomes="""    whole = flat.clone()
    dist.all_reduce(whole, REDUCE[op], group=groups.node)
    dist.all_reduce(whole, REDUCE[op], group=groups.across)
    return whole / groups.topology.world_size if op == "mean" else whole
    local_size = dist.get_world_size(groups.node)
""",
        caught_by="test_only_shards_leave_even_nodes",
        told_as="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-flat-all-reduce",
        exercise="3.8",
        mistake="one all-reduce over all ranks, which crosses more often",
        text="    local_size = dist.get_world_size(groups.node)\n",
        becomes="""    whole = flat.clone()
    dist.all_reduce(whole, REDUCE[op])
    return whole / groups.topology.world_size if op == "mean" else whole
    local_size = dist.get_world_size(groups.node)
""",
        caught_by="test_only_shards_leave_even_nodes",
        told_as="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-through-leaders",
        exercise="3.8",
        mistake="the leaders carry everything, also where all could share the load",
        text="    reduce = reduce_by_shards if groups.topology.even else reduce_through_leaders\n",
        becomes="    reduce = reduce_through_leaders\n",
        caught_by="test_only_shards_leave_even_nodes",
        told_as="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-gathered-inside",
        exercise="3.8",
        mistake="every rank gathers the whole tensors of its node and sums for itself",
        text="    dist.all_to_all_single(received, padded, group=groups.node)\n",
        becomes=(
            "    whole = torch.empty(local_size * len(padded), dtype=flat.dtype, "
            "device=flat.device)\n"
            "    dist.all_gather_into_tensor(whole, padded, group=groups.node)\n"
            "    mine = dist.get_rank(groups.node)\n"
            "    received = whole.view(local_size, local_size, shard)[:, mine].reshape(-1)\n"
        ),
        caught_by="test_only_shards_leave_even_nodes",
        told_as="too-many-bytes-inside",
    ),
    Mutant(
        id="shards-averaged-twice",
        exercise="3.8",
        mistake="the mean is taken in the node and again at the end",
        text="    dist.all_reduce(own, REDUCE[op], group=groups.across)\n",
        becomes="""    if op == "mean":
        own /= local_size
    dist.all_reduce(own, REDUCE[op], group=groups.across)
""",
        caught_by="test_even_nodes_combine",
        told_as="scaled",
    ),
    Mutant(
        id="shards-mean-of-nodes",
        exercise="3.8",
        mistake="the mean is divided by the number of nodes",
        text="""    if op == "mean":
        own /= groups.topology.world_size
""",
        becomes="""    if op == "mean":
        own /= len(groups.topology.nodes)
""",
        caught_by="test_even_nodes_combine",
        told_as="scaled",
    ),
    Mutant(
        id="shards-mean-forgotten",
        exercise="3.8",
        mistake="the mean is not divided",
        text="""    if op == "mean":
        own /= groups.topology.world_size
""",
        becomes="",
        caught_by="test_even_nodes_combine",
        told_as="summed",
    ),
    Mutant(
        id="shards-second-stage-sums",
        exercise="3.8",
        mistake="the second stage sums, whatever the operator",
        text="    dist.all_reduce(own, REDUCE[op], group=groups.across)\n",
        becomes="    dist.all_reduce(own, group=groups.across)\n",
        caught_by="test_even_nodes_combine",
        told_as="wrong",
    ),
    Mutant(
        id="shards-first-stage-sums",
        exercise="3.8",
        mistake="the first stage sums, whatever the operator",
        text='    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)\n',
        becomes="    own = versions.sum(0, dtype=flat.dtype)\n",
        caught_by="test_even_nodes_combine",
        told_as="wrong",
    ),
    Mutant(
        id="shards-max-from-zero",
        exercise="3.8",
        mistake="the maximum starts from zeros: wrong where all values are negative",
        text='    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)\n',
        becomes="""    own = torch.zeros_like(versions[0])
    for version in versions:
        own = torch.maximum(own, version) if op == "max" else own + version
""",
        caught_by="test_even_nodes_combine",
        told_as="zeros",
    ),
    Mutant(
        id="shards-no-second-stage",
        exercise="3.8",
        mistake="nothing crosses: every node has its own sum",
        text="    dist.all_reduce(own, REDUCE[op], group=groups.across)\n",
        becomes="",
        caught_by="test_even_nodes_combine",
        told_as="missing-rank",
    ),
    Mutant(
        id="shards-drop-the-rest",
        exercise="3.8",
        mistake="what does not divide by the ranks of a node is left out",
        text="    shard = -(-flat.numel() // local_size)\n",
        becomes="""    shard = flat.numel() // local_size
    if shard:
        flat = flat[: shard * local_size]
""",
        more=(
            (
                "    return received[: flat.numel()]\n",
                """    tail = received.new_zeros(0)
    return torch.cat([received[: flat.numel()], tail])
""",
            ),
        ),
        caught_by="test_even_nodes_combine",
        told_as="exception",
    ),
    Mutant(
        id="shards-by-global-rank",
        exercise="3.8",
        mistake="the own shard is chosen by the global rank",
        text='    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)\n',
        becomes="""    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)
    total = padded.clone()
    dist.all_reduce(total, REDUCE[op], group=groups.node)
    own = total.view(local_size, shard)[dist.get_rank() // 2 % local_size].clone()
""",
        caught_by="test_even_nodes_combine",
        told_as="wrong",
    ),
    Mutant(
        id="shards-new-tensor",
        exercise="3.8",
        mistake="the result is bound to a new tensor",
        text="    tensor.detach().copy_(reduce(flat, groups, op).view_as(tensor))\n",
        becomes="    tensor = reduce(flat, groups, op).view_as(tensor)\n",
        caught_by="test_even_nodes_combine",
        told_as="unchanged",
    ),
    Mutant(
        id="shards-contiguous-only",
        exercise="3.8",
        mistake="a strided view is flattened to a copy that nobody sees",
        text="    tensor.detach().copy_(reduce(flat, groups, op).view_as(tensor))\n",
        becomes="    flat.copy_(reduce(flat, groups, op))\n",
        caught_by="test_strided_views_are_reduced_in_place",
        told_as="unchanged",
    ),
    Mutant(
        id="shards-integers-widen",
        exercise="3.8",
        mistake="the sum of 32-bit integers becomes 64 bits wide on the way",
        text='    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)\n',
        becomes='    own = versions.amax(0) if op == "max" else versions.sum(0)\n',
        caught_by="test_even_nodes_combine",
        told_as="exception",
    ),
    Mutant(
        id="uneven-as-if-even",
        exercise="3.8",
        mistake="shards on nodes of different size don't match",
        text="    reduce = reduce_by_shards if groups.topology.even else reduce_through_leaders\n",
        becomes="    reduce = reduce_by_shards\n",
        caught_by="test_uneven_nodes_combine",
        told_as="mismatch",
    ),
    Mutant(
        id="uneven-all-go-across",
        exercise="3.8",
        mistake="who is no leader joins its own group across as well",
        text="""    if dist.get_rank(groups.node) == 0:
        dist.all_reduce(result, REDUCE[op], group=groups.across)
""",
        becomes="""    dist.all_reduce(result, REDUCE[op], group=groups.across)
    if dist.get_rank(groups.node) == 0:
""",
        caught_by="test_only_leaders_leave_uneven_nodes",
        told_as="not-the-leader",
    ),
    Mutant(
        id="uneven-leader-is-global-rank-0",
        exercise="3.8",
        mistake="group ranks are taken for global ranks",
        text="    dist.reduce(result, op=REDUCE[op], group=groups.node, group_dst=0)\n",
        becomes="    dist.reduce(result, 0, REDUCE[op], group=groups.node)\n",
        caught_by="test_uneven_nodes_combine",
        told_as="exception",
    ),
    Mutant(
        id="uneven-only-leaders-know",
        exercise="3.8",
        mistake="the result never travels back from the leaders",
        text="    dist.broadcast(result, group=groups.node, group_src=0)\n",
        becomes="",
        caught_by="test_uneven_nodes_combine",
        told_as="unchanged",
    ),
    Mutant(
        id="uneven-mean-of-means",
        exercise="3.8",
        mistake="the mean of the nodes' means, although they have different numbers of ranks",
        text="""        dist.all_reduce(result, REDUCE[op], group=groups.across)
        if op == "mean":
            result /= groups.topology.world_size
""",
        becomes="""        if op == "mean":
            result /= dist.get_world_size(groups.node) * len(groups.topology.nodes)
        dist.all_reduce(result, REDUCE[op], group=groups.across)
""",
        caught_by="test_uneven_nodes_combine",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-everybody-divides",
        exercise="3.8",
        mistake="the leader divides for the mean, and everybody again",
        text="    dist.broadcast(result, group=groups.node, group_src=0)\n",
        becomes="""    dist.broadcast(result, group=groups.node, group_src=0)
    if op == "mean":
        result /= groups.topology.world_size
""",
        caught_by="test_uneven_nodes_combine",
        told_as="divided-twice",
    ),
    Mutant(
        id="uneven-flat-all-reduce",
        exercise="3.8",
        mistake="one all-reduce over all ranks where nodes have different sizes",
        text="""    result = flat.clone()
    dist.reduce(""",
        becomes="""    result = flat.clone()
    dist.all_reduce(result, REDUCE[op])
    return result / groups.topology.world_size if op == "mean" else result
    dist.reduce(""",
        caught_by="test_only_leaders_leave_uneven_nodes",
        told_as="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="hierarchical-integer-mean",
        exercise="3.8",
        mistake="the mean of integers is accepted",
        text='    if op == "mean" and not tensor.is_floating_point():\n',
        becomes="    if False:\n",
        caught_by="test_bad_arguments_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="hierarchical-late-check",
        exercise="3.8",
        mistake="the operator is looked at after the first stage",
        text="""    check_op(tensor, op)
    if check:
""",
        becomes="""    dist.barrier(group=groups.node)
    check_op(tensor, op)
    if check:
""",
        caught_by="test_bad_arguments_are_refused",
        told_as="late-check",
    ),
    Mutant(
        id="formula-ring-per-rank",
        exercise="3.8",
        mistake="every rank of the ring is charged as if it sent to another node",
        text=(
            "    leaving = [sum((r + 1) % w not in ranks for r in ranks) for ranks in "
            "topology.nodes]\n"
        ),
        becomes="    leaving = [len(ranks) for ranks in topology.nodes]\n",
        caught_by="test_bytes_leaving_a_node",
        told_as="formula-ring",
    ),
    Mutant(
        id="formula-hierarchical-by-ranks",
        exercise="3.8",
        mistake="the all-reduce between nodes is charged with the number of ranks",
        text="        return 2 * (n - 1) / n * nbytes\n",
        becomes="        return 2 * (w - 1) / w * nbytes\n",
        caught_by="test_bytes_leaving_a_node",
        told_as="formula-hierarchical",
    ),
    Mutant(
        id="groups-of-others",
        exercise="3.7",
        mistake="a topology without some rank: those that it has wait for it in new_group",
        text="    if sorted(sum(topology.nodes, ())) != everyone:\n",
        becomes="    if not everyone:\n",
        caught_by="test_groups_of_other_ranks_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="hierarchical-check-ignored",
        exercise="3.8",
        mistake="tensors are not compared, although it is asked for",
        text="""    if check:
        expect_alike([tensor])
""",
        becomes="",
        caught_by="test_tensors_that_differ_are_refused_on_every_rank",
        told_as="mismatch",
    ),
]
