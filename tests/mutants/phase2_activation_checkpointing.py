"""Wrong implementations of exercise 2.7."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="checkpoint-random-not-restored",
        exercise="2.7",
        mistake="the second forward draws other dropout masks",
        text="            torch.set_rng_state(self.cpu_state)\n",
        becomes="",
        caught_by="test_random_numbers_are_those_of_the_first_forward",
        told_as="other-random",
    ),
    Mutant(
        id="checkpoint-random-outside",
        exercise="2.7",
        mistake="backward sets the program's random numbers back",
        text="        with torch.random.fork_rng(devices=self.cuda), self.casting():\n",
        becomes="        with self.casting():\n",
        caught_by="test_random_numbers_are_those_of_the_first_forward",
        told_as="random-outside",
    ),
    Mutant(
        id="checkpoint-forward-forks",
        exercise="2.7",
        mistake="the first forward's random numbers are drawn again by what follows",
        text="""        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            return tuple(output.detach() for output in call.run(tensors))
""",
        becomes="""        ctx.save_for_backward(*tensors)
        with call.surroundings.restored():
            return tuple(output.detach() for output in call.run(tensors))
""",
        caught_by="test_random_numbers_are_those_of_the_first_forward",
        told_as="random-forward",
    ),
    Mutant(
        id="checkpoint-random-on-ranks",
        exercise="2.7",
        mistake="the random state is taken in backward, not in forward",
        text="            torch.set_rng_state(self.cpu_state)\n",
        becomes="            torch.set_rng_state(torch.get_rng_state())\n",
        caught_by="test_collectives_in_a_segment",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-no-autocast",
        exercise="2.7",
        mistake="the second forward runs in backward's autocast state",
        text="        with torch.random.fork_rng(devices=self.cuda), self.casting():\n",
        becomes="        with torch.random.fork_rng(devices=self.cuda):\n",
        caught_by="test_autocast_is_that_of_the_first_forward",
        told_as="autocast",
    ),
    Mutant(
        id="checkpoint-autocast-never-off",
        exercise="2.7",
        mistake="autocast is switched on again, but not off",
        text="            for kind, dtype, enabled in self.autocast:\n",
        becomes="""            for kind, dtype, enabled in self.autocast:
                if not enabled:
                    continue
""",
        caught_by="test_autocast_is_that_of_the_first_forward",
        told_as="autocast",
    ),
    Mutant(
        id="checkpoint-autocast-stays",
        exercise="2.7",
        mistake="autocast is set, and its cache switched off, for good",
        text="""        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                stack.enter_context(cast)
            yield
""",
        becomes="""        for kind, dtype, enabled in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(False)
        yield
""",
        caught_by="test_autocast_is_that_of_the_first_forward",
        told_as="autocast-outside",
    ),
    Mutant(
        id="checkpoint-not-detached",
        exercise="2.7",
        mistake="backward inside runs on into what came before the segment",
        text=(
            "        inputs = [t.detach().requires_grad_(t.requires_grad) for t in "
            "ctx.saved_tensors]\n"
        ),
        becomes="        inputs = list(ctx.saved_tensors)\n",
        caught_by="test_nested_arguments_and_outputs",
        told_as="exception",
    ),
    Mutant(
        id="checkpoint-no-enable-grad",
        exercise="2.7",
        mistake="the second forward records nothing: backward runs without grad mode",
        text="        with ctx.call.surroundings.restored(), torch.enable_grad():\n",
        becomes="        with ctx.call.surroundings.restored():\n",
        caught_by="test_parameters_need_no_argument_that_needs_a_gradient",
        told_as="no-gradient",
    ),
    Mutant(
        id="checkpoint-inputs-only",
        exercise="2.7",
        mistake="gradients of the arguments only: parameters get none",
        text="            torch.autograd.backward(*zip(*pairs, strict=True))\n",
        becomes="""            outs, gs = zip(*pairs, strict=True)
            wanted = [t for t in inputs if t.requires_grad]
            found = torch.autograd.grad(outs, wanted, gs, allow_unused=True)
            for t, g in zip(wanted, found, strict=True):
                t.grad = g
