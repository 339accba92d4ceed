"""Wrong implementations of exercise 2.18."""

from distlab.grading.wrong import Mutant

PAIR, BLOCK = "test_gather_and_scatter_are_conjugate", "test_sequence_block_equals_one_process"
BYTES, KEPT = "test_same_bytes_as_tensor_parallelism", "test_activations_follow_the_formula"
SUMMED, AUTOCAST = "test_replicated_gradients_are_summed_once", "test_sequence_under_autocast"
REFUSED = "test_sequence_refuses_what_does_not_divide"

JOIN = "        return torch.cat(blocks.chunk(world_size), TIME)\n"
BLOCKS = "    blocks = torch.cat(x_BTD.chunk(world_size, TIME))\n"
SCATTER = """    mine_BtD = blocks.new_empty(blocks.shape[0] // world_size, *blocks.shape[1:])
    work = dist.reduce_scatter_tensor(mine_BtD, blocks, group=group, async_op=True)
"""
FINISH = "        work.wait()\n        return mine_BtD\n"
GATHER_BACK = "        return scatter_sequence(grad_BTD, ctx.group), None\n"
SCATTER_BACK = "        return gather_sequence(grad_BtD, ctx.group), None\n"
SAVED = "        ctx.save_for_backward(x_BtD if regather else x_BTD, weight_fD)\n"
WIDEN = "        grad_BTf = grad_BTf.to(weight_fD.dtype)  # it comes in 16 bits under autocast\n"
START = "        finish_scatter = start_scatter(grad_BTf @ weight_fD, ctx.group)\n"
ROW = "        y_BtF = scatter_sequence(F.linear(x_BTd, self.weight), self.group)\n"
ROW_BIAS = "        return y_BtF if self.bias is None else y_BtF + self.bias\n"
BIASES = (
    "        yield from (layer.bias for layer in (self.out, self.down) if layer.bias is not None)\n"
)
MISSING = "            p.grad = torch.zeros_like(p) if p.grad is None else p.grad\n"
REDUCE = "        dist.all_reduce(flat, group=group)\n"

