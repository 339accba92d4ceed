"""Wrong implementations of exercise 3.15."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="fsdp-garbage-left",
        exercise="3.15",
        mistake="freed parameters stay in the modules, as tensors whose storage is gone",
        text="        self.put([None] * len(self.leaves))\n",
        becomes="",
        caught_by="test_freed_parameters_are_none",
        told_as="not-none",
    ),
    Mutant(
        id="fsdp-shard-is-a-view",
        exercise="3.15",
        mistake="the shard is a view: the whole vector stays alive on every rank",
        text="""        own = torch.empty(stop - self.start, dtype=first.dtype, device=device)
        if not first.is_meta:
            vector = torch.cat([p.detach().flatten() for p in parameters])
            own.copy_(vector[self.start : stop])
""",
        becomes="""        vector = torch.cat([p.detach().flatten() for p in parameters])
        own = vector[self.start : stop]
""",
        caught_by="test_state_is_one_part_of_w",
        told_as="too-much-memory",
    ),
    Mutant(
        id="fsdp-all-on-rank-0",
        exercise="3.15",
        mistake="rank 0 keeps everything, the others nothing",
        text="""        self.chunk = -(-self.numel // world_size)
        self.start = min(rank * self.chunk, self.numel)
""",
        becomes="""        self.chunk = self.numel
        self.start = 0 if rank == 0 else self.numel
""",
        caught_by="test_state_is_one_part_of_w",
        told_as="too-much-memory",
    ),
    Mutant(
        id="fsdp-never-freed",
        exercise="3.15",
        mistake="the full parameters are never freed, only filled anew",
        text="        self.full.untyped_storage().resize_(0)\n",
        becomes="",
        more=(
            (
                """        if self.full.untyped_storage().nbytes():
            return
""",
                """        if getattr(self, "there", False):
            return
        self.there = True
""",
            ),
            (
                """        self.finish_gather()
        self.put(""",
                """        self.finish_gather()
        self.there = False
        self.put(""",
            ),
        ),
        caught_by="test_full_parameters_live_for_one_unit",
        told_as="never-freed",
    ),
    Mutant(
        id="fsdp-kept-until-backward",
        exercise="3.15",
        mistake="units stay gathered between forward and backward",
        text="""        # --- exercise 3.15: start
        unit.free()
        # --- exercise 3.15: end
""",
        becomes="        pass\n",
        caught_by="test_full_parameters_live_for_one_unit",
        told_as="never-freed",
    ),
    Mutant(
        id="fsdp-gathered-all-at-once",
        exercise="3.15",
        mistake="all units are gathered when the root's forward begins",
        text="""                left.reset()
        unit.gather()
""",
        becomes="""                left.reset()
        for every in self.units if unit is self.units[0] else ():
            every.gather()
        unit.gather()
""",
        caught_by="test_full_parameters_live_for_one_unit",
        told_as="never-freed",
    ),
    Mutant(
        id="fsdp-freed-after-the-whole-backward",
        exercise="3.15",
        mistake="units are freed and reduced when the whole backward is done",
        text="""        unit.free()
        unit.start_reduce()
        unit.finish_reduce()
""",
        becomes="""        if self.in_backward:
            return
        unit.free()
        unit.start_reduce()
        unit.finish_reduce()
""",
        caught_by="test_full_parameters_live_for_one_unit",
        told_as="never-freed",
    ),
    Mutant(
        id="fsdp-gradients-kept",
        exercise="3.15",
        mistake=(
            "the full gradients are never forgotten: they stay, and count again in the next step"
        ),
        text="""        for leaf in self.leaves:
            leaf.grad = None
""",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="fsdp-stale-parameters",
        exercise="3.15",
        mistake="the root stays gathered, so the optimizer's step never reaches its forward",
        text="""        # --- exercise 3.15: start
        unit.free()
        # --- exercise 3.15: end
""",
        becomes="""        if unit is not self.units[0]:
            unit.free()
""",
        more=(
            (
                """        unit.free()
        unit.start_reduce()
        unit.finish_reduce()
""",
                """        if unit is not self.units[0]:
            unit.free()
        unit.start_reduce()
        unit.finish_reduce()
""",
            ),
            (
                "            for left in self.units:\n",
                "            for left in self.units[1:]:\n",
            ),
        ),
        caught_by="test_training_equals_one_process",
        told_as="stale",
    ),
    Mutant(
        id="fsdp-dead-tensors",
        exercise="3.15",
        mistake="parameters() are copies: the optimizer trains what nobody uses",
        text=(
            "        self.shards = nn.ParameterList(f.shard for unit in self.units for f in "
            "unit.flats)\n"
        ),
        becomes="""        self.shards = nn.ParameterList(
            nn.Parameter(f.shard.detach().clone()) for unit in self.units for f in unit.flats
        )
""",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="zeros",
    ),
    Mutant(
        id="fsdp-summed",
        exercise="3.15",
        mistake="the sum over the ranks is not divided",
        text="        return chunk.div_(dist.get_world_size(self.group))\n",
        becomes="        return chunk\n",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="summed",
    ),
    Mutant(
        id="fsdp-divided-twice",
        exercise="3.15",
        mistake="the gradient is divided before and after",
        text="        return chunk.div_(dist.get_world_size(self.group))\n",
        becomes="        return chunk.div_(dist.get_world_size(self.group) ** 2)\n",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="divided-twice",
    ),
    Mutant(
        id="fsdp-own-gradient",
        exercise="3.15",
        mistake="nothing is communicated: each rank cuts its own gradient",
        text="""        chunk = vector.new_empty(self.chunk)
        work = dist.reduce_scatter_tensor(chunk, vector, group=self.group, async_op=True)
""",
        becomes="""        start = dist.get_rank(self.group) * self.chunk
        chunk = vector[start : start + self.chunk] * dist.get_world_size(self.group)
        work = dist.all_reduce(vector.new_zeros(1), group=self.group, async_op=True)
""",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="wrong",
    ),
    Mutant(
        id="fsdp-all-reduced",
        exercise="3.15",
        mistake="gradients are all-reduced, then cut",
        text="""        chunk = vector.new_empty(self.chunk)
        work = dist.reduce_scatter_tensor(chunk, vector, group=self.group, async_op=True)
""",
        becomes="""        work = dist.all_reduce(vector, group=self.group, async_op=True)
        chunk = vector[dist.get_rank(self.group) * self.chunk :][: self.chunk]
""",
        caught_by="test_bytes_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="fsdp-frozen-reduced",
        exercise="3.15",
        mistake="frozen parameters travel with the gradients",
        text="            flats = [flat_type(same, group, where) for same in kinds]\n",
        becomes="""            every = {p: places for same in kinds for p, places in same.items()}
            flats = [flat_type(every, group, where)] if every else []
""",
        more=(
            (
                """        first = next(iter(parameters))
        # ---""",
                """        first = next(iter(parameters))
        first.requires_grad_()
        # ---""",
            ),
            (
                """        if all(leaf.grad is None for leaf in self.leaves):
            return
""",
                "",
            ),
        ),
        caught_by="test_bytes_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="fsdp-one-by-one",
        exercise="3.15",
        mistake="every parameter is a vector of its own: too many small messages",
        text="            flats = [flat_type(same, group, where) for same in kinds]\n",
        becomes="""            flats = [
                flat_type({p: places}, group, where)
                for same in kinds
                for p, places in same.items()
            ]
""",
        caught_by="test_bytes_of_a_step",
        told_as="too-many-messages",
    ),
    Mutant(
        id="fsdp-padded-shards",
        exercise="3.15",
        mistake="the shards hold the padding, and the optimizer a state for it",
        text="""        own = torch.empty(stop - self.start, dtype=first.dtype, device=device)
        if not first.is_meta:
            vector = torch.cat([p.detach().flatten() for p in parameters])
            own.copy_(vector[self.start : stop])
""",
        becomes="""        vector = torch.cat([p.detach().flatten() for p in parameters])
        own = F.pad(vector[self.start : stop], (0, self.chunk - (stop - self.start)))
""",
        caught_by="test_padding_is_nowhere",
        told_as="padding",
    ),
    Mutant(
        id="fsdp-tail-dropped",
        exercise="3.15",
        mistake="shards are rounded down: the last elements belong to nobody",
        text="        self.chunk = -(-self.numel // world_size)\n",
        becomes="        self.chunk = self.numel // world_size\n",
        caught_by="test_padding_is_nowhere",
        told_as="exception",
    ),
    Mutant(
        id="fsdp-last-gradient-wins",
        exercise="3.15",
        mistake="a second backward overwrites the first one's gradient",
        text=(
            "        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + "
            "mean\n"
        ),
        becomes="        self.shard.grad = mean\n",
        caught_by="test_training_equals_one_process",
        told_as="not-added",
    ),
    Mutant(
        id="fsdp-gather-not-awaited",
        exercise="3.15",
        mistake="the all-gather's handle is not waited for",
        text="            self.gathering.wait()\n",
        becomes="",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="never-waited",
    ),
    Mutant(
        id="fsdp-not-gathered-for-backward",
        exercise="3.15",
        mistake="the unit is not gathered again for its backward",
        text=(
            'called once for each output."""\n'
            "        # --- exercise 3.15: start\n"
            "        unit.gather()\n"
        ),
        becomes=(
            'called once for each output."""\n        # --- exercise 3.15: start\n        pass\n'
        ),
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="freed-too-early",
    ),
    Mutant(
        id="fsdp-freed-when-gradients-are-there",
        exercise="3.15",
        mistake=(
            "a unit is freed when its last trainable parameter has its gradient: a frozen one "
            "comes later"
        ),
        text="            part.data.view(shape).requires_grad_(trainable)\n",
        becomes="            part.data.view(shape).requires_grad_(trainable)\n",
        more=(
            (
                "        self.watch_units()\n",
                """        for unit in self.units[1:]:
            leaves = [p for f in unit.flats if f.shard.requires_grad for p in f.leaves]
            for leaf in leaves:
                leaf.register_post_accumulate_grad_hook(
                    lambda _, unit=unit, leaves=leaves: unit.free()
                    if all(p.grad is not None for p in leaves)
                    else None
                )
        self.watch_units()
""",
            ),
        ),
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="freed-too-early",
    ),
    Mutant(
        id="fsdp-first-unit-forgotten",
        exercise="3.15",
        mistake="units whose inputs need no gradient are never reduced",
        text="""        for unit in self.units:
            self.after_backward(unit)
""",
        becomes="        pass\n",
        caught_by="test_first_step_moves_by_the_mean_gradient",
        told_as="zeros",
    ),
    Mutant(
        id="fsdp-unused-gets-zeros",
        exercise="3.15",
        mistake="an unused unit gets a zero gradient: weight decay moves it",
        text="""        if all(leaf.grad is None for leaf in self.leaves):
            return
""",
        becomes="",
        caught_by="test_unit_that_nobody_uses_stays",
        told_as="moved",
    ),
    Mutant(
        id="fsdp-local-norm",
        exercise="3.15",
        mistake="the norm of the rank's own shards",
        text="    dist.all_reduce(squares, group=model.group)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="fsdp-infinite-to-nan",
        exercise="3.15",
        mistake="an infinite norm makes every gradient zero or NaN",
        text='    if max_norm < norm < float("inf"):\n',
        becomes="    if max_norm < norm:\n",
        caught_by="test_clipping",
        told_as="clipping",
    ),
    Mutant(
        id="fsdp-default-group",
        exercise="3.15",
        mistake="the reduction goes over all ranks, not over the group",
        text="reduce_scatter_tensor(chunk, vector, group=self.group, async_op=True)",
        becomes="reduce_scatter_tensor(chunk, vector, async_op=True)",
        caught_by="test_works_in_a_group",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="fsdp-gather-waits-at-once",
        exercise="3.15",
        mistake="start_gather waits for the all-gather: nothing can be prefetched beside compute",
        text="""            self.full, self.gather_input(), group=self.group, async_op=True
        )
""",
        becomes="""            self.full, self.gather_input(), group=self.group, async_op=True
        )
        self.gathering.wait()
        self.gathering = type("Done", (), {"wait": lambda self: True})()
""",
        caught_by="test_one_vector_step_by_step",
        told_as="waited-at-once",
    ),
    Mutant(
        id="fsdp-memory-order",
        exercise="3.15",
        mistake="a transposed parameter is joined in the order of its memory",
        text="torch.cat([p.detach().flatten() for p in parameters])",
        becomes="""torch.cat(
                [p.detach().as_strided((p.numel(),), (1,)) for p in parameters]
            )""",
        caught_by="test_one_vector_step_by_step",
        told_as="permuted",
    ),
    Mutant(
        id="fsdp-squares-in-float32",
        exercise="3.15",
        mistake="the squares of large gradients overflow float32: nothing is clipped",
        text="torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2",
        becomes="torch.linalg.vector_norm(gradient) ** 2",
        caught_by="test_clipping",
        told_as="norm",
    ),
    Mutant(
        id="fsdp-stale-after-an-exception",
        exercise="3.15",
        mistake="what a forward that raised has gathered is used by the next one, stale",
        text="""            for left in self.units:
                left.reset()
""",
        becomes="            pass\n",
        caught_by="test_next_forward_begins_anew",
        told_as="stale",
    ),
    Mutant(
        id="fsdp-overlap-accepted",
        exercise="3.15",
        mistake="a unit inside another is passed over without a word",
        text="        owned = owned_parameters(module, units, group)\n",
        becomes=(
            "        units = [u for u in units if not any(u in [*v.children()] for v in units)]\n"
            "        owned = owned_parameters(module, units, group)\n"
        ),
        caught_by="test_wrong_calls_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="fsdp-placed-under-way",
        exercise="3.15",
        mistake="the leaves stand in the modules while the gather is under way, without values",
        text="        self.gathering = dist.all_gather_into_tensor(",
        becomes="        self.put(self.leaves)\n        self.gathering = dist.all_gather_into_tensor(",
        caught_by="test_one_vector_step_by_step",
        told_as="too-early",
    ),
    Mutant(
        id="fsdp-anew-with-autograd-only",
        exercise="3.15",
        mistake="an evaluation after a forward that raised sees what that one has left",
        text="        if unit is self.units[0]:\n            for left",
        becomes="        if unit is self.units[0] and torch.is_grad_enabled():\n            for left",
        caught_by="test_next_forward_begins_anew",
        told_as="stale",
    ),
    Mutant(
        id="fsdp-norm-in-16-bits",
        exercise="3.15",
        mistake="the norm of a bfloat16 gradient is rounded to bfloat16",
        text="        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2\n",
        becomes="""        wide = gradient.double() if gradient.dtype == torch.float32 else gradient
        squares += torch.linalg.vector_norm(wide).double() ** 2
""",
        caught_by="test_clipping",
        told_as="norm",
    ),
]
