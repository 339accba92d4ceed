"""Wrong implementations of exercise 3.15."""

from distlab.grading.wrong import mutants_of

FIRST, TRAIN = "test_first_step_moves_by_the_mean_gradient", "test_training_equals_one_process"
STATE, LIVE = "test_state_is_one_part_of_w", "test_full_parameters_live_for_one_unit"
BYTES, PADDING = "test_bytes_of_a_step", "test_padding_is_nowhere"
UNUSED, CLIP = (
    "test_unit_that_nobody_uses_stays",
    "test_clipping_leaves_alone_what_it_should",
)
GROUP, WRONG = "test_works_in_a_group", "test_wrong_calls_are_refused"

OWN = """        own = torch.empty(stop - self.start, dtype=first.dtype, device=device)
        if not first.is_meta:
            vector = torch.cat([p.detach().flatten() for p in parameters])
            own.copy_(vector[self.start : stop])
"""
LEAVES = "            part.data.view(shape).requires_grad_(trainable)\n"
SHARD = "        self.shard = nn.Parameter(own, requires_grad=first.requires_grad)\n"
CHUNK = "        self.chunk = -(-self.numel // world_size)\n"
START = "        self.start = min(rank * self.chunk, self.numel)\n"
FREE = "        self.full.untyped_storage().resize_(0)\n"
THERE = "        if self.full.untyped_storage().nbytes():\n            return\n"
WAIT_GATHER = "            self.gathering.wait()\n"
NOTHING = "        if all(leaf.grad is None for leaf in self.leaves):\n            return\n"
FORGET = "        for leaf in self.leaves:\n            leaf.grad = None\n"
SCATTER = """        chunk = vector.new_empty(self.chunk)
        work = dist.reduce_scatter_tensor(chunk, vector, group=self.group, async_op=True)
"""
MEAN = "        return chunk.div_(dist.get_world_size(self.group))\n"
ADD = "        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean\n"
AFTER_FORWARD = """        # --- exercise 3.15: start
        unit.free()
        # --- exercise 3.15: end
"""
BEFORE_BACKWARD = '''called once for each output."""
        # --- exercise 3.15: start
        unit.gather()
'''
AFTER_BACKWARD = "        unit.free()\n        unit.start_reduce()\n        unit.finish_reduce()\n"
SQUARES = "    dist.all_reduce(squares, group=model.group)\n"
KIND = "                kind = parameter.dtype, parameter.requires_grad\n"
LAST = "        for unit in self.units:\n            self.after_backward(unit)\n"

mutant = mutants_of("3.15", "fsdp")

