"""Wrong implementations of exercise 4.6."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="topk-no-error-feedback",
        exercise="4.6",
        mistake="what is not sent is forgotten",
        text="            v.add_(bucket.buffer)\n",
        becomes="            v.copy_(bucket.buffer)\n",
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="topk-residual-not-cleared",
        exercise="4.6",
        mistake="what was sent stays in the residual",
        text="""        values, indices = v[chosen], chosen.int()
        v[chosen] = 0
""",
        becomes="        values, indices = v[chosen], chosen.int()\n",
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="residual-not-cleared",
    ),
    Mutant(
        id="topk-largest-not-absolute",
        exercise="4.6",
        mistake="the largest values are chosen, not the largest absolute values",
        text=(
            "        chosen = v.abs().topk(count_for(self.ratio, v.numel()), "
            "sorted=False).indices\n"
        ),
        becomes="        chosen = v.topk(count_for(self.ratio, v.numel()), sorted=False).indices\n",
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="wrong",
    ),
    Mutant(
        id="topk-chosen-by-gradient",
        exercise="4.6",
        mistake=(
            "the choice looks at this step's gradient: what waits in the residual waits for ever"
        ),
        text=(
            "        chosen = v.abs().topk(count_for(self.ratio, v.numel()), "
            "sorted=False).indices\n"
        ),
        becomes=(
            "        chosen = bucket.buffer.abs().topk(count_for(self.ratio, v.numel()), "
            "sorted=False).indices\n"
        ),
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="wrong",
    ),
    Mutant(
        id="topk-values-reduced",
        exercise="4.6",
        mistake="values are all-reduced, and each rank puts the sums at its own positions",
        text=(
            "            dist.all_gather_into_tensor(all_values, values, self.group, "
            "async_op=True),\n"
            "            dist.all_gather_into_tensor(all_indices, indices, self.group, "
            "async_op=True),\n"
        ),
        becomes="""            dist.all_reduce(values, group=self.group, async_op=True),
            dist.all_reduce(all_indices, group=self.group, async_op=True),
