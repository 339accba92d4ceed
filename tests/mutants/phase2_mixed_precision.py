"""Wrong implementations of exercises 2.5 and 2.6."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="mixed-master-after-cast",
        exercise="2.5",
        mistake="the masters are made of weights that have been rounded",
        text="                    self.master_of[p] = nn.Parameter(p.detach().clone())\n",
        becomes=(
            "                    self.master_of[p] = nn.Parameter(p.detach().to(dtype).float())\n"
        ),
        caught_by="test_masters_are_the_parameters",
        told_as="master-rounded",
    ),
    Mutant(
        id="mixed-master-16-bit",
        exercise="2.5",
        mistake="the masters are in 16 bits",
        text="                    self.master_of[p] = nn.Parameter(p.detach().clone())\n",
        becomes="                    self.master_of[p] = nn.Parameter(p.detach().to(dtype))\n",
        more=(
            (
                "p.grad.float()",
                "p.grad.clone()",
            ),
        ),
        caught_by="test_masters_are_the_parameters",
        told_as="master-dtype",
    ),
    Mutant(
        id="mixed-optimizer-of-weights",
        exercise="2.5",
        mistake="the optimizer is given the 16-bit weights",
        text="            yield name, self.master_of.get(p, p)\n",
        becomes="            yield name, p\n",
        caught_by="test_masters_are_the_parameters",
        told_as="master-dtype",
    ),
    Mutant(
        id="mixed-tie-broken",
        exercise="2.5",
        mistake="new parameters instead of cast ones: tied weights go their own ways",
        text="""            for p in module.parameters(recurse=False):
                if p.requires_grad and p not in self.master_of:
                    self.master_of[p] = nn.Parameter(p.detach().clone())
                    p.register_post_accumulate_grad_hook(self._collect)
                if p.is_floating_point():
                    p.data = p.data.to(dtype)
""",
        becomes="""            for name, old in list(module.named_parameters(recurse=False)):
                p = nn.Parameter(old.detach().to(dtype), old.requires_grad)
                setattr(module, name, p)
                if p.requires_grad:
                    self.master_of[p] = nn.Parameter(old.detach().clone())
                    p.register_post_accumulate_grad_hook(self._collect)
""",
        caught_by="test_masters_are_the_parameters",
        told_as="names",
    ),
    Mutant(
        id="mixed-everything-16-bit",
        exercise="2.5",
        mistake="norms are cast like everything else",
        text="            if isinstance(module, FP32_MODULES):\n",
        becomes=(
            "            if isinstance(module, FP32_MODULES) and not dtype.is_floating_point:\n"
        ),
        caught_by="test_each_tensor_has_its_type",
        told_as="norm-dtype",
    ),
    Mutant(
        id="mixed-norm-of-16-bit",
        exercise="2.5",
        mistake="norms have float32 parameters, but are given 16-bit numbers",
        text=(
            "                module.register_forward_pre_hook(lambda _, args: tuple(a.float() "
            "for a in args))\n"
        ),
        becomes="",
        caught_by="test_each_tensor_has_its_type",
        told_as="norm-dtype",
    ),
    Mutant(
        id="mixed-softmax-16-bit",
        exercise="2.5",
        mistake="softmaxes compute in 16 bits",
        text="    nn.Softmax,\n",
        becomes="",
        caught_by="test_each_tensor_has_its_type",
        told_as="softmax-dtype",
    ),
    Mutant(
        id="mixed-loss-16-bit",
        exercise="2.5",
        mistake="the loss is computed from 16-bit logits",
        text="        return self.model(inputs).float()\n",
        becomes="        return self.model(inputs)\n",
        caught_by="test_each_tensor_has_its_type",
        told_as="loss-dtype",
    ),
    Mutant(
        id="mixed-tokens-cast",
        exercise="2.5",
        mistake="token numbers are cast to 16 bits",
        text="""        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
""",
        becomes="        inputs = inputs.to(self.dtype)\n",
        caught_by="test_each_tensor_has_its_type",
        told_as="exception",
    ),
    Mutant(
        id="mixed-by-autocast",
        exercise="2.5",
        mistake="torch.autocast does the work",
        text="""        if inputs.is_floating_point():
            inputs = inputs.to(self.dtype)
        return self.model(inputs).float()
""",
        becomes="""        with torch.autocast(inputs.device.type, dtype=self.dtype):
            return self.model(inputs).float()
