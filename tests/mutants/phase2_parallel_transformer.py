"""Wrong implementations of exercise 2.17."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="block-qkv-in-one-piece",
        exercise="2.17",
        mistake="the fused rows are cut in one piece: rank 0 has q only",
        text="        self.qkv = self.column(rows_by_rank(block.qkv, place_in(group)[1]), group)\n",
        becomes="        self.qkv = self.column(block.qkv, group)\n",
        caught_by="test_block_takes_over_the_weights",
        told_as="qkv-mixed",
    ),
    Mutant(
        id="block-qkv-per-head",
        exercise="2.17",
        mistake="the rows are taken for (head, q/k/v) instead of (q/k/v, head)",
        text="""        by_part = p.detach().unflatten(0, (3, world_size, -1))
        p.data = by_part.transpose(0, 1).flatten(0, 2)
""",
        becomes="""        by_head = p.detach().unflatten(0, (world_size, 3, -1))
        p.data = by_head.transpose(0, 1).flatten(0, 2)
""",
        caught_by="test_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="block-heads-interleaved",
        exercise="2.17",
        mistake="rank r takes every W-th row: features of all heads",
        text="""        by_part = p.detach().unflatten(0, (3, world_size, -1))
        p.data = by_part.transpose(0, 1).flatten(0, 2)
""",
        becomes="""        by_part = p.detach().unflatten(0, (3, -1, world_size))
        p.data = by_part.movedim(2, 0).flatten(0, 2)
""",
        caught_by="test_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="block-heads-of-all",
        exercise="2.17",
        mistake="the number of heads is that of the whole block: heads of too few features",
        text="        self.group, self.heads = group, mine.stop - mine.start\n",
        becomes="        self.group, self.heads = group, block.heads\n",
        caught_by="test_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="block-nothing-sharded",
        exercise="2.17",
        mistake="every rank keeps and computes the whole block",
        text="""        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))
""",
        becomes="        return self.whole(x_BTD)\n",
        more=(
            (
                "        self.norm_mlp = copy.deepcopy(block.norm_mlp)\n",
                """        self.norm_mlp = copy.deepcopy(block.norm_mlp)
        self.whole = copy.deepcopy(block)
""",
            ),
        ),
        caught_by="test_block_takes_over_the_weights",
        told_as="other-parameters",
    ),
    Mutant(
        id="block-norm-of-partial-sums",
        exercise="2.17",
        mistake="the terms of attention are not summed before the next norm",
        text="        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))\n",
        becomes="""        mixed_BTd = mixed_BHTd.transpose(1, 2).flatten(2)
        return F.linear(mixed_BTd, self.out.weight) + self.out.bias
""",
        caught_by="test_block_equals_one_process",
        told_as="partial-sums",
    ),
    Mutant(
        id="block-gelu-of-partial-sums",
        exercise="2.17",
        mistake="GELU after the row-parallel product, before its sum",
        text="        return self.down(F.gelu(self.up(x_BTD)))\n",
        becomes="""        term = F.gelu(F.linear(self.up(x_BTD), self.down.weight))
        return sum_over_ranks(term, self.group) + self.down.bias
""",
        more=(
            (
                "    block_of,\n",
                """    block_of,
    sum_over_ranks,
""",
            ),
        ),
        caught_by="test_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="block-bias-each-rank",
        exercise="2.17",
        mistake="every rank's term has the bias of the MLP",
        text="        return self.down(F.gelu(self.up(x_BTD)))\n",
        becomes="""        inner = F.gelu(self.up(x_BTD))
        term = F.linear(inner, self.down.weight, self.down.bias)
        return sum_over_ranks(term, self.group)
""",
        more=(
            (
                "    block_of,\n",
                """    block_of,
    sum_over_ranks,
""",
            ),
        ),
        caught_by="test_block_equals_one_process",
        told_as="bias-counted",
    ),
    Mutant(
        id="block-input-gradient-lost",
        exercise="2.17",
        mistake="attention's input has the gradient of this rank's heads only",
        text="        q, k, v = self.qkv(x_BTD).chunk(3, dim=-1)\n",
        becomes="""        fused = F.linear(x_BTD, self.qkv.weight, self.qkv.bias)
        q, k, v = fused.chunk(3, dim=-1)
""",
        caught_by="test_block_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="block-gathers-heads",
        exercise="2.17",
        mistake="all heads are gathered before the output layer, which splits them again",
        text="        return self.out(mixed_BHTd.transpose(1, 2).flatten(2))\n",
        becomes="""        mixed_BTd = mixed_BHTd.transpose(1, 2).flatten(2)
        mixed_BTD = gather_from_ranks(mixed_BTd, -1, self.group)
        return self.out(split_to_ranks(mixed_BTD, -1, self.group))
