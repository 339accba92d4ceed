"""Wrong implementations of exercises 2.14 and 2.15."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="pair-copy-without-reduce",
        exercise="2.14",
        mistake="forward is right, backward lacks the all-reduce",
        text="        return sum_over_ranks(grad, ctx.group), None\n",
        becomes="        return grad, None\n",
        caught_by="test_pair_is_conjugate",
        told_as="only-own",
    ),
    Mutant(
        id="pair-copy-averages",
        exercise="2.14",
        mistake="the gradients are averaged, as in data parallelism",
        text="        return sum_over_ranks(grad, ctx.group), None\n",
        becomes="""        world_size = dist.get_world_size(ctx.group)
        return sum_over_ranks(grad, ctx.group) / world_size, None
""",
        caught_by="test_pair_is_conjugate",
        told_as="divided-twice",
    ),
    Mutant(
        id="pair-sum-reduces-again",
        exercise="2.14",
        mistake="backward of the sum reduces as well: the gradient is W times too large",
        text="        return copy_to_ranks(grad, ctx.group), None\n",
        becomes="        return sum_over_ranks(grad, ctx.group), None\n",
        caught_by="test_pair_is_conjugate",
        told_as="gradient-summed",
    ),
    Mutant(
        id="pair-returns-handle",
        exercise="2.14",
        mistake="returns what dist.all_reduce returns",
        text="""        dist.all_reduce(total, group=group)
        return total
""",
        becomes="        return dist.all_reduce(total, group=group)\n",
        caught_by="test_pair_is_conjugate",
        told_as="missing",
    ),
    Mutant(
        id="pair-sum-in-place",
        exercise="2.14",
        mistake="the caller's tensor is reduced in place",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="""        total = x.detach()
        total = total if total.is_contiguous() else total.contiguous()
""",
        caught_by="test_nothing_is_changed_in_place",
        told_as="input-changed",
    ),
    Mutant(
        id="pair-gradient-in-place",
        exercise="2.14",
        mistake="the gradient that autograd hands out is reduced in place",
        text="        return sum_over_ranks(grad, ctx.group), None\n",
        becomes="""        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
""",
        caught_by="test_nothing_is_changed_in_place",
        told_as="gradient-changed",
    ),
    Mutant(
        id="pair-strides-lost",
        exercise="2.14",
        mistake="the elements travel in the order of memory, whatever the strides",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="""        total = x.new_empty(x.shape)
        total.view(-1).copy_(torch.as_strided(x, (x.numel(),), (1,)))
""",
        caught_by="test_pair_is_conjugate",
        told_as=("permuted", "wrong"),
    ),
    Mutant(
        id="pair-copy-broadcasts",
        exercise="2.14",
        mistake="forward communicates although all ranks have x already",
        text="        return x.view_as(x)\n",
        becomes="""        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, dist.ReduceOp.MAX, group=group)
        return y
""",
        caught_by="test_pair_sends_one_all_reduce_each",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="pair-sum-gathers",
        exercise="2.14",
        mistake="all terms are gathered and added: W/2 times the bytes",
        text="""        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
""",
        becomes=(
            "        terms = [torch.empty_like(x).contiguous() for _ in "
            "range(dist.get_world_size(group))]\n"
            "        dist.all_gather(terms, x.contiguous(), group=group)\n"
            "        return torch.stack(terms).sum(0)\n"
        ),
        caught_by="test_pair_sends_one_all_reduce_each",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="pair-group-forgotten",
        exercise="2.14",
        mistake="the default group is reduced over: the ranks outside never come",
        text="""        dist.all_reduce(total, group=group)
        return total
""",
        becomes="""        dist.all_reduce(total)
        return total
""",
        caught_by="test_pair_of_every_kind_in_groups",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="pair-input-saved",
        exercise="2.14",
        mistake="the terms are kept for backward, which needs none of them",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="""        ctx.save_for_backward(x)
        total = x.clone(memory_format=torch.contiguous_format)
