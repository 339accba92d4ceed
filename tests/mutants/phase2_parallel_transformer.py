"""Wrong implementations of exercise 2.17."""

from distlab.grading.wrong import Mutant

EQUALS, TAKES = "test_block_equals_one_process", "test_block_takes_over_the_weights"
TWO, REFUSED = (
    "test_block_needs_two_all_reduces_each_way",
    "test_block_refuses_what_does_not_divide",
)

ORDER = "        p.data = by_part.transpose(0, 1).flatten(0, 2)\n"
BY_PART = "        by_part = p.detach().unflatten(0, (3, world_size, -1))\n"
MINE = '        mine, width = block_of(block.heads, "heads", group), block.out.in_features\n'
HEADS = "        self.group, self.heads = group, mine.stop - mine.start\n"
NORM = "        self.norm_mlp = copy.deepcopy(block.norm_mlp)\n"
QKV = "        self.qkv = self.column(rows_by_rank(block.qkv, place_in(group)[1]), group)\n"
ATTEND = "        mixed_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
OUT = "        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))\n"
MLP = "        return self.down(F.gelu(self.up(x_BTD)))\n"
FIRST = "        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))\n"
SECOND = "        return x_BTD + self.mlp(self.norm_mlp(x_BTD))\n"

MUTANTS = [
    Mutant(
        id="block-qkv-in-one-piece",
        exercise="2.17",
        bug="BUGS 65: the fused rows are cut in one piece: rank 0 has q only",
        find=QKV,
        replace="        self.qkv = self.column(block.qkv, group)\n",
        killed_by=TAKES,
        cause="qkv-mixed",
    ),
    Mutant(
        id="block-qkv-per-head",
        exercise="2.17",
        bug="BUGS 65: the rows are taken for (head, q/k/v) instead of (q/k/v, head)",
        find=BY_PART + ORDER,
        replace="        by_head = p.detach().unflatten(0, (world_size, 3, -1))\n"
        "        p.data = by_head.transpose(0, 1).flatten(0, 2)\n",
        killed_by=EQUALS,
        cause="wrong",
    ),
    Mutant(
        id="block-heads-interleaved",
        exercise="2.17",
        bug="BUGS 65: rank r takes every W-th row: features of all heads",
        find=BY_PART + ORDER,
        replace="        by_part = p.detach().unflatten(0, (3, -1, world_size))\n"
        "        p.data = by_part.movedim(2, 0).flatten(0, 2)\n",
        killed_by=EQUALS,
        cause="wrong",
    ),
    Mutant(
        id="block-heads-of-all",
        exercise="2.17",
        bug="the number of heads is that of the whole block: heads of too few features",
        find=HEADS,
        replace="        self.group, self.heads = group, block.heads\n",
        killed_by=EQUALS,
        cause="wrong",
    ),
    Mutant(
        id="block-nothing-sharded",
        exercise="2.17",
        bug="every rank keeps and computes the whole block",
        find=FIRST + SECOND,
        replace="        return self.whole(x_BTD)\n",
        patches=[(NORM, NORM + "        self.whole = copy.deepcopy(block)\n")],
        killed_by=TAKES,
        cause="other-parameters",
    ),
    Mutant(
        id="block-norm-of-partial-sums",
        exercise="2.17",
        bug="BUGS 62: the terms of attention are not summed before the next norm",
        find=OUT,
        replace="        mixed_BTd = mixed_BHTd.transpose(1, 2).flatten(2)\n"
        "        return F.linear(mixed_BTd, self.out.weight) + self.out.bias\n",
        killed_by=EQUALS,
        cause="partial-sums",
    ),
    Mutant(
        id="block-gelu-of-partial-sums",
        exercise="2.17",
        bug="BUGS 62: GELU after the row-parallel product, before its sum",
        find=MLP,
        replace="        term = F.gelu(F.linear(self.up(x_BTD), self.down.weight))\n"
        "        return sum_over_ranks(term, self.group) + self.down.bias\n",
        patches=[("    block_of,\n", "    block_of,\n    sum_over_ranks,\n")],
        killed_by=EQUALS,
        cause="wrong",
    ),
    Mutant(
        id="block-bias-each-rank",
        exercise="2.17",
        bug="BUGS 60: every rank's term has the bias of the MLP",
        find=MLP,
        replace="        inner = F.gelu(self.up(x_BTD))\n"
        "        term = F.linear(inner, self.down.weight, self.down.bias)\n"
        "        return sum_over_ranks(term, self.group)\n",
        patches=[("    block_of,\n", "    block_of,\n    sum_over_ranks,\n")],
        killed_by=EQUALS,
        cause="bias-counted",
    ),
    Mutant(
        id="block-input-gradient-lost",
        exercise="2.17",
        bug="BUGS 61: attention's input has the gradient of this rank's heads only",
        find="        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)\n",
        replace="        fused = F.linear(x_BTD, self.qkv.weight, self.qkv.bias)\n"
        "        q, k, v = fused.chunk(3, dim=-1)\n",
        killed_by=EQUALS,
        cause="wrong",
    ),
    Mutant(
        id="block-gathers-heads",
        exercise="2.17",
        bug="all heads are gathered before the output layer, which splits them again",
        find=OUT,
        replace="        mixed_BTd = mixed_BHTd.transpose(1, 2).flatten(2)\n"
        "        mixed_BTD = gather_from_ranks(mixed_BTd, -1, self.group)\n"
        "        return self.out(split_to_ranks(mixed_BTD, -1, self.group))\n",
        patches=[
            ("    block_of,\n", "    block_of,\n    gather_from_ranks,\n    split_to_ranks,\n")
        ],
        killed_by=TWO,
        cause="too-many-bytes",
    ),
    Mutant(
        id="block-norm-shared",
        exercise="2.17",
        bug="the norm is that of the whole block, not a copy",
        find=NORM,
        replace="        self.norm_mlp = block.norm_mlp\n",
        killed_by=TAKES,
        cause="whole-changed",
    ),
    Mutant(
        id="block-qkv-reordered-in-place",
        exercise="2.17",
        bug="the rows of the whole block are reordered",
        find="    ordered = copy.deepcopy(qkv)\n",
        replace="    ordered = qkv\n",
        killed_by=TAKES,
        cause="whole-changed",
    ),
    Mutant(
        id="block-heads-unchecked",
        exercise="2.17",
        bug="4 heads over 3 ranks: one head is lost",
        find=MINE,
        replace="        share = block.heads // place_in(group)[1]\n"
        "        mine, width = slice(0, share), block.out.in_features\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
]
