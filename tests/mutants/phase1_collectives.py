"""Wrong implementations of exercises 1.7 to 1.9."""

from distlab.grading.wrong import Mutant

ROOT, ROOT_P2P = "test_root_combines_all_operators", "test_root_uses_point_to_point_only"
ROOT_VIEW, BOTH = "test_root_writes_into_the_callers_view", "test_direct_and_chain_combine"
DIRECT, CHAIN = (
    "test_direct_costs_what_the_formula_says",
    "test_chain_costs_what_the_formula_says",
)
MEDIAN = "test_warmup_repeats_and_median"
IN_ROOT = "        result = combine(values, op)\n        for peer in range(world_size):"
WRITE_ROOT = "    tensor.detach().copy_(result)\n    # --- exercise 1.7: end"
WRITE_CHAIN = "    tensor.detach().copy_(result)\n    # --- exercise 1.8: end"
NOT_ROOT = """    if rank != root:
        dist.send(result, group=group, group_dst=root)
        dist.recv(result, group=group, group_src=root)
"""
DIRECT_END = "    tensor.detach().copy_(combine(values, op))"
STOP = "        sync(device)\n        seconds.append(time.perf_counter() - begun)"

MUTANTS = [
    Mutant(
        id="root-new-tensor",
        exercise="1.7",
        bug="BUGS 47: the result is bound to a new tensor",
        find=WRITE_ROOT,
        replace="    tensor = result\n    # --- exercise 1.7: end",
        killed_by=ROOT,
        cause="unchanged",
    ),
    Mutant(
        id="root-only-root",
        exercise="1.7",
        bug="a reduce: only the root has the result",
        find="        dist.recv(result, group=group, group_src=root)\n",
        replace="",
        killed_by=ROOT,
        cause="hang",
    ),
    Mutant(
        id="root-mean-forgotten",
        exercise="1.7",
        bug="BUGS 20: the mean is not divided",
        find='    return result / len(values) if op == "mean" else result',
        replace="    return result",
        killed_by=ROOT,
        cause="summed",
    ),
    Mutant(
        id="root-mean-by-others",
        exercise="1.7",
        bug="the mean is divided by the number of messages",
        find='    return result / len(values) if op == "mean" else result',
        replace='    return result / max(1, len(values) - 1) if op == "mean" else result',
        killed_by=ROOT,
        cause="scaled",
    ),
    Mutant(
        id="root-misses-itself",
        exercise="1.7",
        bug="the root's own value is missing",
        find=IN_ROOT,
        replace="        result = combine([v for v in values if v is not result] or values, op)\n"
        "        for peer in range(world_size):",
        killed_by=ROOT,
        cause="missing-rank",
    ),
    Mutant(
        id="root-misses-last",
        exercise="1.7",
        bug="BUGS 44: off by one, the last rank's value is missing",
        find=IN_ROOT,
        replace="        result = combine(values[: max(1, world_size - 1)], op)\n"
        "        for peer in range(world_size):",
        killed_by=ROOT,
        cause="missing-rank",
    ),
    Mutant(
        id="root-min-is-max",
        exercise="1.7",
        bug="min combines like max",
        find='    "min": torch.minimum,',
        replace='    "min": torch.maximum,',
        killed_by=ROOT,
        cause="wrong",
    ),
    Mutant(
        id="root-calls-all-reduce",
        exercise="1.7",
        bug="BUGS 50: calls dist.all_reduce itself",
        find="    check_op(tensor, op)\n    rank, world_size = dist.get_rank(group), "
        "dist.get_world_size(group)\n    if not 0",
        replace="    check_op(tensor, op)\n    reduce = {'product': 'PRODUCT', 'max': 'MAX', "
        "'min': 'MIN'}.get(op, 'SUM')\n    rank, world_size = dist.get_rank(group), "
        "dist.get_world_size(group)\n    if op == 'sum' and tensor.is_contiguous():\n"
        "        dist.all_reduce(tensor, getattr(dist.ReduceOp, reduce), group=group)\n"
        "        return\n    if not 0",
        killed_by=ROOT_P2P,
        cause="forbidden-operator",
    ),
    Mutant(
        id="root-backend-call",
        exercise="1.7",
        bug="BUGS 50: the backend's all-reduce, past torch.distributed",
        find="    if not 0 <= root < world_size:",
        replace="    if op == 'sum' and tensor.is_contiguous() and tensor.numel():\n"
        "        pg = group or dist.group.WORLD\n"
        "        pg._get_backend(tensor.device).allreduce([tensor]).wait()\n"
        "        return\n    if not 0 <= root < world_size:",
        killed_by=ROOT_P2P,
        cause="forbidden-operator",
    ),
    Mutant(
        id="root-sends-twice",
        exercise="1.7",
        bug="every message is sent twice",
        find=NOT_ROOT,
        replace=NOT_ROOT.replace(
            "        dist.recv",
            "        dist.send(result, group=group, group_dst=root)\n        dist.recv",
            1,
        ),
        patches=[
            (
                "                dist.recv(value, group=group, group_src=peer)",
                "                dist.recv(value, group=group, group_src=peer)\n"
                "                dist.recv(value, group=group, group_src=peer)",
            )
        ],
        killed_by=ROOT_P2P,
        cause="too-many-bytes",
    ),
    Mutant(
        id="root-all-send-first",
        exercise="1.7",
        bug="BUGS 43: everybody, the root included, sends first",
        find="        values = []\n",
        replace="        if world_size > 1:\n"
        "            dist.send(result, group=group, group_dst=(rank + 1) % world_size)\n"
        "        values = []\n",
        killed_by=ROOT,
        cause="hang",
    ),
    Mutant(
        id="root-contiguous-only",
        exercise="1.7",
        bug="BUGS 48: a view is flattened to a copy that nobody sees",
        find=WRITE_ROOT,
        replace="    tensor.detach().contiguous().copy_(result)\n    # --- exercise 1.7: end",
        killed_by=ROOT_VIEW,
        cause="unchanged",
    ),
    Mutant(
        id="root-global-ranks",
        exercise="1.7",
        bug="BUGS 1: group ranks are taken for global ranks",
        find=NOT_ROOT,
        replace=NOT_ROOT.replace("group_dst", "dst").replace("group_src", "src"),
        killed_by="test_root_in_a_subgroup",
        cause="exception",
    ),
    Mutant(
        id="root-integer-mean",
        exercise="1.7",
        bug="the mean of integers is accepted",
        find='    if op == "mean" and not tensor.is_floating_point():',
        replace="    if False:",
        killed_by="test_root_refuses_bad_arguments",
        cause="accepted",
    ),
    Mutant(
        id="direct-not-waited",
        exercise="1.8",
        bug="BUGS 22: the handles are never waited for",
        find="    for handle in handles:\n        handle.wait()\n",
        replace="    time.sleep(0.05)\n",
        killed_by=DIRECT,
        cause="never-waited",
    ),
    Mutant(
        id="direct-sends-waited-only",
        exercise="1.8",
        bug="BUGS 22: only the receives are waited for",
        find="    for handle in handles:\n        handle.wait()\n",
        replace="    for handle in handles[: len(others)]:\n        handle.wait()\n",
        killed_by=DIRECT,
        cause="never-waited",
    ),
    Mutant(
        id="direct-send-buffer-reused",
        exercise="1.8",
        bug="BUGS 46: the send buffer is overwritten while in flight",
        find="    for handle in handles:\n        handle.wait()\n",
        replace="    for handle, peer in zip(handles, others):\n        handle.wait()\n"
        "        mine += values[peer]\n"
        "    for handle in handles[len(others) :]:\n        handle.wait()\n"
        "    tensor.detach().copy_(mine)\n    return\n",
        killed_by="test_direct_is_equal_to_the_last_bit",
        cause="overwritten-in-flight",
    ),
    Mutant(
        id="direct-own-order",
        exercise="1.8",
        bug="BUGS 30: each rank adds in its own order, replicas drift in the last bits",
        find=DIRECT_END,
        replace="    tensor.detach().copy_(combine([mine, *(values[p] for p in others)], op))",
        killed_by="test_direct_is_equal_to_the_last_bit",
        cause="order-of-summation",
    ),
    Mutant(
        id="direct-blocking-sends",
        exercise="1.8",
        bug="BUGS 43: blocking sends before the receives",
        find="    handles = [dist.irecv(values[peer], group=group, group_src=peer) for peer in others]\n"
        "    handles += [dist.isend(mine, group=group, group_dst=peer) for peer in others]\n",
        replace="    for peer in others:\n        dist.send(mine, group=group, group_dst=peer)\n"
        "    for peer in others:\n        dist.recv(values[peer], group=group, group_src=peer)\n"
        "    handles = []\n",
        killed_by=BOTH,
        cause="hang",
    ),
    Mutant(
        id="direct-send-first-ring",
        exercise="1.8",
        bug="BUGS 43: a ring in which every rank sends before it receives",
        find="    handles = [dist.irecv(values[peer], group=group, group_src=peer) for peer in others]\n"
        "    handles += [dist.isend(mine, group=group, group_dst=peer) for peer in others]\n",
        replace="    for k in range(1, world_size):\n"
        "        to, source = (rank + k) % world_size, (rank - k) % world_size\n"
        "        dist.send(mine, group=group, group_dst=to)\n"
        "        dist.recv(values[source], group=group, group_src=source)\n"
        "    handles = []\n",
        killed_by=BOTH,
        cause="hang",
    ),
    Mutant(
        id="direct-power-of-two",
        exercise="1.8",
        bug="BUGS 49: partners by XOR work for powers of two only",
        find="    others = [peer for peer in range(world_size) if peer != rank]\n    handles",
        replace="    others = [rank ^ k for k in range(1, world_size)]\n    handles",
        killed_by=BOTH,
        cause="exception",
    ),
    Mutant(
        id="direct-doubles-itself",
        exercise="1.8",
        bug="the own value is counted twice",
        find=DIRECT_END,
        replace="    extra = [mine] if op == 'sum' else []\n"
        "    tensor.detach().copy_(combine([*values, *extra], op))",
        killed_by=BOTH,
        cause="doubled-rank",
    ),
    Mutant(
        id="direct-gathers",
        exercise="1.8",
        bug="BUGS 29: an all-gather and a local sum",
        find="    handles = [dist.irecv(values[peer], group=group, group_src=peer) for peer in others]\n"
        "    handles += [dist.isend(mine, group=group, group_dst=peer) for peer in others]\n",
        replace="    dist.all_gather(values, mine.clone(), group=group)\n    handles = []\n",
        killed_by=DIRECT,
        cause="forbidden-operator",
    ),
    Mutant(
        id="chain-one-way",
        exercise="1.8",
        bug="BUGS 44: the result never travels back",
        find="        dist.recv(result, group=group, group_src=rank + 1)\n",
        replace="",
        patches=[
            (
                "    if rank > 0:\n        dist.send(result, group=group, group_dst=rank - 1)\n",
                "",
            )
        ],
        killed_by=BOTH,
        cause="unchanged",
    ),
    Mutant(
        id="chain-mean-each",
        exercise="1.8",
        bug="BUGS 21: the mean is divided on every rank on the way back",
        find='    elif op == "mean":\n        result = result / (last + 1)\n    if rank > 0:',
        replace='    if op == "mean":\n        result = result / (last + 1)\n    if rank > 0:',
        killed_by=BOTH,
        cause="divided-twice",
    ),
    Mutant(
        id="chain-is-a-root",
        exercise="1.8",
        bug="the chain sends everything to one rank",
        find="    check_op(tensor, op)\n    rank, last",
        replace="    return all_reduce_root(tensor, op, group=group)\n    rank, last",
        killed_by=CHAIN,
        cause="too-many-bytes",
    ),
    Mutant(
        id="chain-unmatched-send",
        exercise="1.8",
        bug="BUGS 42: the last rank also sends the result to rank 0, which expects it from its neighbour",
        find='    elif op == "mean":',
        replace="    elif last > 0 and dist.send(result, group=group, group_dst=0) is None:\n"
        '        pass\n    elif op == "mean":',
        killed_by=BOTH,
        cause="hang",
    ),
    Mutant(
        id="chain-second-receive-lost",
        exercise="1.8",
        bug="BUGS 43: the last rank also waits for a result",
        find='    elif op == "mean":',
        replace="    elif last > 0 and dist.recv(result, group=group, group_src=0) is None:\n"
        '        pass\n    elif op == "mean":',
        killed_by=BOTH,
        cause="hang",
    ),
    Mutant(
        id="cost-root-bytes",
        exercise="1.8",
        bug="the root's bytes are counted on every rank alike",
        find='"root": Cost(2 * (w - 1), 2 * (w - 1) * n, (w - 1) * n, 2 * (w - 1)),',
        replace='"root": Cost(2 * (w - 1), 2 * (w - 1) * n, 2 * n, 2 * (w - 1)),',
        killed_by="test_cost_table",
        cause="formula",
    ),
    Mutant(
        id="cost-ring-total",
        exercise="1.8",
        bug="BUGS 42: the ring is charged with whole tensors per hop",
        find="2 * (w - 1) / w * n, 2 * (w - 1)),",
        replace="2 * (w - 1) * n, 2 * (w - 1)),",
        killed_by="test_cost_table",
        cause="formula",
    ),
    Mutant(
        id="timer-no-sync",
        exercise="1.9",
        bug="BUGS 95: no synchronisation before the clock stops",
        find=STOP,
        replace="        seconds.append(time.perf_counter() - begun)",
        killed_by="test_queued_work_is_counted",
        cause="not-synchronised",
    ),
    Mutant(
        id="timer-no-sync-before",
        exercise="1.9",
        bug="BUGS 95: earlier work is charged to the timed call",
        find="        sync(device)\n        begun = time.perf_counter()",
        replace="        begun = time.perf_counter()",
        killed_by="test_work_of_before_is_not_counted",
        cause="not-synchronised-before",
    ),
    Mutant(
        id="timer-mean",
        exercise="1.9",
        bug="the mean instead of the median",
        find="    return statistics.median(slowest.tolist())",
        replace="    return statistics.mean(slowest.tolist())",
        killed_by=MEDIAN,
        cause="not-the-median",
    ),
    Mutant(
        id="timer-no-warmup",
        exercise="1.9",
        bug="no warm-up calls",
        find="    for _ in range(warmup):\n        fn()\n",
        replace="",
        killed_by=MEDIAN,
        cause="wrong-number-of-calls",
    ),
    Mutant(
        id="timer-own-time",
        exercise="1.9",
        bug="BUGS 96: each rank reports its own time",
        find="    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)\n",
        replace="",
        killed_by="test_slowest_rank_counts_everywhere",
        cause="own-time",
    ),
    Mutant(
        id="timer-no-barrier",
        exercise="1.9",
        bug="waiting for a late rank is counted",
        find="        dist.barrier(group=group)\n",
        replace="",
        killed_by="test_ranks_start_together",
        cause="no-barrier",
    ),
    Mutant(
        id="bandwidth-times-ranks",
        exercise="1.9",
        bug="BUGS 98: throughput W times too high",
        find="    algorithm = nbytes / seconds\n",
        replace="    algorithm = nbytes * world_size / seconds\n",
        killed_by="test_bandwidth_formulas",
        cause="per-rank-as-total",
    ),
    Mutant(
        id="bandwidth-bus-factor",
        exercise="1.9",
        bug="the bus factor of an all-gather",
        find="algorithm * 2 * (world_size - 1) / world_size",
        replace="algorithm * (world_size - 1) / world_size",
        killed_by="test_bandwidth_formulas",
        cause="formula",
    ),
    Mutant(
        id="share-of-the-rest",
        exercise="1.9",
        bug="the share is relative to the step without communication",
        find="(total - alone) / total)",
        replace="(total - alone) / alone)",
        killed_by="test_share_of_a_step",
        cause="share",
    ),
    Mutant(
        id="comparison-without-backend",
        exercise="1.9",
        bug="the backend's all-reduce is missing from the comparison",
        find='{**STRATEGIES, "backend": dist.all_reduce}',
        replace="STRATEGIES",
        killed_by="test_comparison_and_plot",
        cause="missing-rows",
    ),
]