""",
        caught_by="test_pair_keeps_nothing_and_repeats",
        told_as="too-much-memory",
    ),
    Mutant(
        id="pair-strides-kept",
        exercise="2.14",
        mistake="the sum of transposed tensors is transposed in memory, too",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="        total = x.clone()\n",
        caught_by="test_pair_of_every_kind_in_groups",
        told_as=("layout", "wrong"),
    ),
    Mutant(
        id="pair-sum-in-float32",
        exercise="2.14",
        mistake="whatever comes in, the sum is float32",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="        total = x.float().clone(memory_format=torch.contiguous_format)\n",
        caught_by="test_pair_of_every_kind_in_groups",
        told_as="dtype",
    ),
    Mutant(
        id="linear-own-weights",
        exercise="2.15",
        mistake="each shard is initialised by itself, all alike",
        text="        self.weight = shard(linear.weight, 0, block)\n",
        becomes="""        torch.manual_seed(0)
        share = block.stop - block.start
        fresh = nn.Linear(linear.in_features, share, dtype=linear.weight.dtype)
        self.weight = fresh.weight
""",
        caught_by="test_shards_are_the_whole",
        told_as="other-weights",
    ),
    Mutant(
        id="linear-nothing-sharded",
        exercise="2.15",
        mistake="a view of the whole keeps all of it in memory",
        text="    return part.clone(memory_format=torch.contiguous_format)\n",
        becomes="    return part\n",
        caught_by="test_shards_are_the_whole",
        told_as="too-much-memory",
    ),
    Mutant(
        id="linear-wrong-dimension",
        exercise="2.15",
        mistake="the row layer is cut along its output features",
        text="        self.weight = shard(linear.weight, 1, block)\n",
        becomes="""        share = slice(block.start // 2, block.stop // 2)  # 12 of 24
        self.weight = shard(linear.weight, 0, share)
""",
        caught_by="test_shards_are_the_whole",
        told_as="shape",
    ),
    Mutant(
        id="linear-frozen-lost",
        exercise="2.15",
        mistake="what was frozen is trained",
        text="    return nn.Parameter(cut(full.detach(), dim, block), full.requires_grad)\n",
        becomes="    return nn.Parameter(cut(full.detach(), dim, block))\n",
        caught_by="test_shards_are_the_whole",
        told_as="requires-grad",
    ),
    Mutant(
        id="row-bias-before-reduce",
        exercise="2.15",
        mistake="every rank adds the bias to its term",
        text="""        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)
        return y_NF if self.bias is None else y_NF + self.bias
""",
        becomes=(
            "        return sum_over_ranks(F.linear(x_Nd, self.weight, self.bias), self.group)\n"
        ),
        caught_by="test_column_then_row_equals_one_process",
        told_as="bias-counted",
    ),
    Mutant(
        id="row-bias-divided",
        exercise="2.15",
        mistake="bias/W on each rank before the reduce: the output is right, its gradient is 1/W",
        text="""        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)
        return y_NF if self.bias is None else y_NF + self.bias
""",
        becomes=(
            "        bias = None if self.bias is None else self.bias / "
            "dist.get_world_size(self.group)\n"
            "        return sum_over_ranks(F.linear(x_Nd, self.weight, bias), self.group)\n"
        ),
        caught_by="test_column_then_row_equals_one_process",
        told_as="scaled",
    ),
    Mutant(
        id="row-bias-forgotten",
        exercise="2.15",
        mistake="the bias is lost on the way",
        text="        return y_NF if self.bias is None else y_NF + self.bias\n",
        becomes="        return y_NF\n",
        caught_by="test_column_then_row_equals_one_process",
        told_as="bias-missing",
    ),
    Mutant(
        id="column-without-copy",
        exercise="2.15",
        mistake="the gradient of the column layer's input is this rank's part only",
        text="        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)\n",
        becomes="        y_Nf = F.linear(x_ND, self.weight, self.bias)\n",
        caught_by="test_column_then_row_equals_one_process",
        told_as="only-own",
    ),
    Mutant(
        id="row-partial-output",
        exercise="2.15",
        mistake="the terms are never summed; what follows works on a part",
        text="        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)\n",
        becomes="        y_NF = F.linear(x_Nd, self.weight)\n",
        caught_by="test_column_then_row_equals_one_process",
        told_as="only-own",
    ),
    Mutant(
        id="column-gather-cuts-graph",
        exercise="2.15",
        mistake="the output is gathered by a collective of which autograd knows nothing",
        text=(
            "        return gather_from_ranks(y_Nf, -1, self.group) if self.gather_output else "
            "y_Nf\n"
        ),
        becomes="""        if not self.gather_output:
            return y_Nf
        blocks = [torch.empty_like(y_Nf) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(blocks, y_Nf.detach(), group=self.group)
        return torch.cat(blocks, -1)
""",
        caught_by="test_gathered_output_and_split_input",
        told_as="graph-cut",
    ),
    Mutant(
        id="column-gathers-always",
        exercise="2.15",
        mistake=(
            "gathers the features between the layers and splits them again: three times the bytes"
        ),
        text="""        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)
        return gather_from_ranks(y_Nf, -1, self.group) if self.gather_output else y_Nf
