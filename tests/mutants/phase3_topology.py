"""Wrong implementations of exercises 3.7 and 3.8."""

from distlab.grading.wrong import Mutant

PLACE, LIST = "test_place_comes_from_the_launcher", "test_all_ranks_get_the_same_list"
NODES, REFUSED = "test_hosts_make_nodes", "test_contradictions_are_refused_everywhere"
DEVICE, GROUPS = "test_local_rank_chooses_the_device", "test_groups_join_nodes_and_local_ranks"
EVEN, UNEVEN = "test_even_nodes_combine", "test_uneven_nodes_combine"
VIEW, SHARDS = "test_strided_views_are_reduced_in_place", "test_only_shards_leave_even_nodes"
LEADERS, BAD = "test_only_leaders_leave_uneven_nodes", "test_bad_arguments_are_refused"
FORMULA, FASTER = "test_bytes_leaving_a_node", "test_virtual_cluster_is_faster_than_a_flat_ring"

ENVIRON = '    node, local_rank = environ.get("GROUP_RANK"), environ.get("LOCAL_RANK")\n'
SET = '    store.set(f"place/{rank}", json.dumps(asdict(place)))\n'
TEXTS = '    texts = [store.get(f"place/{other}") for other in range(world_size)]\n'
RETURN = "    return Topology(tuple(map(tuple, by_host.values())))\n"
SOME = "        if (place.node is None) != (places[0].node is None):\n"
ON_HOST = "        if places[other].node != place.node:\n"
ON_NODE = "        if places[other].host != place.host:\n"
LOCAL = "        if local_ranks not in ([*range(len(ranks))], [None] * len(ranks)):\n"
COLUMNS = "    columns = [[r[k] for r in topology.nodes if k < len(r)] for k in range(largest)]\n"
OF_NODES = "    of_nodes = [dist.new_group(list(ranks)) for ranks in topology.nodes]\n"
OF_LOCAL = "    of_local_ranks = [dist.new_group(ranks) for ranks in columns]\n"
MADE = "    return NodeGroups(topology, of_nodes[node], of_local_ranks[local_rank])\n"

WRITE = "    tensor.detach().copy_(reduce(flat, groups, op).view_as(tensor))\n"
CHOOSE = "    reduce = reduce_by_shards if groups.topology.even else reduce_through_leaders\n"
SHARD = "    shard = -(-flat.numel() // local_size)\n"
EXCHANGE = "    dist.all_to_all_single(received, padded, group=groups.node)\n"
OWN = '    own = versions.amax(0) if op == "max" else versions.sum(0, dtype=flat.dtype)\n'
ACROSS = "    dist.all_reduce(own, REDUCE[op], group=groups.across)\n"
MEAN = '    if op == "mean":\n        own /= groups.topology.world_size\n'
GATHER = "    dist.all_gather_into_tensor(received, own, group=groups.node)\n"
TO_LEADER = "    dist.reduce(result, op=REDUCE[op], group=groups.node, group_dst=0)\n"
LEADER = "    if dist.get_rank(groups.node) == 0:\n"
OF_LEADERS = "        dist.all_reduce(result, REDUCE[op], group=groups.across)\n"
LEADER_MEAN = '        if op == "mean":\n            result /= groups.topology.world_size\n'
SPREAD = "    dist.broadcast(result, group=groups.node, group_src=0)\n"
BY_LEADERS = "    result = flat.clone()\n    dist.reduce("

