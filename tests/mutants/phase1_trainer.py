"""Wrong implementations of exercises 1.3 to 1.6."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="broadcast-nothing",
        exercise="1.3",
        mistake="the weights are not broadcast",
        text="            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)\n",
        becomes="",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-zeros",
        exercise="1.3",
        mistake="zeros are broadcast (a buffer that was never filled)",
        text="flat = tensor.clone(memory_format=torch.contiguous_format)",
        becomes="flat = torch.zeros_like(tensor, memory_format=torch.contiguous_format)",
        caught_by="test_state_equals_the_source",
        told_as="zeros",
    ),
    Mutant(
        id="broadcast-no-buffers",
        exercise="1.3",
        mistake="buffers are forgotten",
        text="""        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            flat =""",
        becomes="""        for tensor in model.parameters():
            flat =""",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-state-dict",
        exercise="1.3",
        mistake="state_dict leaves non-persistent buffers out",
        text="""        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            flat =""",
        becomes="""        for tensor in model.state_dict().values():
            flat =""",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-tied-twice",
        exercise="1.3",
        mistake="tied parameters are sent twice",
        text="""        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            flat =""",
        becomes="""        named = model.named_parameters(remove_duplicate=False)
        for tensor in (*(p for _, p in named), *model.buffers()):
            flat =""",
        caught_by="test_state_is_sent_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="broadcast-buffer-twice",
        exercise="1.3",
        mistake="a parameter that is a buffer, too, is sent twice",
        text="in dict.fromkeys((*model.parameters(), *model.buffers())):\n            flat",
        becomes="in (*model.parameters(), *model.buffers()):\n            flat",
        caught_by="test_state_is_sent_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="broadcast-known-dtypes",
        exercise="1.3",
        mistake="tensors are sent as they are: gloo knows no int16",
        text="flat.view(-1).view(torch.uint8), src",
        becomes="flat, src",
        caught_by="test_state_equals_the_source",
        told_as="exception",
    ),
    Mutant(
        id="broadcast-trainable-only",
        exercise="1.3",
        mistake="frozen parameters are left out",
        text="""        for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
            flat =""",
        becomes="""        trainable = [p for p in model.parameters() if p.requires_grad]
        for tensor in (*trainable, *model.buffers()):
            flat =""",
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
        text="            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)\n",
        becomes="            dist.broadcast(flat.view(-1).view(torch.uint8), 0, group=group)\n",
        caught_by="test_state_equals_the_source",
        told_as="unchanged",
    ),
    Mutant(
        id="broadcast-rank0-only",
        exercise="1.3",
        mistake="only rank 0 enters the broadcast",
        text="            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)\n",
        becomes="""            if dist.get_rank() == src:
                dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)
""",
        caught_by="test_state_equals_the_source",
        told_as="hang",
    ),
    Mutant(
        id="broadcast-averages",
        exercise="1.3",
        mistake="an all-reduce instead of a broadcast: the mean of all ranks' weights",
        text="            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)\n",
        becomes="""            dist.all_reduce(flat, group=group)
            flat = (flat / dist.get_world_size(group)).to(tensor.dtype)
""",
        caught_by="test_state_equals_the_source",
        told_as=("wrong", "exception"),
    ),
    Mutant(
        id="broadcast-other-memory",
        exercise="1.3",
        mistake="the tensors get other memory: views of it keep the old state",
        text="            tensor.copy_(flat)\n",
        becomes="            tensor.data = flat\n",
        caught_by="test_state_equals_the_source",
        told_as="new-tensors",
    ),
    Mutant(
        id="broadcast-through-float64",
        exercise="1.3",
        mistake="integers go through float64: large ones lose their last digits",
        text="            tensor.copy_(flat)\n",
        becomes="            tensor.copy_(flat.double())\n",
        caught_by="test_state_equals_the_source",
        told_as="wrong",
    ),
    Mutant(
        id="broadcast-group-ignored",
        exercise="1.3",
        mistake="the group is ignored",
        text="            dist.broadcast(flat.view(-1).view(torch.uint8), src, group=group)\n",
        becomes="            dist.broadcast(flat, src)\n",
        caught_by="test_state_in_a_subgroup",
        told_as=("mismatch", "hang"),
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
        id="average-one-buffer",
        exercise="1.4",
        mistake="one flat tensor for all models of a size: the next call overwrites gradients",
        text="        flat = torch.cat(parts)\n",
        becomes="""        kept = vars(average_gradients).setdefault("kept", {})
        size, dtype = sum(map(len, parts)), parts[0].dtype
        flat = torch.cat(parts, out=kept.setdefault((size, dtype), parts[0].new_empty(size)))
