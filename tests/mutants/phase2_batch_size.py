"""Wrong implementations of exercise 2.4."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="rate-not-scaled",
        exercise="2.4",
        mistake="the rate stays the same whatever the batch",
        text="    peak_lr = base_lr * global_batch / base_batch\n",
        becomes="    peak_lr = base_lr\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="linear-rule",
    ),
    Mutant(
        id="rate-square-root",
        exercise="2.4",
        mistake="the square root of the factor, another rule",
        text="    peak_lr = base_lr * global_batch / base_batch\n",
        becomes="    peak_lr = base_lr * math.sqrt(global_batch / base_batch)\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="linear-rule",
    ),
    Mutant(
        id="rate-warm-up-from-zero",
        exercise="2.4",
        mistake="the warm-up begins at 0: the first step is lost",
        text="    return base_lr + (peak_lr - base_lr) * step / warmup_steps\n",
        becomes="    return peak_lr * step / warmup_steps\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="warm-up",
    ),
    Mutant(
        id="rate-warm-up-one-early",
        exercise="2.4",
        mistake="the first step is counted as done: k·η one step early",
        text="    return base_lr + (peak_lr - base_lr) * step / warmup_steps\n",
        becomes="    return base_lr + (peak_lr - base_lr) * (step + 1) / warmup_steps\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="warm-up",
    ),
    Mutant(
        id="rate-no-warm-up",
        exercise="2.4",
        mistake="k·η from the first step on",
        text="    return base_lr + (peak_lr - base_lr) * step / warmup_steps\n",
        becomes="    return peak_lr\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="warm-up",
    ),
    Mutant(
        id="rate-warm-up-downwards",
        exercise="2.4",
        mistake="a smaller batch is warmed up too: from a rate that is too large for it",
        text="    if step >= warmup_steps or global_batch <= base_batch:\n",
        becomes="    if step >= warmup_steps:\n",
        caught_by="test_learning_rate_follows_the_linear_rule",
        told_as="linear-rule",
    ),
    Mutant(
        id="steps-rounded",
        exercise="2.4",
        mistake="rounded down without a word: another batch than the rate is for",
        text=" or global_batch % (micro_batch * world_size):\n",
        becomes=":\n",
        caught_by="test_accumulation_steps_divide",
        told_as="accepted",
    ),
    Mutant(
        id="steps-without-ranks",
        exercise="2.4",
        mistake="the global batch is taken as the rank's",
        text="    return global_batch // (micro_batch * world_size)\n",
        becomes="    return global_batch // micro_batch\n",
        caught_by="test_accumulation_steps_divide",
        told_as="wrong-steps",
    ),
    Mutant(
        id="search-not-agreed",
        exercise="2.4",
        mistake="every rank searches for itself",
        text="    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)\n",
        becomes="",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="ranks-differ",
    ),
    Mutant(
        id="search-rank-0-decides",
        exercise="2.4",
        mistake="rank 0 tells the others what fits on rank 0",
        text="    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)\n",
        becomes="    dist.broadcast(everywhere, group_src=0, group=group)\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="not-largest",
    ),
    Mutant(
        id="search-rank-leaves",
        exercise="2.4",
        mistake="a rank that ran out of memory does not come to the all-reduce",
        text="        fits = 0 if is_out_of_memory(error) else -1\n",
        becomes="        if is_out_of_memory(error):\n            return False\n        fits = -1\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="hang",
    ),
    Mutant(
        id="search-world-group",
        exercise="2.4",
        mistake="ranks outside of the group are waited for",
        text="    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)\n",
        becomes="    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)\n",
        caught_by="test_search_in_a_subgroup",
        told_as="group",
    ),
    Mutant(
        id="search-doubling-only",
        exercise="2.4",
        mistake="only powers of two are tried: up to half of the memory is unused",
        text="""    while fails - fits > 1:
        middle = (fits + fails) // 2
""",
        becomes="""    while False:
        middle = (fits + fails) // 2
