"""Wrong implementations of exercises 2.1 to 2.3."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="window-last-dropped",
        exercise="2.1",
        mistake="the last incomplete window is dropped",
        text="    return iter(lambda: list(islice(source, steps)), [])",
        becomes="""    full = iter(lambda: list(islice(source, steps)), [])
    return (window for window in full if len(window) == steps)""",
        caught_by="test_windows_cut_the_stream",
        told_as="window-lost",
    ),
    Mutant(
        id="window-reads-all",
        exercise="2.1",
        mistake="the whole loader is read before the first window",
        text="    source = iter(micro_batches)\n",
        becomes="    source = iter(list(micro_batches))\n",
        caught_by="test_windows_cut_the_stream",
        told_as="reads-ahead",
    ),
    Mutant(
        id="window-late-refusal",
        exercise="2.1",
        mistake="a bad number of steps is refused at the first window only",
        text="    if steps < 1:\n",
        becomes="    if steps == 0:\n",
        caught_by="test_windows_cut_the_stream",
        told_as="accepted",
    ),
    Mutant(
        id="accumulate-mean-of-means",
        exercise="2.1",
        mistake="the mean of the micro-batches' means",
        text=(
            "        loss = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED, "
            'reduction="sum")\n'
            "        (loss / total).backward()\n"
        ),
        becomes="""        loss = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED)
        loss = loss if (targets != IGNORED).any() else loss.nan_to_num()
        (loss / 4).backward()
        loss = loss * (targets != IGNORED).sum()
""",
        caught_by="test_window_equals_the_full_batch",
        told_as="wrong",
    ),
    Mutant(
        id="accumulate-not-divided",
        exercise="2.1",
        mistake="the loss is not divided by the number of targets",
        text="        (loss / total).backward()\n",
        becomes="        loss.backward()\n",
        caught_by="test_window_equals_the_full_batch",
        told_as="scaled",
    ),
    Mutant(
        id="accumulate-counts-ignored",
        exercise="2.1",
        mistake="samples without target count in the mean",
        text="        (loss / total).backward()\n",
        becomes=(
            "        (loss * len(targets) / (targets != IGNORED).sum().clamp(min=1) / "
            "total).backward()\n"
        ),
        caught_by="test_window_equals_the_full_batch",
        told_as="wrong",
    ),
    Mutant(
        id="accumulate-forgets",
        exercise="2.1",
        mistake="the gradient is cleared for every micro-batch: only the last one counts",
        text="        (loss / total).backward()\n",
        becomes="""        model.zero_grad()
        (loss / total).backward()
""",
        caught_by="test_gradients_add_to_what_is_there",
        told_as="wrong",
    ),
    Mutant(
        id="accumulate-one-backward",
        exercise="2.1",
        mistake="the losses are added up and backward runs once: all graphs are alive",
        text="""        (loss / total).backward()
        losses.append(loss.detach().double())
    return float(sum(losses))""",
        becomes="""        losses.append(loss)
    (sum(losses) / total).backward()
    return float(sum(losses))""",
        caught_by="test_one_micro_batch_is_alive_at_a_time",
        told_as="graphs-kept",
    ),
    Mutant(
        id="window-list-reused",
        exercise="2.1",
        mistake="every window is the same list, filled again",
        text="    return iter(lambda: list(islice(source, steps)), [])",
        becomes="""    def cut():
        window = []
        for each in source:
            if len(window) == steps:
                window.clear()
            window.append(each)
            if len(window) == steps:
                yield window
        if len(window) < steps and window:
            yield window

    return cut()""",
        caught_by="test_windows_cut_the_stream",
        told_as="list-reused",
    ),
    Mutant(
        id="accumulate-own-total",
        exercise="2.1",
        mistake="the loss is divided by the targets that are in the window, whatever the total says",
        text="    losses: list[Tensor] = []\n    for inputs, targets in window:\n",
        becomes="""    losses, window = [], list(window)
    total = max(1, sum(int((targets != IGNORED).sum()) for _, targets in window))
    for inputs, targets in window:
