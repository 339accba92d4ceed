"""Wrong implementations of exercise 2.8."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="split-no-requires-grad",
        exercise="2.8",
        mistake="the received activation does not require a gradient",
        text="    return x.requires_grad_()\n",
        becomes="    return x\n",
        caught_by="test_gradients_of_every_stage",
        told_as="exception",
    ),
    Mutant(
        id="split-zero-gradients-back",
        exercise="2.8",
        mistake="a missing gradient is sent back as zeros, nobody notices",
        text=(
            "        dist.send(x.grad.contiguous(), group=stage.group, group_dst=stage.rank - 1)\n"
        ),
        becomes="""        gradient = torch.zeros_like(x) if x.grad is None else x.grad
        dist.send(gradient.contiguous(), group=stage.group, group_dst=stage.rank - 1)
""",
        more=(
            (
                "    return x.requires_grad_()\n",
                "    return x\n",
            ),
        ),
        caught_by="test_gradients_of_every_stage",
        told_as="no-gradient",
    ),
    Mutant(
        id="split-loss-on-every-stage",
        exercise="2.8",
        mistake="a middle stage starts its backward from a sum of its own",
        text="        y.backward(gradient)\n",
        becomes="        y.sum().backward()\n",
        caught_by="test_gradients_of_every_stage",
        told_as="wrong",
    ),
    Mutant(
        id="split-sends-first",
        exercise="2.8",
        mistake="the gradient is sent before the next stage's has come: nobody receives",
        text="""    x = receive_activation(stage, inputs)
    y = stage(x)
""",
        becomes="""    x = receive_activation(stage, inputs)
    if stage.rank > 0:
        early = torch.zeros_like(x)
        dist.send(early, group=stage.group, group_dst=stage.rank - 1)
    y = stage(x)
""",
        caught_by="test_one_activation_and_one_gradient_per_boundary",
        told_as="hang",
    ),
    Mutant(
        id="split-loss-of-last-only",
        exercise="2.8",
        mistake="only the last stage returns the loss",
        text="    dist.broadcast(loss, group_src=stage.count - 1, group=stage.group)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="split-loss-averaged",
        exercise="2.8",
        mistake="the mean over the stages of a loss that only one has",
        text="    dist.broadcast(loss, group_src=stage.count - 1, group=stage.group)\n",
        becomes="""    dist.all_reduce(loss, group=stage.group)
    loss /= stage.count
""",
        caught_by="test_training_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="split-shape-of-first-batch",
        exercise="2.8",
        mistake="the shape of the first batch is taken for ever: the last batch is smaller",
        text="    announce = inputs.shape not in stage.shapes\n",
        becomes="    announce = not stage.shapes\n",
        more=(
            (
                "    if inputs.shape not in stage.shapes:\n",
                "    if not stage.shapes:\n",
            ),
            (
                "    dtype, shape = stage.shapes[inputs.shape]\n",
                "    dtype, shape = next(iter(stage.shapes.values()))\n",
            ),
        ),
        caught_by="test_training_equals_one_process",
        told_as="mismatch",
    ),
    Mutant(
        id="split-single-precision",
        exercise="2.8",
        mistake="activations are received as float32, whatever they are",
        text="    x = torch.empty(shape, dtype=dtype, device=inputs.device)\n",
        becomes="    x = torch.empty(shape, device=inputs.device)\n",
        caught_by="test_training_equals_one_process",
        told_as="mismatch",
    ),
    Mutant(
        id="split-gradients-accumulate",
        exercise="2.8",
        mistake="the gradients of the step before stay in the sum",
        text="    optimizer.zero_grad(set_to_none=True)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="split-everything-everywhere",
        exercise="2.8",
        mistake="right values by cheating: every rank computes the whole model",
        text="    announce = inputs.shape not in stage.shapes\n",
        becomes="""    whole = stage.whole[0]
    whole.zero_grad()
    loss = loss_fn(whole(inputs), targets)
    loss.backward()
    return loss.item()
    announce = inputs.shape not in stage.shapes
""",
        more=(
            (
                "        self.layers = nn.Sequential(*stages[self.rank])\n",
                """        self.layers = nn.Sequential(*stages[self.rank])
        self.whole = [nn.Sequential(*layers)]
""",
            ),
            (
                "        dist.all_reduce(p.grad, group=tie)\n",
                "        pass\n",
            ),
        ),
        caught_by="test_one_activation_and_one_gradient_per_boundary",
        told_as="too-few-bytes",
    ),
    Mutant(
        id="split-holds-all-layers",
        exercise="2.8",
        mistake="nothing is split: the other stages' layers stay on every rank",
        text="        self.layers = nn.Sequential(*stages[self.rank])\n",
        becomes="""        self.layers = nn.Sequential(*stages[self.rank])
        self.all_layers = list(layers)
