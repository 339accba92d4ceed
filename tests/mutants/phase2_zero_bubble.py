"""Wrong implementations of exercise 2.13."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="split-not-at-all",
        exercise="2.13",
        mistake="an ordinary forward: B computes everything, W nothing",
        text="    for layer in module.modules():\n",
        becomes="    for layer in ():\n",
        caught_by="test_backward_leaves_the_weights_alone",
        told_as="not-split",
    ),
    Mutant(
        id="split-weights-in-b",
        exercise="2.13",
        mistake="B computes the weights' gradients too and keeps them for W",
        text="        ctx.later.append((output, gradient, ctx.parameters))\n",
        becomes=(
            "        found = torch.autograd.grad(output, ctx.parameters, gradient, "
            "retain_graph=True)\n"
            "        ctx.later.append((ctx.parameters, found, ctx.parameters))\n"
        ),
        more=(
            (
                """        if output.requires_grad:  # not if the layer uses none of its parameters
            torch.autograd.backward(output, gradient, inputs=parameters)
""",
                """        for p, g in zip(output, gradient):
            p.grad = g if p.grad is None else p.grad + g
""",
            ),
        ),
        caught_by="test_nothing_is_computed_twice",
        told_as="not-split",
    ),
    Mutant(
        id="split-second-backward-over-all",
        exercise="2.13",
        mistake="W goes through the whole stage again: the inputs' gradients are computed twice",
        text="""    try:
        return module(x), later
""",
        becomes="""    for handle in handles:
        handle.remove()
    try:
        whole = module(x)
        weights = [p for p in module.parameters() if p.requires_grad]
        class Halves(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *_):
                return whole.detach()
            @staticmethod
            def backward(ctx, g):
                later.append((whole, g, weights))
                found = None
                if x.requires_grad:
                    (found,) = torch.autograd.grad(whole, x, g, retain_graph=True)
                return found, *(None for _ in weights)
        return Halves.apply(x, *weights), later
""",
        caught_by="test_nothing_is_computed_twice",
        told_as="double-work",
    ),
    Mutant(
        id="split-forward-again",
        exercise="2.13",
        mistake="the layer runs a second time to get a graph of its own",
        text="        return output if x is None else Split.apply(later, (args[0], output), x, *trainable)\n",
        becomes="        if x is None:\n            return output\n"
        "        return Split.apply(later, (args[0], layer.forward(args[0])), x, *trainable)\n",
        caught_by="test_nothing_is_computed_twice",
        told_as="forward-twice",
    ),
    Mutant(
        id="split-input-not-isolated",
        exercise="2.13",
        mistake=(
            "a layer's graph goes on into the layer before: W comes back to the same weight twice"
        ),
        text="        return (args[0].detach().requires_grad_(args[0].requires_grad),), kwargs\n",
        becomes="        return args, kwargs\n",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="exception",
    ),
    Mutant(
        id="split-first-layer-forgotten",
        exercise="2.13",
        mistake="without a gradient of the input the first layer's weights get none",
        text="        ctx.later.append((output, gradient, ctx.parameters))\n",
        becomes="""        if x.requires_grad:
            ctx.later.append((output, gradient, ctx.parameters))
""",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="missing",
    ),
    Mutant(
        id="split-gradient-replaced",
        exercise="2.13",
        mistake="W writes p.grad instead of adding to it",
        text="            torch.autograd.backward(output, gradient, inputs=parameters)\n",
        becomes="""            found = torch.autograd.grad(output, parameters, gradient, allow_unused=True)
            for p, g in zip(parameters, found):
                p.grad = g
""",
        caught_by="test_zero_bubble_equals_one_process",
        told_as=("micro-batch-lost", "wrong", "no-gradient", "scaled"),
    ),
    Mutant(
        id="split-hooks-stay",
        exercise="2.13",
        mistake="the hooks stay on the module: the next forward has them twice",
        text="""        for handle in handles:
            handle.remove()