""",
        caught_by="test_window_equals_the_full_batch",
        told_as="scaled",
    ),
    Mutant(
        id="reduce-every-micro-batch",
        exercise="2.2",
        mistake="the gradients are reduced after every micro-batch",
        text="    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)\n",
        becomes="""    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)
    for _ in window:
        for p in trainable:
            dist.all_reduce(torch.zeros_like(p), group=group)
""",
        caught_by="test_gradients_travel_once_per_window",
        told_as="mismatch",
    ),
    Mutant(
        id="reduce-twice",
        exercise="2.2",
        mistake="the gradients travel twice",
        text="""        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
""",
        becomes="""        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
        dist.all_reduce(flat.clone(), group=group)
""",
        caught_by="test_gradients_travel_once_per_window",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="reduce-one-by-one",
        exercise="2.2",
        mistake="a message per parameter",
        text="""        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
""",
        becomes="""        parts = [
            (p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket
        ]
        for each in parts:
            dist.all_reduce(each, group=group)
        flat = torch.cat(parts)
""",
        caught_by="test_gradients_travel_once_per_window",
        told_as="too-many-messages",
    ),
    Mutant(
        id="reduce-local-total",
        exercise="2.2",
        mistake="each rank divides by its own number of targets",
        text="    dist.all_reduce(count, group=group)\n",
        becomes="    count = count.clone()\n",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="targets",
    ),
    Mutant(
        id="reduce-averages-again",
        exercise="2.2",
        mistake="divided by the world size, although the losses were divided by the global number",
        text="""        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
""",
        becomes="""        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
""",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="divided-twice",
    ),
    Mutant(
        id="reduce-scale-lost",
        exercise="2.2",
        mistake="the loss scale is not in the gradients",
        text="    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)\n",
        becomes="    loss_sum = accumulate(model, window, max(total, 1))\n",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="scaled",
    ),
    Mutant(
        id="reduce-keeps-old",
        exercise="2.2",
        mistake="gradients from before stay in the sum",
        text="""    for p in trainable:
        p.grad = None
""",
        becomes="",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="old-gradients",
    ),
    Mutant(
        id="reduce-empty-rank-leaves",
        exercise="2.2",
        mistake="a rank without micro-batches returns early: the others wait for ever",
        text="    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)\n",
        becomes="""    if not window:
        return 0.0, 0
    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)
""",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as=("hang", "mismatch"),
    ),
    Mutant(
        id="reduce-only-existing",
        exercise="2.2",
        mistake="each rank sends the gradients that it happens to have",
        text="        bucket = [p for p in trainable if p.dtype == dtype]\n",
        becomes=(
            "        bucket = [p for p in trainable if p.dtype == dtype and p.grad is not None]\n"
            "        bucket = bucket or trainable[:1]\n"
        ),
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="mismatch",
    ),
    Mutant(
        id="reduce-divides-by-zero",
        exercise="2.2",
        mistake="no target anywhere: the mean loss is 0/0",
        text="    return losses.item() / max(total, 1), total\n",
        becomes='    return losses.item() / (total or float("nan")), total\n',
        caught_by="test_window_without_any_target",
        told_as="no-target",
    ),
    Mutant(
        id="reduce-local-loss",
        exercise="2.2",
        mistake="the loss is the rank's own",
        text="    dist.all_reduce(losses, group=group)\n",
        becomes="",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="reduce-over-all-ranks",
        exercise="2.2",
        mistake="the group is forgotten: the mean is over all ranks",
        text="    dist.all_reduce(count, group=group)\n",
        becomes="    dist.all_reduce(count)\n",
        more=[
            ("dist.all_reduce(flat, group=group)", "dist.all_reduce(flat)"),
            ("dist.all_reduce(losses, group=group)", "dist.all_reduce(losses)"),
        ],
        caught_by="test_only_the_ranks_of_the_group_count",
        told_as="group",
    ),
    Mutant(
        id="reduce-one-dtype",
        exercise="2.2",
        mistake="gradients of all dtypes are joined, in the widest one",
        text="""    for dtype in dict.fromkeys(p.dtype for p in trainable):
        bucket = [p for p in trainable if p.dtype == dtype]
