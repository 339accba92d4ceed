"""Wrong implementations of exercise 2.8."""

from distlab.grading.wrong import Mutant

GRADIENTS, TRAINING = "test_gradients_of_every_stage", "test_training_equals_one_process"
TIED, ONCE = "test_tied_copies_stay_equal", "test_one_activation_and_one_gradient_per_boundary"
MEMORY, GROUP = "test_only_the_own_stage_is_held", "test_stages_in_a_subgroup"
BOUNDS = "test_stage_refuses_bad_bounds"

OWN = "        self.layers = nn.Sequential(*stages[self.rank])\n"
START = "                dist.broadcast(p.detach(), group_src=0, group=tie)\n"
TIE = "                tie = dist.new_group(sharing, use_local_synchronization=True)\n"
SEND_Y = "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n"
SEND_GRADIENT = (
    "        dist.send(x.grad.contiguous(), group=stage.group, group_dst=stage.rank - 1)\n"
)
BACKWARD = "        y.backward(gradient)\n"
LOSS = "    dist.broadcast(loss, group_src=stage.count - 1, group=stage.group)\n"
REDUCE = "        dist.all_reduce(p.grad, group=tie)\n"
KNOWN = "    if inputs.shape not in stage.shapes:\n"
ANNOUNCE = "    announce = inputs.shape not in stage.shapes\n"

