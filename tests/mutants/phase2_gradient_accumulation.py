"""Wrong implementations of exercises 2.1 to 2.3."""

from distlab.grading.wrong import Mutant

FULL, ALIVE = "test_window_equals_the_full_batch", "test_one_micro_batch_is_alive_at_a_time"
CUT, ADD = "test_windows_cut_the_stream", "test_gradients_add_to_what_is_there"
REDUCED, ONCE = (
    "test_window_of_all_ranks_equals_one_process",
    "test_gradients_travel_once_per_window",
)
EMPTY = "test_window_without_any_target"
CLIP, STEP = "test_clipping_scales_all_by_one_factor", "test_clipped_step_equals_one_process"
NOTHING = "test_window_without_targets_steps_nothing"

LOSS = '        loss = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED, reduction="sum")\n'
BACKWARD = "        (loss / total).backward()\n"
ISLICE = "    return iter(lambda: list(islice(source, steps)), [])"
FLAT = """        flat = torch.cat(
            [(p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket]
        )
        dist.all_reduce(flat, group=group)
"""
TOTAL = "    loss_sum = accumulate(model, window, max(total, 1) / loss_scale)\n"
COUNTED = "    dist.all_reduce(count, group=group)\n"
NORM = "    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0\n"
LIMIT = '    if max_norm < norm < float("inf"):\n'
REDUCE = (
    "    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)\n"
)
UNSCALE = """    if loss_scale != 1.0:
        for p in trainable:
            p.grad.div_(loss_scale)
"""
CALL = '    norm = clip_by_global_norm(trainable, float("inf") if max_norm is None else max_norm)\n'

