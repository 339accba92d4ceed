"""Wrong implementations of exercises 3.21 and 3.27."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="strategies-state-not-sharded",
        exercise="3.27",
        mistake="every rank is said to keep the whole optimizer state",
        text='    optimizer = state // (1 if strategy == "ddp" else shards)\n',
        becomes="    optimizer = state\n",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-optimizer",
    ),
    Mutant(
        id="strategies-zero1-shards-gradients",
        exercise="3.27",
        mistake="ZeRO-1 is taken for ZeRO-2: its gradients are whole",
        text='(shards if sharded or strategy == "zero2" else 1)',
        becomes='(shards if sharded or strategy in ("zero1", "zero2") else 1)',
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-gradients",
    ),
    Mutant(
        id="strategies-hybrid-over-all",
        exercise="3.27",
        mistake="hybrid shards inside a node, not over all ranks",
        text='    shards = ranks_per_node if strategy == "hybrid" else world_size\n',
        becomes="    shards = world_size\n",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-parameters",
    ),
    Mutant(
        id="strategies-offload-on-device",
        exercise="3.27",
        mistake="what is offloaded still counts as the device's",
        text='    host = parameters + gradients + optimizer if strategy == "offload" else 0\n',
        becomes="    host = 0\n",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-parameters",
    ),
    Mutant(
        id="strategies-state-and-activations",
        exercise="3.27",
        mistake="state plus activations: what is gathered and on its way is forgotten",
        text="fixed + max(*moments, step), host)",
        becomes="fixed + gradients + profile.saved, host)",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-peak",
    ),
    Mutant(
        id="strategies-activations-forgotten",
        exercise="3.27",
        mistake="the famous 16 bytes per parameter, and nothing for activations",
        text="fixed + max(*moments, step), host)",
        becomes="fixed + gradients, host)",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-peak",
    ),
    Mutant(
        id="strategies-sum-of-maxima",
        exercise="3.27",
        mistake="everything gathered at once, on top of the most activations",
        text="fixed + max(*moments, step), host)",
        becomes="fixed + max(*moments, step) + sum(profile.parameters) * sharded, host)",
        caught_by="test_memory_is_what_the_ledger_measures",
        told_as="memory-peak",
    ),
    Mutant(
        id="strategies-gathered-once",
        exercise="3.21",
        mistake="FSDP gathers its parameters for backward again",
        text="    gathered = 2 * sum(profile.parameters) - profile.parameters[0] - last\n",
        becomes="    gathered = sum(profile.parameters)\n",
        caught_by="test_bytes_are_what_the_ledger_counts",
        told_as="bytes-sent",
    ),
    Mutant(
        id="strategies-whole-gradient-across",
        exercise="3.21",
        mistake=(
            "each rank of hybrid is said to send the whole gradient to other nodes, not its chunk"
        ),
        text="        return int(inside + across / ranks_per_node), int(across), seconds\n",
        becomes=(
            "        return int(inside + across / ranks_per_node), int(across * "
            "ranks_per_node), seconds\n"
        ),
        caught_by="test_bytes_are_what_the_ledger_counts",
        told_as="bytes-across",
    ),
    Mutant(
        id="strategies-one-backward",
        exercise="3.21",
        mistake="ZeRO-2 reduces in every backward, not once per step",
        text="(backwards + 1) * whole",
        becomes="2 * whole",
        caught_by="test_seconds_follow_the_slowest_link",
        told_as="bytes-sent",
    ),
    Mutant(
        id="strategies-fastest-link",
        exercise="3.21",
        mistake="the pace of a ring is that of its fastest link",
        text="min(links.inside, links.between)",
        becomes="max(links.inside, links.between)",
        caught_by="test_seconds_follow_the_slowest_link",
        told_as="seconds",
    ),
    Mutant(
        id="strategies-bus-is-free",
        exercise="3.21",
        mistake="what crosses the bus to the host costs no time",
        text='passed / world_size / links.host if strategy == "offload" else 0.0',
        becomes="0.0",
        caught_by="test_seconds_follow_the_slowest_link",
        told_as="seconds",
    ),
    Mutant(
        id="strategies-least-memory",
        exercise="3.21",
        mistake="takes what needs least memory, however much it sends",
        text="    best = min(fitting, key=lambda e: e.seconds)\n",
        becomes="    best = min(fitting, key=lambda e: e.peak)\n",
        caught_by="test_cheapest_that_fits_is_chosen",
        told_as="not-the-cheapest",
    ),
    Mutant(
        id="strategies-first-that-fits",
        exercise="3.21",
        mistake="takes the first that fits: the list is not in the order of cost",
        text="    best = min(fitting, key=lambda e: e.seconds)\n",
        becomes="    best = fitting[0]\n",
        caught_by="test_cheapest_that_fits_is_chosen",
        told_as="not-the-cheapest",
    ),
    Mutant(
        id="strategies-nothing-fits-is-fine",
        exercise="3.21",
        mistake="where nothing fits it takes offload, which then runs out of memory",
        text="    if not fitting:\n",
        becomes="""    if not fitting:
        return Choice(estimates[-1].strategy, budget_bytes, estimates)
    if False:
