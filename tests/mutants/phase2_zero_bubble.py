"""Wrong implementations of exercise 2.13."""

from distlab.grading.wrong import Mutant

WHOLE, ALONE = "test_both_halves_make_the_whole_gradient", "test_backward_leaves_the_weights_alone"
TWICE = "test_nothing_is_computed_twice"
SHORT, EQUAL = (
    "test_zero_bubble_is_short_and_keeps_no_more_than_1f1b",
    "test_zero_bubble_equals_one_process",
)
TIME = "test_zero_bubble_takes_the_time_of_theory"

GRAD = "            (of_input,) = torch.autograd.grad(output, x, gradient, retain_graph=True)\n"
LATER = "        torch.autograd.backward(output, gradient, inputs=parameters)\n"
DETACH = "        return args[0].detach().requires_grad_(args[0].requires_grad)\n"
OWN = "        if own and not any(True for _ in layer.children()):\n"
WAIT = "                if len(waiting) > rank or not forwards_left:\n"

MUTANTS = [
    Mutant(
        id="split-not-at-all",
        exercise="2.13",
        bug="an ordinary forward: B computes everything, W nothing",
        find="    for layer in module.modules():\n",
        replace="    for layer in ():\n",
        killed_by=ALONE,
        cause="not-split",
    ),
    Mutant(
        id="split-weights-in-b",
        exercise="2.13",
        bug="B computes the weights' gradients too and keeps them for W",
        find="        ctx.later.append((output, gradient, ctx.parameters))\n",
        replace="        found = torch.autograd.grad(output, ctx.parameters, gradient, retain_graph=True)\n"
        "        ctx.later.append((ctx.parameters, found, ctx.parameters))\n",
        patches=(
            (
                LATER,
                "        for p, g in zip(output, gradient):\n            p.grad = g if p.grad is None else p.grad + g\n",
            ),
        ),
        killed_by=TWICE,
        cause="not-split",
    ),
    Mutant(
        id="split-second-backward-over-all",
        exercise="2.13",
        bug="W goes through the whole stage again: the inputs' gradients are computed twice",
        find="    try:\n        return module(x), later\n",
        replace="    for handle in handles:\n        handle.remove()\n"
        "    try:\n"
        "        whole = module(x)\n"
        "        weights = [p for p in module.parameters() if p.requires_grad]\n"
        "        class Halves(torch.autograd.Function):\n"
        "            @staticmethod\n"
        "            def forward(ctx, x, *_):\n"
        "                return whole.detach()\n"
        "            @staticmethod\n"
        "            def backward(ctx, g):\n"
        "                later.append((whole, g, weights))\n"
        "                found = None\n"
        "                if x.requires_grad:\n"
        "                    (found,) = torch.autograd.grad(whole, x, g, retain_graph=True)\n"
        "                return found, *(None for _ in weights)\n"
        "        return Halves.apply(x, *weights), later\n",
        killed_by=TWICE,
        cause="double-work",
    ),
    Mutant(
        id="split-forward-again",
        exercise="2.13",
        bug="the layer runs a second time to get a graph of its own",
        find="        return Split.apply(later, (args[0], output), outer.pop(), *trainable)\n",
        replace="        return Split.apply(later, (args[0], layer.forward(args[0])), outer.pop(), *trainable)\n",
        killed_by=TWICE,
        cause="forward-twice",
    ),
    Mutant(
        id="split-input-not-isolated",
        exercise="2.13",
        bug="a layer's graph goes on into the layer before: W comes back to the same weight twice",
        find=DETACH,
        replace="        return args[0]\n",
        killed_by=WHOLE,
        cause="exception",
    ),
    Mutant(
        id="split-first-layer-forgotten",
        exercise="2.13",
        bug="without a gradient of the input the first layer's weights get none",
        find="        ctx.later.append((output, gradient, ctx.parameters))\n",
        replace="        if x.requires_grad:\n"
        "            ctx.later.append((output, gradient, ctx.parameters))\n",
        killed_by=WHOLE,
        cause="missing",
    ),
    Mutant(
        id="split-gradient-replaced",
        exercise="2.13",
        bug="BUGS 57: W writes p.grad instead of adding to it",
        find=LATER,
        replace="        found = torch.autograd.grad(output, parameters, gradient)\n"
        "        for p, g in zip(parameters, found):\n            p.grad = g\n",
        killed_by=EQUAL,
        cause="micro-batch-lost",
    ),
    Mutant(
        id="split-hooks-stay",
        exercise="2.13",
        bug="the hooks stay on the module: the next forward has them twice",
        find="        for handle in handles:\n            handle.remove()\n",
        replace="        pass\n",
        killed_by=WHOLE,
        cause="hooks-left",
    ),
    Mutant(
        id="zero-bubble-is-1f1b",
        exercise="2.13",
        bug="every B is followed by its W at once: the bubble is that of 1F1B but for one half",
        find=WAIT,
        replace="                if waiting:\n",
        killed_by=SHORT,
        cause="bubble",
    ),
    Mutant(
        id="zero-bubble-all-weights-last",
        exercise="2.13",
        bug="all W come at the end: everything is kept until then",
        find=WAIT,
        replace="                if len(waiting) > micro_batches:\n",
        killed_by=SHORT,
        cause="too-many-kept",
    ),
    Mutant(
        id="zero-bubble-weights-lost",
        exercise="2.13",
        bug="BUGS 56: the W that wait at the end are forgotten",
        find="        order.append([*mine, *waiting])\n",
        replace="        order.append(mine)\n",
        killed_by=SHORT,
        cause="incomplete",
    ),
    Mutant(
        id="zero-bubble-weights-with-backward",
        exercise="2.13",
        bug="the pipeline does W's work inside B and skips the W steps",
        find="        output, self.later[stage, i] = split_forward(self.chunks[stage], x)\n        return output\n",
        replace="        return self.chunks[stage](x)\n",
        patches=(
            (
                "            weight_gradients(self.later.pop((step.stage, step.micro_batch)))\n",
                "            pass\n",
            ),
        ),
        killed_by=TIME,
        cause="slower",
    ),
    Mutant(
        id="zero-bubble-last-weights",
        exercise="2.13",
        bug="BUGS 53: W takes what was kept last, whatever its micro-batch",
        find="        output, self.later[stage, i] = split_forward(self.chunks[stage], x)\n        return output\n",
        replace="        output, self.later[stage, 0] = split_forward(self.chunks[stage], x)\n        return output\n",
        patches=(
            (
                "            weight_gradients(self.later.pop((step.stage, step.micro_batch)))\n",
                "            weight_gradients(self.later.get((step.stage, 0)))\n",
            ),
        ),
        killed_by=EQUAL,
        cause="micro-batch-lost",
    ),
]
