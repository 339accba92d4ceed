"""Wrong implementations of exercises 2.14 and 2.15."""

from distlab.grading.wrong import Mutant

PAIR, KEPT = "test_pair_is_conjugate", "test_nothing_is_changed_in_place"
SENDS, SUBGROUP = "test_pair_sends_one_all_reduce_each", "test_pair_in_a_subgroup"
SHARDS, MLP = "test_shards_are_the_whole", "test_column_then_row_equals_one_process"
BORDERS = "test_gathered_output_and_split_input"
DIMENSIONS = "test_split_and_gather_along_any_dimension"
LAYER_COST, REFUSED = (
    "test_layers_send_what_the_formula_says",
    "test_layers_refuse_what_does_not_divide",
)

COPY_BACK = "        return sum_over_ranks(grad, ctx.group), None\n"
CLONE = "        total = x.clone(memory_format=torch.contiguous_format)\n"
TOTAL = "        dist.all_reduce(total, group=group)\n        return total\n"
SUM_BACK = "        return copy_to_ranks(grad, ctx.group), None\n"
CUT = "    return part.clone(memory_format=torch.contiguous_format)\n"
SPLIT_BACK = "        return gather_from_ranks(grad, ctx.dim, ctx.group), None, None, None\n"
GATHER = "        return torch.cat(blocks.chunk(world_size), dim)\n"
GATHER_BACK = "        return split_to_ranks(grad, ctx.dim, ctx.group), None, None\n"
COLUMN_WEIGHT = "        self.weight = shard(linear.weight, 0, block)\n"
COLUMN_BIAS = "        self.bias = None if linear.bias is None else shard(linear.bias, 0, block)\n"
COLUMN = "        y_Nf = F.linear(copy_to_ranks(x_ND, self.group), self.weight, self.bias)\n"
GATHERED = (
    "        return gather_from_ranks(y_Nf, -1, self.group) if self.gather_output else y_Nf\n"
)
ROW_WEIGHT = "        self.weight = shard(linear.weight, 1, block)\n"
ROW = "        y_NF = sum_over_ranks(F.linear(x_Nd, self.weight), self.group)\n"
ROW_BIAS = "        return y_NF if self.bias is None else y_NF + self.bias\n"

