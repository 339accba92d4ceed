"""Wrong implementations of exercise 4.17."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="flops-backward-outside",
        exercise="4.17",
        mistake="backward runs on the model's own parameters: checkpointing calls the layers again",
        text="            torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])\n",
        becomes="            learned.extend(o.sum() for o in outputs if o.requires_grad)\n",
        more=(
            ("    whole = Whole()\n", "    whole, learned = Whole(), []\n"),
            (
                "        torch.func.functional_call(whole, state, shapes)\n",
                "        torch.func.functional_call(whole, state, shapes)\n"
                "        torch.autograd.backward(learned)\n",
            ),
        ),
        caught_by="test_recomputation_and_exceptions",
        told_as="exception",
    ),
    Mutant(
        id="flops-bias-costs",
        exercise="4.17",
        mistake="the gradient of the bias counts as a third convolution",
        text="sum(mask[:2])",
        becomes="sum(mask)",
        caught_by="test_operators_by_their_arguments",
        told_as="flops",
    ),
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
        text="            torch.autograd.backward([o.sum() for o in outputs if o.requires_grad])\n",
        becomes="            del outputs\n",
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
            "        state = {n: meta(t) for n, t in (*whole.named_parameters(), "
            "*whole.named_buffers())}\n"
            "        shapes = tree_map_only(Tensor, lambda t: meta(t.detach()), inputs)\n"
        ),
        becomes="        state, shapes = {}, inputs\n",
        caught_by="test_counting_leaves_no_trace",
        told_as="side-effect",
    ),
    Mutant(
        id="flops-without-gradients",
        exercise="4.17",
        mistake="counted inside torch.no_grad() there is no backward",
        text="    with torch.enable_grad(), torch.random",
        becomes="    with torch.random",
        caught_by="test_inputs_and_outputs_of_many_kinds",
        told_as="forward-only",
    ),
    Mutant(
        id="flops-dense",
        exercise="4.17",
        mistake="tensors with gaps have other strides on the meta device",
        text='torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")',
        becomes='torch.empty_like(t, device="meta")',
        caught_by="test_tensors_lie_as_they_did",
        told_as="strides",
    ),
    Mutant(
        id="flops-draws",
        exercise="4.17",
        mistake="a model that draws a number on the CPU moves the global random numbers on",
        text="torch.enable_grad(), torch.random.fork_rng(devices=[]):",
        becomes="torch.enable_grad():",
        caught_by="test_counting_leaves_no_trace",
        told_as="side-effect",
    ),
    Mutant(
        id="flops-gradients-on-after-an-exception",
        exercise="4.17",
        mistake="gradients are switched on, and not off again where the model raises",
        text="    with torch.enable_grad(), torch.random.fork_rng(devices=[]):",
        becomes="    torch.set_grad_enabled(True)\n    with torch.random.fork_rng(devices=[]):",
        caught_by="test_recomputation_and_exceptions",
        told_as="side-effect",
    ),
]
