"""Wrong implementations of exercise 3.14."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="zero2-all-reduced",
        exercise="3.14",
        mistake="gradients are all-reduced and cut afterwards: twice the bytes",
        text="""        chunk = torch.empty_like(vector.own)
        work = dist.reduce_scatter_tensor(chunk, joined, group=self.group, async_op=True)
""",
        becomes=(
            "        chunk = joined[dist.get_rank(self.group) * len(vector.own) :][: "
            "len(vector.own)]\n"
            "        work = dist.all_reduce(joined, group=self.group, async_op=True)\n"
        ),
        caught_by="test_bytes_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="zero2-chunk-is-a-view",
        exercise="3.14",
        mistake="all-reduced, and the part is a view: the whole gradient stays alive",
        text="""        chunk = torch.empty_like(vector.own)
        work = dist.reduce_scatter_tensor(chunk, joined, group=self.group, async_op=True)
""",
        becomes=(
            "        chunk = joined[dist.get_rank(self.group) * len(vector.own) :][: "
            "len(vector.own)]\n"
            "        work = dist.all_reduce(joined, group=self.group, async_op=True)\n"
        ),
        caught_by="test_gradients_are_one_part_of_w",
        told_as="too-much-memory",
    ),
    Mutant(
        id="zero2-at-the-end",
        exercise="3.14",
        mistake="nothing leaves before backward is done: all gradients are there at once",
        text="        while len(self.left) < len(self.vectors):\n",
        becomes="        while False:\n",
        caught_by="test_gradients_leave_during_backward",
        told_as="no-overlap",
    ),
    Mutant(
        id="zero2-local-norm",
        exercise="3.14",
        mistake="every rank clips by the norm of its own part",
        text="        dist.all_reduce(squares, group=self.group)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="zero2-norm-of-norms",
        exercise="3.14",
        mistake="norms are summed over the ranks, not their squares",
        text="        norm = float(squares.sqrt())\n",
        becomes="        norm = float(squares)\n",
        more=(
            (
                "        dist.all_reduce(squares, group=self.group)\n",
                """        squares = squares.sqrt()
        dist.all_reduce(squares, group=self.group)
""",
            ),
        ),
        caught_by="test_training_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="zero2-summed",
        exercise="3.14",
        mistake="the sum over the ranks, not the mean",
        text="        chunk.div_(dist.get_world_size(self.group))\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="summed",
    ),
    Mutant(
        id="zero2-accumulation-lost",
        exercise="3.14",
        mistake="a second backward replaces what the first has left",
        text="            vector.gradient += chunk\n",
        becomes="            vector.gradient = chunk\n",
        caught_by="test_training_equals_one_process",
        told_as=("not-accumulated", "norm"),
    ),
    Mutant(
        id="zero2-never-cleared",
        exercise="3.14",
        mistake="zero_grad leaves the vector's gradient: every step adds to the last one's",
        text="            vector.gradient = None\n",
        becomes="            vector.own.grad = None\n",
        caught_by="test_gradients_are_one_part_of_w",
        told_as="not-cleared",
    ),
    Mutant(
        id="zero2-unused-stepped",
        exercise="3.14",
        mistake="a parameter that no rank has used gets zeros: weight decay moves it",
        text="                if piece.whole in anyone:\n",
        becomes="                if anyone:\n",
        caught_by="test_training_equals_one_process",
        told_as="moved",
    ),
    Mutant(
        id="zero2-last-never-leaves",
        exercise="3.14",
        mistake="a vector with an unused parameter is never sent",
        text="""            self._leave(vector)
        parameters""",
        becomes="""            pass
        parameters""",
        caught_by="test_training_equals_one_process",
        told_as="exception",
    ),
    Mutant(
        id="zero2-all-on-their-way",
        exercise="3.14",
        mistake="nobody waits before the end of backward: all joined gradients are alive",
        text="        if len(self.reducing) > 1:\n",
        becomes="        if False:\n",
        caught_by="test_gradients_are_one_part_of_w",
        told_as="high-peak",
    ),
    Mutant(
        id="zero2-second-gradient-lost",
        exercise="3.14",
        mistake="a gradient that is complete twice is taken once, or too late",
        text="        if p in self.arrived:\n",
        becomes="        if False:\n",
        caught_by="test_a_gradient_that_is_complete_twice_is_an_error",
        told_as="twice-accepted",
    ),
    Mutant(
        id="zero2-default-group",
        exercise="3.14",
        mistake="the reduce-scatter ignores the group",
        text="joined, group=self.group, async_op=True",
        becomes="joined, async_op=True",
        caught_by="test_works_in_a_group",
        told_as=("exception", "hang"),
    ),
    Mutant(
        id="zero2-norm-in-half",
        exercise="3.14",
        mistake="squares are summed in the gradients' dtype: in float16 they overflow",
        text="new_zeros((), dtype=torch.float64)",
        becomes="new_zeros(())",
        more=(("vector_norm(gradient, dtype=torch.float64)", "vector_norm(gradient)"),),
        caught_by="test_clipping",
        told_as="norm",
    ),
    Mutant(
        id="zero2-enlarged",
        exercise="3.14",
        mistake="gradients are scaled to the limit also where their norm is below it",
        text='        if max_norm < norm < float("inf"):\n',
        becomes='        if norm < float("inf"):\n',
        caught_by="test_clipping",
        told_as="enlarged",
    ),
    Mutant(
        id="zero2-infinite-clipped",
        exercise="3.14",
        mistake="an infinite norm zeroes every gradient, and makes NaN of the infinite one",
        text='        if max_norm < norm < float("inf"):\n',
        becomes="        if max_norm < norm:\n",
        caught_by="test_clipping",
        told_as="infinite-clipped",
    ),
    Mutant(
        id="zero2-waits-at-once",
        exercise="3.14",
        mistake="each bucket is waited for when it leaves: backward stands still",
        text="        self.reducing.append((vector, work, chunk, joined))\n",
        becomes="""        self.reducing.append((vector, work, chunk, joined))
        self._arrive()
""",
        caught_by="test_gradients_leave_during_backward",
        told_as="waits-at-once",
    ),
    Mutant(
        id="zero2-undefined-counts",
        exercise="3.14",
        mistake="a gradient that backward leaves undefined counts as one: weight decay moves it",
        text="""        if p.grad is None:  # undefined: torch calls this all the same
            return
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="moved",
    ),
    Mutant(
        id="zero2-failure-goes-on",
        exercise="3.14",
        mistake="after a backward that raised zero_grad clears only: the others wait for ever",
        text="        if self.running:\n            for vector",
        becomes="        if False:\n            for vector",
        caught_by="test_a_backward_that_raises",
        told_as=("mismatch", "hang"),
    ),
    Mutant(
        id="zero2-set-to-none-false",
        exercise="3.14",
        mistake="zero_grad(set_to_none=False) leaves the gradients",
        text="        if self.running:\n            for vector",
        becomes="        if not set_to_none:\n            return\n        if self.running:\n            for vector",
        caught_by="test_gradients_are_one_part_of_w",
        told_as="not-cleared",
    ),
]