""",
        becomes="    for bucket in [trainable]:\n",
        more=[
            (
                "            p.grad = part.view(p.shape)",
                "            p.grad = part.view(p.shape).to(p.dtype)",
            )
        ],
        caught_by="test_gradients_travel_once_per_window",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="reduce-keeps-graphs",
        exercise="2.2",
        mistake="the losses are added up and backward runs once: all graphs are alive",
        text="    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)\n",
        becomes="""    losses = [
        F.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum") for x, y in window
    ]
    if losses:
        (sum(losses) / (max(total, 1) / loss_scale)).backward()
    loss_sum = float(sum(losses))
""",
        caught_by="test_reduction_keeps_no_graph",
        told_as="graphs-kept",
    ),
    Mutant(
        id="reduce-unused-stays-none",
        exercise="2.2",
        mistake="a parameter without gradient on any rank gets none",
        text="            p.grad = part.view(p.shape)",
        becomes="            p.grad = part.view(p.shape) if part.any() else None",
        caught_by="test_window_of_all_ranks_equals_one_process",
        told_as="missing",
    ),
    Mutant(
        id="clip-each-alone",
        exercise="2.3",
        mistake="every parameter is clipped by its own norm",
        text="""    if max_norm < norm < float("inf"):
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
""",
        becomes="""    if max_norm < norm < float("inf"):
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (float(gradient.norm()) or 1.0)))
""",
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="scaled",
    ),
    Mutant(
        id="clip-tied-twice",
        exercise="2.3",
        mistake="a parameter listed twice counts twice in the norm",
        text="    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]\n",
        becomes="    gradients = [p.grad for p in parameters if p.grad is not None]\n",
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="norm",
    ),
    Mutant(
        id="clip-sum-of-norms",
        exercise="2.3",
        mistake="the norms are added instead of their squares",
        text="    norm = float(sum(squares)) ** 0.5\n",
        becomes="    norm = float(sum(s.sqrt() for s in squares))\n",
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="norm",
    ),
    Mutant(
        id="clip-always-scales",
        exercise="2.3",
        mistake="small gradients are blown up to the limit",
        text='    if max_norm < norm < float("inf"):\n',
        becomes='    if 0 < norm < float("inf") and max_norm < float("inf"):\n',
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="within-limit",
    ),
    Mutant(
        id="clip-infinite-to-nan",
        exercise="2.3",
        mistake="an infinite norm makes every gradient NaN or zero",
        text='    if max_norm < norm < float("inf"):\n',
        becomes="    if not norm <= max_norm:\n",
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="not-finite",
    ),
    Mutant(
        id="clip-before-reduce",
        exercise="2.3",
        mistake="every rank clips its own gradient, then the sum is taken",
        text=(
            "    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, "
            "group=group)\n"
        ),
        becomes="""    limit = max_norm if max_norm is not None else float('inf')
    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)
    if total:
        world_size = dist.get_world_size(group)
        for p in model.parameters():
            if p.grad is not None and p.requires_grad:
                p.grad /= world_size
        clip_by_global_norm([p for p in model.parameters() if p.requires_grad], limit)
        for p in model.parameters():
            if p.grad is not None and p.requires_grad:
                p.grad *= world_size
