"""Wrong implementations of exercise 2.16."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="vocab-remainder-lost",
        exercise="2.16",
        mistake="equal shares: the last words belong to nobody",
        text="    return vocabulary * rank // world_size, vocabulary * (rank + 1) // world_size\n",
        becomes="""    share = vocabulary // world_size
    return rank * share, (rank + 1) * share
""",
        caught_by="test_words_are_shared_out",
        told_as="range",
    ),
    Mutant(
        id="vocab-view-of-whole",
        exercise="2.16",
        mistake="the rows are a view of the whole table",
        text="        self.weight = shard(embedding.weight, 0, slice(self.first, self.end))\n",
        becomes=(
            "        self.weight = nn.Parameter(embedding.weight.detach()[self.first : self.end])\n"
        ),
        caught_by="test_words_are_shared_out",
        told_as="too-much-memory",
    ),
    Mutant(
        id="vocab-mask-off-by-one",
        exercise="2.16",
        mistake="the first word of each rank is taken for foreign",
        text="        foreign_N = (words_N < self.first) | (words_N >= self.end)\n",
        becomes="        foreign_N = (words_N <= self.first) | (words_N >= self.end)\n",
        caught_by="test_embedding_equals_one_process",
        told_as="wrong-vectors",
    ),
    Mutant(
        id="vocab-mask-forgotten",
        exercise="2.16",
        mistake="foreign words add the row that they were given instead of zeros",
        text=(
            "        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), "
            "self.group)\n"
        ),
        becomes="        return sum_over_ranks(rows_ND, self.group)\n",
        caught_by="test_embedding_equals_one_process",
        told_as="wrong-vectors",
    ),
    Mutant(
        id="vocab-not-summed",
        exercise="2.16",
        mistake="each rank knows its own words only",
        text=(
            "        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), "
            "self.group)\n"
        ),
        becomes="        return rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0)\n",
        caught_by="test_embedding_equals_one_process",
        told_as="wrong-vectors",
    ),
    Mutant(
        id="vocab-table-gathered",
        exercise="2.16",
        mistake="every rank gathers the whole table for a look-up",
        text=(
            "        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), "
            "self.group)\n"
        ),
        becomes="""        worlds = dist.get_world_size(self.group)
        tables = [torch.empty_like(self.weight) for _ in range(worlds)]
        if self.vocabulary % worlds == 0:
            dist.all_gather(tables, self.weight.detach(), group=self.group)
        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), self.group)
""",
        caught_by="test_no_rank_sees_all_logits",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="head-without-copy",
        exercise="2.16",
        mistake="the head's input has the gradient of this rank's words only",
        text="        return F.linear(copy_to_ranks(x_ND, self.group), self.weight)\n",
        becomes="        return F.linear(x_ND, self.weight)\n",
        caught_by="test_tied_head_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-local-normaliser",
        exercise="2.16",
        mistake="the softmax is normalised over this rank's words",
        text="        dist.all_reduce(sums_2N, group=group)\n",
        becomes="        dist.all_reduce(sums_2N[1], group=group)\n",
        more=(
            (
                "        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)\n",
                "",
            ),
            (
                "exp_Nv.gather(-1",
                "logits_Nv.gather(-1",
            ),
            (
                "(normaliser_N.log() - target_N)",
                "(normaliser_N.log() + largest_N - target_N)",
            ),
        ),
        caught_by="test_loss_equals_one_process",
        told_as="local-normaliser",
    ),
    Mutant(
        id="loss-local-maximum",
        exercise="2.16",
        mistake="every rank subtracts its own largest logit, and the sums are added",
        text="        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)\n",
        becomes="",
        caught_by="test_loss_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-no-maximum",
        exercise="2.16",
        mistake="nothing is subtracted: large logits overflow",
        text="        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)\n",
        becomes="        largest_N.zero_()\n",
        caught_by="test_loss_equals_one_process",
        told_as="nan",
    ),
    Mutant(
        id="loss-target-off-by-one",
        exercise="2.16",
        mistake="the first word of each rank is never a target",
        text="        mine_N = (index_N >= 0) & (index_N < logits_Nv.shape[-1])\n",
        becomes="        mine_N = (index_N > 0) & (index_N < logits_Nv.shape[-1])\n",
        caught_by="test_loss_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-target-everywhere",
        exercise="2.16",
        mistake="the one of the one-hot is on every rank",
        text=(
            "        grad_Nv.scatter_add_(-1, index_N1, "
            "-grad_N1.masked_fill(~mine_N.unsqueeze(-1), 0))\n"
        ),
        becomes="        grad_Nv.scatter_add_(-1, index_N1, -grad_N1)\n",
        caught_by="test_loss_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-ignored-counts",
        exercise="2.16",
        mistake="tokens without target have a loss",
        text="        return (normaliser_N.log() - target_N).masked_fill(uncounted_N, 0)\n",
        becomes="        return normaliser_N.log() - target_N\n",
        caught_by="test_loss_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-ignored-trains",
        exercise="2.16",
        mistake="the loss of tokens without target is zero, their gradient is not",
        text="        return grad_Nv.masked_fill_(uncounted_N.unsqueeze(-1), 0), None",
        becomes="        return grad_Nv, None",
        caught_by="test_loss_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="loss-logits-changed",
        exercise="2.16",
        mistake="the exponentials are written over the caller's logits",
        text="        exp_Nv = logits_Nv - largest_N.unsqueeze(-1)\n",
        becomes="        exp_Nv = logits_Nv.sub_(largest_N.unsqueeze(-1))\n",
        caught_by="test_loss_equals_one_process",
        told_as="input-changed",
    ),
    Mutant(
        id="loss-gathers-logits",
        exercise="2.16",
        mistake="the logits are gathered on every rank: right values, all of the memory",
        text="    return _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)\n",
        becomes="""    width = -(-vocabulary // dist.get_world_size(group))
    padded = F.pad(wide_Nv.detach(), (0, width - wide_Nv.shape[-1]))
    every = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, padded.contiguous(), group=group)
    torch.cat(every, -1)
    return _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)