""",
        more=(
            (
                """                if p.is_floating_point():
                    p.data = p.data.to(dtype)
""",
                "",
            ),
        ),
        caught_by="test_each_tensor_has_its_type",
        told_as="shortcut",
    ),
    Mutant(
        id="mixed-gradient-left",
        exercise="2.5",
        mistake="16-bit gradients stay in the model, and are counted again",
        text="""            master.grad += p.grad
        p.grad = None
""",
        becomes="            master.grad += p.grad\n",
        caught_by="test_each_tensor_has_its_type",
        told_as="gradient-left",
    ),
    Mutant(
        id="mixed-reads-back",
        exercise="2.5",
        mistake="the masters are made anew from the rounded weights after each step",
        text=(
            "            torch._foreach_copy_(list(self.master_of), "
            "list(self.master_of.values()))\n"
        ),
        becomes=(
            "            torch._foreach_copy_(list(self.master_of), "
            "list(self.master_of.values()))\n"
            "            torch._foreach_copy_(list(self.master_of.values()), "
            "list(self.master_of))\n"
        ),
        caught_by="test_small_updates_are_not_lost",
        told_as="update-lost",
    ),
    Mutant(
        id="mixed-no-write-back",
        exercise="2.5",
        mistake="the weights don't follow their masters",
        text=(
            "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, "
            "group=group)\n"
            "    model.write_back()\n"
        ),
        becomes=(
            "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, "
            "group=group)\n"
        ),
        caught_by="test_forward_reads_the_rounded_masters",
        told_as="stale-weights",
    ),
    Mutant(
        id="mixed-rank-alone",
        exercise="2.5",
        mistake="every rank steps with its own gradient",
        text=(
            "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, "
            "group=group)\n"
        ),
        becomes=(
            "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, "
            "group=torch.distributed.new_subgroups(1)[0])\n"
        ),
        caught_by="test_step_equals_autocast_in_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="mixed-sum-of-micro-batches-16-bit",
        exercise="2.5",
        mistake="gradients of micro-batches add up in 16 bits",
        text="""        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
""",
        becomes=(
            "        total = p.grad if master.grad is None else master.grad.to(p.dtype) + p.grad\n"
            "        master.grad = total.float()\n"
        ),
        caught_by="test_micro_batches_add_up_in_float32",
        told_as="sum-rounded",
    ),
    Mutant(
        id="mixed-wire-16-bit",
        exercise="2.5",
        mistake="the gradients are summed over the ranks in 16 bits and cast afterwards",
        text=(
            "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, "
            "group=group)\n"
        ),
        becomes="""    total = torch.tensor(sum(int((y != -100).sum()) for _, y in window))
    torch.distributed.all_reduce(total, group=group)
    model.zero_grad()
    summed = torch.tensor(accumulate(model, window, max(int(total), 1)))
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat([p.grad.flatten() for p in trainable]).to(model.dtype)
    torch.distributed.all_reduce(flat, group=group)
    for p, part in zip(trainable, flat.split([p.numel() for p in trainable])):
        p.grad = part.float().view(p.shape)
    torch.distributed.all_reduce(summed, group=group)
    loss = float(summed) / max(int(total), 1)
    norm = clip_by_global_norm(trainable, max_norm or float('inf'))
    optimizer.step()
""",
        more=(
            (
                "    MicroBatch,\n",
                """    MicroBatch,
    accumulate,
    clip_by_global_norm,
""",
            ),
        ),
        caught_by="test_gradients_travel_in_float32_once",
        told_as="wire-dtype",
    ),
    Mutant(
        id="mixed-any-dtype",
        exercise="2.5",
        mistake="every dtype is taken",
        text="    if dtype not in (torch.bfloat16, torch.float16):\n",
        becomes="    if not isinstance(dtype, torch.dtype):\n",
        caught_by="test_what_can_not_be_done_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="mixed-cast-before",
        exercise="2.5",
        mistake="a model that was cast before is taken: its masters begin rounded",
        text="        if p.is_floating_point() and p.dtype != torch.float32:\n",
        becomes="        if p.is_floating_point() and p.dtype.itemsize < 2:\n",
        caught_by="test_what_can_not_be_done_is_refused",
        told_as=("accepted", "exception"),
    ),
    Mutant(
        id="mixed-device-not-tried",
        exercise="2.5",
        mistake="what the device can't do shows in the first forward only",
        text="        one @ one\n",
        becomes="        one + one\n",
        caught_by="test_what_can_not_be_done_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="scale-overflow-alone",
        exercise="2.6",
        mistake="each rank looks at its own gradients only",
        text="        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)\n",
        becomes="",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="decided-alone",
    ),
    Mutant(
        id="scale-updated-alone",
        exercise="2.6",
        mistake="all skip, but only the rank that overflowed lowers its scale",
        text="""        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        self.finite = not overflow.item()
        return self.finite