""",
        more=(
            (
                (
                    "            for positions, part in parts:  # none twice in one part, so "
                    "that no order is left open\n"
                    "                bucket.buffer.index_add_(0, positions, part)\n"
                ),
                "            bucket.buffer[chosen] = values\n",
            ),
        ),
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="topk-indices-reduced",
        exercise="4.6",
        mistake="the all-reduce of indices gives sums of indices, which are no indices",
        text=(
            "            dist.all_gather_into_tensor(all_indices, indices, self.group, "
            "async_op=True),\n"
        ),
        becomes="            dist.all_reduce(indices, group=self.group, async_op=True),\n",
        more=(
            (
                (
                    "            for positions, part in parts:  # none twice in one part, so "
                    "that no order is left open\n"
                    "                bucket.buffer.index_add_(0, positions, part)\n"
                ),
                (
                    "            for positions, part in parts:  # none twice in one part, so "
                    "that no order is left open\n"
                    "                bucket.buffer.index_add_(0, indices, part)\n"
                ),
            ),
        ),
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="exception",
    ),
    Mutant(
        id="topk-places-overwrite",
        exercise="4.6",
        mistake="where two ranks send the same position, the later one overwrites the earlier one",
        text=(
            "            for positions, part in parts:  # none twice in one part, so that no "
            "order is left open\n"
            "                bucket.buffer.index_add_(0, positions, part)\n"
        ),
        becomes=(
            "            for positions, part in parts:  # none twice in one part, so that no "
            "order is left open\n"
            "                bucket.buffer[positions] = part\n"
        ),
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="wrong",
    ),
    Mutant(
        id="topk-own-first",
        exercise="4.6",
        mistake="each rank adds its own part first: sums of three have other bits on each rank",
        text="""            bucket.buffer.zero_()
            parts = zip(""",
        becomes="""            bucket.buffer.zero_()
            bucket.buffer.index_add_(0, indices, values)
            parts = zip(""",
        more=(
            (
                "            for positions, part in parts:",
                """            mine = dist.get_rank(self.group)
            parts = [x for r, x in enumerate(parts) if r != mine]
            for positions, part in parts:""",
            ),
        ),
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="topk-dense-all-reduce",
        exercise="4.6",
        mistake="zeros travel too: what was chosen is all-reduced as a full buffer",
        text="""        world_size = dist.get_world_size(self.group)
        all_values""",
        becomes="""        bucket.buffer.zero_()[chosen] = values
        return dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        world_size = dist.get_world_size(self.group)
        all_values""",
        caught_by="test_bytes_are_those_of_k_values_and_indices",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="topk-int64-indices",
        exercise="4.6",
        mistake="indices travel in 64 bits, as topk gives them",
        text="""        values, indices = v[chosen], chosen.int()
        v[chosen] = 0
""",
        becomes="""        values, indices = v[chosen], chosen
        v[chosen] = 0
""",
        caught_by="test_bytes_are_those_of_k_values_and_indices",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="topk-everything-sent",
        exercise="4.6",
        mistake=(
            "k is not a share of the entries: everything travels, and the result is even better"
        ),
        text=(
            "        chosen = v.abs().topk(count_for(self.ratio, v.numel()), "
            "sorted=False).indices\n"
        ),
        becomes="        chosen = v.abs().topk(v.numel()).indices\n",
        caught_by="test_bytes_are_those_of_k_values_and_indices",
        told_as="too-many-entries",
    ),
    Mutant(
        id="topk-velocity-kept",
        exercise="4.6",
        mistake="the velocity is not cleared where something was sent",
        text="""        if self.momentum:
            u[chosen] = 0
""",
        becomes="",
        caught_by="test_momentum_comes_before_the_choice",
        told_as="velocity-not-cleared",
    ),
    Mutant(
        id="topk-momentum-forgotten",
        exercise="4.6",
        mistake="there is no momentum",
        text="            v.add_(u.mul_(self.momentum).add_(bucket.buffer))\n",
        becomes="            v.add_(bucket.buffer)\n",
        caught_by="test_momentum_comes_before_the_choice",
        told_as="no-momentum",
    ),
    Mutant(
        id="topk-momentum-after",
        exercise="4.6",
        mistake="momentum is taken of what has arrived",
        text="            v.add_(u.mul_(self.momentum).add_(bucket.buffer))\n",
        becomes="            v.add_(bucket.buffer)\n",
        more=(
            (
                """        if self.momentum:
            u[chosen] = 0
""",
                "",
            ),
            (
                (
                    "            for positions, part in parts:  # none twice in one part, so "
                    "that no order is left open\n"
                    "                bucket.buffer.index_add_(0, positions, part)\n"
                ),
                (
                    "            for positions, part in parts:  # none twice in one part, so "
                    "that no order is left open\n"
                    "                bucket.buffer.index_add_(0, positions, part)\n"
                    "            if self.momentum:\n"
                    "                "
                    "bucket.buffer.copy_(u.mul_(self.momentum).add_(bucket.buffer))\n"
                ),
            ),
        ),
        caught_by="test_momentum_comes_before_the_choice",
        told_as="momentum-after-the-choice",
    ),
    Mutant(
        id="topk-momentum-twice",
        exercise="4.6",
        mistake="momentum is taken before the choice, and once more of what has arrived",
        text=(
            "            for positions, part in parts:  # none twice in one part, so that no "
            "order is left open\n"
            "                bucket.buffer.index_add_(0, positions, part)\n"
        ),
        becomes=(
            "            for positions, part in parts:  # none twice in one part, so that no "
            "order is left open\n"
            "                bucket.buffer.index_add_(0, positions, part)\n"
            "            if self.momentum:\n"
            "                last = getattr(self, 'last', 0) * self.momentum + bucket.buffer\n"
            "                self.last = last.clone()\n"
            "                bucket.buffer.copy_(last)\n"
        ),
        caught_by="test_momentum_comes_before_the_choice",
        told_as="momentum-twice",
    ),
    Mutant(
        id="topk-residual-by-bucket",
        exercise="4.6",
        mistake="the residual belongs to the bucket: it is lost when buckets are made anew",
        text="            flat = torch.cat([self.parts[p] for p in together])\n",
        becomes="            flat = torch.zeros_like(bucket.buffer)\n",
        caught_by="test_nothing_is_lost_when_buckets_are_made_anew",
        told_as="not-moved",
    ),
    Mutant(
        id="topk-state-without-residual",
        exercise="4.6",
        mistake="the residual is not saved",
        text=(
            '        return {"residual": self.residual.state_dict(), "velocity": '
            "self.velocity.state_dict()}\n"
        ),
        becomes='        return {"velocity": self.velocity.state_dict()}\n',
        more=(
            (
                """        self.velocity.load_state_dict(state["velocity"])
        self.residual.load_state_dict(state["residual"])
""",
                '        self.velocity.load_state_dict(state["velocity"])\n',
            ),
        ),
        caught_by="test_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="topk-state-without-velocity",
        exercise="4.6",
        mistake="the velocity is not saved",
        text=(
            '        return {"residual": self.residual.state_dict(), "velocity": '
            "self.velocity.state_dict()}\n"
        ),
        becomes='        return {"residual": self.residual.state_dict()}\n',
        more=(
            (
                """        self.velocity.load_state_dict(state["velocity"])
        self.residual.load_state_dict(state["residual"])
""",
                '        self.residual.load_state_dict(state["residual"])\n',
            ),
        ),
        caught_by="test_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="topk-state-not-loaded",
        exercise="4.6",
        mistake="the state is saved and never used",
        text="""        self.velocity.load_state_dict(state["velocity"])
        self.residual.load_state_dict(state["residual"])
""",
        becomes="        pass\n",
        caught_by="test_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="topk-state-is-no-copy",
        exercise="4.6",
        mistake="the state holds the tensors themselves, which training goes on to change",
        text="        return [part.clone() for part in self.parts.values()]\n",
        becomes="        return [*self.parts.values()]\n",
        caught_by="test_state_goes_on_to_the_bit",
        told_as="state-not-copied",
    ),
    Mutant(
        id="topk-state-by-parameter",
        exercise="4.6",
        mistake=(
            "the state's keys are the parameters themselves: no file without pickle can hold it"
        ),
        text=(
            '        return {"residual": self.residual.state_dict(), "velocity": '
            "self.velocity.state_dict()}\n"
        ),
        becomes='        return {"residual": dict(self.residual.parts), "velocity": {}}\n',
        caught_by="test_state_goes_on_to_the_bit",
        told_as="not-a-tree",
    ),
    Mutant(
        id="topk-numbered-as-they-come",
        exercise="4.6",
        mistake="the state is in the order of the buckets, which is another one after a resume",
        text="            flat = torch.cat([self.parts[p] for p in together])\n",
        becomes="            flat = torch.cat([self.parts.pop(p) for p in together])\n",
        caught_by="test_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="topk-empty-bucket",
        exercise="4.6",
        mistake="an empty bucket asks for its largest entry",
        text="""        if not bucket.buffer.numel():
            return None
        v = self.residual.beside(bucket)
        if self.momentum:
""",
        becomes="""        v = self.residual.beside(bucket)
        if self.momentum:
""",
        more=(
            (
                "    return min(numel, max(1, round(ratio * numel)))\n",
                "    return max(1, round(ratio * numel))\n",
            ),
        ),
        caught_by="test_empty_and_tiny_buckets",
        told_as="exception",
    ),
    Mutant(
        id="topk-group-ignored",
        exercise="4.6",
        mistake="the default group is used",
        text=(
            "            dist.all_gather_into_tensor(all_values, values, self.group, "
            "async_op=True),\n"
        ),
        becomes="            dist.all_gather_into_tensor(all_values, values, async_op=True),\n",
        caught_by="test_two_models_in_two_groups",
        told_as=("hang", "exception"),
    ),
    Mutant(
        id="topk-indices-in-wait",
        exercise="4.6",
        mistake="only the values leave while backward goes on: the indices are sent in wait",
        text="""            dist.all_gather_into_tensor(all_indices, indices, self.group, async_op=True),
        ]
""",
        becomes="""        ]