MUTANTS = [
    mutant(
        "garbage-left",
        "freed parameters stay in the modules, as tensors whose storage is gone",
        "        self.put([None] * len(self.leaves))\n",
        "",
        "test_freed_parameters_are_none",
        "not-none",
    ),
    mutant(
        "shard-is-a-view",
        "BUGS 69: the shard is a view: the whole vector stays alive on every rank",
        OWN,
        "        vector = torch.cat([p.detach().flatten() for p in parameters])\n"
        "        own = vector[self.start : stop]\n",
        STATE,
        "too-much-memory",
    ),
    mutant(
        "all-on-rank-0",
        "BUGS 70: rank 0 keeps everything, the others nothing",
        CHUNK + START,
        "        self.chunk = self.numel\n        self.start = 0 if rank == 0 else self.numel\n",
        STATE,
        "too-much-memory",
    ),
    mutant(
        "never-freed",
        "BUGS 71: the full parameters are never freed, only filled anew",
        FREE,
        "",
        LIVE,
        "never-freed",
        (
            THERE,
            '        if getattr(self, "there", False):\n            return\n        self.there = True\n',
        ),
        (
            "        self.finish_gather()\n        self.put(",
            "        self.finish_gather()\n        self.there = False\n        self.put(",
        ),
    ),
    mutant(
        "kept-until-backward",
        "BUGS 71: units stay gathered between forward and backward",
        AFTER_FORWARD,
        "        pass\n",
        LIVE,
        "never-freed",
    ),
    mutant(
        "gathered-all-at-once",
        "all units are gathered when the root's forward begins",
        "        # Step 9: four places and what happens there\n        unit.gather()\n",
        "        # Step 9: four places and what happens there\n"
        "        for every in self.units if unit is self.units[0] else ():\n"
        "            every.gather()\n        unit.gather()\n",
        LIVE,
        "never-freed",
    ),
    mutant(
        "freed-after-the-whole-backward",
        "BUGS 71: units are freed and reduced when the whole backward is done",
        AFTER_BACKWARD,
        "        if self.in_backward:\n            return\n" + AFTER_BACKWARD,
        LIVE,
        "never-freed",
    ),
    mutant(
        "gradients-kept",
        "the full gradients are never forgotten: they stay, and count again in the next step",
        FORGET,
        "",
        TRAIN,
        "norm",
    ),
    mutant(
        "stale-parameters",
        "BUGS 75: the root stays gathered, so the optimizer's step never reaches its forward",
        AFTER_FORWARD,
        "        if unit is not self.units[0]:\n            unit.free()\n",
        TRAIN,
        "norm",
        (AFTER_BACKWARD, "        if unit is not self.units[0]:\n    " + AFTER_BACKWARD),
    ),
    mutant(
        "dead-tensors",
        "BUGS 73: parameters() are copies: the optimizer trains what nobody uses",
        "        self.shards = nn.ParameterList(f.shard for unit in self.units for f in unit.flats)\n",
        "        self.shards = nn.ParameterList(\n"
        "            nn.Parameter(f.shard.detach().clone()) for unit in self.units for f in unit.flats\n"
        "        )\n",
        FIRST,
        "zeros",
    ),
    mutant(
        "summed",
        "BUGS 20: the sum over the ranks is not divided",
        MEAN,
        "        return chunk\n",
        FIRST,
        "summed",
    ),
    mutant(
        "divided-twice",
        "BUGS 21: the gradient is divided before and after",
        MEAN,
        "        return chunk.div_(dist.get_world_size(self.group) ** 2)\n",
        FIRST,
        "divided-twice",
    ),
    mutant(
        "own-gradient",
        "nothing is communicated: each rank cuts its own gradient",
        SCATTER,
        "        start = dist.get_rank(self.group) * self.chunk\n"
        "        chunk = vector[start : start + self.chunk] * dist.get_world_size(self.group)\n"
        "        work = dist.all_reduce(vector.new_zeros(1), group=self.group, async_op=True)\n",
        FIRST,
        "wrong",
    ),
    mutant(
        "all-reduced",
        "BUGS 72: gradients are all-reduced, then cut",
        SCATTER,
        "        work = dist.all_reduce(vector, group=self.group, async_op=True)\n"
        "        chunk = vector[dist.get_rank(self.group) * self.chunk :][: self.chunk]\n",
        BYTES,
        "too-many-bytes",
    ),
    mutant(
        "frozen-reduced",
        "BUGS 26: frozen parameters travel with the gradients",
        KIND,
        "                kind = parameter.dtype\n",
        BYTES,
        "too-many-bytes",
        (
            "        first = next(iter(parameters))\n        # ---",
            "        first = next(iter(parameters))\n        first.requires_grad_()\n        # ---",
        ),
        (NOTHING, ""),
    ),
    mutant(
        "one-by-one",
        "every parameter is a vector of its own: too many small messages",
        KIND,
        "                kind = parameter\n",
        BYTES,
        "too-many-messages",
    ),
    mutant(
        "padded-shards",
        "BUGS 74: the shards hold the padding, and the optimizer a state for it",
        OWN,
        "        vector = torch.cat([p.detach().flatten() for p in parameters])\n"
        "        own = F.pad(vector[self.start : stop], (0, self.chunk - (stop - self.start)))\n",
        PADDING,
        "padding",
    ),
    mutant(
        "tail-dropped",
        "chunks are rounded down: the last elements belong to nobody",
        CHUNK,
        "        self.chunk = self.numel // world_size\n",
        PADDING,
        "exception",
    ),
    mutant(
        "last-gradient-wins",
        "a second backward overwrites the first one's gradient",
        ADD,
        "        self.shard.grad = mean\n",
        TRAIN,
        "norm",
    ),
    mutant(
        "gather-not-awaited",
        "BUGS 22: the all-gather's handle is not waited for",
        WAIT_GATHER,
        "",
        FIRST,
        "never-waited",
    ),
    mutant(
        "not-gathered-for-backward",
        "the unit is not gathered again for its backward",
        BEFORE_BACKWARD,
        BEFORE_BACKWARD.replace("        unit.gather()\n", "        pass\n"),
        FIRST,
        "freed-too-early",
    ),
    mutant(
        "freed-when-gradients-are-there",
        "a unit is freed when its last trainable parameter has its gradient: a frozen one comes later",
        LEAVES,
        "            part.data.view(shape).requires_grad_(trainable)\n",
        FIRST,
        "freed-too-early",
        (
            "        self.watch_units()\n",
            "        for unit in self.units[1:]:\n"
            "            leaves = [p for f in unit.flats if f.shard.requires_grad for p in f.leaves]\n"
            "            for leaf in leaves:\n"
            "                leaf.register_post_accumulate_grad_hook(\n"
            "                    lambda _, unit=unit, leaves=leaves: unit.free()\n"
            "                    if all(p.grad is not None for p in leaves)\n"
            "                    else None\n"
            "                )\n"
            "        self.watch_units()\n",
        ),
    ),
    mutant(
        "first-unit-forgotten",
        "units whose inputs need no gradient are never reduced",
        LAST,
        "        pass\n",
        FIRST,
        "zeros",
    ),
    mutant(
        "unused-gets-zeros",
        "an unused unit gets a zero gradient: weight decay moves it",
        NOTHING,
        "",
        UNUSED,
        "moved",
    ),
    mutant(
        "local-norm",
        "BUGS 39: the norm of the rank's own shards",
        SQUARES,
        "",
        TRAIN,
        "norm",
    ),
    mutant(
        "infinite-to-nan",
        "an infinite norm makes every gradient zero or NaN",
        '    if max_norm < norm < float("inf"):\n',
        "    if max_norm < norm:\n",
        CLIP,
        "clipping",
    ),
    mutant(
        "default-group",
        "the reduction goes over all ranks, not over the group",
        "reduce_scatter_tensor(chunk, vector, group=self.group, async_op=True)",
        "reduce_scatter_tensor(chunk, vector, async_op=True)",
        GROUP,
        "hang",
    ),
    mutant(
        "overlap-accepted",
        "a unit inside another is passed over without a word",
        "        owned = owned_parameters(module, units, group)\n",
        "        units = [u for u in units if not any(u in [*v.children()] for v in units)]\n"
        "        owned = owned_parameters(module, units, group)\n",
        WRONG,
        "accepted",
    ),
]