""",
        caught_by="test_clipped_step_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="clip-before-unscale",
        exercise="2.3",
        mistake="the scaled gradient is clipped",
        text="            p.grad.div_(loss_scale)\n",
        becomes="            pass\n",
        more=[
            (
                "    optimizer.step()\n    return loss, norm\n",
                "    for p in model.parameters():\n"
                "        if p.requires_grad:\n"
                "            p.grad.div_(loss_scale)\n"
                "    optimizer.step()\n    return loss, norm\n",
            )
        ],
        caught_by="test_clipped_step_equals_one_process",
        told_as="norm-scaled",
    ),
    Mutant(
        id="step-not-unscaled",
        exercise="2.3",
        mistake="the gradient is never divided by the loss scale",
        text="            p.grad.div_(loss_scale)\n",
        becomes="            pass\n",
        caught_by="test_clipped_step_equals_one_process",
        told_as="norm-scaled",
    ),
    Mutant(
        id="step-forgotten",
        exercise="2.3",
        mistake="the optimizer is not stepped",
        text="    optimizer.step()\n",
        becomes="",
        caught_by="test_clipped_step_equals_one_process",
        told_as="unchanged",
    ),
    Mutant(
        id="step-without-targets",
        exercise="2.3",
        mistake="weight decay moves the weights although there was nothing to learn from",
        text="""    if not total:
        return 0.0, 0.0
""",
        becomes="",
        caught_by="test_window_without_targets_steps_nothing",
        told_as="no-target",
    ),
    Mutant(
        id="clip-own-dtype",
        exercise="2.3",
        mistake="the norm is computed in the dtype of each gradient",
        text="torch.linalg.vector_norm(g, dtype=torch.float64) ** 2",
        becomes="torch.linalg.vector_norm(g) ** 2",
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as="norm",
    ),
    Mutant(
        id="clip-new-tensors",
        exercise="2.3",
        mistake="the clipped gradients are new tensors",
        text="""        for gradient in gradients:
            gradient.mul_(max_norm / norm)
""",
        becomes="""        for p in {p.grad: p for p in parameters if p.grad is not None}.values():
            p.grad = p.grad * (max_norm / norm)
""",
        more=[
            (
                "    gradients = [p.grad for p in dict",
                "    parameters = list(parameters)\n    gradients = [p.grad for p in dict",
            )
        ],
        caught_by="test_clipping_scales_all_by_one_factor",
        told_as=("not-in-place", "wrong", "scaled"),
    ),
    Mutant(
        id="step-norm-with-frozen",
        exercise="2.3",
        mistake="an old gradient of a frozen parameter counts in the norm",
        text="            p.grad = None  # an old one: the optimizer would step it\n",
        becomes="            continue\n",
        caught_by="test_clipped_step_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="step-moves-frozen",
        exercise="2.3",
        mistake="the norm leaves an old gradient of a frozen parameter out, the optimizer steps it",
        text="            p.grad = None  # an old one: the optimizer would step it\n",
        becomes="            continue\n",
        more=[
            (
                "    norm = clip_by_global_norm(model.parameters(), ",
                "    trainable = [p for p in model.parameters() if p.requires_grad]\n"
                "    norm = clip_by_global_norm(trainable, ",
            )
        ],
        caught_by="test_clipped_step_equals_one_process",
        told_as="frozen-moved",
    ),
    Mutant(
        id="reduce-count-in-16-bits",
        exercise="2.2",
        mistake="the number of targets is sent in the dtype of the parameters: bfloat16 rounds it",
        text="    count = count.to(device)\n",
        becomes="    count = count.to(device, trainable[0].dtype)\n",
        caught_by="test_gradients_travel_once_per_window",
        told_as="targets",
    ),
    Mutant(
        id="losses-in-their-dtype",
        exercise="2.2",
        mistake="the losses of the micro-batches are added in the dtype of the logits",
        text="        losses.append(loss.detach().double())\n",
        becomes="        losses.append(loss.detach())\n",
        caught_by="test_gradients_travel_once_per_window",
        told_as="losses-rounded",
    ),
    Mutant(
        id="clips-one-group",
        exercise="2.3",
        mistake="only the first group of the optimizer's parameters is clipped",
        text="    norm = clip_by_global_norm(model.parameters(), ",
        becomes="    norm = clip_by_global_norm(optimizer.param_groups[0]['params'], ",
        caught_by="test_clipped_step_equals_one_process",
        told_as="norm",
    ),
]
