"""Wrong implementations of exercise 3.31."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="uneven-divides-by-all",
        exercise="3.31",
        mistake="the mean is over all ranks: as ranks run out, the steps become smaller",
        text="mine / math.fsum(weights)",
        becomes="(mine > 0) / len(weights)",
        caught_by="test_training_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-weights-ignored",
        exercise="3.31",
        mistake="a small batch counts as much as a large one",
        text="mine / math.fsum(weights)",
        becomes="(mine > 0) / len(having)",
        caught_by="test_weights_make_the_mean_over_samples",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-first-ranks-buffers",
        exercise="3.31",
        mistake="the buffers come from the first rank, which saw its last batch long ago",
        text="self.source, self.share = having[0],",
        becomes="self.source, self.share = 0,",
        caught_by="test_buffers_come_from_a_rank_with_a_batch",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-no-last-buffers",
        exercise="3.31",
        mistake="after the last step each rank keeps its own buffers",
        text="            yield None if self.shadows else batch\n        self._send_buffers()\n",
        becomes="            yield None if self.shadows else batch\n",
        caught_by="test_buffers_come_from_a_rank_with_a_batch",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-buffers-in-evaluation",
        exercise="3.31",
        mistake="buffers travel in evaluation, too, where no forward changes them",
        text=" if self.module.training else []",
        becomes="",
        caught_by="test_buffers_come_from_a_rank_with_a_batch",
        told_as="too-many-messages",
    ),
    Mutant(
        id="uneven-shadow-is-silent",
        exercise="3.31",
        mistake="a rank without a batch sends nothing, and the others wait for its buckets",
        text="        self._finish()\n        # --- exercise 3.31: end",
        becomes="        self.owed = False\n        # --- exercise 3.31: end",
        caught_by="test_training_equals_one_process",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="uneven-forward-sends-buffers",
        exercise="3.31",
        mistake="forward sends the buffers once more, and a shadow runs no forward",
        text="        if self.over:\n            return super().forward(*args, **kwargs)\n",
        becomes="        if not kwargs:\n            return super().forward(*args, **kwargs)\n",
        caught_by="test_training_equals_one_process",
        told_as=("mismatch", "hang"),
    ),
    Mutant(
        id="uneven-plain-forward-silent",
        exercise="3.31",
        mistake="outside of a join forward sends no buffers either",
        text="        if self.over:\n            return super().forward(*args, **kwargs)\n",
        becomes="",
        caught_by="test_buffers_come_from_a_rank_with_a_batch",
        told_as="buffers-not-sent",
    ),
    Mutant(
        id="uneven-leaves-silently",
        exercise="3.31",
        mistake="a rank whose loader raises goes away, and the others wait for its weight",
        text="                self._tell(math.nan)\n",
        becomes="                pass\n",
        caught_by="test_a_rank_that_fails_ends_the_join_of_all",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="uneven-leaves-owing",
        exercise="3.31",
        mistake="a rank that raises in its step leaves before it has sent its buckets",
        text="        finally:\n            self._settle()\n",
        becomes="        finally:\n",
        caught_by="test_a_rank_that_fails_ends_the_join_of_all",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="uneven-skipped-step-forgotten",
        exercise="3.31",
        mistake="a rank that skips its backward tells its next weight where buckets are expected",
        text="        while True:\n            self._settle()\n",
        becomes="        while True:\n",
        caught_by="test_a_step_that_fails_is_left_out",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="uneven-failed-step-still-owed",
        exercise="3.31",
        mistake="a step that the ranks gave up together is given up once more when the body ends",
        text="        self.owed = False\n        super()._finish()\n",
        becomes="        super()._finish()\n        self.owed = False\n",
        caught_by="test_a_rank_that_fails_ends_the_join_of_all",
        told_as=("hang", "mismatch", "failure-not-told"),
    ),
    Mutant(
        id="uneven-names-another-rank",
        exercise="3.31",
        mistake="StepAborted names the rank after the one that left",
        text="StepAborted(left[0])",
        becomes="StepAborted((left[0] + 1) % len(weights))",
        caught_by="test_a_rank_that_fails_ends_the_join_of_all",
        told_as="failure-not-told",
    ),
    Mutant(
        id="uneven-share-stays",
        exercise="3.31",
        mistake="after the join the gradients still have the shares of its last step",
        text="            self.over, self.share = True, 1 / dist.get_world_size(self.group)\n",
        becomes="            self.over = True\n",
        caught_by="test_join_again_and_train_without",
        told_as="wrong",
    ),
    Mutant(
        id="uneven-share-stays-after-a-failure",
        exercise="3.31",
        mistake="only a join that ends well gives DDP its mean back",
        text="""            yield self._steps(batches, weight, throw)
        finally:
