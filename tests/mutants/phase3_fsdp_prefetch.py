"""Wrong implementations of exercise 3.16."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="prefetch-not-forward",
        exercise="3.16",
        mistake="nothing is prefetched in forward",
        text="""        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
""",
        becomes="",
        caught_by="test_next_unit_is_on_its_way",
        told_as="no-prefetch",
    ),
    Mutant(
        id="prefetch-not-backward",
        exercise="3.16",
        mistake="nothing is prefetched in backward",
        text="""        if index > 0:
            self.order[index - 1].start_gather()
""",
        becomes="",
        caught_by="test_next_unit_is_on_its_way",
        told_as="no-prefetch",
    ),
    Mutant(
        id="prefetch-after-compute",
        exercise="3.16",
        mistake="the next unit is gathered after this one's forward: too late to overlap",
        text="""        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
""",
        becomes="",
        more=(
            (
                "        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()\n",
                """        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()
""",
            ),
        ),
        caught_by="test_next_unit_is_on_its_way",
        told_as="no-prefetch",
    ),
    Mutant(
        id="prefetch-wrong-direction",
        exercise="3.16",
        mistake="backward prefetches the unit that comes next in forward",
        text="""        if index > 0:
            self.order[index - 1].start_gather()
""",
        becomes="""        if index + 1 < len(self.order):
            self.order[index + 1].start_gather()
""",
        caught_by="test_next_unit_is_on_its_way",
        told_as="too-early",
    ),
    Mutant(
        id="prefetch-all-ahead",
        exercise="3.16",
        mistake="every unit is prefetched at once",
        text="""        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
""",
        becomes="""        for ahead in self.expected:
            ahead.start_gather()
""",
        caught_by="test_one_unit_ahead_and_no_more",
        told_as="never-freed",
    ),
    Mutant(
        id="prefetch-waits-at-once",
        exercise="3.16",
        mistake="the prefetched gather is waited for before the unit computes",
        text="""        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].start_gather()
""",
        becomes="""        if len(self.order) < len(self.expected):
            self.expected[len(self.order)].gather()
""",
        caught_by="test_communication_hides_behind_compute",
        told_as="exposed",
    ),
    Mutant(
        id="prefetch-reduce-waits-at-once",
        exercise="3.16",
        mistake="every reduce-scatter is waited for where it is issued",
        text="""        if self.reducing is not None:
            self.reducing.finish_reduce()
        unit.start_reduce()
""",
        becomes="""        if self.reducing is not None:
            self.reducing.finish_reduce()
        unit.start_reduce()
        unit.finish_reduce()
""",
        caught_by="test_communication_hides_behind_compute",
        told_as="exposed",
    ),
    Mutant(
        id="prefetch-last-handle",
        exercise="3.16",
        mistake="the last reduce-scatter is never waited for",
        text="""        if self.reducing is not None:
            self.reducing.finish_reduce()
            self.reducing = None
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="never-waited",
    ),
    Mutant(
        id="prefetch-last-freed",
        exercise="3.16",
        mistake="the last unit is freed and gathered again at once",
        text="        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()\n",
        becomes="        kept = ()\n",
        caught_by="test_last_unit_and_root_are_gathered_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="prefetch-kept-in-evaluation",
        exercise="3.16",
        mistake="root and last unit stay after an evaluation too",
        text="        kept = (root, self.expected[-1]) if torch.is_grad_enabled() else ()\n",
        becomes="        kept = (root, self.expected[-1])\n",
        caught_by="test_one_unit_ahead_and_no_more",
        told_as="never-freed",
    ),
    Mutant(
        id="prefetch-stale",
        exercise="3.16",
        mistake="what an evaluation has kept is used after the optimizer's step",
        text="""            for left in self.units:
                left.free()
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="prefetch-always-in-order",
        exercise="3.16",
        mistake="a unit that the last forward did not run has no place in its order",
        text="self.order.index(unit) if unit in self.order else 0",
        becomes="self.order.index(unit)",
        caught_by="test_wrong_guesses_cost_no_value",
        told_as="exception",
    ),
    Mutant(
        id="prefetch-wrong-guess-stays",
        exercise="3.16",
        mistake="a unit that was gathered and not used is not freed",
        text="        for each in self.units if unit is root else [unit]:\n",
        becomes="        for each in [unit]:\n",
        caught_by="test_wrong_guesses_cost_no_value",
        told_as="never-waited",
    ),
]
