"""Wrong implementations of exercise 3.16."""

from distlab.grading.wrong import mutants_of

TRAIN, NEXT = "test_training_equals_one_process", "test_next_unit_is_on_its_way"
HIDES, BYTES = (
    "test_communication_hides_behind_compute",
    "test_last_unit_and_root_are_gathered_once",
)
AHEAD, GUESS = "test_one_unit_ahead_and_no_more", "test_wrong_guesses_cost_no_value"

LEFT = "            for left in self.units:\n                left.free()\n"
FORWARD = """        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
"""
KEPT = "        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()\n"
EACH = "        for each in self.units if unit is root else [unit]:\n"
BACKWARD = """        if place > 0:
            self.order[place - 1].start_gather()
"""
FINISH = """        if self.reducing is not None:
            self.reducing.finish_reduce()
        unit.start_reduce()
"""
END = """        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None
"""

mutant = mutants_of("3.16", "prefetch")

MUTANTS = [
    mutant("not-forward", "nothing is prefetched in forward", FORWARD, "", NEXT, "no-prefetch"),
    mutant("not-backward", "nothing is prefetched in backward", BACKWARD, "", NEXT, "no-prefetch"),
    mutant(
        "after-compute",
        "the next unit is gathered after this one's forward: too late to overlap",
        FORWARD,
        "",
        NEXT,
        "no-prefetch",
        (KEPT, FORWARD + KEPT),
    ),
    mutant(
        "wrong-direction",
        "backward prefetches the unit that comes next in forward",
        BACKWARD,
        "        if place + 1 < len(self.order):\n"
        "            self.order[place + 1].start_gather()\n",
        NEXT,
        "too-early",
    ),
    mutant(
        "all-ahead",
        "every unit is prefetched at once",
        FORWARD,
        "        for ahead in self.expected:\n            ahead.start_gather()\n",
        AHEAD,
        "never-freed",
    ),
    mutant(
        "waits-at-once",
        "BUGS 27: the prefetched gather is waited for before the unit computes",
        FORWARD,
        FORWARD.replace("start_gather", "gather"),
        HIDES,
        "exposed",
    ),
    mutant(
        "reduce-waits-at-once",
        "BUGS 27: every reduce-scatter is waited for where it is issued",
        FINISH,
        FINISH + "        unit.finish_reduce()\n",
        HIDES,
        "exposed",
    ),
    mutant(
        "last-handle",
        "BUGS 22: the last reduce-scatter is never waited for",
        END,
        "",
        TRAIN,
        "never-waited",
    ),
    mutant(
        "last-freed",
        "the last unit is freed and gathered again at once",
        KEPT,
        "        kept = ()\n",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "kept-in-evaluation",
        "root and last unit stay after an evaluation too",
        KEPT,
        "        kept = (root, self.expected[-1])\n",
        AHEAD,
        "never-freed",
    ),
    mutant(
        "stale",
        "BUGS 75: what an evaluation has kept is used after the optimizer's step",
        LEFT,
        "",
        TRAIN,
        "norm",
    ),
    mutant(
        "always-in-order",
        "a unit that the last forward did not run has no place in its order",
        "self.order.index(unit) if unit in self.order else 0",
        "self.order.index(unit)",
        GUESS,
        "exception",
    ),
    mutant(
        "wrong-guess-stays",
        "a unit that was gathered and not used is not freed",
        EACH,
        "        for each in [unit]:\n",
        GUESS,
        "never-waited",
    ),
]
