"""Wrong implementations of exercises 1.3 to 1.6."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="broadcast-nothing",
        exercise="1.3",
        mistake="the weights are not broadcast",
        text="            dist.broadcast(flat, src, group=group)\n",
        becomes="",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-zeros",
        exercise="1.3",
        mistake="zeros are broadcast (a buffer that was never filled)",
        text="flat = tensor.detach().clone(memory_format=torch.contiguous_format)",
        becomes="flat = torch.zeros_like(tensor, memory_format=torch.contiguous_format)",
        caught_by="test_state_equals_the_source",
        told_as="zeros",
    ),
    Mutant(
        id="broadcast-no-buffers",
        exercise="1.3",
        mistake="buffers are forgotten",
        text="""        for tensor in (*model.parameters(), *model.buffers()):
            if""",
        becomes="""        for tensor in model.parameters():
            if""",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-state-dict",
        exercise="1.3",
        mistake="state_dict leaves non-persistent buffers out",
        text="""        for tensor in (*model.parameters(), *model.buffers()):
            if""",
        becomes="""        for tensor in model.state_dict().values():
            if""",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-tied-twice",
        exercise="1.3",
        mistake="tied parameters are sent twice",
        text="""        for tensor in (*model.parameters(), *model.buffers()):
            if""",
        becomes="""        named = model.named_parameters(remove_duplicate=False)
        for tensor in (*(p for _, p in named), *model.buffers()):
            if""",
        caught_by="test_state_is_sent_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="broadcast-trainable-only",
        exercise="1.3",
        mistake="frozen parameters are left out",
        text="""        for tensor in (*model.parameters(), *model.buffers()):
            if""",
        becomes="""        trainable = [p for p in model.parameters() if p.requires_grad]
        for tensor in (*trainable, *model.buffers()):
            if""",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-new-tensors",
        exercise="1.3",
        mistake="new parameters, the optimizer keeps the old ones",
        text="            tensor.copy_(flat)\n",
        becomes="""            tensor.copy_(flat)
        for module in model.modules():
            for name, p in list(module._parameters.items()):
                if p is not None:
                    setattr(module, name, nn.Parameter(p.clone(), p.requires_grad))
""",
        caught_by="test_state_equals_the_source",
        told_as="new-tensors",
    ),
    Mutant(
        id="broadcast-src-ignored",
        exercise="1.3",
        mistake="the source is always rank 0",
        text="            dist.broadcast(flat, src, group=group)\n",
        becomes="            dist.broadcast(flat, 0, group=group)\n",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-rank0-only",
        exercise="1.3",
        mistake="only rank 0 enters the broadcast",
        text="            dist.broadcast(flat, src, group=group)\n",
        becomes="""            if dist.get_rank() == src:
                dist.broadcast(flat, src, group=group)
""",
        caught_by="test_state_equals_the_source",
        told_as="hang",
    ),
    Mutant(
        id="broadcast-averages",
        exercise="1.3",
        mistake="an all-reduce instead of a broadcast: the mean of all ranks' weights",
        text="            dist.broadcast(flat, src, group=group)\n",
        becomes="""            dist.all_reduce(flat, group=group)
            flat = (flat / dist.get_world_size(group)).to(tensor.dtype)
