"""Wrong implementations of exercises 3.21 and 3.27."""

from distlab.grading.wrong import mutants_of

MEMORY, BYTES = "test_memory_is_what_the_ledger_measures", "test_bytes_are_what_the_ledger_counts"
SECONDS, CHEAPEST = "test_seconds_follow_the_slowest_link", "test_cheapest_that_fits_is_chosen"
BUDGET = "test_ranks_agree_on_the_budget"

REDUCE = "    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)\n"
BEST = "    best = min(fitting, key=lambda e: e.seconds)\n"

mutant = mutants_of("3.21", "strategies")
memory = mutants_of("3.27", "strategies")

MUTANTS = [
    memory(
        "state-not-sharded",
        "BUGS 69: every rank is said to keep the whole optimizer state",
        '    optimizer = state // (1 if strategy == "ddp" else shards)\n',
        "    optimizer = state\n",
        MEMORY,
        "memory-optimizer",
    ),
    memory(
        "zero1-shards-gradients",
        "ZeRO-1 is taken for ZeRO-2: its gradients are whole",
        '(shards if sharded or strategy == "zero2" else 1)',
        '(shards if sharded or strategy in ("zero1", "zero2") else 1)',
        MEMORY,
        "memory-gradients",
    ),
    memory(
        "hybrid-over-all",
        "hybrid shards inside a node, not over all ranks",
        '    shards = ranks_per_node if strategy == "hybrid" else world_size\n',
        "    shards = world_size\n",
        MEMORY,
        "memory-parameters",
    ),
    memory(
        "offload-on-device",
        "what is offloaded still counts as the device's",
        '    host = parameters + gradients + optimizer if strategy == "offload" else 0\n',
        "    host = 0\n",
        MEMORY,
        "memory-parameters",
    ),
    memory(
        "state-and-activations",
        "state plus activations: what is gathered and on its way is forgotten",
        "peak=fixed + max(*moments, step)",
        "peak=fixed + gradients + profile.saved",
        MEMORY,
        "memory-peak",
    ),
    memory(
        "activations-forgotten",
        "the famous 16 bytes per parameter, and nothing for activations",
        "peak=fixed + max(*moments, step)",
        "peak=fixed + gradients",
        MEMORY,
        "memory-peak",
    ),
    memory(
        "sum-of-maxima",
        "everything gathered at once, on top of the most activations",
        "peak=fixed + max(*moments, step)",
        "peak=fixed + max(*moments, step) + sum(profile.parameters) * sharded",
        MEMORY,
        "memory-peak",
    ),
    mutant(
        "gathered-once",
        "FSDP gathers its parameters for backward again",
        "    gathered = 2 * sum(profile.parameters) - profile.parameters[0] - last\n",
        "    gathered = sum(profile.parameters)\n",
        BYTES,
        "bytes-sent",
    ),
    mutant(
        "whole-gradient-across",
        "each rank of hybrid is said to send the whole gradient to other nodes, not its chunk",
        "        return int(inside + across / ranks_per_node), int(across), seconds\n",
        "        return int(inside + across / ranks_per_node), int(across * ranks_per_node), seconds\n",
        BYTES,
        "bytes-across",
    ),
    mutant(
        "one-backward",
        "ZeRO-2 reduces in every backward, not once per step",
        "(backwards + 1) * whole",
        "2 * whole",
        SECONDS,
        "bytes-sent",
    ),
    mutant(
        "fastest-link",
        "the pace of a ring is that of its fastest link",
        "min(links.inside, links.between)",
        "max(links.inside, links.between)",
        SECONDS,
        "seconds",
    ),
    mutant(
        "bus-is-free",
        "what crosses the bus to the host costs no time",
        'passed / world_size / links.host if strategy == "offload" else 0.0',
        "0.0",
        SECONDS,
        "seconds",
    ),
    mutant(
        "least-memory",
        "takes what needs least memory, however much it sends",
        BEST,
        "    best = min(fitting, key=lambda e: e.peak)\n",
        CHEAPEST,
        "not-the-cheapest",
    ),
    mutant(
        "first-that-fits",
        "takes the first that fits: the list is not in the order of cost",
        BEST,
        "    best = fitting[0]\n",
        CHEAPEST,
        "not-the-cheapest",
    ),
    mutant(
        "nothing-fits-is-fine",
        "where nothing fits it takes offload, which then runs out of memory",
        "    if not fitting:\n",
        "    if not fitting:\n        return Choice(estimates[-1].strategy, budget_bytes, estimates)\n"
        "    if False:\n",
        "test_bad_arguments_are_refused",
        "accepted",
    ),
    mutant(
        "manual-ignored",
        "a strategy that was asked for is replaced by a cheaper one",
        "        return Choice(strategy, budget_bytes, estimates)\n",
        "        cheapest = min(estimates, key=lambda e: e.seconds)\n"
        "        return Choice(cheapest.strategy, budget_bytes, estimates)\n",
        "test_manual_choice_is_obeyed",
        "manual",
    ),
    mutant(
        "own-budget",
        "every rank decides by its own free memory: the ranks build different strategies",
        REDUCE,
        "",
        BUDGET,
        "ranks-differ",
    ),
    mutant(
        "float-budget",
        "the budget as float32, which can't tell one byte in sixteen million",
        "dtype=torch.int64, device=device)",
        "dtype=torch.float32, device=device)",
        BUDGET,
        "ranks-differ",
    ),
    mutant(
        "wrong-group",
        "the default group's minimum instead of the group's",
        REDUCE,
        "    dist.all_reduce(least, dist.ReduceOp.MIN)\n",
        BUDGET,
        "wrong-group",
    ),
    mutant(
        "stranger",
        "on a rank outside the group the all-reduce does nothing: its own memory is the budget",
        "    rank_in(group)\n",
        "",
        "test_who_is_no_member_is_refused",
        "accepted",
    ),
]