""",
        becomes="""        mine = not overflow.item()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
        self.finite = mine
        return not overflow.item()
""",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="scales-differ",
    ),
    Mutant(
        id="scale-without-gradient-leaves",
        exercise="2.6",
        mistake="a rank without gradients does not take part: the others wait",
        text="        overflow = torch.zeros((), device=parameters[0].device if parameters else None)\n",
        becomes="""        overflow = torch.zeros(())
        if not gradients:
            self.finite = True
            return True
""",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="hang",
    ),
    Mutant(
        id="scale-nan-missed",
        exercise="2.6",
        mistake="only infinity counts as overflow, NaN does not",
        text="            overflow += ~extremes.isfinite().all()\n",
        becomes="            overflow += extremes.isinf().any()\n",
        caught_by="test_overflow_on_one_rank_is_everybodys",
        told_as="overflow-missed",
    ),
    Mutant(
        id="scale-never-down",
        exercise="2.6",
        mistake="steps are skipped, but the scale stays",
        text="            self.scale = max(self.scale * self.backoff_factor, self.minimum)\n",
        becomes="            self.scale = max(self.scale, self.minimum)\n",
        caught_by="test_scale_follows_overflows_and_quiet_steps",
        told_as="backoff",
    ),
    Mutant(
        id="scale-grows-after-skips",
        exercise="2.6",
        mistake="the count of quiet steps goes on after an overflow",
        text="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
""",
        becomes="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = self.quiet_steps, self.overflows + 1
""",
        caught_by="test_scale_follows_overflows_and_quiet_steps",
        told_as="growth-too-early",
    ),
    Mutant(
        id="scale-counter-not-reset",
        exercise="2.6",
        mistake="once grown, the scale grows at every step",
        text="            self.quiet_steps = 0\n            if self.scale",
        becomes="            if self.scale",
        caught_by="test_scale_follows_overflows_and_quiet_steps",
        told_as="growth-too-early",
    ),
    Mutant(
        id="scale-grows-once",
        exercise="2.6",
        mistake="the count is not set back, and never equals the interval again",
        text="""        if self.quiet_steps >= self.growth_interval:
            self.quiet_steps = 0
""",
        becomes="        if self.quiet_steps == self.growth_interval:\n",
        caught_by="test_scale_follows_overflows_and_quiet_steps",
        told_as="growth-missing",
    ),
    Mutant(
        id="scale-skips-count",
        exercise="2.6",
        mistake="skipped steps count as quiet ones",
        text="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
""",
        becomes="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, self.overflows + 1
