"""Wrong implementations of exercise 3.13."""

from distlab.grading.wrong import mutants_of

TRAIN, STATE = "test_training_equals_one_process", "test_state_is_one_part_of_w"
BYTES, MOVES = "test_bytes_of_a_step", "test_state_moves_to_another_world_size"
DTYPES = "test_each_dtype_stays"
GROUP, USERS = "test_works_in_a_group", "test_users_groups_are_obeyed"

BOUNDS = "        first, last = rank * chunk, (rank + 1) * chunk\n"
VIEWS = "            p.data = view.view(p.shape)\n"
GATHER = """        handles = [
            dist.all_gather_into_tensor(v.flat, v.own, group=self.group, async_op=True)
            for v in self.vectors
        ]
        for handle in handles:
            handle.wait()
"""
OPTIONS = """            mine.update({name: v for name, v in users.items() if name != "params"})
"""
JOIN = "                    joined.view(-1)[start:stop] = value\n"
LOADED = """            users.update({name: v for name, v in loaded.items() if name != "params"})
"""
CEIL = "        chunk = -(-numel // world_size)\n"

mutant = mutants_of("3.13", "zero")

MUTANTS = [
    mutant(
        "shards-nothing",
        "BUGS 69: every rank steps everything and nothing is gathered: the right values",
        BOUNDS,
        "        first, last = 0, world_size * chunk\n",
        STATE,
        "too-much-memory",
        (GATHER, ""),
    ),
    mutant(
        "all-on-first-rank",
        "BUGS 70: rank 0 owns everything and broadcasts it",
        BOUNDS,
        "        first, last = (0, len(self.flat)) if rank == 0 else (0, 0)\n",
        STATE,
        "too-much-memory",
        (
            GATHER,
            "        for v in self.vectors:\n"
            "            dist.broadcast(v.flat, group=self.group, group_src=0)\n",
        ),
    ),
    mutant(
        "not-gathered",
        "BUGS 75: the updated chunks are not gathered: every rank has its own model",
        GATHER,
        "",
        TRAIN,
        "ranks-differ",
    ),
    mutant(
        "dead-tensors",
        "BUGS 73: the parameters are no views of the vector: the model never moves",
        VIEWS,
        "",
        TRAIN,
        "not-trained",
    ),
    mutant(
        "not-copied",
        "the parameters become views of a vector of zeros: the weights are lost",
        "            view.copy_(p.detach().flatten())\n",
        "",
        TRAIN,
        "values-lost",
    ),
    mutant(
        "summed-vectors",
        "chunks brought together by an all-reduce of zeros elsewhere: twice the bytes",
        GATHER,
        "        for v in self.vectors:\n"
        "            kept = v.own.clone()\n"
        "            v.flat.zero_()\n"
        "            v.own.copy_(kept)\n"
        "            dist.all_reduce(v.flat, group=self.group)\n",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "not-waited",
        "BUGS 22: nobody waits for the all-gathers",
        "        for handle in handles:\n            handle.wait()\n",
        "        del handles\n",
        BYTES,
        "never-waited",
    ),
    mutant(
        "rates-not-copied",
        "BUGS 30: the scheduler writes to the user's groups, nobody reads there",
        OPTIONS,
        "            del mine, users\n",
        USERS,
        "rate-ignored",
    ),
    mutant(
        "floor-chunks",
        "BUGS 74: the chunk is rounded down: the last elements belong to nobody",
        CEIL,
        "        chunk = max(1, numel // world_size)\n",
        TRAIN,
        "exception",
    ),
    mutant(
        "unused-stepped",
        "a parameter without gradient counts as zero: weight decay moves it",
        "            part = None if whole is None else whole.flatten()[piece.start : piece.stop]\n",
        "            whole = torch.zeros_like(piece.whole) if whole is None else whole\n"
        "            part = whole.flatten()[piece.start : piece.stop]\n",
        TRAIN,
        "moved",
    ),
    mutant(
        "own-state-saved",
        "BUGS 88: the pieces of the first rank are saved as the whole state",
        "for pieces in told for piece in pieces",
        "for pieces in told[:1] for piece in pieces",
        MOVES,
        "wrong-keys",
    ),
    mutant(
        "pieces-joined-at-start",
        "BUGS 92: a piece is written to the beginning of its parameter",
        JOIN,
        "                    joined.view(-1)[: stop - start] = value\n",
        MOVES,
        "wrong-state",
    ),
    mutant(
        "rate-not-loaded",
        "BUGS 85: the groups' options are saved, but not loaded",
        LOADED,
        "            del users, loaded\n",
        MOVES,
        "wrong-rate",
    ),
    mutant(
        "frozen-sent",
        "frozen parameters are sent in every step, though nobody changes them",
        "if p.requires_grad and p.numel()]",
        "if p.requires_grad or p.numel()]",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "one-vector-for-all",
        "BUGS 76: parameters of all dtypes in one vector, whose dtype they take on",
        "            for places in partition(trainable, limit, limit)\n",
        "            for places in [range(len(trainable))]\n",
        DTYPES,
        "wrong-dtype",
    ),
    mutant(
        "default-group",
        "the all-gather ignores the group",
        "v.own, group=self.group, async_op=True",
        "v.own, async_op=True",
        GROUP,
        "hang",
    ),
]
