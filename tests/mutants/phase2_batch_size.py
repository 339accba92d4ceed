"""Wrong implementations of exercise 2.4."""

from distlab.grading.wrong import Mutant

RATE, DIVIDE = "test_learning_rate_follows_the_linear_rule", "test_accumulation_steps_divide"
SEARCH, REFUSE = (
    "test_search_finds_the_largest_on_all_ranks",
    "test_refusals_are_the_same_on_all_ranks",
)
ERRORS, MEMORY = "test_other_errors_come_out", "test_a_trial_leaves_no_memory_behind"
GROUP, BUDGET = "test_search_in_a_subgroup", "test_budget_in_bytes_is_kept"
UNTOUCHED = "test_trials_train_nothing"

PEAK_LR = "    peak_lr = base_lr * global_batch / base_batch\n"
WARM = "    return base_lr + (peak_lr - base_lr) * step / warmup_steps\n"
REDUCE = "    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN, group=group)\n"
NOT_FITTING = "            raise\n        fits = False\n"
BACKWARD = "                return measure(lambda: loss_of(size).backward())\n"
PUT_BACK = """                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
"""
BUFFERS = """                for buffer, value in zip(buffers, values, strict=True):
                    buffer.detach().copy_(value)
"""
DOUBLE = """    while fails <= upper and fits_everywhere(trial, fails, budget_bytes, device, group):
        fits, fails = fails, 2 * fails
"""
BISECT = """    while fails - fits > 1:
        middle = (fits + fails) // 2
"""
NOT_ONE = "    if not fits:\n        limit ="