""",
        becomes="""        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)
        whole = gather_from_ranks(y_Nf, -1, self.group)
        return whole if self.gather_output else split_to_ranks(whole, -1, self.group)
""",
        caught_by="test_layers_send_what_the_formula_says",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="column-computes-all",
        exercise="2.15",
        mistake="every rank gathers the weight and computes everything",
        text="        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)\n",
        becomes="""        whole = gather_from_ranks(self.weight, 0, self.group)
        bias = gather_from_ranks(self.bias, 0, self.group)
        y_NF = F.linear(x_ND, whole, bias)
        y_Nf = split_to_ranks(y_NF, -1, self.group)
""",
        caught_by="test_layers_send_what_the_formula_says",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="gather-gradient-summed",
        exercise="2.15",
        mistake="the gradient of a gathered whole is summed over ranks that all have it",
        text="        return split_to_ranks(grad, ctx.dim, ctx.group), None, None\n",
        becomes=(
            "        return split_to_ranks(sum_over_ranks(grad, ctx.group), ctx.dim, "
            "ctx.group), None, None\n"
        ),
        caught_by="test_gathered_output_and_split_input",
        told_as="gradient-summed",
    ),
    Mutant(
        id="gather-along-rows",
        exercise="2.15",
        mistake="the blocks are put together along the first dimension and reshaped",
        text="        return torch.cat(blocks.chunk(world_size), dim)\n",
        becomes="""        shape = list(x.shape)
        shape[dim] *= world_size
        return blocks.reshape(shape)
""",
        caught_by="test_split_and_gather_along_any_dimension",
        told_as="permuted",
    ),
    Mutant(
        id="split-gradient-zeros",
        exercise="2.15",
        mistake="the gradient of the whole x has zeros where other ranks' blocks are",
        text="        return gather_from_ranks(grad, ctx.dim, ctx.group), None, None, None\n",
        becomes="""        rank, world_size = place_in(ctx.group)
        parts = [grad if r == rank else torch.zeros_like(grad) for r in range(world_size)]
        return torch.cat(parts, ctx.dim), None, None, None
""",
        caught_by="test_gathered_output_and_split_input",
        told_as="wrong",
    ),
    Mutant(
        id="split-remainder-dropped",
        exercise="2.15",
        mistake="what does not divide is silently dropped",
        text="    if size % world_size:\n",
        becomes="    if size < world_size:\n",
        caught_by="test_layers_refuse_what_does_not_divide",
        told_as="accepted",
    ),
    Mutant(
        id="linear-width-unchecked",
        exercise="2.15",
        mistake="a wrong width is found by the matrix product only",
        text="    if x.shape[-1:] != (width,):\n",
        becomes="    if x.ndim == 0:\n",
        caught_by="test_layers_refuse_what_does_not_divide",
        told_as="accepted",
    ),
    Mutant(
        id="linear-group-forgotten",
        exercise="2.15",
        mistake="the row layer sums over all ranks, whatever its group",
        text="        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)\n",
        becomes="        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight))\n",
        caught_by="test_odd_layers_in_groups",
        told_as=("mismatch", "hang"),
    ),
    Mutant(
        id="linear-two-dimensions-only",
        exercise="2.15",
        mistake="the features are taken for dimension 1",
        text="gather_from_ranks(y_Nf, -1, self.group)",
        becomes="gather_from_ranks(y_Nf, 1, self.group)",
        caught_by="test_odd_layers_in_groups",
        told_as=("shape", "exception", "mismatch"),
    ),
    Mutant(
        id="linear-strides-kept",
        exercise="2.15",
        mistake="a block of a transposed weight stays transposed in memory",
        text="    return part.clone(memory_format=torch.contiguous_format)\n",
        becomes="    return part.clone()\n",
        caught_by="test_odd_layers_in_groups",
        told_as="parameters",
    ),
    Mutant(
        id="linear-whole-kept",
        exercise="2.15",
        mistake="the layer remembers the whole one: every rank holds all of the weights",
        text="        self.weight = shard(linear.weight, 0, block)\n",
        becomes="""        self.whole = [linear]
        self.weight = shard(linear.weight, 0, block)
