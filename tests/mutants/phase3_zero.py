"""Wrong implementations of exercise 3.13."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="zero-shards-nothing",
        exercise="3.13",
        mistake="every rank steps everything and nothing is gathered: the right values",
        text="        first, last = rank * shard, (rank + 1) * shard\n",
        becomes="        first, last = 0, world_size * shard\n",
        more=(
            (
                """        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
""",
                "",
            ),
        ),
        caught_by="test_state_is_one_part_of_w",
        told_as="too-much-memory",
    ),
    Mutant(
        id="zero-all-on-first-rank",
        exercise="3.13",
        mistake="rank 0 owns everything and broadcasts it",
        text="        first, last = rank * shard, (rank + 1) * shard\n",
        becomes="        first, last = (0, len(self.flat)) if rank == 0 else (0, 0)\n",
        more=(
            (
                """        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
""",
                """        for v in self.vectors:
            dist.broadcast(v.flat, group=self.group, group_src=0)
""",
            ),
        ),
        caught_by="test_state_is_one_part_of_w",
        told_as="too-much-memory",
    ),
    Mutant(
        id="zero-not-gathered",
        exercise="3.13",
        mistake="the updated shards are not gathered: every rank has its own model",
        text="""        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="ranks-differ",
    ),
    Mutant(
        id="zero-dead-tensors",
        exercise="3.13",
        mistake="the parameters are no views of the vector: the model never moves",
        text="            p.data = view.view(p.shape)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="not-trained",
    ),
    Mutant(
        id="zero-not-copied",
        exercise="3.13",
        mistake="the parameters become views of a vector of zeros: the weights are lost",
        text="            view.copy_(p.detach().flatten())\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="values-lost",
    ),
    Mutant(
        id="zero-summed-vectors",
        exercise="3.13",
        mistake="shards brought together by an all-reduce of zeros elsewhere: twice the bytes",
        text="""        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
""",
        becomes="""        for v in self.vectors:
            kept = v.own.clone()
            v.flat.zero_()
            v.own.copy_(kept)
            dist.all_reduce(v.flat, group=self.group)
""",
        caught_by="test_bytes_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="zero-not-waited",
        exercise="3.13",
        mistake="nobody waits for the all-gathers",
        text="""        for handle in handles:
            handle.wait()
""",
        becomes="        del handles\n",
        caught_by="test_bytes_of_a_step",
        told_as="never-waited",
    ),
    Mutant(
        id="zero-rates-not-copied",
        exercise="3.13",
        mistake="the scheduler writes to the user's groups, nobody reads there",
        text="            mine.update(options_of(users))\n",
        becomes="            del mine, users\n",
        caught_by="test_users_groups_are_obeyed",
        told_as="rate-ignored",
    ),
    Mutant(
        id="zero-floor-chunks",
        exercise="3.13",
        mistake="the shard is rounded down: the last elements belong to nobody",
        text="        shard = -(-numel // world_size)\n",
        becomes="        shard = max(1, numel // world_size)\n",
        caught_by="test_training_equals_one_process",
        told_as="exception",
    ),
    Mutant(
        id="zero-unused-stepped",
        exercise="3.13",
        mistake="a parameter without gradient counts as zero: weight decay moves it",
        text="None if whole is None else whole.flatten()",
        becomes="(torch.zeros_like(piece.whole) if whole is None else whole).flatten()",
        caught_by="test_training_equals_one_process",
        told_as="moved",
    ),
    Mutant(
        id="zero-own-state-saved",
        exercise="3.13",
        mistake="the pieces of the first rank are saved as the whole state",
        text="for pieces in told for piece in pieces",
        becomes="for pieces in told[:1] for piece in pieces",
        caught_by="test_state_moves_to_another_world_size",
        told_as="wrong-keys",
    ),
    Mutant(
        id="zero-pieces-joined-at-start",
        exercise="3.13",
        mistake="a piece is written to the beginning of its parameter",
        text="                    joined.view(-1)[start:stop] = value\n",
        becomes="                    joined.view(-1)[: stop - start] = value\n",
        caught_by="test_state_moves_to_another_world_size",
        told_as="wrong-state",
    ),
    Mutant(
        id="zero-rate-not-loaded",
        exercise="3.13",
        mistake="the groups' options are saved, but not loaded",
        text="            users.update(copy.deepcopy(options_of(loaded)))\n",
        becomes="            del users, loaded\n",
        caught_by="test_state_moves_to_another_world_size",
        told_as="wrong-rate",
    ),
    Mutant(
        id="zero-frozen-sent",
        exercise="3.13",
        mistake="frozen parameters are sent in every step, though nobody changes them",
        text="if p.requires_grad and p.numel()]",
        becomes="if p.requires_grad or p.numel()]",
        caught_by="test_bytes_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="zero-one-vector-for-all",
        exercise="3.13",
        mistake="parameters of all dtypes in one vector, whose dtype they take on",
        text="            for indices in partition(trainable, self.bucket_bytes, self.bucket_bytes)\n",
        becomes="            for indices in [range(len(trainable))]\n",
        caught_by="test_each_dtype_stays",
        told_as="wrong-dtype",
    ),
    Mutant(
        id="zero-default-group",
        exercise="3.13",
        mistake="the all-gather ignores the group",
        text="v.own, group=self.group, async_op=True",
        becomes="v.own, async_op=True",
        caught_by="test_works_in_a_group",
        told_as=("exception", "hang"),
    ),
    Mutant(
        id="zero-one-by-one",
        exercise="3.13",
        mistake="each all-gather is waited for before the next one begins",
        text="v.own, group=self.group, async_op=True)\n            for v in self.vectors\n",
        becomes="v.own, group=self.group)\n            for v in self.vectors\n",
        more=(("            handle.wait()\n", "            assert handle is None\n"),),
        caught_by="test_bytes_of_a_step",
        told_as="one-by-one",
    ),
    Mutant(
        id="zero-options-hidden",
        exercise="3.13",
        mistake="what the inner optimizer writes to its options is neither seen nor saved",
        text="            users.update(options_of(mine))\n",
        becomes="            del mine, users\n",
        caught_by="test_what_the_inner_optimizer_adds_is_kept",
        told_as="option-lost",
    ),
    Mutant(
        id="zero-old-state-stays",
        exercise="3.13",
        mistake="state from before load_state_dict stays where the loaded one has none",
        text="        self.state.clear()\n",
        becomes="",
        caught_by="test_state_moves_to_another_world_size",
        told_as="wrong-keys",
    ),
    Mutant(
        id="zero-loads-views",
        exercise="3.13",
        mistake="the own range is a view of what was loaded: it stays alive, and steps change it",
        text="part.to(piece.part, copy=True)",
        becomes="part",
        caught_by="test_state_moves_to_another_world_size",
        told_as=("state-alive", "too-much-memory"),
    ),
    Mutant(
        id="zero-options-shared",
        exercise="3.13",
        mistake="a saved option that is a tensor is the one that later steps change",
        text='"param_groups": copy.deepcopy(groups)}',
        becomes='"param_groups": groups}',
        caught_by="test_what_the_inner_optimizer_adds_is_kept",
        told_as="option-alive",
    ),
    Mutant(
        id="zero-twice-in-a-group",
        exercise="3.13",
        mistake="that a group has a parameter twice is left to torch, which only warns",
        text='        if len({*options["params"]}) < len(options["params"]):',
        becomes="        if False:",
        caught_by="test_wrong_calls_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="zero-only-rates",
        exercise="3.13",
        mistake="of what the user writes to a group, the learning rate alone is obeyed",
        text="            mine.update(options_of(users))\n",
        becomes='            mine["lr"] = users["lr"]\n',
        caught_by="test_users_groups_are_obeyed",
        told_as="option-ignored",
    ),
    Mutant(
        id="zero-cleared-by-refusal",
        exercise="3.13",
        mistake="load_state_dict forgets the state before it refuses another",
        text="        saved = [len(each",
        becomes="        self.state.clear()\n        saved = [len(each",
        caught_by="test_wrong_calls_are_refused",
        told_as="changed-by-refusal",
    ),
    Mutant(
        id="zero-options-of-first-group",
        exercise="3.13",
        mistake="what the inner optimizer writes comes back in the first group only",
        text="            users.update(options_of(mine))",
        becomes="            if users is self.param_groups[0]:\n                users.update(options_of(mine))",
        caught_by="test_what_the_inner_optimizer_adds_is_kept",
        told_as="option-lost",
    ),
]