""",
        caught_by="test_state_equals_the_source",
        told_as="wrong",
    ),
    Mutant(
        id="average-summed",
        exercise="1.4",
        mistake="gradients summed, not averaged",
        text="    share = num_samples / max(total, 1)\n",
        becomes="    share = 1.0\n",
        caught_by="test_average_equals_global_batch",
        told_as="summed",
    ),
    Mutant(
        id="average-divided-twice",
        exercise="1.4",
        mistake="divided twice",
        text="            p.grad = part.view(p.shape)\n",
        becomes="            p.grad = part.view(p.shape) / dist.get_world_size(group)\n",
        caught_by="test_average_equals_global_batch",
        told_as="divided-twice",
    ),
    Mutant(
        id="average-nothing",
        exercise="1.4",
        mistake="no synchronisation at all",
        text="    trainable = [p for p in dict",
        becomes="""    return
    trainable = [p for p in dict""",
        caught_by="test_average_equals_global_batch",
        told_as="unchanged",
    ),
    Mutant(
        id="average-unweighted",
        exercise="1.4",
        mistake="a plain mean over ranks with different numbers of samples",
        text="    share = num_samples / max(total, 1)\n",
        becomes="    share = (num_samples > 0) / dist.get_world_size(group)\n",
        caught_by="test_uneven_batches_are_weighted",
        told_as="unweighted-mean",
    ),
    Mutant(
        id="average-not-waited",
        exercise="1.4",
        mistake="the handle is never waited for",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.all_reduce(flat, group=group, async_op=True)\n",
        caught_by="test_gradients_under_delays",
        told_as="never-waited",
    ),
    Mutant(
        id="average-tied-twice",
        exercise="1.4",
        mistake="tied weights are reduced twice",
        text="trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]",
        becomes="trainable = [p for p in parameters if p.requires_grad]",
        caught_by="test_only_trainable_bytes_are_sent",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="average-frozen",
        exercise="1.4",
        mistake="frozen parameters are communicated",
        text="trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]",
        becomes="trainable = list(dict.fromkeys(parameters))",
        more=(
            (
                "        if count:\n",
                "        if count or not p.requires_grad:\n",
            ),
        ),
        caught_by="test_only_trainable_bytes_are_sent",
        told_as="wrong",
    ),
    Mutant(
        id="average-gathers",
        exercise="1.4",
        mistake="an all-gather and a local sum",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes=(
            "        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]\n"
            "        dist.all_gather(parts, flat, group=group)\n"
            "        flat = torch.stack(parts).sum(0)\n"
        ),
        caught_by="test_only_trainable_bytes_are_sent",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="average-reduced-twice",
        exercise="1.4",
        mistake="every gradient is reduced twice",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="""        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        dist.all_reduce(flat, group=group)
""",
        caught_by="test_only_trainable_bytes_are_sent",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="average-local-none",
        exercise="1.4",
        mistake="each rank leaves out the gradients that it lacks",
        text="        if count:\n",
        becomes="        if p.grad is not None:\n",
        caught_by="test_average_equals_global_batch",
        told_as="mismatch",
    ),
    Mutant(
        id="average-none-becomes-zero",
        exercise="1.4",
        mistake="parameters that nobody used get a zero gradient (and weight decay)",
        text="        if count:\n",
        becomes="        if True:\n",
        caught_by="test_average_equals_global_batch",
        told_as="invented-gradient",
    ),
    Mutant(
        id="average-rank0-only",
        exercise="1.4",
        mistake="rank 0's gradient is broadcast",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="""        flat = flat / max(share, 1e-9)
        dist.broadcast(flat, 0)
""",
        caught_by="test_average_equals_global_batch",
        told_as="rank-0-only",
    ),
    Mutant(
        id="average-only-root",
        exercise="1.4",
        mistake="reduce instead of all-reduce: only rank 0 gets the mean",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.reduce(flat.clone() if dist.get_rank() else flat, 0)\n",
        caught_by="test_average_equals_global_batch",
        told_as="only-own",
    ),
    Mutant(
        id="average-group-ignored",
        exercise="1.4",
        mistake="the group is ignored",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.all_reduce(flat)\n",
        caught_by="test_dtypes_and_groups",
        told_as="hang",
    ),
    Mutant(
        id="train-no-broadcast",
        exercise="1.5",
        mistake="training starts from different weights",
        text="    broadcast_model_state(model, src, group)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="replicas-differ",
    ),
    Mutant(
        id="train-no-set-epoch",
        exercise="1.5",
        mistake="set_epoch is not called",
        text="        loader.batch_sampler.set_epoch(epoch)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="train-no-zero-grad",
        exercise="1.5",
        mistake="the last step's gradients are kept",
        text="    optimizer.zero_grad(set_to_none=True)\n",
        becomes="",
        caught_by="test_one_step_on_unequal_parts",
        told_as="wrong",
    ),
    Mutant(
        id="train-no-averaging",
        exercise="1.5",
        mistake="each rank follows its own gradients",
        text="    average_gradients(model.parameters(), len(targets), group)\n",
        becomes="",
        caught_by="test_training_equals_one_process",
        told_as="replicas-differ",
    ),
    Mutant(
        id="train-step-before-average",
        exercise="1.5",
        mistake="the optimizer steps before the gradients are averaged",
        text="""    average_gradients(model.parameters(), len(targets), group)
    optimizer.step()
""",
        becomes="""    optimizer.step()
    average_gradients(model.parameters(), len(targets), group)
""",
        caught_by="test_training_equals_one_process",
        told_as="replicas-differ",
    ),
    Mutant(
        id="train-skips-empty",
        exercise="1.5",
        mistake="a rank without samples skips the step and its communication",
        text="""    loss_sum = 0.0
    if len(targets):""",
        becomes="""    loss_sum = 0.0
    if not len(targets):
        return 0.0
    if len(targets):""",
        caught_by="test_one_step_on_unequal_parts",
        told_as="hang",
    ),
    Mutant(
        id="train-own-loss",
        exercise="1.5",
        mistake="the rank's own loss is returned as the global one",
        text="    return (sums[0] / sums[1].clamp(min=1)).item()\n",
        becomes="    return loss_sum / max(1, len(targets))\n",
        caught_by="test_one_step_on_unequal_parts",
        told_as="only-own",
    ),
    Mutant(
        id="train-mean-of-means",
        exercise="1.5",
        mistake="the global loss is the plain mean of the ranks' means",
        text=(
            "    sums = torch.tensor([loss_sum, len(targets)], dtype=torch.float64, "
            "device=inputs.device)"
        ),
        becomes="""    mean = loss_sum / max(1, len(targets))
    sums = torch.tensor([mean, 1], dtype=torch.float64)""",
        caught_by="test_one_step_on_unequal_parts",
        told_as="unweighted-mean",
    ),
    Mutant(
        id="train-rank0-steps",
        exercise="1.5",
        mistake="only rank 0 takes the optimizer step",
        text="    optimizer.step()\n",
        becomes="""    if dist.get_rank(group) == 0:
        optimizer.step()
""",
        caught_by="test_training_equals_one_process",
        told_as="replicas-differ",
    ),
    Mutant(
        id="train-lr-drift",
        exercise="1.5",
        mistake="the learning rate differs per rank, slow drift",
        text="""    model.train()
    losses: list[float] = []
""",
        becomes="""    model.train()
    losses: list[float] = []
    for g in optimizer.param_groups:
        g['lr'] *= 1 + 1e-3 * dist.get_rank(group)
""",
        caught_by="test_training_equals_one_process",
        told_as="replicas-differ",
    ),
    Mutant(
        id="train-broadcasts-each-step",
        exercise="1.5",
        mistake="the weights travel at every step",
        text="    optimizer.step()\n",
        becomes="""    optimizer.step()
    broadcast_model_state(model, 0, group)
""",
        caught_by="test_communication_of_a_step",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="hash-rounds",
        exercise="1.5",
        mistake="the hash is of rounded sums and misses drift",
        text="        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)\n",
        becomes="        data = (tensor.detach().cpu().double().sum() * 1e6).round()\n",
        caught_by="test_hash_sees_every_bit",
        told_as="hash",
    ),
    Mutant(
        id="hash-without-buffers",
        exercise="1.5",
        mistake="the hash leaves buffers out",
        text="""    for tensor in (*model.parameters(), *model.buffers()):
        data""",
        becomes="""    for tensor in model.parameters():
        data""",
        caught_by="test_hash_sees_every_bit",
        told_as="hash",
    ),
    Mutant(
        id="metrics-own",
        exercise="1.6",
        mistake="rank-local metrics",
        text="""    dist.all_reduce(sums, group=group)
    total_loss""",
        becomes="    total_loss",
        more=(
            (
                '        raise ValueError("no rank has a sample to evaluate")\n',
                "        return 0.0, 0.0\n",
            ),
        ),
        caught_by="test_metrics_of_uneven_shards",
        told_as="own-metrics",
    ),
    Mutant(
        id="metrics-mean-of-means",
        exercise="1.6",
        mistake="the mean of the ranks' means",
        text=(
            "    sums = torch.tensor([loss_sum, correct, count], dtype=torch.float64, "
            "device=device)"
        ),
        becomes="""    n = max(1, count)
    sums = torch.tensor([loss_sum / n, correct / n, count > 0], dtype=torch.float64)""",
        caught_by="test_metrics_of_uneven_shards",
        told_as="mean-of-means",
    ),
    Mutant(
        id="metrics-float32",
        exercise="1.6",
        mistake="large counts are summed in float32",
        text="[loss_sum, correct, count], dtype=torch.float64",
        becomes="[loss_sum, correct, count], dtype=torch.float32",
        caught_by="test_metrics_of_uneven_shards",
        told_as="precision",
    ),
    Mutant(
        id="metrics-three-messages",
        exercise="1.6",
        mistake="one message per number",
        text="""    dist.all_reduce(sums, group=group)
    total_loss""",
        becomes="""    for part in sums.split(1):
        dist.all_reduce(part, group=group)
    total_loss""",
        caught_by="test_metrics_of_uneven_shards",
        told_as="too-many-messages",
    ),
    Mutant(
        id="evaluate-counts-padding",
        exercise="1.6",
        mistake="padding duplicates are counted",
        text=(
            "                inputs, targets = inputs[:left].to(device), targets[:left].to(device)"
        ),
        becomes="                inputs, targets = inputs.to(device), targets.to(device)",
        caught_by="test_evaluation_is_exact",
        told_as="not-exact",
    ),
    Mutant(
        id="evaluate-drops-last",
        exercise="1.6",
        mistake="the last batch is left out",
        text="                if not len(targets):\n",
        becomes="                if len(targets) < loader.batch_sampler.batch_size:\n",
        caught_by="test_evaluation_is_exact",
        told_as="not-exact",
    ),
    Mutant(
        id="evaluate-training-mode",
        exercise="1.6",
        mistake="evaluation in training mode",
        text="    model.eval()\n",
        becomes="",
        caught_by="test_evaluation_is_exact",
        told_as="not-exact",
    ),
    Mutant(
        id="evaluate-mode-lost",
        exercise="1.6",
        mistake="the model stays in eval mode",
        text="        model.train(was_training)\n",
        becomes="        pass\n",
        caught_by="test_evaluation_is_exact",
        told_as="mode-lost",
    ),
    Mutant(
        id="evaluate-always-train",
        exercise="1.6",
        mistake="the model is put in training mode whatever it was in",
        text="        model.train(was_training)\n",
        becomes="        model.train()\n",
        caught_by="test_evaluation_is_exact",
        told_as="mode-lost",
    ),
    Mutant(
        id="evaluate-records-gradients",
        exercise="1.6",
        mistake="gradients are recorded in evaluation",
        text="""        with torch.no_grad():
            for inputs, targets in loader:""",
        becomes="""        with torch.enable_grad():
            for inputs, targets in loader:""",
        caught_by="test_evaluation_is_exact",
        told_as="grad-recorded",
    ),
    Mutant(
        id="print-everywhere",
        exercise="1.6",
        mistake="every rank prints",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="    if True:\n",
        caught_by="test_one_rank_prints",
        told_as="every-rank-prints",
    ),
    Mutant(
        id="print-global-rank",
        exercise="1.6",
        mistake="the global rank decides in a sub-group",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="    if dist.get_rank() == 0:\n",
        caught_by="test_one_rank_prints",
        told_as="not-printed",
    ),
    Mutant(
        id="print-barrier-of-rank-0",
        exercise="1.6",
        mistake="a collective that only the printing rank calls",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="""    if dist.get_rank(group) == 0:
        dist.barrier(group=group)
""",
        caught_by="test_one_rank_prints",
        told_as="hang",
    ),
    Mutant(
        id="print-with-barrier",
        exercise="1.6",
        mistake="printing waits at a barrier that not every rank reaches",
        text="    if dist.get_rank(group) == 0:\n",
        becomes="""    dist.barrier(group=group)
    if dist.get_rank(group) == 0:
""",
        caught_by="test_one_rank_prints",
        told_as="hang",
    ),
]
