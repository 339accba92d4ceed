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
        text=(
            '            mine.update({name: v for name, v in users.items() if name != "params"})\n'
        ),
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
        text=(
            "            part = None if whole is None else whole.flatten()[piece.start : "
            "piece.stop]\n"
        ),
        becomes="""            whole = torch.zeros_like(piece.whole) if whole is None else whole
            part = whole.flatten()[piece.start : piece.stop]
""",
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
        text=(
            "            users.update({name: v for name, v in loaded.items() if name != "
            '"params"})\n'
        ),
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
        text="            for indices in partition(trainable, limit, limit)\n",
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
        told_as="hang",
    ),
]
