"""Wrong implementations of exercise 2.18."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="sequence-gather-cuts-graph",
        exercise="2.18",
        mistake="the collective is called outside of a Function: autograd sees no gather",
        text="    return _GatherSequence.apply(x_BtD, group)\n",
        becomes="    return start_gather(x_BtD, group)()\n",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="graph-cut",
    ),
    Mutant(
        id="sequence-gather-takes-own",
        exercise="2.18",
        mistake=(
            "the gradient of the gathered whole is cut, not summed: fit for replicated use only"
        ),
        text="        return scatter_sequence(grad_BTD, ctx.group), None\n",
        becomes="""        rank, world_size = place_in(ctx.group)
        return grad_BTD.chunk(world_size, TIME)[rank].contiguous(), None
""",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="only-own",
    ),
    Mutant(
        id="sequence-scatter-gradient-own",
        exercise="2.18",
        mistake="the other positions' gradients are zero",
        text="        return gather_sequence(grad_BtD, ctx.group), None\n",
        becomes="""        rank, world_size = place_in(ctx.group)
        zeros = torch.zeros_like(grad_BtD)
        parts = [grad_BtD if r == rank else zeros for r in range(world_size)]
        return torch.cat(parts, TIME), None
""",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="wrong",
    ),
    Mutant(
        id="sequence-joins-batches",
        exercise="2.18",
        mistake="the gathered blocks are reshaped: positions of different samples mix",
        text="        return torch.cat(blocks.chunk(world_size), TIME)\n",
        becomes="        return blocks.view(x_BtD.shape[0], -1, *x_BtD.shape[2:])\n",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="permuted",
    ),
    Mutant(
        id="sequence-scatters-batches",
        exercise="2.18",
        mistake="blocks of memory are scattered, not blocks of positions",
        text="    blocks = torch.cat(x_BTD.chunk(world_size, TIME))\n",
        becomes=(
            "    blocks = x_BTD.contiguous().view(-1, x_BTD.shape[1] // world_size, "
            "*x_BTD.shape[2:])\n"
        ),
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="wrong",
    ),
    Mutant(
        id="sequence-never-waits",
        exercise="2.18",
        mistake="the result of the reduce-scatter is used before it has arrived",
        text="""        work.wait()
        return mine_BtD