""",
        caught_by="test_bad_arguments_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="strategies-manual-ignored",
        exercise="3.21",
        mistake="a strategy that was asked for is replaced by a cheaper one",
        text="        return Choice(strategy, budget_bytes, estimates)\n",
        becomes="""        cheapest = min(estimates, key=lambda e: e.seconds)
        return Choice(cheapest.strategy, budget_bytes, estimates)
""",
        caught_by="test_manual_choice_is_obeyed",
        told_as="manual",
    ),
    Mutant(
        id="strategies-own-budget",
        exercise="3.21",
        mistake="every rank decides by its own free memory: the ranks build different strategies",
        text="    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)\n",
        becomes="",
        caught_by="test_ranks_agree_on_the_budget",
        told_as="ranks-differ",
    ),
    Mutant(
        id="strategies-float-budget",
        exercise="3.21",
        mistake="the budget as float32, which can't tell one byte in sixteen million",
        text="dtype=torch.int64, device=device)",
        becomes="dtype=torch.float32, device=device)",
        caught_by="test_ranks_agree_on_the_budget",
        told_as="not-the-least",
    ),
    Mutant(
        id="strategies-wrong-group",
        exercise="3.21",
        mistake="the default group's minimum instead of the group's",
        text="    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)\n",
        becomes="    dist.all_reduce(least, dist.ReduceOp.MIN)\n",
        caught_by="test_ranks_agree_on_the_budget",
        told_as="wrong-group",
    ),
    Mutant(
        id="strategies-stranger",
        exercise="3.21",
        mistake=(
            "on a rank outside the group the all-reduce does nothing: its own memory is the budget"
        ),
        text="    rank_in(group)\n",
        becomes="",
        caught_by="test_who_is_no_member_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="strategies-just-fits-is-refused",
        exercise="3.21",
        mistake="a peak of just the budget does not fit",
        text="e.peak <= budget_bytes]",
        becomes="e.peak < budget_bytes]",
        caught_by="test_cheapest_that_fits_is_chosen",
        told_as="refused-though-it-fits",
    ),
    Mutant(
        id="strategies-largest-trainable-unit",
        exercise="3.27",
        mistake="the optimizer's copies are those of the largest gradients: frozen units forgotten",
        text="2 * max(profile.parameters) // shards",
        becomes="2 * max(profile.gradients) // shards",
        caught_by="test_peak_is_the_largest_moment",
        told_as="memory-peak",
    ),
    Mutant(
        id="strategies-by-hand-with-defaults",
        exercise="3.21",
        mistake="a choice by hand is estimated with the default links, passes and buckets",
        text="""    if strategy != "auto":
        return Choice(""",
        becomes="""    if strategy != "auto":
        estimates = tuple(estimate(profile, n, nodes, ranks_per_node) for n in names)
        return Choice(""",
        caught_by="test_manual_choice_is_obeyed",
        told_as="manual",
    ),
    Mutant(
        id="strategies-root-after-the-units",
        exercise="3.27",
        mistake="what the root computes after its units is said to have the last unit in full",
        text="        ahead = unit - 1 if phase.backward else unit + 1\n",
        becomes="""        ahead = unit - 1 if phase.backward else unit + 1
        if unit == 0 and moments:
            ahead = last
""",
        caught_by="test_peak_is_the_largest_moment",
        told_as="memory-peak",
    ),
]
