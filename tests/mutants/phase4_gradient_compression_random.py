"""Wrong implementations of exercise 4.7."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="randomk-unshared-seed",
        exercise="4.7",
        mistake="every rank draws positions of its own, and sums of different positions are mixed",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        if not hasattr(self, 'own'):
            seed = self.generator.initial_seed() + dist.get_rank(self.group)
            self.own = torch.Generator().manual_seed(seed)
        order = torch.randperm(v.numel(), generator=self.own)
""",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="randomk-global-generator",
        exercise="4.7",
        mistake="positions are drawn from the default generator, which is each rank's own",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        torch.manual_seed(torch.initial_seed() + dist.get_rank())
        order = torch.randperm(v.numel())
""",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="randomk-no-error-feedback",
        exercise="4.7",
        mistake="what is not drawn is forgotten",
        text="""        v = self.residual.beside(bucket)
        v.add_(bucket.buffer)
""",
        becomes="        v = bucket.buffer.clone()\n",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="no-error-feedback",
    ),
    Mutant(
        id="randomk-residual-not-cleared",
        exercise="4.7",
        mistake="what was sent stays in the residual",
        text="        v[positions] = 0\n",
        becomes="",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="residual-not-cleared",
    ),
    Mutant(
        id="randomk-scaled-up",
        exercise="4.7",
        mistake="values are scaled up by n/k, as if there were no residual",
        text="""            bucket.buffer.zero_()
            bucket.buffer[positions] = values
""",
        becomes="""            bucket.buffer.zero_()
            bucket.buffer[positions] = values * (v.numel() / len(values))
""",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="scaled-up",
    ),
    Mutant(
        id="randomk-not-zero-elsewhere",
        exercise="4.7",
        mistake="elsewhere the buffer keeps this rank's own gradient",
        text="""            bucket.buffer.zero_()
            bucket.buffer[positions] = values
""",
        becomes="            bucket.buffer[positions] = values\n",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="ranks-differ",
    ),
    Mutant(
        id="randomk-with-repetition",
        exercise="4.7",
        mistake="positions may be drawn twice: fewer are sent",
        text="""        order = torch.randperm(v.numel(), generator=self.generator)
        positions = order[: count_for(self.ratio, v.numel())].to(v.device)
""",
        becomes="""        k = count_for(self.ratio, v.numel())
        positions = torch.randint(v.numel(), (k,), generator=self.generator)