""",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="not-largest",
    ),
    Mutant(
        id="search-one-by-one",
        exercise="2.4",
        mistake="1, 2, 3, …: as many trials as samples",
        text=(
            "    while fails <= upper and fits_everywhere(trial, fails, budget_bytes, device, "
            "group):\n"
            "        fits, fails = fails, 2 * fails\n"
        ),
        becomes=(
            "    while fails <= upper and fits_everywhere(trial, fails, budget_bytes, device, "
            "group):\n"
            "        fits, fails = fails, fails + 1\n"
        ),
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="too-many-trials",
    ),
    Mutant(
        id="search-from-above",
        exercise="2.4",
        mistake="plain bisection: the first trial is half of the upper limit",
        text=(
            "    while fails <= upper and fits_everywhere(trial, fails, budget_bytes, device, "
            "group):\n"
            "        fits, fails = fails, 2 * fails\n"
        ),
        becomes="""    if fits_everywhere(trial, 1, budget_bytes, device, group):
        fits, fails = 1, upper + 1
""",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="tried-too-large",
    ),
    Mutant(
        id="search-beyond-upper",
        exercise="2.4",
        mistake="doubling does not stop at the upper limit",
        text="    while fails <= upper and fits_everywhere(",
        becomes="    while fits < upper and fits_everywhere(",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="tried-too-large",
    ),
    Mutant(
        id="search-last-not-tried",
        exercise="2.4",
        mistake="off by one: the size below the first that fails is taken to fit",
        text="""    while fails - fits > 1:
        middle = (fits + fails) // 2
""",
        becomes="""    while fails - fits > 2:
        middle = (fits + fails) // 2
""",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="not-largest",
    ),
    Mutant(
        id="search-budget-ignored",
        exercise="2.4",
        mistake="only errors count, on a CPU there are none",
        text="        fits = int(trial(size) <= budget_bytes)\n",
        becomes="        trial(size)\n        fits = 1\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="not-largest",
    ),
    Mutant(
        id="search-cuda-error-only",
        exercise="2.4",
        mistake="only torch.OutOfMemoryError counts: the CPU's allocator raises another error",
        text=(
            "    return isinstance(error, RuntimeError) and any(text in str(error) for text in "
            "OUT_OF_MEMORY)\n"
        ),
        becomes="    return False\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="exception",
    ),
    Mutant(
        id="search-memory-error-missed",
        exercise="2.4",
        mistake="Python's MemoryError is no RuntimeError",
        text="    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):\n",
        becomes="    if isinstance(error, torch.OutOfMemoryError):\n",
        caught_by="test_search_finds_the_largest_on_all_ranks",
        told_as="exception",
    ),
    Mutant(
        id="search-swallows-errors",
        exercise="2.4",
        mistake="every RuntimeError is taken for a lack of memory",
        text="        fits = 0 if is_out_of_memory(error) else -1\n        failed = None if is_out_of_memory(error) else error\n",
        becomes="        fits = 0\n",
        caught_by="test_other_errors_come_out",
        told_as="error-swallowed",
    ),
    Mutant(
        id="search-zero-fits",
        exercise="2.4",
        mistake="returns 0 where not even 1 fits",
        text="    if not fits:\n        raise",
        becomes="    if not fits:\n        return 0\n        raise",
        caught_by="test_refusals_are_the_same_on_all_ranks",
        told_as="accepted",
    ),
    Mutant(
        id="search-error-of-one-rank",
        exercise="2.4",
        mistake="only the rank on which 1 does not fit raises",
        text="        fits = 0 if is_out_of_memory(error) else -1\n",
        becomes="        if size == 1 and is_out_of_memory(error):\n            raise ValueError('not even a micro-batch of 1 fits') from None\n        fits = 0 if is_out_of_memory(error) else -1\n",
        caught_by="test_refusals_are_the_same_on_all_ranks",
        told_as="hang",
    ),
    Mutant(
        id="search-cleans-in-except",
        exercise="2.4",
        mistake="collects garbage inside the except clause: the error still holds the frames",
        text="        failed = None if is_out_of_memory(error) else error\n    gc.collect()  # frames and errors that refer to each other\n",
        becomes="        failed = None if is_out_of_memory(error) else error\n        gc.collect()\n",
        caught_by="test_a_trial_leaves_no_memory_behind",
        told_as="memory-kept",
    ),
    Mutant(
        id="search-error-kept",
        exercise="2.4",
        mistake="the errors are kept for a report: with them every trial's tensors",
        text="        fits = 0 if is_out_of_memory(error) else -1\n",
        becomes="        trial.__dict__.setdefault('errors', []).append(error)\n        fits = 0 if is_out_of_memory(error) else -1\n",
        caught_by="test_a_trial_leaves_no_memory_behind",
        told_as="memory-kept",
    ),
    Mutant(
        id="trial-forward-only",
        exercise="2.4",
        mistake="only forward is measured, without the graph that backward needs",
        text="                return measure(lambda: loss_of(size).backward())\n",
        becomes="""                with torch.no_grad():
                    return measure(lambda: loss_of(size))