MUTANTS = [
    Mutant(
        id="rate-not-scaled",
        exercise="2.4",
        bug="the rate stays the same whatever the batch",
        find=PEAK_LR,
        replace="    peak_lr = base_lr\n",
        killed_by=RATE,
        cause="linear-rule",
    ),
    Mutant(
        id="rate-square-root",
        exercise="2.4",
        bug="the square root of the factor, another rule",
        find=PEAK_LR,
        replace="    peak_lr = base_lr * math.sqrt(global_batch / base_batch)\n",
        killed_by=RATE,
        cause="linear-rule",
    ),
    Mutant(
        id="rate-warm-up-from-zero",
        exercise="2.4",
        bug="the warm-up begins at 0: the first step is lost",
        find=WARM,
        replace="    return peak_lr * step / warmup_steps\n",
        killed_by=RATE,
        cause="warm-up",
    ),
    Mutant(
        id="rate-warm-up-one-early",
        exercise="2.4",
        bug="the first step is counted as done: k·η one step early",
        find=WARM,
        replace="    return base_lr + (peak_lr - base_lr) * (step + 1) / warmup_steps\n",
        killed_by=RATE,
        cause="warm-up",
    ),
    Mutant(
        id="rate-no-warm-up",
        exercise="2.4",
        bug="k·η from the first step on",
        find=WARM,
        replace="    return peak_lr\n",
        killed_by=RATE,
        cause="warm-up",
    ),
    Mutant(
        id="rate-warm-up-downwards",
        exercise="2.4",
        bug="a smaller batch is warmed up too: from a rate that is too large for it",
        find="    if step >= warmup_steps or global_batch <= base_batch:\n",
        replace="    if step >= warmup_steps:\n",
        killed_by=RATE,
        cause="linear-rule",
    ),
    Mutant(
        id="steps-rounded",
        exercise="2.4",
        bug="BUGS 17: rounded down without a word: another batch than the rate is for",
        find=" or global_batch % (micro_batch * world_size):\n",
        replace=":\n",
        killed_by=DIVIDE,
        cause="accepted",
    ),
    Mutant(
        id="steps-without-ranks",
        exercise="2.4",
        bug="BUGS 17: the global batch is taken as the rank's",
        find="    return global_batch // (micro_batch * world_size)\n",
        replace="    return global_batch // micro_batch\n",
        killed_by=DIVIDE,
        cause="wrong-steps",
    ),
    Mutant(
        id="search-not-agreed",
        exercise="2.4",
        bug="BUGS 7: every rank searches for itself",
        find=REDUCE,
        replace="",
        killed_by=SEARCH,
        cause="ranks-differ",
    ),
    Mutant(
        id="search-rank-0-decides",
        exercise="2.4",
        bug="BUGS 7: rank 0 tells the others what fits on rank 0",
        find=REDUCE,
        replace="    dist.broadcast(everywhere, group_src=0, group=group)\n",
        killed_by=SEARCH,
        cause="not-largest",
    ),
    Mutant(
        id="search-rank-leaves",
        exercise="2.4",
        bug="BUGS 7: a rank that ran out of memory does not come to the all-reduce",
        find=NOT_FITTING,
        replace="            raise\n        return False\n",
        killed_by=SEARCH,
        cause="hang",
    ),
    Mutant(
        id="search-world-group",
        exercise="2.4",
        bug="ranks outside of the group are waited for",
        find=REDUCE,
        replace="    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)\n",
        killed_by=GROUP,
        cause="hang",
    ),
    Mutant(
        id="search-doubling-only",
        exercise="2.4",
        bug="only powers of two are tried: up to half of the memory is unused",
        find=BISECT,
        replace="    while False:\n        middle = (fits + fails) // 2\n",
        killed_by=SEARCH,
        cause="not-largest",
    ),
    Mutant(
        id="search-one-by-one",
        exercise="2.4",
        bug="1, 2, 3, …: as many trials as samples",
        find=DOUBLE,
        replace=DOUBLE.replace("2 * fails", "fails + 1"),
        killed_by=SEARCH,
        cause="too-many-trials",
    ),
    Mutant(
        id="search-from-above",
        exercise="2.4",
        bug="plain bisection: the first trial is half of the upper limit",
        find=DOUBLE,
        replace="    if fits_everywhere(trial, 1, budget_bytes, device, group):\n"
        "        fits, fails = 1, upper + 1\n",
        killed_by=SEARCH,
        cause="tried-too-large",
    ),
    Mutant(
        id="search-beyond-upper",
        exercise="2.4",
        bug="doubling does not stop at the upper limit",
        find="    while fails <= upper and fits_everywhere(",
        replace="    while fits < upper and fits_everywhere(",
        killed_by=SEARCH,
        cause="tried-too-large",
    ),
    Mutant(
        id="search-last-not-tried",
        exercise="2.4",
        bug="off by one: the size below the first that fails is taken to fit",
        find=BISECT,
        replace=BISECT.replace("fails - fits > 1", "fails - fits > 2"),
        killed_by=SEARCH,
        cause="not-largest",
    ),
    Mutant(
        id="search-budget-ignored",
        exercise="2.4",
        bug="only errors count, on a CPU there are none",
        find="        fits = trial(size) <= budget_bytes\n",
        replace="        trial(size)\n        fits = True\n",
        killed_by=SEARCH,
        cause="not-largest",
    ),
    Mutant(
        id="search-cuda-error-only",
        exercise="2.4",
        bug="only torch.OutOfMemoryError counts: the CPU's allocator raises another error",
        find="    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)\n",
        replace="    return False\n",
        killed_by=SEARCH,
        cause="exception",
    ),
    Mutant(
        id="search-memory-error-missed",
        exercise="2.4",
        bug="Python's MemoryError is no RuntimeError",
        find="    except (RuntimeError, MemoryError) as error:\n",
        replace="    except RuntimeError as error:\n",
        killed_by=SEARCH,
        cause="exception",
    ),
    Mutant(
        id="search-swallows-errors",
        exercise="2.4",
        bug="every RuntimeError is taken for a lack of memory",
        find="        if not is_out_of_memory(error):\n            raise\n",
        replace="",
        killed_by=ERRORS,
        cause="error-swallowed",
    ),
    Mutant(
        id="search-zero-fits",
        exercise="2.4",
        bug="returns 0 where not even 1 fits",
        find=NOT_ONE,
        replace="    if not fits:\n        return 0\n        limit =",
        killed_by=REFUSE,
        cause="accepted",
    ),
    Mutant(
        id="search-error-of-one-rank",
        exercise="2.4",
        bug="BUGS 8: only the rank on which 1 does not fit raises",
        find=NOT_FITTING,
        replace="            raise\n"
        "        if size == 1:\n"
        "            raise ValueError('not even a micro-batch of 1 fits') from None\n"
        "        fits = False\n",
        killed_by=REFUSE,
        cause="hang",
    ),
    Mutant(
        id="search-cleans-in-except",
        exercise="2.4",
        bug="collects garbage inside the except clause: the error still holds the frames",
        find=NOT_FITTING + "    gc.collect()  # frames and errors that refer to each other\n",
        replace=NOT_FITTING + "        gc.collect()\n",
        killed_by=MEMORY,
        cause="memory-kept",
    ),
    Mutant(
        id="search-error-kept",
        exercise="2.4",
        bug="the errors are kept for a report: with them every trial's tensors",
        find=NOT_FITTING,
        replace="            raise\n        trial.__dict__.setdefault('errors', []).append(error)\n"
        "        fits = False\n",
        killed_by=MEMORY,
        cause="memory-kept",
    ),
    Mutant(
        id="trial-forward-only",
        exercise="2.4",
        bug="only forward is measured, without the graph that backward needs",
        find=BACKWARD,
        replace="                with torch.no_grad():\n"
        "                    return measure(lambda: loss_of(size))\n",
        killed_by=BUDGET,
        cause="over-budget",
    ),
    Mutant(
        id="trial-adds-to-gradients",
        exercise="2.4",
        bug="backward adds to the gradients that are there",
        find="            for p in parameters:\n                p.grad = None\n",
        replace="",
        killed_by=UNTOUCHED,
        cause="trained",
    ),
    Mutant(
        id="trial-leaves-gradients",
        exercise="2.4",
        bug="the trial's gradients stay in p.grad",
        find=PUT_BACK,
        replace="",
        killed_by=UNTOUCHED,
        cause="trained",
    ),
    Mutant(
        id="trial-leaves-gradients-after-error",
        exercise="2.4",
        bug="gradients are put back only where nothing went wrong",
        find="            try:\n" + BACKWARD + "            finally:\n" + PUT_BACK,
        replace="            try:\n"
        "                peak = measure(lambda: loss_of(size).backward())\n"
        "                for p, gradient in zip(parameters, gradients, strict=True):\n"
        "                    p.grad = gradient\n"
        "                return peak\n"
        "            finally:\n",
        killed_by=UNTOUCHED,
        cause="trained",
    ),
    Mutant(
        id="trial-moves-statistics",
        exercise="2.4",
        bug="BatchNorm's statistics are those of the trials",
        find=PUT_BACK + BUFFERS,
        replace=PUT_BACK,
        killed_by=UNTOUCHED,
        cause="trained",
    ),
    Mutant(
        id="trial-uses-random-numbers",
        exercise="2.4",
        bug="dropout in the trials moves the random state",
        find="        with torch.random.fork_rng(devices=list(devices)):\n",
        replace="        if True:\n",
        killed_by=UNTOUCHED,
        cause="trained",
    ),
]