""",
        caught_by="test_scale_follows_overflows_and_quiet_steps",
        told_as="backoff",
    ),
    Mutant(
        id="scale-no-hysteresis",
        exercise="2.6",
        mistake="every overflow lowers the scale",
        text="        if self.overflows >= self.hysteresis:\n",
        becomes="        if self.overflows:\n",
        caught_by="test_hysteresis_and_limits",
        told_as="backoff",
    ),
    Mutant(
        id="scale-hysteresis-not-in-a-row",
        exercise="2.6",
        mistake="overflows count although quiet steps lie between them",
        text="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
        if self.overflows >= self.hysteresis:
""",
        becomes="""        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, self.overflows
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
        if not self.finite and self.overflows >= self.hysteresis:
""",
        caught_by="test_hysteresis_and_limits",
        told_as="backoff",
    ),
    Mutant(
        id="scale-no-minimum",
        exercise="2.6",
        mistake="the scale falls towards zero",
        text="            self.scale = max(self.scale * self.backoff_factor, self.minimum)\n",
        becomes="            self.scale = self.scale * self.backoff_factor\n",
        caught_by="test_hysteresis_and_limits",
        told_as="backoff",
    ),
    Mutant(
        id="scale-beyond-float32",
        exercise="2.6",
        mistake="the scale grows until a float32 loss times it is infinite",
        text="            if self.scale * self.growth_factor <= torch.finfo(torch.float32).max:\n",
        becomes="            if self.scale < math.inf:\n",
        caught_by="test_hysteresis_and_limits",
        told_as="beyond-float32",
    ),
    Mutant(
        id="unscale-twice",
        exercise="2.6",
        mistake="unscale may be called twice and divides twice",
        text="        if self.finite is not None:\n",
        becomes="        if self.scale <= 0:\n",
        caught_by="test_gradients_are_unscaled_once",
        told_as="accepted",
    ),
    Mutant(
        id="unscale-listed-twice",
        exercise="2.6",
        mistake="a tied parameter is divided once per mention",
        text="""        parameters = list(dict.fromkeys(parameters))
        gradients""",
        becomes="""        parameters = list(parameters)
        gradients""",
        caught_by="test_gradients_are_unscaled_once",
        told_as="scaled",
    ),
    Mutant(
        id="unscale-forgotten",
        exercise="2.6",
        mistake="the gradients are looked at, but not divided",
        text="            torch._foreach_div_(gradients, self.scale)\n",
        becomes="",
        caught_by="test_gradients_are_unscaled_once",
        told_as="unchanged",
    ),
    Mutant(
        id="scaler-state-scale-only",
        exercise="2.6",
        mistake="only the scale is saved",
        text="""            "quiet_steps": self.quiet_steps,
            "overflows": self.overflows,
""",
        becomes="",
        more=(
            (
                (
                    '        self.quiet_steps, self.overflows = int(state["quiet_steps"]), '
                    'int(state["overflows"])\n'
                ),
                "",
            ),
        ),
        caught_by="test_state_is_saved_and_restored",
        told_as="state-lost",
    ),
    Mutant(
        id="scaler-state-not-loaded",
        exercise="2.6",
        mistake="the state is saved, but a resumed run begins with the first scale",
        text="""        self.scale = float(state["scale"])
        self.quiet_steps, self.overflows = int(state["quiet_steps"]), int(state["overflows"])
""",
        becomes="        state = dict(state)\n",
        caught_by="test_state_is_saved_and_restored",
        told_as="state-lost",
    ),
    Mutant(
        id="scaler-takes-anything",
        exercise="2.6",
        mistake="a growth factor of 1 is taken: the scale never grows",
        text="        if not growth_factor > 1:\n",
        becomes="        if not growth_factor > 0:\n",
        caught_by="test_bad_settings_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="scaled-norm-refused-late",
        exercise="2.6",
        mistake="a bad limit is refused after the gradients were sent and divided",
        text="    if max_norm is not None and not max_norm > 0:\n",
        becomes="    if max_norm is not None and math.isnan(max_norm):\n",
        caught_by="test_bad_norm_is_refused_before_anything_is_sent",
        told_as="too-late",
    ),
    Mutant(
        id="scaled-clip-first",
        exercise="2.6",
        mistake="the gradient is clipped before it is unscaled",
        text="""    finite = scaler.unscale(trainable, group)
    norm = clip_by_global_norm(trainable, math.inf if max_norm is None else max_norm)
""",
        becomes=(
            "    norm = clip_by_global_norm(trainable, math.inf if max_norm is None else "
            "max_norm)\n"
            "    finite = scaler.unscale(trainable, group)\n"
        ),
        caught_by="test_scaled_step_equals_one_process",
        told_as="norm-scaled",
    ),
    Mutant(
        id="scaled-unscaled-twice",
        exercise="2.6",
        mistake="the gradient is divided by the scale twice",
        text="    finite = scaler.unscale(trainable, group)\n",
        becomes="""    finite = scaler.unscale(trainable, group)
    for p in trainable:
        p.grad.div_(scaler.scale)
""",
        caught_by="test_scaled_step_equals_one_process",
        told_as="norm",
    ),
    Mutant(
        id="scaled-after-backward",
        exercise="2.6",
        mistake="the gradients are scaled after backward, when the small ones are 0 already",
        text=(
            "    loss, total = accumulate_and_reduce(model, window, loss_scale=scaler.scale, "
            "group=group)\n"
        ),
        becomes="""    loss, total = accumulate_and_reduce(model, window, group=group)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scaler.scale)
""",
        caught_by="test_small_gradients_survive",
        told_as="underflow",
    ),
    Mutant(
        id="scaled-steps-anyway",
        exercise="2.6",
        mistake="the optimizer steps with infinite gradients",
        text="""    if finite:
        optimizer.step()
""",
        becomes="""    if trainable:
        optimizer.step()
""",
        caught_by="test_overflow_changes_nothing_but_the_scale",
        told_as="half-skipped",
    ),
    Mutant(
        id="scaled-zeroes-instead",
        exercise="2.6",
        mistake="infinite gradients are set to zero: Adam steps all the same",
        text="""    if finite:
        optimizer.step()
        model.write_back()
    scaler.update()
""",
        becomes="""    if not finite:
        for p in trainable:
            p.grad.zero_()
    optimizer.step()
    model.write_back()
    scaler.update()
""",
        caught_by="test_overflow_changes_nothing_but_the_scale",
        told_as="half-skipped",
    ),
    Mutant(
        id="scaled-update-forgotten",
        exercise="2.6",
        mistake="update is called after a step only: after an overflow the scale stays",
        text="""    if finite:
        optimizer.step()
        model.write_back()
    scaler.update()
""",
        becomes="""    if finite:
        optimizer.step()
        model.write_back()
        scaler.update()
""",
        caught_by="test_overflow_changes_nothing_but_the_scale",
        told_as="exception",
    ),
    Mutant(
        id="scaled-no-write-back",
        exercise="2.6",
        mistake="the weights don't follow their masters",
        text="        model.write_back()\n",
        becomes="",
        caught_by="test_scaled_step_equals_one_process",
        told_as="stale-weights",
    ),
    Mutant(
        id="scaled-overflow-of-all-ranks",
        exercise="2.6",
        mistake="the gradients are reduced in the group, the overflow over all ranks",
        text="    finite = scaler.unscale(trainable, group)\n",
        becomes="    finite = scaler.unscale(trainable)\n",
        caught_by="test_a_group_steps_while_another_skips",
        told_as="skipped",
    ),
    Mutant(
        id="unscale-sums",
        exercise="2.6",
        mistake="an overflow is looked for in a float32 sum, which overflows by itself",
        text="            overflow += ~extremes.isfinite().all()\n",
        becomes="            overflow += ~sum(g.float().sum() for g in gradients).isfinite()\n",
        caught_by="test_gradients_are_unscaled_once",
        told_as="overflow-missed",
    ),
    Mutant(
        id="scaler-interval-jumped-over",
        exercise="2.6",
        mistake="loaded beyond its own interval, the count never equals it again",
        text="self.quiet_steps >= self.growth_interval",
        becomes="self.quiet_steps == self.growth_interval",
        caught_by="test_a_state_goes_on_with_other_settings",
        told_as="settings",
    ),
    Mutant(
        id="scaled-nothing-counts",
        exercise="2.6",
        mistake="a window without targets counts as a quiet step",
        text="""    if not total:
        return 0.0, 0.0, False
""",
        becomes="""    if not total:
        scaler.unscale(model.parameters(), group)
        scaler.update()
        return 0.0, 0.0, False
""",
        caught_by="test_window_without_targets_counts_for_nothing",
        told_as="stepped",
    ),
    Mutant(
        id="precision-wrapped-twice",
        exercise="2.5",
        mistake="a wrapper is asked for its parameters, which are float32 masters: it is accepted",
        text="    for name, p in nn.Module.named_parameters(model):\n",
        becomes="    for name, p in model.named_parameters():\n",
        caught_by="test_what_can_not_be_done_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="precision-frozen-rounded",
        exercise="2.5",
        mistake="frozen parameters of other dtypes are accepted",
        text="        if p.is_floating_point() and p.dtype != torch.float32:\n",
        becomes="        if p.requires_grad and p.dtype != torch.float32:\n",
        caught_by="test_what_can_not_be_done_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="frozen-copied",
        exercise="2.5",
        mistake="a frozen parameter is given as a copy",
        text="            yield name, self.master_of.get(p, p)\n",
        becomes="            copy = p if p.requires_grad else nn.Parameter(p.detach(), False)\n            yield name, self.master_of.get(p, copy)\n",
        caught_by="test_masters_are_the_parameters",
        told_as="names",
    ),
]