""",
        becomes="        pass\n",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="hooks-left",
    ),
    Mutant(
        id="zero-bubble-is-1f1b",
        exercise="2.13",
        mistake="every B is followed by its W at once: the bubble is that of 1F1B but for one half",
        text="                if len(waiting) > rank:\n",
        becomes="                if waiting:\n",
        caught_by="test_zero_bubble_is_short_and_keeps_no_more_than_1f1b",
        told_as="bubble",
    ),
    Mutant(
        id="zero-bubble-all-weights-last",
        exercise="2.13",
        mistake="all W come at the end: everything is kept until then",
        text="                if len(waiting) > rank:\n",
        becomes="                if len(waiting) > micro_batches:\n",
        caught_by="test_zero_bubble_is_short_and_keeps_no_more_than_1f1b",
        told_as="too-many-kept",
    ),
    Mutant(
        id="zero-bubble-weights-lost",
        exercise="2.13",
        mistake="the W that wait at the end are forgotten",
        text="        order.append([*mine, *waiting])\n",
        becomes="        order.append(mine)\n",
        caught_by="test_zero_bubble_is_short_and_keeps_no_more_than_1f1b",
        told_as="incomplete",
    ),
    Mutant(
        id="zero-bubble-weights-with-backward",
        exercise="2.13",
        mistake="the pipeline does W's work inside B and skips the W steps",
        text="""        output, self.later[stage, i] = split_forward(self.chunks[stage], x)
        return output
""",
        becomes="        return self.chunks[stage](x)\n",
        more=(
            (
                "            weight_gradients(self.later.pop((step.stage, step.micro_batch)))\n",
                "            pass\n",
            ),
        ),
        caught_by="test_zero_bubble_takes_the_time_of_theory",
        told_as="slower",
    ),
    Mutant(
        id="zero-bubble-last-weights",
        exercise="2.13",
        mistake="W takes what was kept last, whatever its micro-batch",
        text="""        output, self.later[stage, i] = split_forward(self.chunks[stage], x)
        return output
""",
        becomes="""        output, self.later[stage, 0] = split_forward(self.chunks[stage], x)
        return output
""",
        more=(
            (
                "            weight_gradients(self.later.pop((step.stage, step.micro_batch)))\n",
                "            weight_gradients(self.later.get((step.stage, 0)))\n",
            ),
        ),
        caught_by="test_zero_bubble_equals_one_process",
        told_as="micro-batch-lost",
    ),
    Mutant(
        id="split-two-inputs",
        exercise="2.13",
        mistake="a layer that is called with two tensors is split, too, and gets one of them",
        text="        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):\n",
        becomes="        if not args:\n",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="exception",
    ),
    Mutant(
        id="split-unused-input",
        exercise="2.13",
        mistake="a layer that does not use its input has no backward",
        text='{"retain_graph": True, "allow_unused": True}',
        becomes='{"retain_graph": True}',
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="exception",
    ),
    Mutant(
        id="split-hooks-stay-after-errors",
        exercise="2.13",
        mistake="an exception in forward leaves the hooks on the module",
        text="""    try:
        return module(x), later
    finally:
        for handle in handles:
            handle.remove()
""",
        becomes="""    output = module(x)
    for handle in handles:
        handle.remove()
    return output, later
""",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="hooks-left",
    ),
    Mutant(
        id="split-without-weight-steps",
        exercise="2.13",
        mistake="layers are split in a schedule without W, too: their weights get no gradient",
        text='        if all(step.kind != "W" for step in self.steps):\n',
        becomes="        if False:\n",
        caught_by="test_zero_bubble_equals_one_process",
        told_as="no-gradient",
    ),
    Mutant(
        id="split-any-argument",
        exercise="2.13",
        mistake="a layer is split whatever its one argument is, also a tuple",
        text=" or not isinstance(args[0], Tensor):\n",
        becomes=":\n",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="exception",
    ),
    Mutant(
        id="split-own-hooks-removed",
        exercise="2.13",
        mistake="all hooks of the layers are removed, also those that were there before",
        text="""        for handle in handles:
            handle.remove()
""",
        becomes="""        for layer in module.modules():
            layer._forward_hooks.clear()
            layer._forward_pre_hooks.clear()
""",
        caught_by="test_both_halves_make_the_whole_gradient",
        told_as="hooks-left",
    ),
]