""",
        more=(
            (
                "            sent[1].wait()\n",
                "            dist.all_gather_into_tensor(all_indices, indices, self.group)\n",
            ),
        ),
        caught_by="test_hook_begins_and_does_not_wait",
        told_as="sent-in-wait",
    ),
    Mutant(
        id="topk-one-bucket-at-a-time",
        exercise="4.6",
        mistake="what wait needs is kept in the hook, where the next bucket overwrites it",
        text="        world_size = dist.get_world_size(self.group)\n",
        becomes="        world_size = dist.get_world_size(self.group)\n        self.bucket = bucket\n",
        more=(
            (
                "            sent[1].wait()\n            bucket.buffer.zero_()\n",
                "            sent[1].wait()\n            bucket = self.bucket\n"
                "            bucket.buffer.zero_()\n",
            ),
        ),
        caught_by="test_two_models_in_two_groups",
        told_as=("wrong", "exception"),
    ),
    Mutant(
        id="topk-new-buffer",
        exercise="4.6",
        mistake="the bucket gets a new buffer: the gradients are views of the old one",
        text="""            sent[1].wait()
            bucket.buffer.zero_()
""",
        becomes="""            sent[1].wait()
            bucket.buffer = torch.zeros_like(bucket.buffer)
""",
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="exception",
    ),
    Mutant(
        id="topk-remembered-by-bucket",
        exercise="4.6",
        mistake="a bucket that comes again has a residual that is out of date",
        text="            self.joined = {**others, together: flat}\n",
        becomes="            self.joined[together] = flat\n",
        caught_by="test_nothing_is_lost_when_buckets_are_made_anew",
        told_as="not-moved",
    ),
    Mutant(
        id="topk-waits-in-hook",
        exercise="4.6",
        mistake="the hook waits, and backward stands still meanwhile",
        text="""        def add_up() -> None:
            sent[1].wait()