""",
        caught_by="test_only_the_own_stage_is_held",
        told_as="too-much-memory",
    ),
    Mutant(
        id="split-last-takes-rest",
        exercise="2.8",
        mistake="bounds that lose layers are accepted",
        text="        whole = [*bounds[:1], *bounds[-1:]] == [0, len(layers)]\n",
        becomes="        whole = True\n",
        caught_by="test_stage_refuses_bad_bounds",
        told_as=("accepted", "hang"),
    ),
    Mutant(
        id="split-bounds-fall",
        exercise="2.8",
        mistake="bounds that count from the end are accepted",
        text="        rising = all(begin < end for begin, end in pairwise(bounds))\n",
        becomes="        rising = all(stages)\n",
        caught_by="test_stage_refuses_bad_bounds",
        told_as="accepted",
    ),
    Mutant(
        id="split-shapes-of-another",
        exercise="2.8",
        mistake="all models share the table of shapes: a second model takes the first one's",
        text="        self.shapes: dict[torch.Size, tuple[torch.dtype, Sequence[int]]] = {}\n",
        becomes="        self.shapes = vars(nn.Module).get('shapes') or {}\n        nn.Module.shapes = self.shapes\n",
        caught_by="test_odd_models_in_two_groups",
        told_as=("exception", "mismatch", "hang", "wrong"),
    ),
    Mutant(
        id="split-tie-without-gradient",
        exercise="2.8",
        mistake="a copy without gradient does not come to the all-reduce",
        text="            p.grad = torch.zeros_like(p)\n        dist.all",
        becomes="            continue\n        dist.all",
        caught_by="test_odd_models_in_two_groups",
        told_as="hang",
    ),
    Mutant(
        id="split-global-ranks",
        exercise="2.8",
        mistake="the neighbour's rank in the group is used as a global rank",
        text=(
            "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n"
        ),
        becomes="    dist.send(y.detach().contiguous(), stage.rank + 1, group=stage.group)\n",
        caught_by="test_stages_in_a_subgroup",
        told_as="exception",
    ),
    Mutant(
        id="split-tie-by-group-rank",
        exercise="2.8",
        mistake="new_group gets ranks of the group, it wants global ones",
        text="        ranks = dist.get_process_group_ranks(group)\n",
        becomes="        ranks = list(range(self.count))\n",
        caught_by="test_stages_in_a_subgroup",
        told_as="exception",
    ),
    Mutant(
        id="split-activation-to-all",
        exercise="2.8",
        mistake="activations are broadcast: every stage gets what one needs",
        text=(
            "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n"
        ),
        becomes=(
            "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n"
            "    dist.send(y.detach().contiguous(), group=stage.group, group_dst=stage.rank + 1)\n"
        ),
        more=(
            (
                """    dist.recv(x, group=stage.group, group_src=source)
    return""",
                """    dist.recv(x, group=stage.group, group_src=source)
    dist.recv(x, group=stage.group, group_src=source)
    return""",
            ),
        ),
        caught_by="test_one_activation_and_one_gradient_per_boundary",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="split-shape-every-step",
        exercise="2.8",
        mistake="the shape travels ahead of every activation: a message more per boundary",
        text="    announce = inputs.shape not in stage.shapes\n",
        becomes="""    stage.shapes.clear()
    announce = inputs.shape not in stage.shapes
""",
        caught_by="test_one_activation_and_one_gradient_per_boundary",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="tied-not-reduced",
        exercise="2.8",
        mistake="each copy takes its own gradient",
        text="        dist.all_reduce(p.grad, group=tie)\n",
        becomes="",
        caught_by="test_tied_copies_stay_equal",
        told_as="copies-differ",
    ),
    Mutant(
        id="tied-averaged",
        exercise="2.8",
        mistake="the copies' gradients are averaged, as in data parallelism",
        text="        dist.all_reduce(p.grad, group=tie)\n",
        becomes="""        dist.all_reduce(p.grad, group=tie)
        p.grad /= dist.get_world_size(tie)