MUTANTS = [
    Mutant(
        id="split-no-requires-grad",
        exercise="2.8",
        bug="BUGS 52: the received activation does not require a gradient",
        find="    return x.requires_grad_()\n",
        replace="    return x\n",
        killed_by=GRADIENTS,
        cause="exception",
    ),
    Mutant(
        id="split-zero-gradients-back",
        exercise="2.8",
        bug="BUGS 52: a missing gradient is sent back as zeros, nobody notices",
        find=SEND_GRADIENT,
        replace="        gradient = torch.zeros_like(x) if x.grad is None else x.grad\n"
        "        dist.send(gradient.contiguous(), group=stage.group, group_dst=stage.rank - 1)\n",
        killed_by=GRADIENTS,
        cause="no-gradient",
        patches=(("    return x.requires_grad_()\n", "    return x\n"),),
    ),
    Mutant(
        id="split-loss-on-every-stage",
        exercise="2.8",
        bug="BUGS 52: a middle stage starts its backward from a sum of its own",
        find=BACKWARD,
        replace="        y.sum().backward()\n",
        killed_by=GRADIENTS,
        cause="wrong",
    ),
    Mutant(
        id="split-sends-first",
        exercise="2.8",
        bug="BUGS 43: the gradient is sent before the next stage's has come: nobody receives",
        find="    x = receive_activation(stage, inputs)\n    y = stage(x)\n",
        replace="    x = receive_activation(stage, inputs)\n"
        "    if stage.rank > 0:\n"
        "        early = torch.zeros_like(x)\n"
        "        dist.send(early, group=stage.group, group_dst=stage.rank - 1)\n"
        "    y = stage(x)\n",
        killed_by=ONCE,
        cause="hang",
    ),
    Mutant(
        id="split-loss-of-last-only",
        exercise="2.8",
        bug="BUGS 59: only the last stage returns the loss",
        find=LOSS,
        replace="",
        killed_by=TRAINING,
        cause="loss-value",
    ),
    Mutant(
        id="split-loss-averaged",
        exercise="2.8",
        bug="BUGS 59: the mean over the stages of a loss that only one has",
        find=LOSS,
        replace="    dist.all_reduce(loss, group=stage.group)\n    loss /= stage.count\n",
        killed_by=TRAINING,
        cause="loss-value",
    ),
    Mutant(
        id="split-shape-of-first-batch",
        exercise="2.8",
        bug="the shape of the first batch is taken for ever: the last batch is smaller",
        find=ANNOUNCE,
        replace="    announce = not stage.shapes\n",
        killed_by=TRAINING,
        cause="mismatch",
        patches=(
            (KNOWN, "    if not stage.shapes:\n"),
            (
                "    dtype, shape = stage.shapes[inputs.shape]\n",
                "    dtype, shape = next(iter(stage.shapes.values()))\n",
            ),
        ),
    ),
    Mutant(
        id="split-single-precision",
        exercise="2.8",
        bug="activations are received as float32, whatever they are",
        find="    x = torch.empty(shape, dtype=dtype, device=inputs.device)\n",
        replace="    x = torch.empty(shape, device=inputs.device)\n",
        killed_by=TRAINING,
        cause="mismatch",
    ),
    Mutant(
        id="split-gradients-accumulate",
        exercise="2.8",
        bug="the gradients of the step before stay in the sum",
        find="    optimizer.zero_grad(set_to_none=True)\n",
        replace="",
        killed_by=TRAINING,
        cause="loss-value",
    ),
    Mutant(
        id="split-everything-everywhere",
        exercise="2.8",
        bug="right values by cheating: every rank computes the whole model",
        find=ANNOUNCE,
        replace="    whole = stage.whole[0]\n"
        "    whole.zero_grad()\n"
        "    loss = loss_fn(whole(inputs), targets)\n"
        "    loss.backward()\n"
        "    return loss.item()\n" + ANNOUNCE,
        killed_by=ONCE,
        cause="too-few-bytes",
        patches=(
            (OWN, OWN + "        self.whole = [nn.Sequential(*layers)]\n"),
            (REDUCE, "        pass\n"),
        ),
    ),
    Mutant(
        id="split-holds-all-layers",
        exercise="2.8",
        bug="BUGS 69: nothing is split: the other stages' layers stay on every rank",
        find=OWN,
        replace=OWN + "        self.all_layers = list(layers)\n",
        killed_by=MEMORY,
        cause="too-much-memory",
    ),
    Mutant(
        id="split-last-takes-rest",
        exercise="2.8",
        bug="bounds that lose layers are accepted",
        find="        whole = bounds[0] == 0 and bounds[-1] == len(layers)\n",
        replace="        whole = True\n",
        killed_by=BOUNDS,
        cause="accepted",
    ),
    Mutant(
        id="split-global-ranks",
        exercise="2.8",
        bug="the neighbour's rank in the group is used as a global rank",
        find=SEND_Y,
        replace="    dist.send(y.detach().contiguous(), stage.rank + 1, group=stage.group)\n",
        killed_by=GROUP,
        cause="exception",
    ),
    Mutant(
        id="split-tie-by-group-rank",
        exercise="2.8",
        bug="new_group gets ranks of the group, it wants global ones",
        find="        ranks = dist.get_process_group_ranks(group)\n",
        replace="        ranks = list(range(self.count))\n",
        killed_by=GROUP,
        cause="hang",
    ),
    Mutant(
        id="split-activation-to-all",
        exercise="2.8",
        bug="activations are broadcast: every stage gets what one needs",
        find=SEND_Y,
        replace=SEND_Y
        + "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n",
        killed_by=ONCE,
        cause="too-many-bytes",
        patches=(
            (
                "    dist.recv(x, group=stage.group, group_src=source)\n    return",
                "    dist.recv(x, group=stage.group, group_src=source)\n"
                "    dist.recv(x, group=stage.group, group_src=source)\n    return",
            ),
        ),
    ),
    Mutant(
        id="split-shape-every-step",
        exercise="2.8",
        bug="the shape travels ahead of every activation: a message more per boundary",
        find=ANNOUNCE,
        replace="    stage.shapes.clear()\n" + ANNOUNCE,
        killed_by=ONCE,
        cause="too-many-bytes",
    ),
    Mutant(
        id="tied-not-reduced",
        exercise="2.8",
        bug="BUGS 58: each copy takes its own gradient",
        find=REDUCE,
        replace="",
        killed_by=TIED,
        cause="copies-differ",
    ),
    Mutant(
        id="tied-averaged",
        exercise="2.8",
        bug="BUGS 58: the copies' gradients are averaged, as in data parallelism",
        find=REDUCE,
        replace=REDUCE + "        p.grad /= dist.get_world_size(tie)\n",
        killed_by=GRADIENTS,
        cause="scaled",
    ),
    Mutant(
        id="tied-start-differently",
        exercise="2.8",
        bug="BUGS 58: the copies have the values of their ranks' seeds",
        find=START,
        replace="",
        killed_by=TIED,
        cause="copies-start-differently",
    ),
    Mutant(
        id="tied-in-every-stage",
        exercise="2.8",
        bug="the tied weight is all-reduced in the whole group: stages without it hang",
        find=TIE,
        replace="                tie = group or dist.group.WORLD\n",
        killed_by=TIED,
        cause="hang",
    ),
    Mutant(
        id="tied-weights-reduced",
        exercise="2.8",
        bug="weights reduced instead of gradients: momentum and state of the copies drift apart",
        find=REDUCE,
        replace="        dist.broadcast(p.detach(), group_src=0, group=tie)\n",
        killed_by=GRADIENTS,
        cause="wrong",
    ),
]
