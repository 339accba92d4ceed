"""Wrong implementations of exercise 4.17."""

from distlab.grading.wrong import mutants_of

FLOPS = "test_flops_are_those_of_torchs_counter"
GROUPED = "test_flops_of_grouped_convolutions"
NO_TRACE = "test_counting_leaves_no_trace"

mutant = mutants_of("4.17", "flops")

MUTANTS = [
    mutant(
        "multiply-add-is-one",
        "a multiplication and an addition count as one",
        "        return 2 * out.numel() * args[0].shape[-1]\n",
        "        return out.numel() * args[0].shape[-1]\n",
        FLOPS,
        "flops",
    ),
    mutant(
        "forward-only",
        "the FLOPs of backward are forgotten: a third of the MFU",
        "        if learned:\n",
        "        if not learned:\n",
        FLOPS,
        "flops",
    ),
    mutant(
        "backward-is-twice-forward",
        "backward counts as twice forward, also where a gradient is not needed",
        "w[0].numel() * sum(mask[:2])",
        "w[0].numel() * 2",
        FLOPS,
        "flops",
    ),
    mutant(
        "transposed-like-plain",
        "a transposed convolution is counted by its output",
        "        return 2 * (x if transposed else out).numel() * w[0].numel()\n",
        "        return 2 * out.numel() * w[0].numel()\n",
        FLOPS,
        "flops",
    ),
    mutant(
        "groups-ignored",
        "every filter is taken to see all channels",
        "        return 2 * (x if transposed else out).numel() * w[0].numel()\n",
        "        terms = w[0, 0].numel() * (w.shape[1] if transposed else x.shape[1])\n"
        "        return 2 * (x if transposed else out).numel() * terms\n",
        GROUPED,
        "flops",
    ),
    mutant(
        "counts-on-the-model",
        "counting runs the model itself: gradients and running statistics change",
        "    state = {n: meta(t) for n, t in (*model.named_parameters(), *model.named_buffers())}\n"
        "    shapes = tree_map_only(Tensor, lambda t: meta(t.detach()), inputs)\n",
        "    state, shapes = {}, inputs\n",
        NO_TRACE,
        "side-effect",
    ),
]