""",
        caught_by="test_nested_arguments_and_outputs",
        told_as="no-gradient",
    ),
    Mutant(
        id="checkpoint-needless-gradient",
        exercise="2.7",
        mistake="every floating argument gets a gradient in backward, needed or not",
        text=(
            "        inputs = [t.detach().requires_grad_(t.requires_grad) for t in "
            "ctx.saved_tensors]\n"
        ),
        becomes=(
            "        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in "
            "ctx.saved_tensors]\n"
        ),
        caught_by="test_nested_arguments_and_outputs",
        told_as="needless",
    ),
    Mutant(
        id="checkpoint-nested-unseen",
        exercise="2.7",
        mistake="tensors within tuples and dicts are not arguments of the Function",
        text="    return rebuild(value, lambda item: take_out(item, tensors))\n",
        becomes="""    if isinstance(value, dict) or hasattr(value, '_fields'):
        return value
    return rebuild(value, lambda item: take_out(item, tensors))
""",
        caught_by="test_nested_arguments_and_outputs",
        told_as="exception",
    ),
    Mutant(
        id="checkpoint-unused-output",
        exercise="2.7",
        mistake="backward also from outputs that need no gradient",
        text="            if grad is not None and output.requires_grad\n",
        becomes="            if output is not None\n",
        caught_by="test_nested_arguments_and_outputs",
        told_as="exception",
    ),
    Mutant(
        id="checkpoint-no-anchor",
        exercise="2.7",
        mistake="the reentrant pitfall: no argument needs a gradient, so backward never comes",
        text="""    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)
    return put_in(call.outputs, outputs)
""",
        becomes="""    outputs = Recompute.apply(call, torch.empty(0), *tensors)
    return put_in(call.outputs, outputs)
""",
        caught_by="test_parameters_need_no_argument_that_needs_a_gradient",
        told_as="no-gradient",
    ),
    Mutant(
        id="checkpoint-random-by-seed",
        exercise="2.7",
        mistake="the seed is set again: right for the first draw of the program only",
        text="            torch.set_rng_state(self.cpu_state)\n",
        becomes="            torch.manual_seed(torch.initial_seed())\n",
        caught_by="test_segments_within_a_segment",
        told_as="wrong",
    ),
    Mutant(
        id="checkpoint-does-nothing",
        exercise="2.7",
        mistake="a plain call that keeps every activation",
        text="""    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)
    return put_in(call.outputs, outputs)
""",
        becomes="    return fn(*args, **kwargs)\n",
        caught_by="test_runs_once_now_and_once_in_backward",
        told_as="not-recomputed",
    ),
    Mutant(
        id="checkpoint-runs-twice-in-forward",
        exercise="2.7",
        mistake="computed again at once",
        text="""        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            return tuple(output.detach() for output in call.run(tensors))
""",
        becomes="""        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            call.run(tensors)
            return tuple(output.detach() for output in call.run(tensors))
""",
        caught_by="test_runs_once_now_and_once_in_backward",
        told_as="forward-twice",
    ),
    Mutant(
        id="checkpoint-records-without-need",
        exercise="2.7",
        mistake="no_grad is ignored: the output needs a gradient",
        text="""    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
""",
        becomes="    torch.set_grad_enabled(True)\n",
        caught_by="test_runs_once_now_and_once_in_backward",
        told_as="recorded",
    ),
    Mutant(
        id="checkpoint-kept-aside",
        exercise="2.7",
        mistake="arguments are kept on ctx: autograd does not notice that they changed",
        text="        ctx.save_for_backward(*tensors)\n",
        becomes="        ctx.kept = tensors\n",
        more=(
            (
                "for t in ctx.saved_tensors]",
                "for t in ctx.kept]",
            ),
        ),
        caught_by="test_never_silently_wrong",
        told_as="stale-input",
    ),
    Mutant(
        id="checkpoint-unasked",
        exercise="2.7",
        mistake="torch.autograd.grad fills the .grad of parameters",
        text="""        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpointed segment needs backward() without inputs=…")
""",
        becomes="",
        caught_by="test_never_silently_wrong",
        told_as="unasked",
    ),
    Mutant(
        id="checkpoint-saves-output",
        exercise="2.7",
        mistake="the output is kept along with the inputs",
        text="            return tuple(output.detach() for output in call.run(tensors))\n",
        becomes="""            ctx.outputs = call.run(tensors)
            return tuple(t.clone() for t in ctx.outputs)