MUTANTS = [
    Mutant(
        id="place-rank-is-local",
        exercise="3.7",
        bug="BUGS 1: RANK is taken where LOCAL_RANK is needed",
        find=ENVIRON,
        replace='    node, local_rank = environ.get("GROUP_RANK"), environ.get("RANK")\n',
        killed_by=PLACE,
        cause="local-rank",
    ),
    Mutant(
        id="place-node-by-division",
        exercise="3.7",
        bug="the node is RANK divided by LOCAL_WORLD_SIZE: wrong unless ranks fill node after node",
        find=ENVIRON,
        replace='    local_rank = environ.get("LOCAL_RANK")\n'
        '    size = int(environ.get("LOCAL_WORLD_SIZE", 1))\n'
        '    node = str(int(environ["RANK"]) // size) if "GROUP_RANK" in environ else None\n',
        killed_by=PLACE,
        cause="launchers-node",
    ),
    Mutant(
        id="place-default-zero",
        exercise="3.7",
        bug="a launcher that says nothing puts everybody on node 0",
        find=ENVIRON,
        replace='    node, local_rank = environ.get("GROUP_RANK", 0), environ.get("LOCAL_RANK", 0)\n',
        killed_by=PLACE,
        cause="launchers-node",
    ),
    Mutant(
        id="exchange-one-key",
        exercise="3.7",
        bug="all ranks publish under one key: the last one wins",
        find=SET + TEXTS,
        replace='    store.set("place", json.dumps(asdict(place)))\n'
        '    texts = [store.get("place") for _ in range(world_size)]\n',
        killed_by=LIST,
        cause="other-list",
    ),
    Mutant(
        id="exchange-does-not-wait",
        exercise="3.7",
        bug="who is late is left out",
        find=TEXTS,
        replace='    keys = [f"place/{other}" for other in range(world_size)]\n'
        "    texts = [store.get(key) for key in keys if store.check([key])]\n",
        killed_by=LIST,
        cause="other-list",
    ),
    Mutant(
        id="exchange-by-collective",
        exercise="3.7",
        bug="needs a process group to find out what the process group needs",
        find=TEXTS,
        replace="    texts = [None] * world_size\n"
        "    dist.all_gather_object(texts, json.dumps(asdict(place)))\n",
        killed_by=LIST,
        cause="not-the-store",
    ),
    Mutant(
        id="exchange-root-keeps-it",
        exercise="3.7",
        bug="only rank 0 reads the places, the others know their own",
        find=TEXTS,
        replace="    texts = [store.get(f'place/{k if rank == 0 else rank}') for k in "
        "range(world_size)]\n",
        killed_by=LIST,
        cause="other-list",
    ),
    Mutant(
        id="topology-by-division",
        exercise="3.7",
        bug="node = rank // ranks of the first node, whatever the placement",
        find=RETURN,
        replace="    size = len(next(iter(by_host.values())))\n"
        "    starts = range(0, len(places), size)\n"
        "    return Topology(tuple(tuple(range(s, min(s + size, len(places)))) for s in starts))\n",
        killed_by=NODES,
        cause="wrong-nodes",
    ),
    Mutant(
        id="topology-sorted-by-host",
        exercise="3.7",
        bug="nodes in the order of their names, so that rank 0 need not be on the first",
        find=RETURN,
        replace="    return Topology(tuple(tuple(by_host[host]) for host in sorted(by_host)))\n",
        killed_by=NODES,
        cause="wrong-nodes",
    ),
    Mutant(
        id="topology-trusts-launcher",
        exercise="3.7",
        bug="one host with two of the launcher's nodes is accepted",
        find=ON_HOST,
        replace="        if False:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="topology-trusts-hosts",
        exercise="3.7",
        bug="one of the launcher's nodes with two hosts is accepted",
        find=ON_NODE,
        replace="        if False:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="topology-half-told",
        exercise="3.7",
        bug="some ranks know their node and some don't: accepted",
        find=SOME,
        replace="        if False:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="topology-local-ranks-unchecked",
        exercise="3.7",
        bug="two ranks with one local rank, and so one GPU, are accepted",
        find=LOCAL,
        replace="        if False:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="topology-local-ranks-sorted",
        exercise="3.7",
        bug="local ranks against the order of the ranks: groups and shards won't match",
        find=LOCAL,
        replace="        if sorted(map(str, local_ranks)) not in (\n"
        "            [*map(str, range(len(ranks)))], ['None'] * len(ranks)\n        ):\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="device-by-rank",
        exercise="3.7",
        bug="BUGS 1: the global rank chooses the GPU",
        find='    return torch.device("cuda", local_rank) if gpus',
        replace='    return torch.device("cuda", rank) if gpus',
        killed_by=DEVICE,
        cause="device",
    ),
    Mutant(
        id="device-by-remainder",
        exercise="3.7",
        bug="rank mod GPUs: right on full nodes only",
        find='    return torch.device("cuda", local_rank) if gpus',
        replace='    return torch.device("cuda", rank % gpus) if gpus',
        killed_by=DEVICE,
        cause="device",
    ),
    Mutant(
        id="device-shared",
        exercise="3.7",
        bug="more ranks than GPUs is accepted",
        find="    if 0 < gpus < len(topology.nodes[node]):\n",
        replace="    if False:\n",
        killed_by=DEVICE,
        cause="not-refused",
    ),
    Mutant(
        id="groups-own-first",
        exercise="3.7",
        bug="every rank makes the groups that it is in first: another order on every rank",
        find=OF_NODES,
        replace="    order = sorted(range(len(topology.nodes)), key=lambda k: k != node)\n"
        "    made = {k: dist.new_group(list(topology.nodes[k])) for k in order}\n"
        "    of_nodes = [made[k] for k in range(len(order))]\n",
        killed_by=GROUPS,
        cause="mismatch",
    ),
    Mutant(
        id="groups-own-only",
        exercise="3.7",
        bug="every rank makes only the groups that it is in",
        find=OF_NODES + OF_LOCAL + MADE,
        replace="    mine = dist.new_group(list(topology.nodes[node]))\n"
        "    return NodeGroups(topology, mine, dist.new_group(columns[local_rank]))\n",
        killed_by=GROUPS,
        cause="mismatch",
    ),
    Mutant(
        id="groups-smallest-node",
        exercise="3.7",
        bug="local ranks beyond the smallest node have no group",
        find="    largest = max(map(len, topology.nodes))\n",
        replace="    largest = min(map(len, topology.nodes))\n",
        killed_by=GROUPS,
        cause="exception",
    ),
    Mutant(
        id="groups-across-by-stride",
        exercise="3.7",
        bug="the group across is every L-th rank: right only if ranks fill node after node",
        find=COLUMNS,
        replace="    size = len(topology.nodes[0])\n"
        "    columns = [[*range(k, topology.world_size, size)] for k in range(largest)]\n",
        killed_by=GROUPS,
        cause="hang",
    ),
    Mutant(
        id="shards-whole-tensor-across",
        exercise="3.8",
        bug="BUGS 42: an all-reduce inside and one across, of the whole tensor on every rank",
        find="    local_size = dist.get_world_size(groups.node)\n",
        replace="    whole = flat.clone()\n"
        "    dist.all_reduce(whole, REDUCE[op], group=groups.node)\n"
        "    dist.all_reduce(whole, REDUCE[op], group=groups.across)\n"
        '    return whole / groups.topology.world_size if op == "mean" else whole\n'
        "    local_size = dist.get_world_size(groups.node)\n",
        killed_by=SHARDS,
        cause="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-flat-all-reduce",
        exercise="3.8",
        bug="BUGS 50: one all-reduce over all ranks, which crosses more often",
        find="    local_size = dist.get_world_size(groups.node)\n",
        replace="    whole = flat.clone()\n"
        "    dist.all_reduce(whole, REDUCE[op])\n"
        '    return whole / groups.topology.world_size if op == "mean" else whole\n'
        "    local_size = dist.get_world_size(groups.node)\n",
        killed_by=SHARDS,
        cause="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-through-leaders",
        exercise="3.8",
        bug="the leaders carry everything, also where all could share the load",
        find=CHOOSE,
        replace="    reduce = reduce_through_leaders\n",
        killed_by=SHARDS,
        cause="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="shards-gathered-inside",
        exercise="3.8",
        bug="BUGS 29: every rank gathers the whole tensors of its node and sums for itself",
        find=EXCHANGE,
        replace="    whole = torch.empty(local_size * len(padded), dtype=flat.dtype, "
        "device=flat.device)\n"
        "    dist.all_gather_into_tensor(whole, padded, group=groups.node)\n"
        "    mine = dist.get_rank(groups.node)\n"
        "    received = whole.view(local_size, local_size, shard)[:, mine].reshape(-1)\n",
        killed_by=SHARDS,
        cause="too-many-bytes-inside",
    ),
    Mutant(
        id="shards-averaged-twice",
        exercise="3.8",
        bug="BUGS 21: the mean is taken in the node and again at the end",
        find=ACROSS,
        replace='    if op == "mean":\n        own /= local_size\n' + ACROSS,
        killed_by=EVEN,
        cause="scaled",
    ),
    Mutant(
        id="shards-mean-of-nodes",
        exercise="3.8",
        bug="BUGS 20: the mean is divided by the number of nodes",
        find=MEAN,
        replace='    if op == "mean":\n        own /= len(groups.topology.nodes)\n',
        killed_by=EVEN,
        cause="scaled",
    ),
    Mutant(
        id="shards-mean-forgotten",
        exercise="3.8",
        bug="BUGS 20: the mean is not divided",
        find=MEAN,
        replace="",
        killed_by=EVEN,
        cause="summed",
    ),
    Mutant(
        id="shards-second-stage-sums",
        exercise="3.8",
        bug="the second stage sums, whatever the operator",
        find=ACROSS,
        replace="    dist.all_reduce(own, group=groups.across)\n",
        killed_by=EVEN,
        cause="wrong",
    ),
    Mutant(
        id="shards-first-stage-sums",
        exercise="3.8",
        bug="the first stage sums, whatever the operator",
        find=OWN,
        replace="    own = versions.sum(0, dtype=flat.dtype)\n",
        killed_by=EVEN,
        cause="wrong",
    ),
    Mutant(
        id="shards-max-from-zero",
        exercise="3.8",
        bug="the maximum starts from zeros: wrong where all values are negative",
        find=OWN,
        replace="    own = torch.zeros_like(versions[0])\n"
        "    for version in versions:\n"
        '        own = torch.maximum(own, version) if op == "max" else own + version\n',
        killed_by=EVEN,
        cause="zeros",
    ),
    Mutant(
        id="shards-no-second-stage",
        exercise="3.8",
        bug="nothing crosses: every node has its own sum",
        find=ACROSS,
        replace="",
        killed_by=EVEN,
        cause="missing-rank",
    ),
    Mutant(
        id="shards-drop-the-rest",
        exercise="3.8",
        bug="BUGS 45: what does not divide by the ranks of a node is left out",
        find=SHARD,
        replace="    shard = flat.numel() // local_size\n"
        "    if shard:\n"
        "        flat = flat[: shard * local_size]\n",
        patches=[
            (
                "    return received[: flat.numel()]\n",
                "    tail = received.new_zeros(0)\n"
                "    return torch.cat([received[: flat.numel()], tail])\n",
            )
        ],
        killed_by=EVEN,
        cause="exception",
    ),
    Mutant(
        id="shards-by-global-rank",
        exercise="3.8",
        bug="BUGS 1: the own shard is chosen by the global rank",
        find=OWN,
        replace=OWN + "    total = padded.clone()\n"
        "    dist.all_reduce(total, REDUCE[op], group=groups.node)\n"
        "    own = total.view(local_size, shard)[dist.get_rank() // 2 % local_size].clone()\n",
        killed_by=EVEN,
        cause="wrong",
    ),
    Mutant(
        id="shards-new-tensor",
        exercise="3.8",
        bug="BUGS 47: the result is bound to a new tensor",
        find=WRITE,
        replace="    tensor = reduce(flat, groups, op).view_as(tensor)\n",
        killed_by=EVEN,
        cause="unchanged",
    ),
    Mutant(
        id="shards-contiguous-only",
        exercise="3.8",
        bug="BUGS 48: a strided view is flattened to a copy that nobody sees",
        find=WRITE,
        replace="    flat.copy_(reduce(flat, groups, op))\n",
        killed_by=VIEW,
        cause="unchanged",
    ),
    Mutant(
        id="shards-integers-widen",
        exercise="3.8",
        bug="the sum of 32-bit integers becomes 64 bits wide on the way",
        find=OWN,
        replace='    own = versions.amax(0) if op == "max" else versions.sum(0)\n',
        killed_by=EVEN,
        cause="exception",
    ),
    Mutant(
        id="uneven-as-if-even",
        exercise="3.8",
        bug="shards on nodes of different size don't match",
        find=CHOOSE,
        replace="    reduce = reduce_by_shards\n",
        killed_by=UNEVEN,
        cause="mismatch",
    ),
    Mutant(
        id="uneven-all-go-across",
        exercise="3.8",
        bug="who is no leader joins its own group across as well",
        find=LEADER + OF_LEADERS,
        replace="    dist.all_reduce(result, REDUCE[op], group=groups.across)\n" + LEADER,
        killed_by=LEADERS,
        cause="not-the-leader",
    ),
    Mutant(
        id="uneven-leader-is-global-rank-0",
        exercise="3.8",
        bug="BUGS 1: group ranks are taken for global ranks",
        find=TO_LEADER,
        replace="    dist.reduce(result, 0, REDUCE[op], group=groups.node)\n",
        killed_by=UNEVEN,
        cause="exception",
    ),
    Mutant(
        id="uneven-only-leaders-know",
        exercise="3.8",
        bug="BUGS 44: the result never travels back from the leaders",
        find=SPREAD,
        replace="",
        killed_by=UNEVEN,
        cause="unchanged",
    ),
    Mutant(
        id="uneven-mean-of-means",
        exercise="3.8",
        bug="BUGS 35: the mean of the nodes' means, although they have different numbers of ranks",
        find=OF_LEADERS + LEADER_MEAN,
        replace='        if op == "mean":\n'
        "            result /= dist.get_world_size(groups.node) * len(groups.topology.nodes)\n"
        + OF_LEADERS,
        killed_by=UNEVEN,
        cause="wrong",
    ),
    Mutant(
        id="uneven-everybody-divides",
        exercise="3.8",
        bug="BUGS 21: the leader divides for the mean, and everybody again",
        find=SPREAD,
        replace=SPREAD + '    if op == "mean":\n        result /= groups.topology.world_size\n',
        killed_by=UNEVEN,
        cause="divided-twice",
    ),
    Mutant(
        id="uneven-flat-all-reduce",
        exercise="3.8",
        bug="BUGS 50: one all-reduce over all ranks where nodes have different sizes",
        find=BY_LEADERS,
        replace="    result = flat.clone()\n"
        "    dist.all_reduce(result, REDUCE[op])\n"
        '    return result / groups.topology.world_size if op == "mean" else result\n'
        "    dist.reduce(",
        killed_by=LEADERS,
        cause="too-many-bytes-between-nodes",
    ),
    Mutant(
        id="hierarchical-integer-mean",
        exercise="3.8",
        bug="the mean of integers is accepted",
        find='    if op == "mean" and not tensor.is_floating_point():\n',
        replace="    if False:\n",
        killed_by=BAD,
        cause="accepted",
    ),
    Mutant(
        id="hierarchical-late-check",
        exercise="3.8",
        bug="the operator is looked at after the first stage",
        find="    check_op(tensor, op)\n    if check:\n",
        replace="    dist.barrier(group=groups.node)\n    check_op(tensor, op)\n    if check:\n",
        killed_by=BAD,
        cause="late-check",
    ),
    Mutant(
        id="formula-ring-per-rank",
        exercise="3.8",
        bug="every rank of the ring is charged as if it sent to another node",
        find="    leaving = [sum((r + 1) % w not in ranks for r in ranks) for ranks in topology.nodes]\n",
        replace="    leaving = [len(ranks) for ranks in topology.nodes]\n",
        killed_by=FORMULA,
        cause="formula-ring",
    ),
    Mutant(
        id="formula-hierarchical-by-ranks",
        exercise="3.8",
        bug="the all-reduce between nodes is charged with the number of ranks",
        find="        return 2 * (n - 1) / n * nbytes\n",
        replace="        return 2 * (w - 1) / w * nbytes\n",
        killed_by=FORMULA,
        cause="formula-hierarchical",
    ),
    Mutant(
        id="groups-of-others",
        exercise="3.7",
        bug="a topology without some rank: those that it has wait for it in new_group",
        find="    if sorted(sum(topology.nodes, ())) != everyone:\n",
        replace="    if not everyone:\n",
        killed_by="test_groups_of_other_ranks_are_refused",
        cause="accepted",
    ),
    Mutant(
        id="hierarchical-check-ignored",
        exercise="3.8",
        bug="tensors are not compared, although it is asked for",
        find="    if check:\n        expect_alike([tensor])\n",
        replace="",
        killed_by="test_tensors_that_differ_are_refused_on_every_rank",
        cause="mismatch",
    ),
]
