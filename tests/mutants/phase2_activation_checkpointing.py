"""Wrong implementations of exercise 2.7."""

from distlab.grading.wrong import Mutant

NESTED, RANDOM = (
    "test_nested_arguments_and_outputs",
    "test_random_numbers_are_those_of_the_first_forward",
)
AUTOCAST = "test_autocast_is_that_of_the_first_forward"
PARAMETERS = "test_parameters_need_no_argument_that_needs_a_gradient"
INNER, ONCE = "test_segments_within_a_segment", "test_runs_once_now_and_once_in_backward"
SILENT, HOLDS = "test_never_silently_wrong", "test_a_segment_holds_its_input_only"
FORMULA, COMPUTE = (
    "test_segments_hold_what_the_formula_says",
    "test_segments_compute_what_the_formula_says",
)
CUTS, RANKS = "test_impossible_cuts_are_refused", "test_collectives_in_a_segment"

STATE = "            torch.set_rng_state(self.cpu_state)\n"
CASTING = """        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                cast = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                stack.enter_context(cast)
            yield
"""
RESTORED = "        with torch.random.fork_rng(devices=self.cuda), self.casting():\n"
FORWARD = """        ctx.save_for_backward(*tensors)
        with call.surroundings.casting():
            return call.run(tensors)
"""
VALID = """        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a checkpointed segment needs backward() without inputs=…")
"""
INPUTS = (
    "        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]\n"
)
AGAIN = "        with ctx.call.surroundings.restored(), torch.enable_grad():\n"
PAIRS = "            if grad is not None and output.requires_grad\n"
BACKWARD = "            torch.autograd.backward(*zip(*pairs, strict=True))\n"
CALL = """    outputs = Recompute.apply(call, torch.empty(0, requires_grad=True), *tensors)
    return put_in(call.outputs, outputs)
"""
ENDS = "    ends = list(accumulate(short + (k < longer) for k in range(segments)))\n"
LOOP = "        x = checkpoint(run, layers[start:end], x)\n    return run(layers[len(layers) - short :], x)\n"