""",
        caught_by="test_a_segment_holds_its_input_only",
        told_as="activations-kept",
    ),
    Mutant(
        id="checkpoint-graph-in-forward",
        exercise="2.7",
        mistake="the first forward records its graph and keeps it",
        text="            return tuple(output.detach() for output in call.run(tensors))\n",
        becomes="""            with torch.enable_grad():
                ctx.graph = call.run([t.detach() for t in tensors])
            return tuple(t.detach() for t in ctx.graph)
""",
        caught_by="test_a_segment_holds_its_input_only",
        told_as="activations-kept",
    ),
    Mutant(
        id="segments-graphs-stay",
        exercise="2.7",
        mistake="what was computed again stays until all of backward is done",
        text="            torch.autograd.backward(*zip(*pairs, strict=True))\n",
        becomes="""            torch.autograd.backward(*zip(*pairs, strict=True), retain_graph=True)
            ctx.call.kept = outputs
""",
        caught_by="test_segments_hold_what_the_formula_says",
        told_as="peak",
    ),
    Mutant(
        id="segments-none",
        exercise="2.7",
        mistake="no segment is checkpointed",
        text="""        x = checkpoint(run, layers[start:end], x)
    return run(layers[len(layers) - short :], x)
""",
        becomes="""        x = run(layers[start:end], x)
    return run(layers[len(layers) - short :], x)
""",
        caught_by="test_segments_hold_what_the_formula_says",
        told_as="too-much-held",
    ),
    Mutant(
        id="segments-each-layer",
        exercise="2.7",
        mistake="every layer is a segment of its own: n·A held, and the cut is ignored",
        text="    ends = list(accumulate(short + (k < longer) for k in range(segments)))\n",
        becomes="    ends, short = list(range(1, len(layers) + 1)), 1\n",
        caught_by="test_segments_compute_what_the_formula_says",
        told_as="evaluations",
    ),
    Mutant(
        id="segments-last-again",
        exercise="2.7",
        mistake="the last segment is computed again, although its backward comes at once",
        text="""        x = checkpoint(run, layers[start:end], x)
    return run(layers[len(layers) - short :], x)
""",
        becomes="""        x = checkpoint(run, layers[start:end], x)
    return checkpoint(run, layers[len(layers) - short :], x)
""",
        caught_by="test_segments_compute_what_the_formula_says",
        told_as="evaluations",
    ),
    Mutant(
        id="segments-rest-in-the-last",
        exercise="2.7",
        mistake="what does not divide goes to the last segment: 7 layers in 3 are 2, 2 and 3",
        text="    ends = list(accumulate(short + (k < longer) for k in range(segments)))\n",
        becomes="""    ends = [short * (k + 1) for k in range(segments)]
    short += longer
""",
        caught_by="test_segments_compute_what_the_formula_says",
        told_as="evaluations",
    ),
    Mutant(
        id="segments-any-cut",
        exercise="2.7",
        mistake="more segments than layers are taken for as many as there are",
        text="    if not 1 <= segments <= len(layers):\n",
        becomes="""    if layers:
        segments = max(1, min(segments, len(layers)))
    else:
""",
        caught_by="test_impossible_cuts_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="checkpoint-takes-buffers-over",
        exercise="2.7",
        mistake="a buffer that fn returns becomes an output of the node, and needs a gradient",
        text="            return tuple(output.detach() for output in call.run(tensors))\n",
        becomes="            return call.run(tensors)\n",
        caught_by="test_detached_and_unused_outputs",
        told_as="taken-over",
    ),
    Mutant(
        id="checkpoint-random-after-error",
        exercise="2.7",
        mistake="after an error in the second forward the program's random state stays in the past",
        text="        with torch.random.fork_rng(devices=self.cuda), self.casting():\n",
        becomes="        outer = torch.get_rng_state()\n        with self.casting():\n",
        more=[
            (
                "                torch.cuda.set_rng_state(state, device)\n            yield\n",
                "                torch.cuda.set_rng_state(state, device)\n            yield\n"
                "        torch.set_rng_state(outer)\n",
            )
        ],
        caught_by="test_random_numbers_are_those_of_the_first_forward",
        told_as="random-outside",
    ),
    Mutant(
        id="given-twice-is-one",
        exercise="2.7",
        mistake="a tensor that is given twice gets the gradient of one place only",
        text="    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)\n",
        becomes="    seen = {id(t): t for t in tensors}\n    tensors = [t if seen.pop(id(t), None) is not None else t.detach() for t in tensors]\n    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)\n",
        caught_by="test_nested_arguments_and_outputs",
        told_as="wrong",
    ),
]
