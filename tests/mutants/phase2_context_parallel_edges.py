"""Wrong implementations of exercise 2.22: a scale of 0, pairs over no keys, copies of arguments."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="context-scale-of-zero",
        exercise="2.22",
        mistake="a scale of 0 counts as none",
        text="q.shape[3] ** -0.5 if scale is None else scale",
        becomes="scale or q.shape[3] ** -0.5",
        caught_by="test_documents_do_not_see_each_other",
        told_as="default-scale",
    ),
    Mutant(
        id="context-scale-ignored",
        exercise="2.22",
        mistake="the scale is 1/√d, also if another one is given",
        text="q.shape[3] ** -0.5 if scale is None else scale",
        becomes="q.shape[3] ** -0.5",
        caught_by="test_documents_do_not_see_each_other",
        told_as="default-scale",
    ),
    Mutant(
        id="context-second-pair-has-keys",
        exercise="2.22",
        mistake="only the first pair may be over no keys: else infinity is taken from infinity",
        text="    both = torch.logaddexp(lse, more_lse)\n",
        becomes="    softplus = torch.nn.functional.softplus\n"
        "    both = more_lse + softplus(lse - more_lse, threshold=50.0)\n",
        caught_by="test_a_pair_over_no_keys_weighs_nothing",
        told_as="nan",
    ),
    Mutant(
        id="context-mean-of-no-keys-counts",
        exercise="2.22",
        mistake="the mean of a pair over no keys is taken for zeros, and added",
        text="    out.mul_((lse - both).exp_()).add_",
        becomes="    out.mul_((lse - both).exp_().masked_fill_(lse == -torch.inf, 1.0)).add_",
        caught_by="test_a_pair_over_no_keys_weighs_nothing",
        told_as="wrong",
    ),
    Mutant(
        id="context-keeps-wide-queries",
        exercise="2.22",
        mistake="the queries stay in float32 until backward, twice as large as the argument",
        text="ctx.save_for_backward(q, k, v, out, lse)",
        becomes="ctx.save_for_backward(q_wide, k, v, out, lse)",
        caught_by="test_no_rank_holds_all_blocks",
        told_as="too-much-memory",
    ),
    Mutant(
        id="context-keeps-contiguous-copies",
        exercise="2.22",
        mistake="contiguous copies of strided arguments stay until backward",
        text="ctx.save_for_backward(q, k, v, out, lse)",
        becomes="ctx.save_for_backward(q.contiguous(), k.contiguous(), v.contiguous(), out, lse)",
        caught_by="test_no_rank_holds_all_blocks",
        told_as="too-much-memory",
    ),
]