MUTANTS = [
    Mutant(
        id="sequence-gather-cuts-graph",
        exercise="2.18",
        bug="BUGS 32: the collective is called outside of a Function: autograd sees no gather",
        find="    return _GatherSequence.apply(x_BtD, group)\n",
        replace="    return start_gather(x_BtD, group)()\n",
        killed_by=PAIR,
        cause="graph-cut",
    ),
    Mutant(
        id="sequence-gather-takes-own",
        exercise="2.18",
        bug="the gradient of the gathered whole is cut, not summed: fit for replicated use only",
        find=GATHER_BACK,
        replace="        rank, world_size = place_in(ctx.group)\n"
        "        return grad_BTD.chunk(world_size, TIME)[rank].contiguous(), None\n",
        killed_by=PAIR,
        cause="only-own",
    ),
    Mutant(
        id="sequence-scatter-gradient-own",
        exercise="2.18",
        bug="BUGS 61: the other positions' gradients are zero",
        find=SCATTER_BACK,
        replace="        rank, world_size = place_in(ctx.group)\n"
        "        zeros = torch.zeros_like(grad_BtD)\n"
        "        parts = [grad_BtD if r == rank else zeros for r in range(world_size)]\n"
        "        return torch.cat(parts, TIME), None\n",
        killed_by=PAIR,
        cause="wrong",
    ),
    Mutant(
        id="sequence-joins-batches",
        exercise="2.18",
        bug="the gathered blocks are reshaped: positions of different samples mix",
        find=JOIN,
        replace="        return blocks.view(x_BtD.shape[0], -1, *x_BtD.shape[2:])\n",
        killed_by=PAIR,
        cause="permuted",
    ),
    Mutant(
        id="sequence-scatters-batches",
        exercise="2.18",
        bug="blocks of memory are scattered, not blocks of positions",
        find=BLOCKS,
        replace="    blocks = x_BTD.contiguous().view(-1, x_BTD.shape[1] // world_size, *x_BTD.shape[2:])\n",
        killed_by=PAIR,
        cause="wrong",
    ),
    Mutant(
        id="sequence-never-waits",
        exercise="2.18",
        bug="BUGS 22: the result of the reduce-scatter is used before it has arrived",
        find=FINISH,
        replace="        return mine_BtD\n",
        killed_by=PAIR,
        cause="never-waited",
    ),
    Mutant(
        id="sequence-all-reduces",
        exercise="2.18",
        bug="an all-reduce, of which a block is kept: twice the bytes",
        find=SCATTER,
        replace="    work = dist.all_reduce(blocks, group=group, async_op=True)\n"
        "    mine_BtD = blocks.chunk(world_size)[dist.get_rank(group)]\n",
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="sequence-nothing-shared",
        exercise="2.18",
        bug="BUGS 69: gathers at the beginning, works on all positions, cuts at the end",
        find="    column, row = SequenceColumnLinear, SequenceRowLinear\n",
        replace="    def forward(self, x_BtD: Tensor) -> Tensor:\n"
        "        x_BTD = gather_from_ranks(x_BtD, TIME, self.group)\n"
        "        return split_to_ranks(super().forward(x_BTD), TIME, self.group)\n",
        patches=[
            ("    place_in,\n", "    gather_from_ranks,\n    place_in,\n    split_to_ranks,\n"),
        ],
        killed_by=KEPT,
        cause="too-much-memory",
    ),
    Mutant(
        id="sequence-keeps-the-whole",
        exercise="2.18",
        bug="regather gathers again, but keeps what it gathered as well",
        find=SAVED,
        replace="        ctx.save_for_backward(x_BtD if regather else x_BTD, weight_fD, x_BTD)\n",
        patches=[("x, weight_fD = ctx.saved_tensors", "x, weight_fD, _ = ctx.saved_tensors")],
        killed_by=KEPT,
        cause="too-much-memory",
    ),
    Mutant(
        id="sequence-regather-ignored",
        exercise="2.18",
        bug="the gathered input is kept whatever was asked for",
        find="        self.qkv.regather = self.up.regather = regather\n",
        replace="        self.qkv.regather = self.up.regather = False\n",
        killed_by=KEPT,
        cause="too-much-memory",
    ),
    Mutant(
        id="sequence-scatter-twice",
        exercise="2.18",
        bug="the input's gradient is reduce-scattered, and once more for the next block",
        find=START,
        replace="        start_scatter(grad_BTf @ weight_fD, ctx.group)()\n" + START,
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="sequence-row-bias-each-rank",
        exercise="2.18",
        bug="BUGS 60: every rank's term has the bias",
        find=ROW + ROW_BIAS,
        replace="        return scatter_sequence(F.linear(x_BTd, self.weight, self.bias), self.group)\n",
        killed_by=BLOCK,
        cause="wrong",
    ),
    Mutant(
        id="sequence-norms-not-reduced",
        exercise="2.18",
        bug="BUGS 67: the norms keep the gradients of this rank's positions",
        find=REDUCE,
        replace="",
        killed_by=BLOCK,
        cause="only-own",
    ),
    Mutant(
        id="sequence-norms-averaged",
        exercise="2.18",
        bug="the gradients are averaged, as in data parallelism",
        find=REDUCE,
        replace=REDUCE + "        flat /= dist.get_world_size(group)\n",
        killed_by=SUMMED,
        cause="divided-twice",
    ),
    Mutant(
        id="sequence-biases-forgotten",
        exercise="2.18",
        bug="BUGS 67: the norms are reduced, the biases behind the reduce-scatter are not",
        find=BIASES,
        replace="",
        killed_by=BLOCK,
        cause="replicated-set",
    ),
    Mutant(
        id="sequence-skips-missing",
        exercise="2.18",
        bug="a rank without a gradient leaves it out of the message",
        find="        same = [p for p in trainable if p.dtype == dtype]\n",
        replace="        same = [p for p in trainable if p.dtype == dtype and p.grad is not None]\n",
        killed_by=SUMMED,
        cause="mismatch",
    ),
    Mutant(
        id="sequence-one-by-one",
        exercise="2.18",
        bug="a message per parameter",
        find=REDUCE,
        replace="        parts = flat.split([p.numel() for p in same])\n"
        "        for part in parts:\n"
        "            dist.all_reduce(part, group=group)\n",
        killed_by=SUMMED,
        cause="too-many-messages",
    ),
    Mutant(
        id="sequence-sixteen-bit-gradient",
        exercise="2.18",
        bug="under autocast the gradient meets a weight of another dtype",
        find=WIDEN,
        replace="",
        killed_by=AUTOCAST,
        cause="exception",
    ),
    Mutant(
        id="sequence-positions-unchecked",
        exercise="2.18",
        bug="positions that don't divide are found by the collective, on some ranks",
        find='    block_of(x_BTD.shape[TIME], "positions", group)\n',
        replace="",
        killed_by=REFUSED,
        cause="accepted",
    ),
]
