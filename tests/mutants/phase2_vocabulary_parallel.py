"""Wrong implementations of exercise 2.16."""

from distlab.grading.wrong import Mutant

SHARED, VECTORS = "test_words_are_shared_out", "test_embedding_equals_one_process"
LOSS, SIXTEEN = "test_loss_equals_one_process", "test_loss_in_sixteen_bits"
TIED, SEES = "test_tied_head_equals_one_process", "test_no_rank_sees_all_logits"
REFUSED = "test_vocabulary_refuses_bad_input"

RANGE = "    return vocabulary * rank // world_size, vocabulary * (rank + 1) // world_size\n"
FOREIGN = "        foreign_N = (words_N < self.first) | (words_N >= self.end)\n"
MASKED = (
    "        return sum_over_ranks(rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0), self.group)\n"
)
LARGEST = "        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)\n"
MINE = "        mine_N = (index_N >= 0) & (index_N < logits_Nv.shape[-1])\n"
SUMS = "        dist.all_reduce(sums_2N, group=group)\n"
ONE_HOT = (
    "        grad_Nv.scatter_add_(-1, index_N1, -grad_N1.masked_fill(~mine_N.unsqueeze(-1), 0))\n"
)
APPLY = "    return _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)\n"

MUTANTS = [
    Mutant(
        id="vocab-remainder-lost",
        exercise="2.16",
        bug="equal shares: the last words belong to nobody",
        find=RANGE,
        replace="    share = vocabulary // world_size\n    return rank * share, (rank + 1) * share\n",
        killed_by=SHARED,
        cause="range",
    ),
    Mutant(
        id="vocab-view-of-whole",
        exercise="2.16",
        bug="BUGS 69: the rows are a view of the whole table",
        find="        self.weight = shard(embedding.weight, 0, slice(self.first, self.end))\n",
        replace="        self.weight = nn.Parameter(embedding.weight.detach()[self.first : self.end])\n",
        killed_by=SHARED,
        cause="too-much-memory",
    ),
    Mutant(
        id="vocab-mask-off-by-one",
        exercise="2.16",
        bug="BUGS 66: the first word of each rank is taken for foreign",
        find=FOREIGN,
        replace="        foreign_N = (words_N <= self.first) | (words_N >= self.end)\n",
        killed_by=VECTORS,
        cause="wrong-vectors",
    ),
    Mutant(
        id="vocab-mask-forgotten",
        exercise="2.16",
        bug="foreign words add the row that they were given instead of zeros",
        find=MASKED,
        replace="        return sum_over_ranks(rows_ND, self.group)\n",
        killed_by=VECTORS,
        cause="wrong-vectors",
    ),
    Mutant(
        id="vocab-not-summed",
        exercise="2.16",
        bug="each rank knows its own words only",
        find=MASKED,
        replace="        return rows_ND.masked_fill(foreign_N.unsqueeze(-1), 0)\n",
        killed_by=VECTORS,
        cause="wrong-vectors",
    ),
    Mutant(
        id="vocab-table-gathered",
        exercise="2.16",
        bug="every rank gathers the whole table for a look-up",
        find=MASKED,
        replace="        worlds = dist.get_world_size(self.group)\n"
        "        tables = [torch.empty_like(self.weight) for _ in range(worlds)]\n"
        "        if self.vocabulary % worlds == 0:\n"
        "            dist.all_gather(tables, self.weight.detach(), group=self.group)\n" + MASKED,
        killed_by=SEES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="head-without-copy",
        exercise="2.16",
        bug="BUGS 61: the head's input has the gradient of this rank's words only",
        find="        return F.linear(copy_to_ranks(x_ND, self.group), self.weight)\n",
        replace="        return F.linear(x_ND, self.weight)\n",
        killed_by=TIED,
        cause="wrong",
    ),
    Mutant(
        id="loss-local-normaliser",
        exercise="2.16",
        bug="BUGS 66: the softmax is normalised over this rank's words",
        find=SUMS,
        replace="        dist.all_reduce(sums_2N[1], group=group)\n",
        patches=[
            (LARGEST, ""),
            ("exp_Nv.gather(-1", "logits_Nv.gather(-1"),
            ("(normaliser_N.log() - target_N)", "(normaliser_N.log() + largest_N - target_N)"),
        ],
        killed_by=LOSS,
        cause="local-normaliser",
    ),
    Mutant(
        id="loss-local-maximum",
        exercise="2.16",
        bug="BUGS 66: every rank subtracts its own largest logit, and the sums are added",
        find=LARGEST,
        replace="",
        killed_by=LOSS,
        cause="wrong",
    ),
    Mutant(
        id="loss-no-maximum",
        exercise="2.16",
        bug="nothing is subtracted: large logits overflow",
        find=LARGEST,
        replace="        largest_N.zero_()\n",
        killed_by=LOSS,
        cause="nan",
    ),
    Mutant(
        id="loss-target-off-by-one",
        exercise="2.16",
        bug="BUGS 66: the first word of each rank is never a target",
        find=MINE,
        replace="        mine_N = (index_N > 0) & (index_N < logits_Nv.shape[-1])\n",
        killed_by=LOSS,
        cause="wrong",
    ),
    Mutant(
        id="loss-target-everywhere",
        exercise="2.16",
        bug="the one of the one-hot is on every rank",
        find=ONE_HOT,
        replace="        grad_Nv.scatter_add_(-1, index_N1, -grad_N1)\n",
        killed_by=LOSS,
        cause="wrong",
    ),
    Mutant(
        id="loss-ignored-counts",
        exercise="2.16",
        bug="tokens without target have a loss",
        find="        return (normaliser_N.log() - target_N).masked_fill(uncounted_N, 0)\n",
        replace="        return normaliser_N.log() - target_N\n",
        killed_by=LOSS,
        cause="wrong",
    ),
    Mutant(
        id="loss-ignored-trains",
        exercise="2.16",
        bug="the loss of tokens without target is zero, their gradient is not",
        find="        grad_N1 = grad_N.masked_fill(uncounted_N, 0).unsqueeze(-1)\n",
        replace="        grad_N1 = grad_N.unsqueeze(-1)\n",
        killed_by=LOSS,
        cause="wrong",
    ),
    Mutant(
        id="loss-logits-changed",
        exercise="2.16",
        bug="the exponentials are written over the caller's logits",
        find="        exp_Nv = logits_Nv - largest_N.unsqueeze(-1)\n",
        replace="        exp_Nv = logits_Nv.sub_(largest_N.unsqueeze(-1))\n",
        killed_by=LOSS,
        cause="input-changed",
    ),
    Mutant(
        id="loss-gathers-logits",
        exercise="2.16",
        bug="the logits are gathered on every rank: right values, all of the memory",
        find=APPLY,
        replace="    width = -(-vocabulary // dist.get_world_size(group))\n"
        "    padded = F.pad(wide_Nv.detach(), (0, width - wide_Nv.shape[-1]))\n"
        "    every = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]\n"
        "    dist.all_gather(every, padded.contiguous(), group=group)\n"
        "    torch.cat(every, -1)\n" + APPLY,
        killed_by=SEES,
        cause="full-logits",
    ),
    Mutant(
        id="loss-sends-more",
        exercise="2.16",
        bug="a fourth number per token travels: the loss is summed and divided",
        find=APPLY,
        replace="    losses = _CrossEntropy.apply(wide_Nv, targets_N, first, ignore_index, group)\n"
        "    return sum_over_ranks(losses, group) / dist.get_world_size(group)\n",
        killed_by=SEES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="loss-in-sixteen-bits",
        exercise="2.16",
        bug="exponentials and their sum in bfloat16",
        find="    wide_Nv = logits_Nv.to(torch.promote_types(logits_Nv.dtype, torch.float32))\n",
        replace="    wide_Nv = logits_Nv\n",
        killed_by=SIXTEEN,
        cause="dtype",
    ),
    Mutant(
        id="vocab-words-unchecked",
        exercise="2.16",
        bug="a word that does not exist is a vector of zeros",
        find="        if low < 0 or high >= vocabulary:\n",
        replace="        if low < -vocabulary or high > 2 * vocabulary:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
]
