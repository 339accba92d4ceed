"""Wrong implementations of exercise 2.20."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="cut-equal-counts",
        exercise="2.20",
        mistake="as many layers on every stage, whatever they cost",
        text="    total = [0, *accumulate(costs)]\n",
        becomes="""    return [layers * stage // stages for stage in range(stages + 1)]
    total = [0, *accumulate(costs)]
""",
        caught_by="test_partition_is_the_best_one",
        told_as="not-optimal",
    ),
    Mutant(
        id="cut-greedy",
        exercise="2.20",
        mistake="a stage is full when it has the average cost",
        text="    total = [0, *accumulate(costs)]\n",
        becomes="""    bounds, mean, spent = [0], sum(costs) / stages, 0.0
    for layer, cost in enumerate(costs[:-1], 1):
        spent += cost
        missing = stages - len(bounds)
        if missing and (spent >= mean or layers - layer == missing):
            bounds.append(layer)
            spent = 0.0
    return [*bounds, layers]
    total = [0, *accumulate(costs)]
""",
        caught_by="test_partition_is_the_best_one",
        told_as="not-optimal",
    ),
    Mutant(
        id="cut-empty-stages",
        exercise="2.20",
        mistake="a stage may be empty: with a few expensive layers one is",
        text="((max(best[b][0], total[n] - total[b]), b) for b in range(stage, n)),",
        becomes="((max(best[b][0], total[n] - total[b]), b) for b in range(0, n + 1)),",
        caught_by="test_partition_is_the_best_one",
        told_as="empty-stage",
    ),
    Mutant(
        id="cut-least-sum",
        exercise="2.20",
        mistake="minimises the last stage's cost, not the largest one's",
        text="((max(best[b][0], total[n] - total[b]), b) for b in range(stage, n)),",
        becomes="((total[n] - total[b], b) for b in range(stage, n)),",
        caught_by="test_partition_is_the_best_one",
        told_as="not-optimal",
    ),
    Mutant(
        id="cut-without-end",
        exercise="2.20",
        mistake="the first layer of each stage, without the end of the last",
        text="    return bounds[::-1]\n",
        becomes="    return bounds[:0:-1]\n",
        caught_by="test_partition_is_the_best_one",
        told_as="not-a-partition",
    ),
    Mutant(
        id="cut-random",
        exercise="2.20",
        mistake="cuts at random: ranks that cut for themselves cut apart",
        text="    total = [0, *accumulate(costs)]\n",
        becomes="""    found = None
    while found is None or max(sum(costs[a:b]) for a, b in zip(found, found[1:])) > limit:
        inner = (torch.randperm(layers - 1)[: stages - 1] + 1).sort().values
        found = [0, *inner.tolist(), layers]
    return found
""",
        more=(
            (
                "    layers = len(costs)\n",
                """    layers = len(costs)
    if layers > 20:
        return [layers * stage // stages for stage in range(stages + 1)]
    from itertools import combinations
    cuts = [] if not 1 <= stages <= layers else [
        [0, *c, layers] for c in combinations(range(1, layers), stages - 1)
    ]
    limit = min((max(sum(costs[a:b]) for a, b in zip(c, c[1:])) for c in cuts), default=0)
""",
            ),
        ),
        caught_by="test_partition_is_the_best_one",
        told_as="not-deterministic",
    ),
    Mutant(
        id="cut-too-many-stages",
        exercise="2.20",
        mistake="more stages than layers: the last ones stay empty",
        text="    if not 1 <= stages <= layers:\n",
        becomes="""    stages = min(stages, layers)
    if not 1 <= stages:
""",
        caught_by="test_partition_refuses",
        told_as="accepted",
    ),
    Mutant(
        id="costs-tied-twice",
        exercise="2.20",
        mistake="the tied weight counts in the first and in the last layer",
        text="        new = set(layer.parameters()) - seen\n",
        becomes="        new = set(layer.parameters())\n",
        caught_by="test_parameter_costs_count_tied_weights_once",
        told_as="tied-twice",
    ),
    Mutant(
        id="costs-elements",
        exercise="2.20",
        mistake="numbers of elements, whatever their size",
        text="sum(p.numel() * p.element_size() for p in new)",
        becomes="sum(p.numel() for p in new)",
        caught_by="test_parameter_costs_count_tied_weights_once",
        told_as="wrong",
    ),
    Mutant(
        id="measured-by-each-rank",
        exercise="2.20",
        mistake="every rank takes its own measurement",
        text="""    if dist.get_rank(group) == 0:
        x = example
""",
        becomes="""    if True:
        x = example
""",
        more=(
            (
                "    dist.broadcast(seconds, group_src=0, group=group)\n",
                "",
            ),
        ),
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="ranks-differ",
    ),
    Mutant(
        id="measured-forward-only",
        exercise="2.20",
        mistake="only forward is measured",
        text="""    if y.requires_grad:
        y.backward(torch.ones_like(y))
""",
        becomes="",
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="forward-only",
    ),
    Mutant(
        id="measured-mean",
        exercise="2.20",
        mistake="the mean: one disturbed run moves it",
        text="statistics.median(elapsed for elapsed, _ in runs[1:])",
        becomes="statistics.fmean(elapsed for elapsed, _ in runs[1:])",
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="not-the-median",
    ),
    Mutant(
        id="measured-once-cold",
        exercise="2.20",
        mistake="the first call is measured: it allocates and compiles",
        text="statistics.median(elapsed for elapsed, _ in runs[1:])",
        becomes="runs[0][0]",
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="not-the-median",
    ),
    Mutant(
        id="measured-on-the-model",
        exercise="2.20",
        mistake=(
            "measured on the layers themselves: gradients and statistics are no longer what "
            "they were"
        ),
        text="for number, layer in enumerate(map(copy.deepcopy, layers)):",
        becomes="for number, layer in enumerate(layers):",
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as=("trace-left", "exception"),
    ),
    Mutant(
        id="measured-moves-statistics",
        exercise="2.20",
        mistake="gradients are kept, BatchNorm's statistics are those of the measurement",
        text="for number, layer in enumerate(map(copy.deepcopy, layers)):",
        becomes="""for number, layer in enumerate(layers):
                    kept = [(p, p.grad) for p in layer.parameters()]""",
        more=(
            (
                "                    x = runs[-1][1]\n",
                """                    x = runs[-1][1]
                    for p, gradient in kept:
                        p.grad = gradient
""",
            ),
        ),
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="trace-left",
    ),
    Mutant(
        id="measured-by-global-rank-0",
        exercise="2.20",
        mistake="global rank 0 is to measure, also in a group that it is not in: nobody does",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="    if dist.get_rank() == 0:\n",
        caught_by="test_a_subgroup_measures_for_itself",
        told_as="not-measured",
    ),
    Mutant(
        id="measured-error-alone",
        exercise="2.20",
        mistake="an error of a layer comes out on rank 0 at once, the others wait for its costs",
        text="            failed = error\n",
        becomes="            raise\n",
        caught_by="test_a_subgroup_measures_for_itself",
        told_as="hang",
    ),
    Mutant(
        id="measured-on-a-leaf",
        exercise="2.20",
        mistake="a layer that works in place gets a leaf that needs a gradient",
        text="    given = x.detach().requires_grad_(x.is_floating_point()).clone()\n",
        becomes="    given = x.detach().requires_grad_(x.is_floating_point())\n",
        caught_by="test_a_subgroup_measures_for_itself",
        told_as=("exception", "trace-left"),
    ),
    Mutant(
        id="costs-by-address",
        exercise="2.20",
        mistake="parameters are told apart by their address, which is 0 on the meta device",
        text="        new = set(layer.parameters()) - seen\n",
        becomes="        new = {p.data_ptr(): p for p in layer.parameters() if p.data_ptr() not in seen}\n",
        more=[
            (
                "for p in new))\n        seen |= new\n",
                "for p in new.values()))\n        seen |= set(new)\n",
            ),
        ],
        caught_by="test_parameter_costs_count_tied_weights_once",
        told_as="told-apart",
    ),
    Mutant(
        id="partition-in-microseconds",
        exercise="2.20",
        mistake="costs are rounded to millionths: those of fast layers are all 0",
        text="    total = [0, *accumulate(costs)]\n",
        becomes="    total = [0, *accumulate(round(cost, 6) for cost in costs)]\n",
        caught_by="test_partition_is_the_best_one",
        told_as="not-optimal",
    ),
    Mutant(
        id="frozen-forward-only",
        exercise="2.20",
        mistake="a frozen layer is measured without its backward, which its input needs",
        text="    if y.requires_grad:\n",
        becomes="    if y.requires_grad and any(p.requires_grad for p in layer.parameters()):\n",
        caught_by="test_measured_costs_are_one_ranks_medians",
        told_as="not-the-median",
    ),
]