""",
        caught_by="test_called_again",
        told_as="kept-buffer",
    ),
    Mutant(
        id="average-group-ignored",
        exercise="1.4",
        mistake="the group is ignored",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.all_reduce(flat)\n",
        caught_by="test_every_kind_of_gradient",
        told_as=("mismatch", "hang"),
    ),
    Mutant(
        id="average-divided-by-ranks",
        exercise="1.4",
        mistake="gradients weighted by samples, divided by the number of ranks",
        text="    share = num_samples / max(total, 1)\n",
        becomes="    share = num_samples / dist.get_world_size(group)\n",
        caught_by="test_mean_over_the_ranks",
        told_as="wrong-divisor",
    ),
    Mutant(
        id="average-overflows",
        exercise="1.4",
        mistake="multiplied by the samples before the sum, divided after it: float16 overflows",
        text="    share = num_samples / max(total, 1)\n",
        becomes="    share = num_samples\n",
        more=(
            (
                "            p.grad = part.view(p.shape)\n",
                "            p.grad = part.view(p.shape) / max(total, 1)\n",
            ),
        ),
        caught_by="test_every_kind_of_gradient",
        told_as="overflow",
    ),
    Mutant(
        id="average-nan-times-zero",
        exercise="1.4",
        mistake="gradients of a rank without samples are multiplied by zero: nan stays nan",
        text="            if p.grad is None or not share\n",
        becomes="            if p.grad is None\n",
        caught_by="test_nan_and_no_samples",
        told_as="nan",
    ),
    Mutant(
        id="average-frozen-stale",
        exercise="1.4",
        mistake="a frozen parameter's gradient of another time is averaged, too",
        text="trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]",
        becomes=(
            "trainable = [p for p in dict.fromkeys(parameters) "
            "if p.requires_grad or p.grad is not None]"
        ),
        caught_by="test_only_trainable_bytes_are_sent",
        told_as="wrong",
    ),
    Mutant(
        id="average-in-order-of-memory",
        exercise="1.4",
        mistake="gradients are sent in the order of memory, which differs between ranks",
        text="            else p.grad.detach().flatten() * share\n",
        becomes="            else p.grad.detach().as_strided((p.numel(),), (1,)) * share\n",
        caught_by="test_every_kind_of_gradient",
        told_as="wrong",
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
        text="    model.zero_grad(set_to_none=True)\n",
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
        text="    sums = torch.zeros(2, dtype=torch.float64, device=inputs.device)",
        becomes="""    if not len(targets):
        return 0.0
    sums = torch.zeros(2, dtype=torch.float64, device=inputs.device)""",
        caught_by="test_one_step_on_unequal_parts",
        told_as="hang",
    ),
    Mutant(
        id="train-own-loss",
        exercise="1.5",
        mistake="the rank's own loss is returned as the global one",
        text="    return (sums[0] / sums[1].clamp(min=1)).item()\n",
        becomes="    return loss.item() if len(targets) else 0.0\n",
        caught_by="test_one_step_on_unequal_parts",
        told_as="only-own",
    ),
    Mutant(
        id="train-mean-of-means",
        exercise="1.5",
        mistake="the global loss is the plain mean of the ranks' means",
        text="""        sums[0].add_(loss.detach(), alpha=len(targets))
        sums[1] = len(targets)
    pending""",
        becomes="""        sums[0].add_(loss.detach())
    sums[1] = 1
    pending""",
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
        text="    losses: list[float] = []\n",
        becomes="""    losses: list[float] = []
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
        text="        data = tensor.cpu().flatten().view(torch.uint8)\n",
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
        id="train-starts-from-rank-0",
        exercise="1.5",
        mistake="a group takes the weights of its lowest global rank, not of its first",
        text="dist.get_process_group_ranks(group)[0]",
        becomes="max(dist.get_process_group_ranks(group)) - 2",
        caught_by="test_training_twice_in_a_group",
        told_as=("wrong", "exception"),
    ),
    Mutant(
        id="train-in-the-mode-found",
        exercise="1.5",
        mistake="the model trains in the mode in which it came",
        text="            model.train()\n",
        becomes="",
        caught_by="test_training_twice_in_a_group",
        told_as="mode",
    ),
    Mutant(
        id="train-mode-set-once",
        exercise="1.5",
        mistake="training mode is set once: what on_step leaves changes the rest of the training",
        text="            model.train()\n",
        becomes="            if not losses:\n                model.train()\n",
        caught_by="test_training_twice_in_a_group",
        told_as="mode",
    ),
    Mutant(
        id="train-clears-the-optimizers-gradients",
        exercise="1.5",
        mistake="only gradients of the optimizer's parameters are forgotten: others add up",
        text="    model.zero_grad(set_to_none=True)\n",
        becomes="    optimizer.zero_grad(set_to_none=True)\n",
        caught_by="test_steps_in_two_groups",
        told_as=("old-gradients", "no-samples"),
    ),
    Mutant(
        id="hash-whole-storage",
        exercise="1.5",
        mistake="the hash is of the memory under a tensor, more than the tensor itself",
        text="        digest.update(data.numpy().tobytes())\n",
        becomes="        digest.update(bytes(tensor.untyped_storage()))\n",
        caught_by="test_hash_sees_every_bit",
        told_as="hash",
    ),
    Mutant(
        id="train-zeroes-old-gradients",
        exercise="1.5",
        mistake="old gradients become zero: weight decay shrinks what nobody uses",
        text="    model.zero_grad(set_to_none=True)\n",
        becomes="    model.zero_grad(set_to_none=False)\n",
        caught_by="test_steps_in_two_groups",
        told_as=("invented-gradient", "no-samples"),
    ),
    Mutant(
        id="train-nan-without-samples",
        exercise="1.5",
        mistake="the loss of no samples is zero by zero",
        text="    return (sums[0] / sums[1].clamp(min=1)).item()\n",
        becomes="    return (sums[0] / sums[1]).item()\n",
        caught_by="test_steps_in_two_groups",
        told_as="no-samples",
    ),
    Mutant(
        id="train-counts-steps-per-epoch",
        exercise="1.5",
        mistake="steps are counted anew in each epoch",
        text="                on_step(len(losses), losses[-1], len(targets))\n",
        becomes=(
            "                step = (len(losses) - 1) % len(loader) + 1\n"
            "                on_step(step, losses[-1], len(targets))\n"
        ),
        caught_by="test_training_equals_one_process",
        told_as="steps",
    ),
    Mutant(
        id="evaluate-submodules-train",
        exercise="1.6",
        mistake="a part that was in eval mode is in training mode afterwards",
        text="            module.training = training\n",
        becomes="            model.train(modes[model])\n",
        caught_by="test_evaluation_is_exact",
        told_as="mode-lost",
    ),
    Mutant(
        id="evaluate-group-ignored",
        exercise="1.6",
        mistake="the group is not passed on",
        text="    return global_metrics(float(loss_sum), int(correct), count, group, device)\n",
        becomes="    return global_metrics(float(loss_sum), int(correct), count, None, device)\n",
        caught_by="test_evaluation_in_a_group",
        told_as="not-exact",
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
        text="            module.training = training\n",
        becomes="            pass\n",
        caught_by="test_evaluation_is_exact",
        told_as="mode-lost",
    ),
    Mutant(
        id="evaluate-always-train",
        exercise="1.6",
        mistake="the model is put in training mode whatever it was in",
        text="            module.training = training\n",
        becomes="            model.train()\n",
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
    Mutant(
        id="print-outside-the-group",
        exercise="1.6",
        mistake="a rank outside the group prints, too: it has the number -1 there",
        text="    if dist.get_rank(group) == 0:",
        becomes="    if dist.get_rank(group) < 1:",
        caught_by="test_one_rank_prints",
        told_as="every-rank-prints",
    ),
    Mutant(
        id="evaluate-recording-off",
        exercise="1.6",
        mistake="recording of gradients is switched off and stays so",
        text="        with torch.no_grad():\n            for inputs",
        becomes="        torch.set_grad_enabled(False)\n        if True:\n            for inputs",
        caught_by="test_evaluation_is_exact",
        told_as="grad-off",
    ),
    Mutant(
        id="average-holders-with-samples",
        exercise="1.4",
        mistake="a gradient on a rank without samples does not count as existing",
        text="[p.grad is not None for p in trainable]",
        becomes="[p.grad is not None and num_samples > 0 for p in trainable]",
        caught_by="test_nan_and_no_samples",
        told_as="missing",
    ),
    Mutant(
        id="train-first-epoch-as-found",
        exercise="1.5",
        mistake="set_epoch is not called for the first epoch, which has the order of an earlier use",
        text="        loader.batch_sampler.set_epoch(epoch)\n",
        becomes="        if epoch:\n            loader.batch_sampler.set_epoch(epoch)\n",
        caught_by="test_training_twice_in_a_group",
        told_as="wrong",
    ),
]