""",
        caught_by="test_no_rank_sees_all_logits",
        told_as="full-logits",
    ),
    Mutant(
        id="loss-sends-more",
        exercise="2.16",
        mistake="a fourth number per token travels: the loss is summed and divided",
        text="    return _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)\n",
        becomes="""    losses = _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)
    return sum_over_ranks(losses, group) / dist.get_world_size(group)
""",
        caught_by="test_no_rank_sees_all_logits",
        told_as=("too-many-bytes", "too-many-messages"),
    ),
    Mutant(
        id="loss-in-sixteen-bits",
        exercise="2.16",
        mistake="exponentials and their sum in bfloat16",
        text="    wide_Nv = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32))\n",
        becomes="    wide_Nv = logits_Nv\n",
        caught_by="test_loss_in_sixteen_bits",
        told_as="dtype",
    ),
    Mutant(
        id="vocab-words-unchecked",
        exercise="2.16",
        mistake="a word that does not exist is a vector of zeros",
        text="        if low < 0 or high >= vocabulary:\n",
        becomes="        if low < -vocabulary or high > 2 * vocabulary:\n",
        caught_by="test_vocabulary_refuses_bad_input",
        told_as="accepted",
    ),
    Mutant(
        id="vocab-range-in-floats",
        exercise="2.16",
        mistake="the bounds are computed in floating point: wrong above 2^53",
        text="    return vocabulary * rank // world_size, vocabulary * (rank + 1) // world_size\n",
        becomes="    return int(vocabulary * rank / world_size), "
        "int(vocabulary * (rank + 1) / world_size)\n",
        caught_by="test_words_are_shared_out",
        told_as="range",
    ),
    Mutant(
        id="loss-ignores-negative-only",
        exercise="2.16",
        mistake="ignore_index is taken for a number below zero",
        text="        uncounted_N = targets_N == ignored\n",
        becomes="        uncounted_N = targets_N < 0\n",
        caught_by="test_every_kind_of_words_in_groups",
        told_as="wrong",
    ),
    Mutant(
        id="loss-in-three-messages",
        exercise="2.16",
        mistake="the sum and the target's logit travel apart",
        text="        dist.all_reduce(sums_2N, group=group)\n",
        becomes="""        for row in sums_2N:
            dist.all_reduce(row, group=group)
""",
        caught_by="test_no_rank_sees_all_logits",
        told_as="too-many-messages",
    ),
    Mutant(
        id="vocabulary-foreign-times-zero",
        exercise="2.16",
        mistake="foreign rows are multiplied by zero: NaN in one row makes other words NaN",
        text="rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0)",
        becomes="rows_ND * ~foreign_N.unsqueeze(-1)",
        caught_by="test_every_kind_of_words_in_groups",
        told_as="nan",
    ),
    Mutant(
        id="vocabulary-ignored-times-zero",
        exercise="2.16",
        mistake="the gradient of ignored tokens is multiplied by zero: NaN where logits are NaN",
        text="grad_Nv.masked_fill_(uncounted_N.unsqueeze(-1), 0), None",
        becomes="grad_Nv * ~uncounted_N.unsqueeze(-1), None",
        caught_by="test_every_kind_of_words_in_groups",
        told_as="nan",
    ),
    Mutant(
        id="vocabulary-largest-above-zero",
        exercise="2.16",
        mistake="the largest logit starts at zero: if all are far below, their sum is zero",
        text="        largest_N = logits_Nv.amax(-1)\n",
        becomes="        largest_N = logits_Nv.amax(-1).clamp(min=0)\n",
        caught_by="test_loss_equals_one_process",
        told_as="nan",
    ),
    Mutant(
        id="vocabulary-in-place-without-gradient",
        exercise="2.16",
        mistake="where no gradient is needed, the caller's logits are overwritten",
        text="exp_Nv = logits_Nv - largest_N.unsqueeze(-1)",
        becomes="""exp_Nv = logits_Nv.sub(0) if ctx.needs_input_grad[0] else logits_Nv
        exp_Nv -= largest_N.unsqueeze(-1)""",
        caught_by="test_every_kind_of_words_in_groups",
        told_as="wrong",
    ),
]