""",
        becomes="""        sent[1].wait()

        def add_up() -> None:
""",
        caught_by="test_hook_begins_and_does_not_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="topk-values-not-waited",
        exercise="4.6",
        mistake="only the indices are waited for",
        text="        return Then(sent[0], add_up)\n",
        becomes="        return Then(sent[1], add_up)\n",
        caught_by="test_bytes_are_those_of_k_values_and_indices",
        told_as="never-waited",
    ),
    Mutant(
        id="topk-sizes-not-compared",
        exercise="4.6",
        mistake="a state of other parameters is loaded as far as it goes",
        text="    if sizes != wanted:\n",
        becomes="    if False:\n",
        caught_by="test_bad_input_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="topk-half-loaded",
        exercise="4.6",
        mistake="sizes are compared while the state is being written",
        text="""        check_sizes(state, [*self.parts.values()])
        for part, saved in zip(self.parts.values(), state, strict=True):
""",
        becomes="""        for part, saved in zip(self.parts.values(), state, strict=True):
            check_sizes([saved], [part])
""",
        caught_by="test_a_refused_state_changes_nothing",
        told_as="half-loaded",
    ),
    Mutant(
        id="topk-ratio-not-checked",
        exercise="4.6",
        mistake="any ratio is taken",
        text="    if not 0 < ratio <= 1:\n",
        becomes="    if ratio < 0:\n",
        caught_by="test_bad_input_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="topk-takes-the-state-over",
        exercise="4.6",
        mistake="tensors of the state are taken over, and later steps write into them",
        text="""        for part, saved in zip(self.parts.values(), state, strict=True):
            part.copy_(saved)
""",
        becomes="""        self.parts = dict(zip(self.parts, state, strict=True))
""",
        more=(
            (
                "        if together not in self.joined:\n",
                "        if len(together) == 1:\n"
                "            return self.parts[together[0]]\n"
                "        if together not in self.joined:\n",
            ),
        ),
        caught_by="test_state_goes_on_to_the_bit",
        told_as="state-changed",
    ),
    Mutant(
        id="topk-second-velocity-not-cleared",
        exercise="4.6",
        mistake="only the first bucket's velocity is cleared where it was sent",
        text="        if self.momentum:\n            u[chosen]",
        becomes="        if self.momentum and not bucket.index:\n            u[chosen]",
        caught_by="test_two_models_in_two_groups",
        told_as="velocity-not-cleared",
    ),
    Mutant(
        id="topk-chosen-in-float32",
        exercise="4.6",
        mistake="the largest are looked for in float32: close numbers of float64 are taken to be equal",
        text="v.abs().topk(",
        becomes="v.abs().float().topk(",
        caught_by="test_sends_the_largest_and_owes_the_rest",
        told_as="wrong",
    ),
]
