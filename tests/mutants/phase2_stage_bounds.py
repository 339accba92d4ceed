"""Wrong implementations of exercise 2.20."""

from distlab.grading.wrong import Mutant

CUT, REFUSE = "test_partition_is_the_best_one", "test_partition_refuses"
BYTES, MEASURED = (
    "test_parameter_costs_count_tied_weights_once",
    "test_measured_costs_are_one_ranks_medians",
)
SUBGROUP = "test_a_subgroup_measures_for_itself"

TOTAL = "    total = [0, *accumulate(costs)]\n"
SMALLEST = "((max(best[b][0], total[n] - total[b]), b) for b in range(stage, n)),"
BACK = "    return bounds[::-1]\n"
MEASURE = "    if dist.get_rank(group) == 0:\n        x = example\n"
AGREE = "    dist.broadcast(seconds, group_src=0, group=group)\n"
MEDIAN = "statistics.median(elapsed for elapsed, _ in runs[1:])"

MUTANTS = [
    Mutant(
        id="cut-equal-counts",
        exercise="2.20",
        bug="as many layers on every stage, whatever they cost",
        find=TOTAL,
        replace="    return [layers * stage // stages for stage in range(stages + 1)]\n" + TOTAL,
        killed_by=CUT,
        cause="not-optimal",
    ),
    Mutant(
        id="cut-greedy",
        exercise="2.20",
        bug="a stage is full when it has the average cost",
        find=TOTAL,
        replace="    bounds, mean, spent = [0], sum(costs) / stages, 0.0\n"
        "    for layer, cost in enumerate(costs[:-1], 1):\n"
        "        spent += cost\n"
        "        missing = stages - len(bounds)\n"
        "        if missing and (spent >= mean or layers - layer == missing):\n"
        "            bounds.append(layer)\n"
        "            spent = 0.0\n"
        "    return [*bounds, layers]\n" + TOTAL,
        killed_by=CUT,
        cause="not-optimal",
    ),
    Mutant(
        id="cut-empty-stages",
        exercise="2.20",
        bug="a stage may be empty: with a few expensive layers one is",
        find=SMALLEST,
        replace="((max(best[b][0], total[n] - total[b]), b) for b in range(0, n + 1)),",
        killed_by=CUT,
        cause="empty-stage",
    ),
    Mutant(
        id="cut-least-sum",
        exercise="2.20",
        bug="minimises the last stage's cost, not the largest one's",
        find=SMALLEST,
        replace="((total[n] - total[b], b) for b in range(stage, n)),",
        killed_by=CUT,
        cause="not-optimal",
    ),
    Mutant(
        id="cut-without-end",
        exercise="2.20",
        bug="the first layer of each stage, without the end of the last",
        find=BACK,
        replace="    return bounds[:0:-1]\n",
        killed_by=CUT,
        cause="not-a-partition",
    ),
    Mutant(
        id="cut-random",
        exercise="2.20",
        bug="cuts at random: ranks that cut for themselves cut apart",
        find=TOTAL,
        replace="    found = None\n"
        "    while found is None or max(sum(costs[a:b]) for a, b in zip(found, found[1:])) > limit:\n"
        "        inner = (torch.randperm(layers - 1)[: stages - 1] + 1).sort().values\n"
        "        found = [0, *inner.tolist(), layers]\n"
        "    return found\n",
        killed_by=CUT,
        cause="not-deterministic",
        patches=(
            (
                "    layers = len(costs)\n",
                "    layers = len(costs)\n"
                "    if layers > 20:\n"
                "        return [layers * stage // stages for stage in range(stages + 1)]\n"
                "    from itertools import combinations\n"
                "    cuts = [] if not 1 <= stages <= layers else [\n"
                "        [0, *c, layers] for c in combinations(range(1, layers), stages - 1)\n"
                "    ]\n"
                "    limit = min((max(sum(costs[a:b]) for a, b in zip(c, c[1:])) for c in cuts), default=0)\n",
            ),
        ),
    ),
    Mutant(
        id="cut-too-many-stages",
        exercise="2.20",
        bug="more stages than layers: the last ones stay empty",
        find="    if not 1 <= stages <= layers:\n",
        replace="    stages = min(stages, layers)\n    if not 1 <= stages:\n",
        killed_by=REFUSE,
        cause="accepted",
    ),
    Mutant(
        id="costs-tied-twice",
        exercise="2.20",
        bug="the tied weight counts in the first and in the last layer",
        find="        new = set(layer.parameters()) - seen\n",
        replace="        new = set(layer.parameters())\n",
        killed_by=BYTES,
        cause="tied-twice",
    ),
    Mutant(
        id="costs-elements",
        exercise="2.20",
        bug="numbers of elements, whatever their size",
        find="sum(p.numel() * p.element_size() for p in new)",
        replace="sum(p.numel() for p in new)",
        killed_by=BYTES,
        cause="wrong",
    ),
    Mutant(
        id="measured-by-each-rank",
        exercise="2.20",
        bug="BUGS 7: every rank takes its own measurement",
        find=MEASURE,
        replace="    if True:\n        x = example\n",
        killed_by=MEASURED,
        cause="ranks-differ",
        patches=((AGREE, ""),),
    ),
    Mutant(
        id="measured-forward-only",
        exercise="2.20",
        bug="only forward is measured",
        find="    if y.requires_grad:\n        y.backward(torch.ones_like(y))\n",
        replace="",
        killed_by=MEASURED,
        cause="forward-only",
    ),
    Mutant(
        id="measured-mean",
        exercise="2.20",
        bug="the mean: one disturbed run moves it",
        find=MEDIAN,
        replace="statistics.fmean(elapsed for elapsed, _ in runs[1:])",
        killed_by=MEASURED,
        cause="not-the-median",
    ),
    Mutant(
        id="measured-once-cold",
        exercise="2.20",
        bug="the first call is measured: it allocates and compiles",
        find=MEDIAN,
        replace="runs[0][0]",
        killed_by=MEASURED,
        cause="not-the-median",
    ),
    Mutant(
        id="measured-on-the-model",
        exercise="2.20",
        bug="measured on the layers themselves: gradients and statistics are no longer what they were",
        find="for number, layer in enumerate(map(copy.deepcopy, layers)):",
        replace="for number, layer in enumerate(layers):",
        killed_by=MEASURED,
        cause="trace-left",
    ),
    Mutant(
        id="measured-moves-statistics",
        exercise="2.20",
        bug="gradients are kept, BatchNorm's statistics are those of the measurement",
        find="for number, layer in enumerate(map(copy.deepcopy, layers)):",
        replace="for number, layer in enumerate(layers):\n"
        "                kept = [(p, p.grad) for p in layer.parameters()]",
        killed_by=MEASURED,
        cause="trace-left",
        patches=(
            (
                "                x = runs[-1][1]\n",
                "                x = runs[-1][1]\n"
                "                for p, gradient in kept:\n"
                "                    p.grad = gradient\n",
            ),
        ),
    ),
    Mutant(
        id="measured-by-global-rank-0",
        exercise="2.20",
        bug="global rank 0 is to measure, also in a group that it is not in: nobody does",
        find="    if dist.get_rank(group) == 0:\n",
        replace="    if dist.get_rank() == 0:\n",
        killed_by=SUBGROUP,
        cause="not-measured",
    ),
]