MUTANTS = [
    Mutant(
        id="pair-copy-without-reduce",
        exercise="2.14",
        bug="BUGS 61: forward is right, backward lacks the all-reduce",
        find=COPY_BACK,
        replace="        return grad, None\n",
        killed_by=PAIR,
        cause="only-own",
    ),
    Mutant(
        id="pair-copy-averages",
        exercise="2.14",
        bug="the gradients are averaged, as in data parallelism",
        find=COPY_BACK,
        replace="        world_size = dist.get_world_size(ctx.group)\n"
        "        return sum_over_ranks(grad, ctx.group) / world_size, None\n",
        killed_by=PAIR,
        cause="divided-twice",
    ),
    Mutant(
        id="pair-sum-reduces-again",
        exercise="2.14",
        bug="backward of the sum reduces as well: the gradient is W times too large",
        find=SUM_BACK,
        replace="        return sum_over_ranks(grad, ctx.group), None\n",
        killed_by=PAIR,
        cause="gradient-summed",
    ),
    Mutant(
        id="pair-returns-handle",
        exercise="2.14",
        bug="BUGS 68: returns what dist.all_reduce returns",
        find=TOTAL,
        replace="        return dist.all_reduce(total, group=group)\n",
        killed_by=PAIR,
        cause="missing",
    ),
    Mutant(
        id="pair-sum-in-place",
        exercise="2.14",
        bug="the caller's tensor is reduced in place",
        find=CLONE,
        replace="        total = x.detach()\n        total = total if total.is_contiguous() else total.contiguous()\n",
        killed_by=KEPT,
        cause="input-changed",
    ),
    Mutant(
        id="pair-gradient-in-place",
        exercise="2.14",
        bug="the gradient that autograd hands out is reduced in place",
        find=COPY_BACK,
        replace="        grad = grad.contiguous()\n"
        "        dist.all_reduce(grad, group=ctx.group)\n"
        "        return grad, None\n",
        killed_by=KEPT,
        cause="gradient-changed",
    ),
    Mutant(
        id="pair-strides-lost",
        exercise="2.14",
        bug="BUGS 48: the elements travel in the order of memory, whatever the strides",
        find=CLONE,
        replace="        total = x.new_empty(x.shape)\n"
        "        total.view(-1).copy_(torch.as_strided(x, (x.numel(),), (1,)))\n",
        killed_by=PAIR,
        cause="permuted",
    ),
    Mutant(
        id="pair-copy-broadcasts",
        exercise="2.14",
        bug="forward communicates although all ranks have x already",
        find="        return x.view_as(x)\n",
        replace="        y = x.clone(memory_format=torch.contiguous_format)\n"
        "        dist.all_reduce(y, dist.ReduceOp.MAX, group=group)\n"
        "        return y\n",
        killed_by=SENDS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="pair-sum-gathers",
        exercise="2.14",
        bug="all terms are gathered and added: W/2 times the bytes",
        find=CLONE + TOTAL,
        replace="        terms = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size(group))]\n"
        "        dist.all_gather(terms, x.contiguous(), group=group)\n"
        "        return torch.stack(terms).sum(0)\n",
        killed_by=SENDS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="pair-group-forgotten",
        exercise="2.14",
        bug="the default group is reduced over: the ranks outside never come",
        find=TOTAL,
        replace="        dist.all_reduce(total)\n        return total\n",
        killed_by=SUBGROUP,
        cause="hang",
    ),
    Mutant(
        id="linear-own-weights",
        exercise="2.15",
        bug="BUGS 63: each shard is initialised by itself, all alike",
        find=COLUMN_WEIGHT,
        replace="        torch.manual_seed(0)\n"
        "        share = block.stop - block.start\n"
        "        fresh = nn.Linear(linear.in_features, share, dtype=linear.weight.dtype)\n"
        "        self.weight = fresh.weight\n",
        killed_by=SHARDS,
        cause="other-weights",
    ),
    Mutant(
        id="linear-nothing-sharded",
        exercise="2.15",
        bug="BUGS 69: a view of the whole keeps all of it in memory",
        find=CUT,
        replace="    return part\n",
        killed_by=SHARDS,
        cause="too-much-memory",
    ),
    Mutant(
        id="linear-wrong-dimension",
        exercise="2.15",
        bug="the row layer is cut along its output features",
        find=ROW_WEIGHT,
        replace="        share = slice(block.start // 2, block.stop // 2)  # 12 of 24\n"
        "        self.weight = shard(linear.weight, 0, share)\n",
        killed_by=SHARDS,
        cause="shape",
    ),
    Mutant(
        id="linear-frozen-lost",
        exercise="2.15",
        bug="what was frozen is trained",
        find="    return nn.Parameter(cut(full.detach(), dim, block), full.requires_grad)\n",
        replace="    return nn.Parameter(cut(full.detach(), dim, block))\n",
        killed_by=SHARDS,
        cause="wrong",
    ),
    Mutant(
        id="row-bias-before-reduce",
        exercise="2.15",
        bug="BUGS 60: every rank adds the bias to its term",
        find=ROW + ROW_BIAS,
        replace="        return sum_over_ranks(F.linear(x_Nd, self.weight, self.bias), self.group)\n",
        killed_by=MLP,
        cause="bias-counted",
    ),
    Mutant(
        id="row-bias-divided",
        exercise="2.15",
        bug="bias/W on each rank before the reduce: the output is right, its gradient is 1/W",
        find=ROW + ROW_BIAS,
        replace="        bias = None if self.bias is None else self.bias / dist.get_world_size(self.group)\n"
        "        return sum_over_ranks(F.linear(x_Nd, self.weight, bias), self.group)\n",
        killed_by=MLP,
        cause="scaled",
    ),
    Mutant(
        id="row-bias-forgotten",
        exercise="2.15",
        bug="the bias is lost on the way",
        find=ROW_BIAS,
        replace="        return y_NF\n",
        killed_by=MLP,
        cause="bias-missing",
    ),
    Mutant(
        id="column-without-copy",
        exercise="2.15",
        bug="BUGS 61: the gradient of the column layer's input is this rank's part only",
        find=COLUMN,
        replace="        y_Nf = F.linear(x_ND, self.weight, self.bias)\n",
        killed_by=MLP,
        cause="only-own",
    ),
    Mutant(
        id="row-partial-output",
        exercise="2.15",
        bug="BUGS 62: the terms are never summed; what follows works on a part",
        find=ROW,
        replace="        y_NF = F.linear(x_Nd, self.weight)\n",
        killed_by=MLP,
        cause="only-own",
    ),
    Mutant(
        id="column-gather-cuts-graph",
        exercise="2.15",
        bug="BUGS 32: the output is gathered by a collective of which autograd knows nothing",
        find=GATHERED,
        replace="        if not self.gather_output:\n"
        "            return y_Nf\n"
        "        blocks = [torch.empty_like(y_Nf) for _ in range(dist.get_world_size(self.group))]\n"
        "        dist.all_gather(blocks, y_Nf.detach(), group=self.group)\n"
        "        return torch.cat(blocks, -1)\n",
        killed_by=BORDERS,
        cause="graph-cut",
    ),
    Mutant(
        id="column-gathers-always",
        exercise="2.15",
        bug="gathers the features between the layers and splits them again: three times the bytes",
        find=COLUMN + GATHERED,
        replace=COLUMN
        + "        whole = gather_from_ranks(y_Nf, -1, self.group)\n"
        + "        return whole if self.gather_output else split_to_ranks(whole, -1, self.group)\n",
        killed_by=LAYER_COST,
        cause="too-many-bytes",
    ),
    Mutant(
        id="column-computes-all",
        exercise="2.15",
        bug="every rank gathers the weight and computes everything",
        find=COLUMN,
        replace="        whole = gather_from_ranks(self.weight, 0, self.group)\n"
        "        bias = gather_from_ranks(self.bias, 0, self.group)\n"
        "        y_NF = F.linear(x_ND, whole, bias)\n"
        "        y_Nf = split_to_ranks(y_NF, -1, self.group)\n",
        killed_by=LAYER_COST,
        cause="too-many-bytes",
    ),
    Mutant(
        id="gather-gradient-summed",
        exercise="2.15",
        bug="the gradient of a gathered whole is summed over ranks that all have it",
        find=GATHER_BACK,
        replace="        return split_to_ranks(sum_over_ranks(grad, ctx.group), ctx.dim, ctx.group), None, None\n",
        killed_by=BORDERS,
        cause="gradient-summed",
    ),
    Mutant(
        id="gather-along-rows",
        exercise="2.15",
        bug="the blocks are put together along the first dimension and reshaped",
        find=GATHER,
        replace="        shape = list(x.shape)\n"
        "        shape[dim] *= world_size\n"
        "        return blocks.reshape(shape)\n",
        killed_by=DIMENSIONS,
        cause="permuted",
    ),
    Mutant(
        id="split-gradient-zeros",
        exercise="2.15",
        bug="the gradient of the whole x has zeros where other ranks' blocks are",
        find=SPLIT_BACK,
        replace="        rank, world_size = place_in(ctx.group)\n"
        "        parts = [grad if r == rank else torch.zeros_like(grad) for r in range(world_size)]\n"
        "        return torch.cat(parts, ctx.dim), None, None, None\n",
        killed_by=BORDERS,
        cause="wrong",
    ),
    Mutant(
        id="split-remainder-dropped",
        exercise="2.15",
        bug="what does not divide is silently dropped",
        find="    if size % world_size:\n",
        replace="    if size < world_size:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="linear-width-unchecked",
        exercise="2.15",
        bug="a wrong width is found by the matrix product only",
        find="    if x.shape[-1] != width:\n",
        replace="    if x.ndim == 0:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
]
