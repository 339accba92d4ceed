"""Wrong implementations of exercise 3.16."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="prefetch-not-forward",
        exercise="3.16",
        mistake="nothing is prefetched in forward",
        text="""        for following in ahead:
            following.start_gather()
""",
        becomes="",
        caught_by="test_next_unit_is_on_its_way",
        told_as="no-prefetch",
    ),
    Mutant(
        id="prefetch-not-backward",
        exercise="3.16",
        mistake="nothing is prefetched in backward",
        text="""            self.to_come[-1].start_gather()
""",
        becomes="",
        caught_by="test_next_unit_is_on_its_way",
        told_as="no-prefetch",
    ),
    Mutant(
        id="prefetch-after-compute",
        exercise="3.16",
        mistake="the next unit is gathered after this one's forward: too late to overlap",
        text="""        for following in ahead:
            following.start_gather()
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
        text="""            self.to_come[-1].start_gather()
""",
        becomes="""            if len(self.to_come) + 1 < len(self.order):
                self.order[len(self.to_come) + 1].start_gather()
""",
        caught_by="test_next_unit_is_on_its_way",
        told_as=("too-early", "no-prefetch"),
    ),
    Mutant(
        id="prefetch-all-ahead",
        exercise="3.16",
        mistake="every unit is prefetched at once",
        text="""        for following in ahead:
            following.start_gather()
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
        text="""        for following in ahead:
            following.start_gather()
""",
        becomes="""        for following in ahead:
            following.gather()
""",
        caught_by="test_communication_hides_behind_compute",
        told_as="exposed",
    ),
    Mutant(
        id="prefetch-reduce-waits-at-once",
        exercise="3.16",
        mistake="every reduce-scatter is waited for where it is issued",
        text="""        unit.start_reduce()
        self.reducing = [unit]
""",
        becomes="""        unit.start_reduce()
        unit.finish_reduce()
""",
        caught_by="test_communication_hides_behind_compute",
        told_as="exposed",
    ),
    Mutant(
        id="prefetch-last-handle",
        exercise="3.16",
        mistake="the last reduce-scatter is never waited for",
        text="""        for unit in self.reducing:
            unit.finish_reduce()
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="left-over",
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
                left.reset()
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="stale",
    ),
    Mutant(
        id="prefetch-always-in-order",
        exercise="3.16",
        mistake="a unit that the last forward did not run has no place in its order",
        text="        if unit in self.to_come[1:]:\n",
        becomes="        if unit is not self.units[0]:\n",
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
        told_as=("never-waited", "never-freed"),
    ),
    Mutant(
        id="prefetch-order-never-learnt",
        exercise="3.16",
        mistake="every forward expects the order in which units were given",
        text="self.order or self.expected, []",
        becomes="self.expected, []",
        caught_by="test_next_unit_is_on_its_way",
        told_as=("no-prefetch", "too-early"),
    ),
    Mutant(
        id="prefetch-two-reductions",
        exercise="3.16",
        mistake="reduce-scatters are waited for when the whole backward is done",
        text="""        for other in self.reducing:
            other.finish_reduce()
        unit.start_reduce()
        self.reducing = [unit]
""",
        becomes="""        unit.start_reduce()
        self.reducing += [unit]
""",
        caught_by="test_one_reduction_is_under_way",
        told_as="too-many-under-way",
    ),
    Mutant(
        id="prefetch-stale-after-an-exception",
        exercise="3.16",
        mistake="units that a forward which raised has gathered are used again, stale",
        text="""            for left in self.units:
                left.reset()
""",
        becomes="            self.units[0].free()\n",
        caught_by="test_next_forward_begins_anew",
        told_as=("stale", "old-gradient"),
    ),
    Mutant(
        id="prefetch-next-first",
        exercise="3.16",
        mistake="the next unit's gather is issued before the unit's own, which waits behind it",
        text="""        unit.gather()
        for following in ahead:
            following.start_gather()
""",
        becomes="""        for following in ahead:
            following.start_gather()
        unit.gather()
""",
        caught_by="test_next_unit_is_on_its_way",
        told_as="next-before-own",
    ),
    Mutant(
        id="prefetch-order-of-training-only",
        exercise="3.16",
        mistake="a forward without autograd is not noted: the order that it had is not expected",
        text="        self.order.append(unit)\n",
        becomes="        self.order += [unit] if torch.is_grad_enabled() else []\n",
        caught_by="test_next_unit_is_on_its_way",
        told_as=("no-prefetch", "too-early"),
    ),
    Mutant(
        id="prefetch-guesses-pile-up",
        exercise="3.16",
        mistake="wrong guesses stay beside the next ones until the root's forward is done",
        text="            for other in self.held.difference([unit, *ahead]):\n",
        becomes="            for other in ():\n",
        caught_by="test_one_unit_ahead_and_no_more",
        told_as="never-freed",
    ),
    Mutant(
        id="prefetch-guesses-pile-up-in-backward",
        exercise="3.16",
        mistake="units that backward passes over stay gathered until it is done",
        text="                self.to_come.pop().free()\n",
        becomes="                self.to_come.pop()\n",
        caught_by="test_one_unit_ahead_and_no_more",
        told_as="never-freed",
    ),
    Mutant(
        id="prefetch-kept-in-training-mode-only",
        exercise="3.16",
        mistake="in evaluation mode with autograd nothing stays for backward",
        text="if torch.is_grad_enabled() else ()",
        becomes="if torch.is_grad_enabled() and self.training else ()",
        caught_by="test_last_unit_and_root_are_gathered_once",
        told_as="too-many-bytes",
    ),
]