""",
        becomes="        return mine_BtD\n",
        caught_by="test_gather_and_scatter_are_conjugate",
        told_as="never-waited",
    ),
    Mutant(
        id="sequence-all-reduces",
        exercise="2.18",
        mistake="an all-reduce, of which a block is kept: twice the bytes",
        text="""    mine_BtD = blocks.new_empty(blocks.shape[0] // world_size, *blocks.shape[1:])
    work = dist.reduce_scatter_tensor(mine_BtD, blocks, group=group, async_op=True)
""",
        becomes="""    work = dist.all_reduce(blocks, group=group, async_op=True)
    mine_BtD = blocks.chunk(world_size)[dist.get_rank(group)]
""",
        caught_by="test_same_bytes_as_tensor_parallelism",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="sequence-nothing-shared",
        exercise="2.18",
        mistake="gathers at the beginning, works on all positions, cuts at the end",
        text="    column, row = SequenceColumnLinear, SequenceRowLinear\n",
        becomes="""    def forward(self, x_BtD: Tensor) -> Tensor:
        x_BTD = gather_from_ranks(x_BtD, TIME, self.group)
        return split_to_ranks(super().forward(x_BTD), TIME, self.group)
""",
        more=(
            (
                "    place_in,\n",
                """    gather_from_ranks,
    place_in,
    split_to_ranks,
""",
            ),
        ),
        caught_by="test_activations_follow_the_formula",
        told_as="too-much-memory",
    ),
    Mutant(
        id="sequence-keeps-the-whole",
        exercise="2.18",
        mistake="regather gathers again, but keeps what it gathered as well",
        text="        ctx.save_for_backward(x_BtD if regather else x_BTD, weight_fD)\n",
        becomes="        ctx.save_for_backward(x_BtD if regather else x_BTD, weight_fD, x_BTD)\n",
        more=(
            (
                "x, weight_fD = ctx.saved_tensors",
                "x, weight_fD, _ = ctx.saved_tensors",
            ),
        ),
        caught_by="test_activations_follow_the_formula",
        told_as="too-much-memory",
    ),
    Mutant(
        id="sequence-regather-ignored",
        exercise="2.18",
        mistake="the gathered input is kept whatever was asked for",
        text="        self.qkv.regather = self.up.regather = regather\n",
        becomes="        self.qkv.regather = self.up.regather = False\n",
        caught_by="test_activations_follow_the_formula",
        told_as="too-much-memory",
    ),
    Mutant(
        id="sequence-scatter-twice",
        exercise="2.18",
        mistake="the input's gradient is reduce-scattered, and once more for the next block",
        text="        finish_scatter = start_scatter(grad_BTf @ weight_fD, ctx.group)\n",
        becomes="""        start_scatter(grad_BTf @ weight_fD, ctx.group)()
        finish_scatter = start_scatter(grad_BTf @ weight_fD, ctx.group)
""",
        caught_by="test_same_bytes_as_tensor_parallelism",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="sequence-row-bias-each-rank",
        exercise="2.18",
        mistake="every rank's term has the bias",
        text="""        y_BtF = scatter_sequence(F.linear(x_BTd, self.weight), self.group)
        return y_BtF if self.bias is None else y_BtF + self.bias
""",
        becomes=(
            "        return scatter_sequence(F.linear(x_BTd, self.weight, self.bias), self.group)\n"
        ),
        caught_by="test_sequence_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="sequence-norms-not-reduced",
        exercise="2.18",
        mistake="the norms keep the gradients of this rank's positions",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="",
        caught_by="test_sequence_block_equals_one_process",
        told_as="only-own",
    ),
    Mutant(
        id="sequence-norms-averaged",
        exercise="2.18",
        mistake="the gradients are averaged, as in data parallelism",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="""        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
""",
        caught_by="test_replicated_gradients_are_summed_once",
        told_as="divided-twice",
    ),
    Mutant(
        id="sequence-biases-forgotten",
        exercise="2.18",
        mistake="the norms are reduced, the biases behind the reduce-scatter are not",
        text=(
            "        yield from (layer.bias for layer in (self.out, self.down) if layer.bias "
            "is not None)\n"
        ),
        becomes="",
        caught_by="test_sequence_block_equals_one_process",
        told_as="replicated-set",
    ),
    Mutant(
        id="sequence-skips-missing",
        exercise="2.18",
        mistake="a rank without a gradient leaves it out of the message",
        text="        same = [p for p in trainable if p.dtype == dtype]\n",
        becomes=(
            "        same = [p for p in trainable if p.dtype == dtype and p.grad is not None]\n"
        ),
        caught_by="test_replicated_gradients_are_summed_once",
        told_as="mismatch",
    ),
    Mutant(
        id="sequence-one-by-one",
        exercise="2.18",
        mistake="a message per parameter",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="""        parts = flat.split([p.numel() for p in same])
        for part in parts:
            dist.all_reduce(part, group=group)
""",
        caught_by="test_replicated_gradients_are_summed_once",
        told_as="too-many-messages",
    ),
    Mutant(
        id="sequence-positions-unchecked",
        exercise="2.18",
        mistake="positions that don't divide are found by the collective, on some ranks",
        text='    block_of(x_BTD.shape[TIME], "positions", group)\n',
        becomes="",
        caught_by="test_sequence_refuses_what_does_not_divide",
        told_as="accepted",
    ),
    Mutant(
        id="sequence-waits-at-once",
        exercise="2.18",
        mistake="the gather is waited for where it is started",
        text="    work = dist.all_gather_into_tensor(blocks, x_BtD, group=group, async_op=True)\n",
        becomes="""    work = dist.all_gather_into_tensor(blocks, x_BtD, group=group, async_op=True)
    work.wait()
    work = type("Done", (), {"wait": lambda self: None})()
""",
        caught_by="test_gathers_and_scatters_overlap",
        told_as="no-overlap",
    ),
    Mutant(
        id="sequence-frozen-stale-summed",
        exercise="2.18",
        mistake="what is frozen and has an old gradient is summed, too",
        text="    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]\n",
        becomes="""    every = dict.fromkeys(parameters)
    trainable = [p for p in every if p.requires_grad or p.grad is not None]
""",
        caught_by="test_replicated_gradients_are_summed_once",
        told_as=("too-many-bytes", "wrong", "scaled"),
    ),
    Mutant(
        id="sequence-replicated-in-the-world",
        exercise="2.18",
        mistake="replicated gradients are summed over all ranks, whatever the group",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.all_reduce(flat)\n",
        caught_by="test_half_frozen_blocks_in_groups",
        told_as=("wrong", "mismatch"),
    ),
    Mutant(
        id="sequence-gathered-on-ctx",
        exercise="2.18",
        mistake="the gathered input is gathered again, and all the same kept by an attribute",
        text="        ctx.regather, ctx.group = regather, group\n",
        becomes="        ctx.regather, ctx.group, ctx.whole = regather, group, x_BTD\n",
        caught_by="test_activations_follow_the_formula",
        told_as="too-much-memory",
    ),
    Mutant(
        id="sequence-down-without-bias",
        exercise="2.18",
        mistake="down is taken to have a bias",
        text="        yield from (layer.bias for layer in (self.out, self.down) if layer.bias is not None)\n",
        becomes="        yield from (layer.bias for layer in (self.out, self.down) if layer.bias is not None or layer is self.down)\n",
        caught_by="test_half_frozen_blocks_in_groups",
        told_as="exception",
    ),
    Mutant(
        id="sequence-keeps-the-terms",
        exercise="2.18",
        mistake="the terms stay in an attribute until backward",
        text="""        ctx.group = group
        return start_scatter(x_BTD, group)()
""",
        becomes="""        ctx.group, ctx.x = group, x_BTD.detach()
        return start_scatter(x_BTD, group)()
""",
        caught_by="test_activations_follow_the_formula",
        told_as="too-much-memory",
    ),
    Mutant(
        id="sequence-own-dtype-missing",
        exercise="2.18",
        mistake="a rank without any gradient of a dtype leaves the message out",
        text="""        for p in same:
            p.grad = """,
        becomes="""        if all(p.grad is None for p in same):
            continue
        for p in same:
            p.grad = """,
        caught_by="test_replicated_gradients_are_summed_once",
        told_as="hang",
    ),
]
