"""Wrong implementations of exercise 4.17."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="flops-multiply-add-is-one",
        exercise="4.17",
        mistake="a multiplication and an addition count as one",
        text="        return 2 * out.numel() * args[0].shape[-1]\n",
        becomes="        return out.numel() * args[0].shape[-1]\n",
        caught_by="test_flops_are_those_of_torchs_counter",
        told_as="flops",
    ),
    Mutant(
        id="flops-forward-only",
        exercise="4.17",
        mistake="the FLOPs of backward are forgotten: a third of the MFU",
        text="        if learned:\n",
        becomes="        if not learned:\n",
        caught_by="test_flops_are_those_of_torchs_counter",
        told_as="flops",
    ),
    Mutant(
        id="flops-backward-is-twice-forward",
        exercise="4.17",
        mistake="backward counts as twice forward, also where a gradient is not needed",
        text="w[0].numel() * sum(mask[:2])",
        becomes="w[0].numel() * 2",
        caught_by="test_flops_are_those_of_torchs_counter",
        told_as="flops",
    ),
    Mutant(
        id="flops-transposed-like-plain",
        exercise="4.17",
        mistake="a transposed convolution is counted by its output",
        text="        return 2 * (x if transposed else out).numel() * w[0].numel()\n",
        becomes="        return 2 * out.numel() * w[0].numel()\n",
        caught_by="test_flops_are_those_of_torchs_counter",
        told_as="flops",
    ),
    Mutant(
        id="flops-groups-ignored",
        exercise="4.17",
        mistake="every filter is taken to see all channels",
        text="        return 2 * (x if transposed else out).numel() * w[0].numel()\n",
        becomes="""        terms = w[0, 0].numel() * (w.shape[1] if transposed else x.shape[1])
        return 2 * (x if transposed else out).numel() * terms
""",
        caught_by="test_flops_of_grouped_convolutions",
        told_as="flops",
    ),
    Mutant(
        id="flops-counts-on-the-model",
        exercise="4.17",
        mistake="counting runs the model itself: gradients and running statistics change",
        text=(
            "    state = {n: meta(t) for n, t in (*model.named_parameters(), "
            "*model.named_buffers())}\n"
            "    shapes = tree_map_only(Tensor, lambda t: meta(t.detach()), inputs)\n"
        ),
        becomes="    state, shapes = {}, inputs\n",
        caught_by="test_counting_leaves_no_trace",
        told_as="side-effect",
    ),
]