""",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="count",
    ),
    Mutant(
        id="randomk-same-places",
        exercise="4.7",
        mistake="the generator is seeded anew at every call: the same positions every time",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        self.generator.manual_seed(self.generator.initial_seed())
        order = torch.randperm(v.numel(), generator=self.generator)
""",
        caught_by="test_every_position_is_as_likely",
        told_as="not-uniform",
    ),
    Mutant(
        id="randomk-first-half-only",
        exercise="4.7",
        mistake="positions are drawn from the front part of the bucket",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes=(
            "        order = torch.randperm(max(1, v.numel() // 2), generator=self.generator)\n"
        ),
        caught_by="test_every_position_is_as_likely",
        told_as="not-uniform",
    ),
    Mutant(
        id="randomk-seed-ignored",
        exercise="4.7",
        mistake="every hook draws the same positions, whatever its seed is",
        text="        self.generator = torch.Generator().manual_seed(seed)\n",
        becomes="        self.generator = torch.Generator().manual_seed(0)\n",
        caught_by="test_calls_buckets_and_seeds_draw_their_own",
        told_as="seeds-collide",
    ),
    Mutant(
        id="randomk-seed-plus-call",
        exercise="4.7",
        mistake="seed plus number of the call: seed 1 draws in call 0 what seed 0 draws in call 1",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        self.calls = getattr(self, 'calls', -1) + 1
        own = torch.Generator().manual_seed(self.generator.initial_seed() + self.calls)
        order = torch.randperm(v.numel(), generator=own)
""",
        caught_by="test_calls_buckets_and_seeds_draw_their_own",
        told_as="seeds-collide",
    ),
    Mutant(
        id="randomk-block",
        exercise="4.7",
        mistake="a block of neighbours at a random place: each position is as likely, no pair is",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        start = torch.randint(v.numel(), (1,), generator=self.generator)
        order = (torch.arange(v.numel()) + start) % v.numel()
""",
        caught_by="test_every_position_is_as_likely",
        told_as="positions-together",
    ),
    Mutant(
        id="randomk-in-turns",
        exercise="4.7",
        mistake="positions that were sent come again only after all others",
        text="        order = torch.randperm(v.numel(), generator=self.generator)\n",
        becomes="""        late = v.new_ones(v.numel(), device='cpu')
        late[getattr(bucket, 'last', [])] = 0
        order = torch.multinomial(late + 1e-9, v.numel(), generator=self.generator)
        bucket.last = order[: count_for(self.ratio, v.numel())]
""",
        caught_by="test_every_position_is_as_likely",
        told_as="calls-depend",
    ),
    Mutant(
        id="randomk-indices-sent",
        exercise="4.7",
        mistake="the positions are sent along, though every rank knows them",
        text="        work = dist.all_reduce(values, group=self.group, async_op=True)\n",
        becomes="""        dist.broadcast(positions, group=self.group, group_src=0)
        work = dist.all_reduce(values, group=self.group, async_op=True)
""",
        caught_by="test_bytes_are_those_of_k_values",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="randomk-dense",
        exercise="4.7",
        mistake="the whole buffer is reduced, and the rest is thrown away",
        text="        work = dist.all_reduce(values, group=self.group, async_op=True)\n",
        becomes="""        whole = bucket.buffer.zero_()
        whole[positions] = values
        work = dist.all_reduce(whole, group=self.group, async_op=True)
""",
        more=(
            (
                """            bucket.buffer.zero_()
            bucket.buffer[positions] = values
""",
                "            pass\n",
            ),
        ),
        caught_by="test_bytes_are_those_of_k_values",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="randomk-residual-not-saved",
        exercise="4.7",
        mistake="the residual is not saved",
        text=(
            '        return {"residual": self.residual.state_dict(), "generator": '
            "self.generator.get_state()}\n"
        ),
        becomes='        return {"generator": self.generator.get_state()}\n',
        more=(
            (
                """        self.residual.load_state_dict(state["residual"])
        self.generator.set_state(state["generator"])
""",
                '        self.generator.set_state(state["generator"])\n',
            ),
        ),
        caught_by="test_random_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="randomk-generator-not-loaded",
        exercise="4.7",
        mistake="the random state is not restored",
        text='        self.generator.set_state(state["generator"])\n',
        becomes="",
        caught_by="test_random_state_goes_on_to_the_bit",
        told_as="resume-differs",
    ),
    Mutant(
        id="randomk-group-ignored",
        exercise="4.7",
        mistake="the default group is used",
        text="        work = dist.all_reduce(values, group=self.group, async_op=True)\n",
        becomes="        work = dist.all_reduce(values, async_op=True)\n",
        caught_by="test_random_two_models_in_two_groups",
        told_as="hang",
    ),
    Mutant(
        id="randomk-waits-in-hook",
        exercise="4.7",
        mistake="the hook waits, and backward stands still meanwhile",
        text="        work = dist.all_reduce(values, group=self.group, async_op=True)\n",
        becomes="""        work = dist.all_reduce(values, group=self.group, async_op=True)
        work.wait()
""",
        caught_by="test_random_hook_begins_and_does_not_wait",
        told_as="hook-waits",
    ),
    Mutant(
        id="random-generator-first",
        exercise="4.7",
        mistake="the generator is set before the residual is refused",
        text="""        self.residual.load_state_dict(state["residual"])
        self.generator.set_state(state["generator"])
""",
        becomes="""        self.generator.set_state(state["generator"])
        self.residual.load_state_dict(state["residual"])
""",
        caught_by="test_a_refused_random_state_changes_nothing",
        told_as="half-loaded",
    ),
    Mutant(
        id="randomk-residual-in-float32",
        exercise="4.7",
        mistake="what is owed is rounded to float32",
        text="        v.add_(bucket.buffer)\n        order",
        becomes="        v.add_(bucket.buffer)\n        v.copy_(v.float())\n        order",
        caught_by="test_sums_at_shared_positions_and_owes_the_rest",
        told_as="wrong",
    ),
]