""",
        becomes="""            yield self._steps(batches, weight, throw)
            self.share = 1 / dist.get_world_size(self.group)
        finally:
""",
        more=(
            (
                "            self.over, self.share = True, 1 / dist.get_world_size(self.group)\n",
                "            self.over = True\n",
            ),
        ),
        caught_by="test_a_group_after_a_rank_has_left",
        told_as="old-share",
    ),
    Mutant(
        id="uneven-names-the-global-rank",
        exercise="3.31",
        mistake="StepAborted has the number in the world, not the one in the group",
        text="StepAborted(left[0])",
        becomes="StepAborted(dist.get_global_rank(self.group or dist.group.WORLD, left[0]))",
        caught_by="test_a_group_after_a_rank_has_left",
        told_as="failure-not-told",
    ),
    Mutant(
        id="uneven-refused-join-ends-all",
        exercise="3.31",
        mistake="a join that is refused tells the other ranks that the running one is left",
        text="""        if not self.over:
            raise RuntimeError("a join of this wrapper is running: end it first")
        self.over = False
        try:
""",
        becomes="""        try:
            if not self.over:
                raise RuntimeError("a join of this wrapper is running: end it first")
            self.over = False
""",
        caught_by="test_a_refused_join_leaves_the_running_one",
        told_as="join-ended",
    ),
    Mutant(
        id="uneven-tells-the-world",
        exercise="3.31",
        mistake="the weights are those of all ranks, not of the group",
        text="""        told = own.new_empty(dist.get_world_size(self.group))
        dist.all_gather_into_tensor(told, own, group=self.group)
""",
        becomes="""        told = own.new_empty(dist.get_world_size())
        dist.all_gather_into_tensor(told, own)
""",
        caught_by="test_groups_join_by_themselves",
        told_as=("hang", "mismatch", "exception", "steps"),
    ),
    Mutant(
        id="uneven-throw-ignored",
        exercise="3.31",
        mistake="throw=True changes nothing",
        text=" or (throw and len(having) < len(weights))",
        becomes="",
        caught_by="test_throw_ends_all_ranks_at_the_first_end",
        told_as="throw",
    ),
    Mutant(
        id="uneven-any-weight",
        exercise="3.31",
        mistake="a weight of zero counts as no batch, a negative one turns the gradient round",
        text="            if not self.shadows and not 0 < mine < math.inf:\n",
        becomes="            if False:\n",
        caught_by="test_what_a_join_refuses",
        told_as="accepted",
    ),
    Mutant(
        id="uneven-shadow-any-time",
        exercise="3.31",
        mistake="shadow() beside a batch sends buckets that no other rank expects",
        text="        if not (self.owed and self.shadows):\n",
        becomes="        if False:\n",
        caught_by="test_what_a_join_refuses",
        told_as=("accepted", "hang", "mismatch"),
    ),
    Mutant(
        id="uneven-two-gathers",
        exercise="3.31",
        mistake="who has a batch and its weight travel one after the other",
        text="        return told.tolist()\n",
        becomes="        dist.all_gather_into_tensor(told, own, group=self.group)\n"
        "        return told.tolist()\n",
        caught_by="test_a_step_costs_8_bytes_more",
        told_as="cost",
    ),
    Mutant(
        id="uneven-keeps-the-batches",
        exercise="3.31",
        mistake="the loader is read into a list first: all batches are in memory",
        text="        own, nothing = iter(batches), object()\n",
        becomes="        self.kept = list(batches)\n        own, nothing = iter(self.kept), object()\n",
        caught_by="test_nothing_stays",
        told_as="memory-kept",
    ),
]