""",
        more=(
            (
                "    block_of,\n",
                """    block_of,
    gather_from_ranks,
    split_to_ranks,
""",
            ),
        ),
        caught_by="test_block_needs_two_all_reduces_each_way",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="block-norm-shared",
        exercise="2.17",
        mistake="the norm is that of the whole block, not a copy",
        text="        self.norm_mlp = copy.deepcopy(block.norm_mlp)\n",
        becomes="        self.norm_mlp = block.norm_mlp\n",
        caught_by="test_block_takes_over_the_weights",
        told_as="whole-changed",
    ),
    Mutant(
        id="block-qkv-reordered-in-place",
        exercise="2.17",
        mistake="the rows of the whole block are reordered",
        text="    ordered = copy.deepcopy(qkv)\n",
        becomes="    ordered = qkv\n",
        caught_by="test_block_takes_over_the_weights",
        told_as="whole-changed",
    ),
    Mutant(
        id="block-heads-unchecked",
        exercise="2.17",
        mistake="4 heads over 3 ranks: one head is lost",
        text='        mine, width = block_of(block.heads, "heads", group), block.out.in_features\n',
        becomes="""        share = block.heads // place_in(group)[1]
        mine, width = slice(0, share), block.out.in_features
""",
        caught_by="test_block_refuses_what_does_not_divide",
        told_as="accepted",
    ),
    Mutant(
        id="block-norms-made-new",
        exercise="2.17",
        mistake="the norms are made again and get the weights, but not the epsilon",
        text="        self.norm_mlp = copy.deepcopy(block.norm_mlp)\n",
        becomes="""        self.norm_mlp = nn.LayerNorm(block.out.in_features)
        for name, p in block.norm_mlp.named_parameters():
            setattr(self.norm_mlp, name, nn.Parameter(p.detach().clone(), p.requires_grad))
""",
        caught_by="test_odd_blocks_in_groups",
        told_as=("wrong", "rounding"),  # the epsilon changes little where a row varies much
    ),
    Mutant(
        id="block-group-forgotten",
        exercise="2.17",
        mistake="one of the layers shares its features out among all ranks",
        text="self.column(block.up, group), self.row(block.down, group)",
        becomes="self.column(block.up), self.row(block.down)",
        caught_by="test_odd_blocks_in_groups",
        told_as=("mismatch", "hang", "shape"),
    ),
    Mutant(
        id="block-frozen-rows-train",
        exercise="2.17",
        mistake="the reordered projection is trainable, whatever the whole one is",
        text="        p.data = by_part.transpose(0, 1).flatten(0, 2)\n",
        becomes="""        p.data = by_part.transpose(0, 1).flatten(0, 2)
        p.requires_grad_(True)
""",
        caught_by="test_odd_blocks_in_groups",
        told_as="frozen",
    ),
    Mutant(
        id="rows-of-one-rank-shared",
        exercise="2.17",
        mistake="with one rank the rows in their new order are a view of qkv",
        text="    ordered = copy.deepcopy(qkv)\n",
        becomes="    ordered = copy.copy(qkv)\n    ordered._parameters = dict(qkv._parameters)\n"
        "    for name, p in qkv.named_parameters():\n"
        "        setattr(ordered, name, nn.Parameter(p.detach(), p.requires_grad))\n",
        caught_by="test_rows_are_put_in_the_order_of_the_ranks",
        told_as="whole-changed",
    ),
    Mutant(
        id="rows-bias-like-weight",
        exercise="2.17",
        mistake="the bias is trainable if the weight is",
        text="    return ordered\n",
        becomes="    return ordered.requires_grad_(qkv.weight.requires_grad)\n",
        caught_by="test_rows_are_put_in_the_order_of_the_ranks",
        told_as="copied",
    ),
    Mutant(
        id="transformer-one-epsilon",
        exercise="2.17",
        mistake="the second norm gets the epsilon of the first",
        text="        self.norm_mlp = copy.deepcopy(block.norm_mlp)\n",
        becomes="""        self.norm_mlp = copy.deepcopy(block.norm_mlp)
        self.norm_mlp.eps = self.norm_attention.eps
""",
        caught_by="test_odd_blocks_in_groups",
        told_as=("wrong", "rounding"),
    ),
    Mutant(
        id="transformer-keeps-a-layer",
        exercise="2.17",
        mistake="a layer of the whole block is kept",
        text="        self.group, self.heads = ",
        becomes="""        self.source = [block.qkv]
        self.group, self.heads = """,
        caught_by="test_odd_blocks_in_groups",
        told_as="copied",
    ),
]