MUTANTS = [
    Mutant(
        id="checkpoint-random-not-restored",
        exercise="2.7",
        bug="the second forward draws other dropout masks",
        find=STATE,
        replace="",
        killed_by=RANDOM,
        cause="other-random",
    ),
    Mutant(
        id="checkpoint-random-outside",
        exercise="2.7",
        bug="backward sets the program's random numbers back",
        find=RESTORED,
        replace="        with self.casting():\n",
        killed_by=RANDOM,
        cause="random-outside",
    ),
    Mutant(
        id="checkpoint-forward-forks",
        exercise="2.7",
        bug="the first forward's random numbers are drawn again by what follows",
        find=FORWARD,
        replace=FORWARD.replace("call.surroundings.casting()", "call.surroundings.restored()"),
        killed_by=RANDOM,
        cause="random-forward",
    ),
    Mutant(
        id="checkpoint-random-on-ranks",
        exercise="2.7",
        bug="the random state is taken in backward, not in forward",
        find=STATE,
        replace="            torch.set_rng_state(torch.get_rng_state())\n",
        killed_by=RANKS,
        cause="wrong",
    ),
    Mutant(
        id="checkpoint-no-autocast",
        exercise="2.7",
        bug="the second forward runs in backward's autocast state",
        find=RESTORED,
        replace="        with torch.random.fork_rng(devices=self.cuda):\n",
        killed_by=AUTOCAST,
        cause="autocast",
    ),
    Mutant(
        id="checkpoint-autocast-never-off",
        exercise="2.7",
        bug="autocast is switched on again, but not off",
        find="            for kind, dtype, enabled in self.autocast:\n",
        replace="            for kind, dtype, enabled in self.autocast:\n"
        "                if not enabled:\n                    continue\n",
        killed_by=AUTOCAST,
        cause="autocast",
    ),
    Mutant(
        id="checkpoint-autocast-stays",
        exercise="2.7",
        bug="autocast is set, and its cache switched off, for good",
        find=CASTING,
        replace="        for kind, dtype, enabled in self.autocast:\n"
        "            torch.set_autocast_enabled(kind, enabled)\n"
        "            torch.set_autocast_dtype(kind, dtype)\n"
        "        torch.set_autocast_cache_enabled(False)\n"
        "        yield\n",
        killed_by=AUTOCAST,
        cause="autocast-outside",
    ),
    Mutant(
        id="checkpoint-not-detached",
        exercise="2.7",
        bug="backward inside runs on into what came before the segment",
        find=INPUTS,
        replace="        inputs = list(ctx.saved_tensors)\n",
        killed_by=NESTED,
        cause="exception",
    ),
    Mutant(
        id="checkpoint-no-enable-grad",
        exercise="2.7",
        bug="the second forward records nothing: backward runs without grad mode",
        find=AGAIN,
        replace="        with ctx.call.surroundings.restored():\n",
        killed_by=PARAMETERS,
        cause="no-gradient",
    ),
    Mutant(
        id="checkpoint-inputs-only",
        exercise="2.7",
        bug="gradients of the arguments only: parameters get none",
        find=BACKWARD,
        replace="            outs, gs = zip(*pairs, strict=True)\n"
        "            wanted = [t for t in inputs if t.requires_grad]\n"
        "            found = torch.autograd.grad(outs, wanted, gs, allow_unused=True)\n"
        "            for t, g in zip(wanted, found, strict=True):\n"
        "                t.grad = g\n",
        killed_by=NESTED,
        cause="no-gradient",
    ),
    Mutant(
        id="checkpoint-needless-gradient",
        exercise="2.7",
        bug="every floating argument gets a gradient in backward, needed or not",
        find=INPUTS,
        replace=INPUTS.replace("t.requires_grad)", "t.is_floating_point())"),
        killed_by=NESTED,
        cause="needless",
    ),
    Mutant(
        id="checkpoint-nested-unseen",
        exercise="2.7",
        bug="tensors within tuples and dicts are not arguments of the Function",
        find="    return rebuild(value, lambda item: take_out(item, tensors))\n",
        replace="    if isinstance(value, dict) or hasattr(value, '_fields'):\n"
        "        return value\n"
        "    return rebuild(value, lambda item: take_out(item, tensors))\n",
        killed_by=NESTED,
        cause="exception",
    ),
    Mutant(
        id="checkpoint-unused-output",
        exercise="2.7",
        bug="backward also from outputs that need no gradient",
        find=PAIRS,
        replace="            if output is not None\n",
        killed_by=NESTED,
        cause="exception",
    ),
    Mutant(
        id="checkpoint-no-anchor",
        exercise="2.7",
        bug="the reentrant pitfall: no argument needs a gradient, so backward never comes",
        find=CALL,
        replace=CALL.replace("torch.empty(0, requires_grad=True)", "torch.empty(0)"),
        killed_by=PARAMETERS,
        cause="no-gradient",
    ),
    Mutant(
        id="checkpoint-random-by-seed",
        exercise="2.7",
        bug="the seed is set again: right for the first draw of the program only",
        find=STATE,
        replace="            torch.manual_seed(torch.initial_seed())\n",
        killed_by=INNER,
        cause="wrong",
    ),
    Mutant(
        id="checkpoint-does-nothing",
        exercise="2.7",
        bug="BUGS 55: a plain call that keeps every activation",
        find=CALL,
        replace="    return fn(*args, **kwargs)\n",
        killed_by=ONCE,
        cause="not-recomputed",
    ),
    Mutant(
        id="checkpoint-runs-twice-in-forward",
        exercise="2.7",
        bug="computed again at once",
        find=FORWARD,
        replace=FORWARD.replace(
            "            return call", "            call.run(tensors)\n            return call"
        ),
        killed_by=ONCE,
        cause="forward-twice",
    ),
    Mutant(
        id="checkpoint-records-without-need",
        exercise="2.7",
        bug="no_grad is ignored: the output needs a gradient",
        find="    if not torch.is_grad_enabled():\n        return fn(*args, **kwargs)\n",
        replace="    torch.set_grad_enabled(True)\n",
        killed_by=ONCE,
        cause="recorded",
    ),
    Mutant(
        id="checkpoint-kept-aside",
        exercise="2.7",
        bug="arguments are kept on ctx: autograd does not notice that they changed",
        find="        ctx.save_for_backward(*tensors)\n",
        replace="        ctx.kept = tensors\n",
        patches=[("for t in ctx.saved_tensors]", "for t in ctx.kept]")],
        killed_by=SILENT,
        cause="stale-input",
    ),
    Mutant(
        id="checkpoint-unasked",
        exercise="2.7",
        bug="torch.autograd.grad fills the .grad of parameters",
        find=VALID,
        replace="",
        killed_by=SILENT,
        cause="unasked",
    ),
    Mutant(
        id="checkpoint-saves-output",
        exercise="2.7",
        bug="the output is kept along with the inputs",
        find="            return call.run(tensors)\n",
        replace="            ctx.outputs = call.run(tensors)\n"
        "            return tuple(t.clone() for t in ctx.outputs)\n",
        killed_by=HOLDS,
        cause="activations-kept",
    ),
    Mutant(
        id="checkpoint-graph-in-forward",
        exercise="2.7",
        bug="the first forward records its graph and keeps it",
        find="            return call.run(tensors)\n",
        replace="            with torch.enable_grad():\n"
        "                ctx.graph = call.run([t.detach() for t in tensors])\n"
        "            return tuple(t.detach() for t in ctx.graph)\n",
        killed_by=HOLDS,
        cause="activations-kept",
    ),
    Mutant(
        id="segments-graphs-stay",
        exercise="2.7",
        bug="BUGS 71: what was computed again stays until all of backward is done",
        find=BACKWARD,
        replace=BACKWARD.replace("strict=True))", "strict=True), retain_graph=True)")
        + "            ctx.call.kept = outputs\n",
        killed_by=FORMULA,
        cause="peak",
    ),
    Mutant(
        id="segments-none",
        exercise="2.7",
        bug="no segment is checkpointed",
        find=LOOP,
        replace=LOOP.replace("checkpoint(run, layers[start:end], x)", "run(layers[start:end], x)"),
        killed_by=FORMULA,
        cause="too-much-held",
    ),
    Mutant(
        id="segments-each-layer",
        exercise="2.7",
        bug="every layer is a segment of its own: n·A held, and the cut is ignored",
        find=ENDS,
        replace="    ends, short = list(range(1, len(layers) + 1)), 1\n",
        killed_by=COMPUTE,
        cause="evaluations",
    ),
    Mutant(
        id="segments-last-again",
        exercise="2.7",
        bug="the last segment is computed again, although its backward comes at once",
        find=LOOP,
        replace="        x = checkpoint(run, layers[start:end], x)\n"
        "    return checkpoint(run, layers[len(layers) - short :], x)\n",
        killed_by=COMPUTE,
        cause="evaluations",
    ),
    Mutant(
        id="segments-rest-in-the-last",
        exercise="2.7",
        bug="what does not divide goes to the last segment: 7 layers in 3 are 2, 2 and 3",
        find=ENDS,
        replace="    ends = [short * (k + 1) for k in range(segments)]\n    short += longer\n",
        killed_by=COMPUTE,
        cause="evaluations",
    ),
    Mutant(
        id="segments-any-cut",
        exercise="2.7",
        bug="more segments than layers are taken for as many as there are",
        find="    if not 1 <= segments <= len(layers):\n",
        replace="    if layers:\n        segments = max(1, min(segments, len(layers)))\n    else:\n",
        killed_by=CUTS,
        cause="accepted",
    ),
]