""",
        caught_by="test_gradients_of_every_stage",
        told_as="scaled",
    ),
    Mutant(
        id="tied-start-differently",
        exercise="2.8",
        mistake="the copies have the values of their ranks' seeds",
        text="                dist.broadcast(p.detach(), group_src=0, group=groups[sharing])\n",
        becomes="",
        caught_by="test_tied_copies_stay_equal",
        told_as="copies-start-differently",
    ),
    Mutant(
        id="tied-in-every-stage",
        exercise="2.8",
        mistake="the tied weight is all-reduced in the whole group: stages without it hang",
        text="                self.ties.append((p, groups[sharing]))\n",
        becomes="                self.ties.append((p, group or dist.group.WORLD))\n",
        caught_by="test_tied_copies_stay_equal",
        told_as="hang",
    ),
    Mutant(
        id="tied-weights-reduced",
        exercise="2.8",
        mistake=(
            "weights reduced instead of gradients: momentum and state of the copies drift apart"
        ),
        text="        dist.all_reduce(p.grad, group=tie)\n",
        becomes="        dist.broadcast(p.detach(), group_src=0, group=tie)\n",
        caught_by="test_gradients_of_every_stage",
        told_as="wrong",
    ),
    Mutant(
        id="stage-shapes-by-elements",
        exercise="2.8",
        mistake="shapes are remembered by the number of elements: a batch turned by 90 degrees",
        text="    announce = inputs.shape not in stage.shapes\n",
        becomes="    inputs_seen = {shape.numel() for shape in stage.shapes}\n"
        "    announce = inputs.numel() not in inputs_seen\n",
        more=[
            (
                "    if inputs.shape not in stage.shapes:\n",
                "    alike = [s for s in stage.shapes if s.numel() == inputs.numel()]\n"
                "    if alike:\n"
                "        stage.shapes[inputs.shape] = stage.shapes[alike[0]]\n"
                "    else:\n",
            )
        ],
        caught_by="test_training_equals_one_process",
        told_as=("loss-value", "exception", "shapes"),
    ),
    Mutant(
        id="stage-ties-frozen",
        exercise="2.8",
        mistake="frozen parameters are tied, too, and get a gradient",
        text="for layer in layers for p in layer.parameters() if p.requires_grad)",
        becomes="for layer in layers for p in layer.parameters())",
        caught_by="test_odd_models_in_two_groups",
        told_as="frozen-tied",
    ),
    Mutant(
        id="tie-groups-of-one-pipeline",
        exercise="2.8",
        mistake="each rank makes the groups of its own pipeline only",
        text="    pipelines = pipelines or [range(dist.get_world_size())]\n",
        becomes="""    pipelines = pipelines or [range(dist.get_world_size())]
    pipelines = [ranks for ranks in pipelines if dist.get_rank() in ranks]
""",
        caught_by="test_every_rank_makes_the_groups_of_tied_stages",
        told_as=("hang", "mismatch", "tie-groups"),
    ),
    Mutant(
        id="tie-groups-of-members-only",
        exercise="2.8",
        mistake="ranks that are no members make no group: others count more, names differ",
        text="for ranks in dict.fromkeys(sets)}",
        becomes="for ranks in dict.fromkeys(sets) if dist.get_rank() in ranks}",
        caught_by="test_every_rank_makes_the_groups_of_tied_stages",
        told_as=("hang", "mismatch", "tie-groups"),
    ),
    Mutant(
        id="all-are-tied",
        exercise="2.8",
        mistake="every parameter is tied: one that nobody uses gets a gradient of zeros",
        text="    return {p: stages for p, stages in sharing.items() if len(stages) > 1}\n",
        becomes="    return sharing\n",
        caught_by="test_odd_models_in_two_groups",
        told_as="not-tied",
    ),
    Mutant(
        id="tie-groups-in-the-order-of-ranks",
        exercise="2.8",
        mistake="stages are the ranks as they stand in the list, but a group sorts them",
        text="    sets = [tuple(sorted(ranks)[s] for s in stages)",
        becomes="    sets = [tuple(ranks[s] for s in stages)",
        caught_by="test_every_rank_makes_the_groups_of_tied_stages",
        told_as="tie-groups",
    ),
    Mutant(
        id="stage-without-its-groups",
        exercise="2.8",
        mistake="a missing group is no error: the copies stay apart",
        text="        if missing := {*tied.values()} - groups.keys():\n",
        becomes="""        tied = {p: ranks for p, ranks in tied.items() if ranks in groups}
        if missing := {*tied.values()} - groups.keys():
""",
        caught_by="test_stage_refuses_a_group_that_nobody_has_made",
        told_as=("accepted", "late-check"),
    ),
    Mutant(
        id="stage-makes-groups-in-a-part",
        exercise="2.8",
        mistake="the stages of a part of the world make groups, which waits for all ranks on NCCL",
        text="tie_groups(layers, bounds) if self.count == dist.get_world_size() else {}\n",
        becomes="tie_groups(layers, bounds, [dist.get_process_group_ranks(group)])\n",
        caught_by="test_stage_refuses_a_group_that_nobody_has_made",
        told_as=("accepted", "late-check", "mismatch", "hang"),
    ),
]