""",
        caught_by="test_odd_layers_in_groups",
        told_as="kept",
    ),
    Mutant(
        id="pair-sends-float32",
        exercise="2.14",
        mistake="16 bits are summed in float32: twice the bytes",
        text="        dist.all_reduce(total, group=group)\n        return total\n",
        becomes="""        wide = total.float() if total.dtype.itemsize == 2 else total
        dist.all_reduce(wide, group=group)
        return wide.to(x.dtype)
""",
        caught_by="test_pair_sends_one_all_reduce_each",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="pair-group-for-one-backward",
        exercise="2.14",
        mistake="the first backward takes the group away: the second sums over all ranks",
        text="        return sum_over_ranks(grad, ctx.group), None\n",
        becomes="""        group, ctx.group = ctx.group, None
        return sum_over_ranks(grad, group), None
""",
        caught_by="test_pair_keeps_nothing_and_repeats",
        told_as="backward-once",
    ),
    Mutant(
        id="gather-block-of-global-rank",
        exercise="2.15",
        mistake="the gradient's block is that of the global rank, modulo the group's size",
        text="        return split_to_ranks(grad, ctx.dim, ctx.group), None, None\n",
        becomes="""        size = dist.get_world_size(ctx.group)
        return grad.chunk(size, ctx.dim)[dist.get_rank() % size].contiguous(), None, None
""",
        caught_by="test_split_and_gather_along_any_dimension",
        told_as="other-block",
    ),
    Mutant(
        id="pair-sum-kept-by-hand",
        exercise="2.14",
        mistake="the sum is kept in an attribute until backward, which needs none of it",
        text="""        dist.all_reduce(total, group=group)
        return total
""",
        becomes="""        dist.all_reduce(total, group=group)
        ctx.kept = total.detach()
        return total
""",
        caught_by="test_pair_keeps_nothing_and_repeats",
        told_as="too-much-memory",
    ),
    Mutant(
        id="pair-sum-of-one-rank",
        exercise="2.14",
        mistake="a group of one rank gets its own tensor back, not a new one",
        text="        total = x.clone(memory_format=torch.contiguous_format)\n",
        becomes="""        if dist.get_world_size(group) == 1:
            return x.contiguous().view_as(x)
        total = x.clone(memory_format=torch.contiguous_format)
""",
        caught_by="test_pair_of_every_kind_in_groups",
        told_as="input-changed",
    ),
    Mutant(
        id="pair-strides-of-each-rank",
        exercise="2.14",
        mistake="the copy keeps the rank's strides: ranks of other strides add other elements",
        text="""        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total
""",
        becomes="""        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.contiguous()
""",
        caught_by="test_pair_is_conjugate",
        told_as="mismatch",
    ),
    Mutant(
        id="tensor-weights-kept",
        exercise="2.15",
        mistake="a list beside the parameters holds the whole weight",
        text="        self.weight = shard(linear.weight, 0, block)\n",
        becomes="""        self.whole = [linear.weight.detach()]
        self.weight = shard(linear.weight, 0, block)
""",
        caught_by="test_odd_layers_in_groups",
        told_as="kept",
    ),
    Mutant(
        id="tensor-any-negative-is-last",
        exercise="2.15",
        mistake="every negative dimension is taken for the last one",
        text="return torch.cat(blocks.chunk(world_size), dim)",
        becomes="return torch.cat(blocks.chunk(world_size), dim if dim >= 0 else x.ndim - 1)",
        caught_by="test_split_and_gather_along_any_dimension",
        told_as="exception",
    ),
]