MUTANTS = [
    Mutant(
        id="window-last-dropped",
        exercise="2.1",
        bug="BUGS 37: the last incomplete window is dropped",
        find=ISLICE,
        replace="    full = iter(lambda: list(islice(source, steps)), [])\n"
        "    return (window for window in full if len(window) == steps)",
        killed_by=CUT,
        cause="window-lost",
    ),
    Mutant(
        id="window-reads-all",
        exercise="2.1",
        bug="the whole loader is read before the first window",
        find="    source = iter(micro_batches)\n",
        replace="    source = iter(list(micro_batches))\n",
        killed_by=CUT,
        cause="reads-ahead",
    ),
    Mutant(
        id="window-late-refusal",
        exercise="2.1",
        bug="a bad number of steps is refused at the first window only",
        find="    if steps < 1:\n",
        replace="    if steps == 0:\n",
        killed_by=CUT,
        cause="accepted",
    ),
    Mutant(
        id="accumulate-mean-of-means",
        exercise="2.1",
        bug="BUGS 35: the mean of the micro-batches' means",
        find=LOSS + BACKWARD,
        replace="        loss = F.cross_entropy(model(inputs), targets, ignore_index=IGNORED)\n"
        "        loss = loss if (targets != IGNORED).any() else loss.nan_to_num()\n"
        "        (loss / 4).backward()\n"
        "        loss = loss * (targets != IGNORED).sum()\n",
        killed_by=FULL,
        cause="wrong",
    ),
    Mutant(
        id="accumulate-not-divided",
        exercise="2.1",
        bug="BUGS 36: the loss is not divided by the number of targets",
        find=BACKWARD,
        replace="        loss.backward()\n",
        killed_by=FULL,
        cause="scaled",
    ),
    Mutant(
        id="accumulate-counts-ignored",
        exercise="2.1",
        bug="samples without target count in the mean",
        find=BACKWARD,
        replace="        (loss * len(targets) / (targets != IGNORED).sum().clamp(min=1) / total)"
        ".backward()\n",
        killed_by=FULL,
        cause="wrong",
    ),
    Mutant(
        id="accumulate-forgets",
        exercise="2.1",
        bug="the gradient is cleared for every micro-batch: only the last one counts",
        find=BACKWARD,
        replace="        model.zero_grad()\n" + BACKWARD,
        killed_by=ADD,
        cause="wrong",
    ),
    Mutant(
        id="accumulate-one-backward",
        exercise="2.1",
        bug="the losses are added up and backward runs once: all graphs are alive",
        find=BACKWARD + "        loss_sum += loss.item()\n    return loss_sum",
        replace="        loss_sum = loss_sum + loss\n    (loss_sum / total).backward()\n"
        "    return float(loss_sum)",
        killed_by=ALIVE,
        cause="graphs-kept",
    ),
    Mutant(
        id="reduce-every-micro-batch",
        exercise="2.2",
        bug="BUGS 33: the gradients are reduced after every micro-batch",
        find=TOTAL,
        replace=TOTAL + "    for _ in window:\n"
        "        for p in trainable:\n"
        "            dist.all_reduce(torch.zeros_like(p), group=group)\n",
        killed_by=ONCE,
        cause="mismatch",
    ),
    Mutant(
        id="reduce-twice",
        exercise="2.2",
        bug="BUGS 33: the gradients travel twice",
        find=FLAT,
        replace=FLAT + "        dist.all_reduce(flat.clone(), group=group)\n",
        killed_by=ONCE,
        cause="too-many-bytes",
    ),
    Mutant(
        id="reduce-one-by-one",
        exercise="2.2",
        bug="a message per parameter",
        find=FLAT,
        replace="        parts = [\n"
        "            (p.new_zeros(p.shape) if p.grad is None else p.grad).flatten() for p in bucket\n"
        "        ]\n"
        "        for each in parts:\n"
        "            dist.all_reduce(each, group=group)\n"
        "        flat = torch.cat(parts)\n",
        killed_by=ONCE,
        cause="too-many-messages",
    ),
    Mutant(
        id="reduce-local-total",
        exercise="2.2",
        bug="BUGS 35: each rank divides by its own number of targets",
        find=COUNTED,
        replace="    count = count.clone()\n",
        killed_by=REDUCED,
        cause="summed",
    ),
    Mutant(
        id="reduce-averages-again",
        exercise="2.2",
        bug="divided by the world size, although the losses were divided by the global number",
        find=FLAT,
        replace=FLAT + "        flat /= dist.get_world_size(group)\n",
        killed_by=REDUCED,
        cause="divided-twice",
    ),
    Mutant(
        id="reduce-scale-lost",
        exercise="2.2",
        bug="the loss scale is not in the gradients",
        find=TOTAL,
        replace="    loss_sum = accumulate(model, window, max(total, 1))\n",
        killed_by=REDUCED,
        cause="scaled",
    ),
    Mutant(
        id="reduce-keeps-old",
        exercise="2.2",
        bug="gradients from before stay in the sum",
        find="    for p in trainable:\n        p.grad = None\n",
        replace="",
        killed_by=REDUCED,
        cause="wrong",
    ),
    Mutant(
        id="reduce-empty-rank-leaves",
        exercise="2.2",
        bug="a rank without micro-batches returns early: the others wait for ever",
        find=TOTAL,
        replace="    if not window:\n        return 0.0, 0\n" + TOTAL,
        killed_by=REDUCED,
        cause="hang",
    ),
    Mutant(
        id="reduce-only-existing",
        exercise="2.2",
        bug="each rank sends the gradients that it happens to have",
        find="        bucket = [p for p in trainable if p.dtype == dtype]\n",
        replace="        bucket = [p for p in trainable if p.dtype == dtype and p.grad is not None]\n"
        "        bucket = bucket or trainable[:1]\n",
        killed_by=REDUCED,
        cause="mismatch",
    ),
    Mutant(
        id="reduce-divides-by-zero",
        exercise="2.2",
        bug="no target anywhere: the mean loss is 0/0",
        find="    return losses.item() / max(total, 1), total\n",
        replace='    return losses.item() / (total or float("nan")), total\n',
        killed_by=EMPTY,
        cause="wrong",
    ),
    Mutant(
        id="reduce-local-loss",
        exercise="2.2",
        bug="BUGS 14: the loss is the rank's own",
        find="    dist.all_reduce(losses, group=group)\n",
        replace="",
        killed_by=REDUCED,
        cause="loss-value",
    ),
    Mutant(
        id="clip-each-alone",
        exercise="2.3",
        bug="every parameter is clipped by its own norm",
        find=LIMIT
        + "        for gradient in gradients:\n            gradient.mul_(max_norm / norm)\n",
        replace=LIMIT + "        for gradient in gradients:\n"
        "            gradient.mul_(min(1.0, max_norm / float(gradient.norm())))\n",
        killed_by=CLIP,
        cause="scaled",
    ),
    Mutant(
        id="clip-tied-twice",
        exercise="2.3",
        bug="BUGS 39: a parameter listed twice counts twice in the norm",
        find="    gradients = [p.grad for p in dict.fromkeys(parameters) if p.grad is not None]\n",
        replace="    gradients = [p.grad for p in parameters if p.grad is not None]\n",
        killed_by=CLIP,
        cause="norm",
    ),
    Mutant(
        id="clip-sum-of-norms",
        exercise="2.3",
        bug="the norms are added instead of their squares",
        find=NORM,
        replace="    norm = float(sum(s.sqrt() for s in squares))\n",
        killed_by=CLIP,
        cause="norm",
    ),
    Mutant(
        id="clip-always-scales",
        exercise="2.3",
        bug="small gradients are blown up to the limit",
        find=LIMIT,
        replace='    if 0 < norm < float("inf") and max_norm < float("inf"):\n',
        killed_by=CLIP,
        cause="scaled",
    ),
    Mutant(
        id="clip-infinite-to-nan",
        exercise="2.3",
        bug="an infinite norm makes every gradient NaN or zero",
        find=LIMIT,
        replace="    if not norm <= max_norm:\n",
        killed_by=CLIP,
        cause="not-finite",
    ),
    Mutant(
        id="clip-before-reduce",
        exercise="2.3",
        bug="BUGS 38: every rank clips its own gradient, then the sum is taken",
        find=REDUCE,
        replace="    limit = max_norm if max_norm is not None else float('inf')\n"
        "    loss, total = accumulate_and_reduce(model, window, loss_scale=loss_scale, group=group)\n"
        "    if total:\n"
        "        world_size = dist.get_world_size(group)\n"
        "        for p in model.parameters():\n"
        "            if p.grad is not None and p.requires_grad:\n"
        "                p.grad /= world_size\n"
        "        clip_by_global_norm([p for p in model.parameters() if p.requires_grad], limit)\n"
        "        for p in model.parameters():\n"
        "            if p.grad is not None and p.requires_grad:\n"
        "                p.grad *= world_size\n",
        killed_by=STEP,
        cause="norm",
    ),
    Mutant(
        id="clip-before-unscale",
        exercise="2.3",
        bug="BUGS 38: the scaled gradient is clipped",
        find=UNSCALE + CALL,
        replace=CALL + UNSCALE,
        killed_by=STEP,
        cause="norm-scaled",
    ),
    Mutant(
        id="step-not-unscaled",
        exercise="2.3",
        bug="the gradient is never divided by the loss scale",
        find=UNSCALE,
        replace="",
        killed_by=STEP,
        cause="norm-scaled",
    ),
    Mutant(
        id="step-forgotten",
        exercise="2.3",
        bug="BUGS 37: the optimizer is not stepped",
        find="    optimizer.step()\n",
        replace="",
        killed_by=STEP,
        cause="unchanged",
    ),
    Mutant(
        id="step-without-targets",
        exercise="2.3",
        bug="weight decay moves the weights although there was nothing to learn from",
        find="    if not total:\n        return 0.0, 0.0\n",
        replace="",
        killed_by=NOTHING,
        cause="wrong",
    ),
]