""",
        caught_by="test_budget_in_bytes_is_kept",
        told_as="over-budget",
    ),
    Mutant(
        id="trial-adds-to-gradients",
        exercise="2.4",
        mistake="backward adds to the gradients that are there",
        text="""            for p in parameters:
                p.grad = None
""",
        becomes="",
        caught_by="test_trials_train_nothing",
        told_as="trained",
    ),
    Mutant(
        id="trial-leaves-gradients",
        exercise="2.4",
        mistake="the trial's gradients stay in p.grad",
        text="""                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
""",
        becomes="",
        caught_by="test_trials_train_nothing",
        told_as="trained",
    ),
    Mutant(
        id="trial-leaves-gradients-after-error",
        exercise="2.4",
        mistake="gradients are put back only where nothing went wrong",
        text="""            try:
                return measure(lambda: loss_of(size).backward())
            finally:
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
""",
        becomes="""            try:
                peak = measure(lambda: loss_of(size).backward())
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
                return peak
            finally:
""",
        caught_by="test_trials_train_nothing",
        told_as="trained",
    ),
    Mutant(
        id="trial-moves-statistics",
        exercise="2.4",
        mistake="BatchNorm's statistics are those of the trials",
        text="""                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.detach().copy_(value)
""",
        becomes="""                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
""",
        caught_by="test_trials_train_nothing",
        told_as="trained",
    ),
    Mutant(
        id="trial-uses-random-numbers",
        exercise="2.4",
        mistake="dropout in the trials moves the random state",
        text="        with torch.random.fork_rng(devices=list(devices)):\n",
        becomes="        if True:\n",
        caught_by="test_trials_train_nothing",
        told_as="trained",
    ),
    Mutant(
        id="fits-error-before-agreement",
        exercise="2.4",
        mistake="a rank whose trial has another error leaves at once, the others wait for it",
        text="        fits = 0 if is_out_of_memory(error) else -1\n",
        becomes="        if not is_out_of_memory(error):\n            raise\n        fits = 0\n",
        caught_by="test_other_errors_come_out",
        told_as="hang",
    ),
    Mutant(
        id="fits-error-is-no-lack",
        exercise="2.4",
        mistake="a rank whose trial has another error says that it does not fit: others go on",
        text="        fits = 0 if is_out_of_memory(error) else -1\n",
        becomes="        fits = 0\n",
        caught_by="test_other_errors_come_out",
        told_as="goes-on-alone",
    ),
    Mutant(
        id="garbage-of-failures-only",
        exercise="2.4",
        mistake="garbage is collected after a trial that failed only",
        text="    gc.collect()  #",
        becomes="    if not fits:\n        gc.collect()  #",
        caught_by="test_a_trial_leaves_no_memory_behind",
        told_as="memory-kept",
    ),
    Mutant(
        id="out-of-memory-and-alone",
        exercise="2.4",
        mistake="a rank that runs out of memory does not learn of another rank's error",
        text="    if everywhere < 0:\n",
        becomes="    if everywhere < 0 and fits:\n",
        caught_by="test_other_errors_come_out",
        told_as="hang",
    ),
]
