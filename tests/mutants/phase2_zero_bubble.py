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
                "        torch.autograd.backward(output, gradient, inputs=parameters)\n",
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
        text="        return Split.apply(later, (args[0], output), outer.pop(), *trainable)\n",
        becomes=(
            "        return Split.apply(later, (args[0], layer.forward(args[0])), outer.pop(), "
            "*trainable)\n"
        ),
        caught_by="test_nothing_is_computed_twice",
        told_as="forward-twice",
    ),
    Mutant(
        id="split-input-not-isolated",
        exercise="2.13",
        mistake=(
            "a layer's graph goes on into the layer before: W comes back to the same weight twice"
        ),
        text="        return args[0].detach().requires_grad_(args[0].requires_grad)\n",
        becomes="        return args[0]\n",
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
        text="        torch.autograd.backward(output, gradient, inputs=parameters)\n",
        becomes="""        found = torch.autograd.grad(output, parameters, gradient)
        for p, g in zip(parameters, found):
            p.grad = g
""",
        caught_by="test_zero_bubble_equals_one_process",
        told_as="micro-batch-lost",
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
        text="                if len(waiting) > rank or not forwards_left:\n",
        becomes="                if waiting:\n",
        caught_by="test_zero_bubble_is_short_and_keeps_no_more_than_1f1b",
        told_as="bubble",
    ),
    Mutant(
        id="zero-bubble-all-weights-last",
        exercise="2.13",
        mistake="all W come at the end: everything is kept until then",
        text="                if len(waiting) > rank or not forwards_left:\n",
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
]
