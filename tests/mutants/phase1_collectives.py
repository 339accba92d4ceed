"""Wrong implementations of exercises 1.7 to 1.9."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="chain-times-one-over-w",
        exercise="1.8",
        mistake="the mean is a product with 1/W: other bits where W is no power of two",
        text="        result = result / (last + 1)\n",
        becomes="        result = result * (1 / (last + 1))\n",
        caught_by="test_chain_is_equal_to_the_last_bit",
        told_as="order-of-summation",
    ),
    Mutant(
        id="direct-in-float32",
        exercise="1.8",
        mistake="16-bit values are combined in float32 and rounded once",
        text="    tensor.detach().copy_(combine(values, op))\n",
        becomes="""    wide = [v.float() if tensor.element_size() == 2 else v for v in values]
    tensor.detach().copy_(combine(wide, op))
""",
        caught_by="test_direct_is_equal_to_the_last_bit",
        told_as="other-dtype",
    ),
    Mutant(
        id="root-mean-of-complex",
        exercise="1.7",
        mistake="only the mean of integers is refused, that of complex numbers is taken",
        text="    check_op(tensor, op)\n    rank, world_size = dist.get_rank(group), dist.get_world"
        "_size(group)\n    if not 0 <=",
        becomes="    check_op(tensor.real if tensor.is_complex() else tensor, op)\n    rank, "
        "world_size = dist.get_rank(group), dist.get_world_size(group)\n    if not 0 <=",
        caught_by="test_root_refuses_bad_arguments",
        told_as="accepted",
    ),
    Mutant(
        id="root-adds-as-they-come",
        exercise="1.7",
        mistake="the root begins with its own value: other bits than in rank order",
        text="        result = combine(values, op)\n",
        becomes="        result = combine([values[root], *values[:root], *values[root + 1 :]], op)\n",
        caught_by="test_root_combines_in_rank_order",
        told_as="order-of-summation",
    ),
    Mutant(
        id="root-copies-into-leaf",
        exercise="1.7",
        mistake="a parameter that requires grad can't be written to",
        text="    tensor.detach().copy_(result)\n    # --- exercise 1.7: end",
        becomes="    tensor.copy_(result)\n    # --- exercise 1.7: end",
        caught_by="test_root_on_any_tensor_and_group",
        told_as="exception",
    ),
    Mutant(
        id="direct-in-float64",
        exercise="1.8",
        mistake="values are combined in float64: other bits, and large integers lose digits",
        text="    tensor.detach().copy_(combine(values, op))\n",
        becomes="    tensor.detach().copy_(combine([v.double() for v in values], op))\n",
        caught_by="test_direct_and_chain_on_views_and_groups",
        told_as="wrong",
    ),
    Mutant(
        id="chain-of-global-ranks",
        exercise="1.8",
        mistake="the left neighbour is a global rank, not one of the group",
        text="        dist.recv(partial, group=group, group_src=rank - 1)\n",
        becomes="        dist.recv(partial, rank - 1, group=group)\n",
        caught_by="test_chain_is_equal_to_the_last_bit",
        told_as="hang",
    ),
    Mutant(
        id="root-new-tensor",
        exercise="1.7",
        mistake="the result is bound to a new tensor",
        text="""    tensor.detach().copy_(result)
    # --- exercise 1.7: end""",
        becomes="""    tensor = result
    # --- exercise 1.7: end""",
        caught_by="test_root_combines_all_operators",
        told_as="unchanged",
    ),
    Mutant(
        id="root-only-root",
        exercise="1.7",
        mistake="a reduce: only the root has the result",
        text="        dist.recv(result, group=group, group_src=root)\n",
        becomes="",
        caught_by="test_root_combines_all_operators",
        told_as="hang",
    ),
    Mutant(
        id="root-mean-forgotten",
        exercise="1.7",
        mistake="the mean is not divided",
        text='    return result / len(values) if op == "mean" else result',
        becomes="    return result",
        caught_by="test_root_combines_all_operators",
        told_as="summed",
    ),
    Mutant(
        id="root-mean-by-others",
        exercise="1.7",
        mistake="the mean is divided by the number of messages",
        text='    return result / len(values) if op == "mean" else result',
        becomes='    return result / max(1, len(values) - 1) if op == "mean" else result',
        caught_by="test_root_combines_all_operators",
        told_as="scaled",
    ),
    Mutant(
        id="root-misses-itself",
        exercise="1.7",
        mistake="the root's own value is missing",
        text="""        result = combine(values, op)
        for peer in range(world_size):""",
        becomes="""        result = combine([v for v in values if v is not result] or values, op)
        for peer in range(world_size):""",
        caught_by="test_root_combines_all_operators",
        told_as="missing-rank",
    ),
    Mutant(
        id="root-misses-last",
        exercise="1.7",
        mistake="off by one, the last rank's value is missing",
        text="""        result = combine(values, op)
        for peer in range(world_size):""",
        becomes="""        result = combine(values[: max(1, world_size - 1)], op)
        for peer in range(world_size):""",
        caught_by="test_root_combines_all_operators",
        told_as="missing-rank",
    ),
    Mutant(
        id="root-min-is-max",
        exercise="1.7",
        mistake="min combines like max",
        text='    "min": torch.minimum,',
        becomes='    "min": torch.maximum,',
        caught_by="test_root_combines_all_operators",
        told_as="wrong",
    ),
    Mutant(
        id="root-calls-all-reduce",
        exercise="1.7",
        mistake="calls dist.all_reduce itself",
        text="""    check_op(tensor, op)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if not 0""",
        becomes="""    check_op(tensor, op)
    reduce = {'product': 'PRODUCT', 'max': 'MAX', 'min': 'MIN'}.get(op, 'SUM')
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if op == 'sum' and tensor.is_contiguous():
        dist.all_reduce(tensor, getattr(dist.ReduceOp, reduce), group=group)
        return
    if not 0""",
        caught_by="test_root_uses_point_to_point_only",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="root-backend-call",
        exercise="1.7",
        mistake="the backend's all-reduce, past torch.distributed",
        text="    if not 0 <= root < world_size:",
        becomes="""    if op == 'sum' and tensor.is_contiguous() and tensor.numel():
        pg = group or dist.group.WORLD
        pg._get_backend(tensor.device).allreduce([tensor]).wait()
        return
    if not 0 <= root < world_size:""",
        caught_by="test_root_uses_point_to_point_only",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="root-sends-twice",
        exercise="1.7",
        mistake="every message is sent twice",
        text="""    if rank != root:
        dist.send(result, group=group, group_dst=root)
        dist.recv(result, group=group, group_src=root)
""",
        becomes="""    if rank != root:
        dist.send(result, group=group, group_dst=root)
        dist.send(result, group=group, group_dst=root)
        dist.recv(result, group=group, group_src=root)
""",
        more=(
            (
                "                dist.recv(value, group=group, group_src=peer)",
                """                dist.recv(value, group=group, group_src=peer)
                dist.recv(value, group=group, group_src=peer)""",
            ),
        ),
        caught_by="test_root_uses_point_to_point_only",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="root-all-send-first",
        exercise="1.7",
        mistake="everybody, the root included, sends first",
        text="        values = []\n",
        becomes="""        if world_size > 1:
            dist.send(result, group=group, group_dst=(rank + 1) % world_size)
        values = []
""",
        caught_by="test_root_combines_all_operators",
        told_as="hang",
    ),
    Mutant(
        id="root-contiguous-only",
        exercise="1.7",
        mistake="a view is flattened to a copy that nobody sees",
        text="""    tensor.detach().copy_(result)
    # --- exercise 1.7: end""",
        becomes="""    tensor.detach().contiguous().copy_(result)
    # --- exercise 1.7: end""",
        caught_by="test_root_on_any_tensor_and_group",
        told_as="unchanged",
    ),
    Mutant(
        id="root-global-ranks",
        exercise="1.7",
        mistake="group ranks are taken for global ranks",
        text="""    if rank != root:
        dist.send(result, group=group, group_dst=root)
        dist.recv(result, group=group, group_src=root)
""",
        becomes="""    if rank != root:
        dist.send(result, group=group, dst=root)
        dist.recv(result, group=group, src=root)
""",
        caught_by="test_root_on_any_tensor_and_group",
        told_as="exception",
    ),
    Mutant(
        id="root-integer-mean",
        exercise="1.7",
        mistake="the mean of integers is accepted",
        text='    if op == "mean" and not tensor.is_floating_point():',
        becomes="    if False:",
        caught_by="test_root_refuses_bad_arguments",
        told_as="accepted",
    ),
    Mutant(
        id="direct-not-waited",
        exercise="1.8",
        mistake="the handles are never waited for",
        text="""    for handle in handles:
        handle.wait()
""",
        becomes="    import time\n\n    time.sleep(0.05)\n",
        caught_by="test_direct_costs_what_the_formula_says",
        told_as="never-waited",
    ),
    Mutant(
        id="direct-sends-waited-only",
        exercise="1.8",
        mistake="only the receives are waited for",
        text="""    for handle in handles:
        handle.wait()
""",
        becomes="""    for handle in handles[: len(others)]:
        handle.wait()
""",
        caught_by="test_direct_costs_what_the_formula_says",
        told_as="never-waited",
    ),
    Mutant(
        id="direct-send-buffer-reused",
        exercise="1.8",
        mistake="the send buffer is overwritten while in flight",
        text="""    for handle in handles:
        handle.wait()
""",
        becomes="""    for handle, peer in zip(handles, others):
        handle.wait()
        mine += values[peer]
    for handle in handles[len(others) :]:
        handle.wait()
    tensor.detach().copy_(mine)
    return
""",
        caught_by="test_direct_is_equal_to_the_last_bit",
        told_as="overwritten-in-flight",
    ),
    Mutant(
        id="direct-own-order",
        exercise="1.8",
        mistake="each rank adds in its own order, replicas drift in the last bits",
        text="    tensor.detach().copy_(combine(values, op))",
        becomes="    tensor.detach().copy_(combine([mine, *(values[p] for p in others)], op))",
        caught_by="test_direct_is_equal_to_the_last_bit",
        told_as="order-of-summation",
    ),
    Mutant(
        id="direct-blocking-sends",
        exercise="1.8",
        mistake="blocking sends before the receives",
        text=(
            "    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer "
            "in others]\n"
            "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in "
            "others]\n"
            "    handles = dist.batch_isend_irecv(batch) if batch else []\n"
        ),
        becomes="""    for peer in others:
        dist.send(mine, group=group, group_dst=peer)
    for peer in others:
        dist.recv(values[peer], group=group, group_src=peer)
    handles = []
""",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
    ),
    Mutant(
        id="direct-send-first-ring",
        exercise="1.8",
        mistake="a ring in which every rank sends before it receives",
        text=(
            "    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer "
            "in others]\n"
            "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in "
            "others]\n"
            "    handles = dist.batch_isend_irecv(batch) if batch else []\n"
        ),
        becomes="""    for k in range(1, world_size):
        to, source = (rank + k) % world_size, (rank - k) % world_size
        dist.send(mine, group=group, group_dst=to)
        dist.recv(values[source], group=group, group_src=source)
    handles = []
""",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
    ),
    Mutant(
        id="direct-power-of-two",
        exercise="1.8",
        mistake="partners by XOR work for powers of two only",
        text="""    others = [peer for peer in range(world_size) if peer != rank]
    batch =""",
        becomes="""    others = [rank ^ k for k in range(1, world_size)]
    batch =""",
        caught_by="test_direct_and_chain_combine",
        told_as="exception",
    ),
    Mutant(
        id="direct-doubles-itself",
        exercise="1.8",
        mistake="the own value is counted twice",
        text="    tensor.detach().copy_(combine(values, op))",
        becomes="""    extra = [mine] if op == 'sum' else []
    tensor.detach().copy_(combine([*values, *extra], op))""",
        caught_by="test_direct_and_chain_combine",
        told_as="doubled-rank",
    ),
    Mutant(
        id="direct-gathers",
        exercise="1.8",
        mistake="an all-gather and a local sum",
        text=(
            "    batch = [dist.P2POp(dist.irecv, values[peer], group=group, group_peer=peer) for peer "
            "in others]\n"
            "    batch += [dist.P2POp(dist.isend, mine, group=group, group_peer=peer) for peer in "
            "others]\n"
            "    handles = dist.batch_isend_irecv(batch) if batch else []\n"
        ),
        becomes="""    dist.all_gather(values, mine.clone(), group=group)
    handles = []
""",
        caught_by="test_direct_costs_what_the_formula_says",
        told_as="forbidden-operator",
    ),
    Mutant(
        id="chain-one-way",
        exercise="1.8",
        mistake="the result never travels back",
        text="        dist.recv(result, group=group, group_src=rank + 1)\n",
        becomes="",
        more=(
            (
                """    if rank > 0:
        dist.send(result, group=group, group_dst=rank - 1)
""",
                "",
            ),
        ),
        caught_by="test_direct_and_chain_combine",
        told_as="unchanged",
    ),
    Mutant(
        id="chain-mean-each",
        exercise="1.8",
        mistake="the mean is divided on every rank on the way back",
        text="""    elif op == "mean":
        result = result / (last + 1)
    if rank > 0:""",
        becomes="""    if op == "mean":
        result = result / (last + 1)
    if rank > 0:""",
        caught_by="test_direct_and_chain_combine",
        told_as="divided-twice",
    ),
    Mutant(
        id="chain-is-a-root",
        exercise="1.8",
        mistake="the chain sends everything to one rank",
        text="""    check_op(tensor, op)
    rank, last""",
        becomes="""    return all_reduce_root(tensor, op, group=group)
    rank, last""",
        caught_by="test_chain_costs_what_the_formula_says",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="chain-unmatched-send",
        exercise="1.8",
        mistake=(
            "the last rank also sends the result to rank 0, which expects it from its neighbour"
        ),
        text='    elif op == "mean":',
        becomes="""    elif last > 0 and dist.send(result, group=group, group_dst=0) is None:
        pass
    elif op == "mean":""",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
    ),
    Mutant(
        id="chain-second-receive-lost",
        exercise="1.8",
        mistake="the last rank also waits for a result",
        text='    elif op == "mean":',
        becomes="""    elif last > 0 and dist.recv(result, group=group, group_src=0) is None:
        pass
    elif op == "mean":""",
        caught_by="test_direct_and_chain_combine",
        told_as="hang",
    ),
    Mutant(
        id="cost-root-bytes",
        exercise="1.8",
        mistake="the root's bytes are counted on every rank alike",
        text='"root": Cost(2 * (w - 1), 2 * (w - 1) * n, (w - 1) * n, 2 * (w - 1)),',
        becomes='"root": Cost(2 * (w - 1), 2 * (w - 1) * n, 2 * n, 2 * (w - 1)),',
        caught_by="test_cost_table",
        told_as="formula",
    ),
    Mutant(
        id="cost-ring-total",
        exercise="1.8",
        mistake="the ring is charged with whole tensors per hop",
        text="2 * (w - 1) / w * n, 2 * (w - 1)),",
        becomes="2 * (w - 1) * n, 2 * (w - 1)),",
        caught_by="test_cost_table",
        told_as="formula",
    ),
    Mutant(
        id="timer-no-sync",
        exercise="1.9",
        mistake="no synchronisation before the clock stops",
        text="""        sync(device)
        seconds.append(time.perf_counter() - begun)""",
        becomes="        seconds.append(time.perf_counter() - begun)",
        caught_by="test_queued_work_is_counted",
        told_as="not-synchronised",
    ),
    Mutant(
        id="timer-no-sync-before",
        exercise="1.9",
        mistake="earlier work is charged to the timed call",
        text="""        sync(device)
        begun = time.perf_counter()""",
        becomes="        begun = time.perf_counter()",
        caught_by="test_work_of_before_is_not_counted",
        told_as="not-synchronised-before",
    ),
    Mutant(
        id="timer-mean",
        exercise="1.9",
        mistake="the mean instead of the median",
        text="    return statistics.median(slowest.tolist())",
        becomes="    return statistics.mean(slowest.tolist())",
        caught_by="test_warmup_repeats_and_median",
        told_as="not-the-median",
    ),
    Mutant(
        id="timer-no-warmup",
        exercise="1.9",
        mistake="no warm-up calls",
        text="""    for _ in range(warmup):
        fn()
""",
        becomes="",
        caught_by="test_warmup_repeats_and_median",
        told_as="wrong-number-of-calls",
    ),
    Mutant(
        id="timer-own-time",
        exercise="1.9",
        mistake="each rank reports its own time",
        text="    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)\n",
        becomes="",
        caught_by="test_slowest_rank_counts_everywhere",
        told_as="own-time",
    ),
    Mutant(
        id="timer-no-barrier",
        exercise="1.9",
        mistake="waiting for a late rank is counted",
        text="        dist.barrier(group=group)\n",
        becomes="",
        caught_by="test_ranks_start_together",
        told_as="no-barrier",
    ),
    Mutant(
        id="bandwidth-times-ranks",
        exercise="1.9",
        mistake="throughput W times too high",
        text="    algorithm = nbytes / seconds\n",
        becomes="    algorithm = nbytes * world_size / seconds\n",
        caught_by="test_bandwidth_formulas",
        told_as="per-rank-as-total",
    ),
    Mutant(
        id="bandwidth-bus-factor",
        exercise="1.9",
        mistake="the bus factor of an all-gather",
        text="algorithm * 2 * (world_size - 1) / world_size",
        becomes="algorithm * (world_size - 1) / world_size",
        caught_by="test_bandwidth_formulas",
        told_as="formula",
    ),
    Mutant(
        id="share-of-the-rest",
        exercise="1.9",
        mistake="the share is relative to the step without communication",
        text="(total - alone) / total)",
        becomes="(total - alone) / alone)",
        caught_by="test_share_of_a_step",
        told_as="share",
    ),
    Mutant(
        id="comparison-without-backend",
        exercise="1.9",
        mistake="the backend's all-reduce is missing from the comparison",
        text='{**STRATEGIES, "backend": dist.all_reduce}',
        becomes="STRATEGIES",
        caught_by="test_comparison_of_strategies",
        told_as="missing-rows",
    ),
    Mutant(
        id="median-upper",
        exercise="1.9",
        mistake="of an even number of repeats the upper one of the middle is taken",
        text="    return statistics.median(slowest.tolist())\n",
        becomes="    return statistics.median_high(slowest.tolist())\n",
        caught_by="test_warmup_repeats_and_median",
        told_as="not-the-median",
    ),
    Mutant(
        id="plot-bandwidths",
        exercise="1.9",
        mistake="the picture shows sizes along both axes",
        text="[row.seconds * 1e3 for row in line]",
        becomes="sizes",
        caught_by="test_picture_of_costs",
        told_as="lines",
    ),
    Mutant(
        id="plot-without-legend",
        exercise="1.9",
        mistake="nobody can tell which line is which",
        text="    axes.legend()\n",
        becomes="",
        caught_by="test_picture_of_costs",
        told_as="legend",
    ),
    Mutant(
        id="comparison-of-the-world",
        exercise="1.9",
        mistake="the strategies are timed among all ranks instead of the group",
        text="            call = lambda f=all_reduce, t=tensor: f(t, group=group)\n",
        becomes="            call = lambda f=all_reduce, t=tensor: f(t)\n",
        caught_by="test_times_of_two_groups",
        told_as=("mismatch", "hang"),
    ),
    Mutant(
        id="time-median-of-each-rank",
        exercise="1.9",
        mistake="the slowest rank's median: too small where another rank is slow in each run",
        text="    return statistics.median(slowest.tolist())\n",
        becomes="""    own = torch.tensor(statistics.median(seconds), dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
    return own.item()
""",
        caught_by="test_slowest_rank_counts_everywhere",
        told_as="own-time",
    ),
    Mutant(
        id="time-sync-before-barrier",
        exercise="1.9",
        mistake="what the barrier queues on the device is timed",
        text="        dist.barrier(group=group)\n        sync(device)\n",
        becomes="        sync(device)\n        dist.barrier(group=group)\n",
        caught_by="test_ranks_start_together",
        told_as="not-synchronised-before",
    ),
    Mutant(
        id="compare-bus-of-the-world",
        exercise="1.9",
        mistake="the bus bandwidth is that of all ranks instead of the group's",
        text="    world_size = dist.get_world_size(group)\n    rows",
        becomes="    world_size = dist.get_world_size()\n    rows",
        caught_by="test_times_of_two_groups",
        told_as="wrong-group",
    ),
    Mutant(
        id="plot-always-png",
        exercise="1.9",
        mistake="the picture is PNG, whatever the name of the file says",
        text="    figure.savefig(path, dpi=150)\n",
        becomes='    figure.savefig(path, dpi=150, format="png")\n',
        caught_by="test_picture_of_costs",
        told_as="no-plot",
    ),
    Mutant(
        id="plot-other-unit",
        exercise="1.9",
        mistake="seconds are drawn, milliseconds are written beside them",
        text="[row.seconds * 1e3 for row in line]",
        becomes="[row.seconds for row in line]",
        caught_by="test_picture_of_costs",
        told_as="labels",
    ),
    Mutant(
        id="time-one-barrier",
        exercise="1.9",
        mistake="the ranks meet before the first run only",
        text="        dist.barrier(group=group)\n        sync(device)\n",
        becomes="        if not seconds:\n            dist.barrier(group=group)\n        sync(device)\n",
        caught_by="test_slowest_rank_counts_everywhere",
        told_as="no-barrier",
    ),
]
