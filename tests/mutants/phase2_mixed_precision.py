"""Wrong implementations of exercises 2.5 and 2.6."""

from distlab.grading.wrong import Mutant

MASTERS, TYPES = "test_masters_are_the_parameters", "test_each_tensor_has_its_type"
SMALL, READS = "test_small_updates_are_not_lost", "test_forward_reads_the_rounded_masters"
STEP, WIRE = "test_step_equals_autocast_in_one_process", "test_gradients_travel_in_float32_once"
ADD, REFUSED = "test_micro_batches_add_up_in_float32", "test_what_can_not_be_done_is_refused"
SCALES, LIMITS = "test_scale_follows_overflows_and_quiet_steps", "test_hysteresis_and_limits"
ALL, ONCE = "test_overflow_on_one_rank_is_everybodys", "test_gradients_are_unscaled_once"
STATE, SETTINGS = "test_state_is_saved_and_restored", "test_bad_settings_are_refused"
SCALED, SURVIVE = "test_scaled_step_equals_one_process", "test_small_gradients_survive"
OVERFLOW = "test_overflow_changes_nothing_but_the_scale"
LIMIT = "test_bad_norm_is_refused_before_anything_is_sent"
NOTHING = "test_window_without_targets_counts_for_nothing"

COPY = "                    self.master_of[p] = nn.Parameter(p.detach().clone())\n"
PRE = "                module.register_forward_pre_hook(lambda _, args: tuple(a.float() for a in args))\n"
CAST = """            for p in module.parameters(recurse=False):
                if p.requires_grad and p not in self.master_of:
                    self.master_of[p] = nn.Parameter(p.detach().clone())
                    p.register_post_accumulate_grad_hook(self._collect)
                if p.is_floating_point():
                    p.data = p.data.to(dtype)
"""
SUM = """        if master.grad is None:
            master.grad = p.grad.float()
        else:
            master.grad += p.grad
"""
INPUTS = "        if inputs.is_floating_point():\n            inputs = inputs.to(self.dtype)\n"
BACK = "            torch._foreach_copy_(list(self.master_of), list(self.master_of.values()))\n"
MIXED = "    loss, norm = train_window(model, optimizer, window, max_norm=max_norm, group=group)\n"
OWN_STEP = """    total = torch.tensor(sum(int((y != -100).sum()) for _, y in window))
    dist.all_reduce(total, group=group)
    model.zero_grad()
    summed = torch.tensor(accumulate(model, window, max(int(total), 1)))
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat([p.grad.flatten() for p in trainable]).to(model.dtype)
    dist.all_reduce(flat, group=group)
    for p, part in zip(trainable, flat.split([p.numel() for p in trainable])):
        p.grad = part.float().view(p.shape)
    dist.all_reduce(summed, group=group)
    loss = float(summed) / max(int(total), 1)
    norm = clip_by_global_norm(trainable, max_norm or math.inf)
    optimizer.step()
"""
REDUCE = "        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)\n"
FINITE = "        self.finite = not overflow.item()\n        return self.finite\n"
DIVIDE = "            torch._foreach_div_(gradients, self.scale)\n"
COUNT = """        if self.finite:
            self.quiet_steps, self.overflows = self.quiet_steps + 1, 0
        else:
            self.quiet_steps, self.overflows = 0, self.overflows + 1
"""
GROW = """        if self.quiet_steps == self.growth_interval:
            self.quiet_steps = 0
"""
SAVED = """            "quiet_steps": self.quiet_steps,
            "overflows": self.overflows,
"""
LOADED = '        self.quiet_steps, self.overflows = int(state["quiet_steps"]), int(state["overflows"])\n'
LOSS = (
    "    loss, total = accumulate_and_reduce(model, window, loss_scale=scaler.scale, group=group)\n"
)
UNSCALE = "    finite = scaler.unscale(trainable, group)\n"
CLIP = "    norm = clip_by_global_norm(trainable, math.inf if max_norm is None else max_norm)\n"
TAKE = """    if finite:
        optimizer.step()
        model.write_back()
    scaler.update()
"""

MUTANTS = [
    Mutant(
        id="mixed-master-after-cast",
        exercise="2.5",
        bug="the masters are made of weights that have been rounded",
        find=COPY,
        replace=COPY.replace("p.detach().clone()", "p.detach().to(dtype).float()"),
        killed_by=MASTERS,
        cause="master-rounded",
    ),
    Mutant(
        id="mixed-master-16-bit",
        exercise="2.5",
        bug="BUGS 76: the masters are in 16 bits",
        find=COPY,
        replace=COPY.replace("p.detach().clone()", "p.detach().to(dtype)"),
        patches=[("p.grad.float()", "p.grad.clone()")],
        killed_by=MASTERS,
        cause="master-dtype",
    ),
    Mutant(
        id="mixed-optimizer-of-weights",
        exercise="2.5",
        bug="BUGS 73, 76: the optimizer is given the 16-bit weights",
        find="            yield name, self.master_of.get(p, p)\n",
        replace="            yield name, p\n",
        killed_by=MASTERS,
        cause="master-dtype",
    ),
    Mutant(
        id="mixed-tie-broken",
        exercise="2.5",
        bug="new parameters instead of cast ones: tied weights go their own ways",
        find=CAST,
        replace="""            for name, old in list(module.named_parameters(recurse=False)):
                p = nn.Parameter(old.detach().to(dtype), old.requires_grad)
                setattr(module, name, p)
                if p.requires_grad:
                    self.master_of[p] = nn.Parameter(old.detach().clone())
                    p.register_post_accumulate_grad_hook(self._collect)
""",
        killed_by=MASTERS,
        cause="names",
    ),
    Mutant(
        id="mixed-everything-16-bit",
        exercise="2.5",
        bug="norms are cast like everything else",
        find="            if isinstance(module, FP32_MODULES):\n",
        replace="            if isinstance(module, FP32_MODULES) and not dtype.is_floating_point:\n",
        killed_by=TYPES,
        cause="norm-dtype",
    ),
    Mutant(
        id="mixed-norm-of-16-bit",
        exercise="2.5",
        bug="norms have float32 parameters, but are given 16-bit numbers",
        find=PRE,
        replace="",
        killed_by=TYPES,
        cause="norm-dtype",
    ),
    Mutant(
        id="mixed-softmax-16-bit",
        exercise="2.5",
        bug="softmaxes compute in 16 bits",
        find="    nn.Softmax,\n",
        replace="",
        killed_by=TYPES,
        cause="softmax-dtype",
    ),
    Mutant(
        id="mixed-loss-16-bit",
        exercise="2.5",
        bug="the loss is computed from 16-bit logits",
        find="        return self.model(inputs).float()\n",
        replace="        return self.model(inputs)\n",
        killed_by=TYPES,
        cause="loss-dtype",
    ),
    Mutant(
        id="mixed-tokens-cast",
        exercise="2.5",
        bug="token numbers are cast to 16 bits",
        find=INPUTS,
        replace="        inputs = inputs.to(self.dtype)\n",
        killed_by=TYPES,
        cause="exception",
    ),
    Mutant(
        id="mixed-by-autocast",
        exercise="2.5",
        bug="torch.autocast does the work",
        find=INPUTS + "        return self.model(inputs).float()\n",
        replace="        with torch.autocast(inputs.device.type, dtype=self.dtype):\n"
        "            return self.model(inputs).float()\n",
        patches=[
            (
                "                if p.is_floating_point():\n                    p.data = p.data.to(dtype)\n",
                "",
            )
        ],
        killed_by=TYPES,
        cause="autocast",
    ),
    Mutant(
        id="mixed-gradient-left",
        exercise="2.5",
        bug="16-bit gradients stay in the model, and are counted again",
        find="            master.grad += p.grad\n        p.grad = None\n",
        replace="            master.grad += p.grad\n",
        killed_by=TYPES,
        cause="gradient-left",
    ),
    Mutant(
        id="mixed-reads-back",
        exercise="2.5",
        bug="BUGS 76: the masters are made anew from the rounded weights after each step",
        find=BACK,
        replace=BACK
        + "            torch._foreach_copy_(list(self.master_of.values()), list(self.master_of))\n",
        killed_by=SMALL,
        cause="update-lost",
    ),
    Mutant(
        id="mixed-no-write-back",
        exercise="2.5",
        bug="the weights don't follow their masters",
        find=MIXED + "    model.write_back()\n",
        replace=MIXED,
        killed_by=READS,
        cause="stale-weights",
    ),
    Mutant(
        id="mixed-rank-alone",
        exercise="2.5",
        bug="BUGS 33: every rank steps with its own gradient",
        find=MIXED,
        replace=MIXED.replace("group=group", "group=dist.new_subgroups(1)[0]"),
        killed_by=STEP,
        cause="wrong",
    ),
    Mutant(
        id="mixed-sum-of-micro-batches-16-bit",
        exercise="2.5",
        bug="gradients of micro-batches add up in 16 bits",
        find=SUM,
        replace="        total = p.grad if master.grad is None else master.grad.to(p.dtype) + p.grad\n"
        "        master.grad = total.float()\n",
        killed_by=ADD,
        cause="sum-rounded",
    ),
    Mutant(
        id="mixed-wire-16-bit",
        exercise="2.5",
        bug="BUGS 76: the gradients are summed over the ranks in 16 bits and cast afterwards",
        find=MIXED,
        replace=OWN_STEP,
        patches=[("    MicroBatch,\n", "    MicroBatch,\n    accumulate,\n")],
        killed_by=WIRE,
        cause="wire-dtype",
    ),
    Mutant(
        id="mixed-any-dtype",
        exercise="2.5",
        bug="every dtype is taken",
        find="    if dtype not in (torch.bfloat16, torch.float16):\n",
        replace="    if not isinstance(dtype, torch.dtype):\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="mixed-cast-before",
        exercise="2.5",
        bug="a model that was cast before is taken: its masters begin rounded",
        find="        if p.is_floating_point() and p.dtype != torch.float32:\n",
        replace="        if not p.is_floating_point():\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="mixed-device-not-tried",
        exercise="2.5",
        bug="what the device can't do shows in the first forward only",
        find="        one @ one\n",
        replace="        one + one\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="scale-overflow-alone",
        exercise="2.6",
        bug="BUGS 40: each rank looks at its own gradients only",
        find=REDUCE,
        replace="",
        killed_by=ALL,
        cause="decided-alone",
    ),
    Mutant(
        id="scale-updated-alone",
        exercise="2.6",
        bug="BUGS 40: all skip, but only the rank that overflowed lowers its scale",
        find=REDUCE + FINITE,
        replace="        mine = not overflow.item()\n"
        + REDUCE
        + "        self.finite = mine\n        return not overflow.item()\n",
        killed_by=ALL,
        cause="scales-differ",
    ),
    Mutant(
        id="scale-without-gradient-leaves",
        exercise="2.6",
        bug="a rank without gradients does not take part: the others wait",
        find="        overflow = torch.zeros((), device=parameters[0].device)\n",
        replace="        overflow = torch.zeros((), device=parameters[0].device)\n"
        "        if not gradients:\n            self.finite = True\n            return True\n",
        killed_by=ALL,
        cause="hang",
    ),
    Mutant(
        id="scale-nan-missed",
        exercise="2.6",
        bug="only infinity counts as overflow, NaN does not",
        find="            overflow += ~extremes.isfinite().all()\n",
        replace="            overflow += extremes.isinf().any()\n",
        killed_by=ALL,
        cause="overflow-missed",
    ),
    Mutant(
        id="scale-never-down",
        exercise="2.6",
        bug="steps are skipped, but the scale stays",
        find="            self.scale = max(self.scale * self.backoff_factor, self.minimum)\n",
        replace="            self.scale = max(self.scale, self.minimum)\n",
        killed_by=SCALES,
        cause="backoff",
    ),
    Mutant(
        id="scale-grows-after-skips",
        exercise="2.6",
        bug="the count of quiet steps goes on after an overflow",
        find=COUNT,
        replace=COUNT.replace("0, self.overflows + 1", "self.quiet_steps, self.overflows + 1"),
        killed_by=SCALES,
        cause="growth-too-early",
    ),
    Mutant(
        id="scale-counter-not-reset",
        exercise="2.6",
        bug="once grown, the scale grows at every step",
        find=GROW,
        replace="        if self.quiet_steps >= self.growth_interval:\n",
        killed_by=SCALES,
        cause="growth-too-early",
    ),
    Mutant(
        id="scale-grows-once",
        exercise="2.6",
        bug="the count is not set back, and never equals the interval again",
        find=GROW,
        replace="        if self.quiet_steps == self.growth_interval:\n",
        killed_by=SCALES,
        cause="growth-missing",
    ),
    Mutant(
        id="scale-skips-count",
        exercise="2.6",
        bug="skipped steps count as quiet ones",
        find=COUNT,
        replace=COUNT.replace(
            "= 0, self.overflows + 1", "= self.quiet_steps + 1, self.overflows + 1"
        ),
        killed_by=SCALES,
        cause="backoff",
    ),
    Mutant(
        id="scale-no-hysteresis",
        exercise="2.6",
        bug="every overflow lowers the scale",
        find="        if self.overflows >= self.hysteresis:\n",
        replace="        if self.overflows:\n",
        killed_by=LIMITS,
        cause="backoff",
    ),
    Mutant(
        id="scale-hysteresis-not-in-a-row",
        exercise="2.6",
        bug="overflows count although quiet steps lie between them",
        find=COUNT + "        if self.overflows >= self.hysteresis:\n",
        replace=COUNT.replace("self.quiet_steps + 1, 0", "self.quiet_steps + 1, self.overflows")
        + "        if not self.finite and self.overflows >= self.hysteresis:\n",
        killed_by=LIMITS,
        cause="backoff",
    ),
    Mutant(
        id="scale-no-minimum",
        exercise="2.6",
        bug="the scale falls towards zero",
        find="            self.scale = max(self.scale * self.backoff_factor, self.minimum)\n",
        replace="            self.scale = self.scale * self.backoff_factor\n",
        killed_by=LIMITS,
        cause="backoff",
    ),
    Mutant(
        id="scale-beyond-float32",
        exercise="2.6",
        bug="the scale grows until a float32 loss times it is infinite",
        find="            if self.scale * self.growth_factor <= torch.finfo(torch.float32).max:\n",
        replace="            if self.scale < math.inf:\n",
        killed_by=LIMITS,
        cause="beyond-float32",
    ),
    Mutant(
        id="unscale-twice",
        exercise="2.6",
        bug="unscale may be called twice and divides twice",
        find="        if self.finite is not None:\n",
        replace="        if self.scale <= 0:\n",
        killed_by=ONCE,
        cause="accepted",
    ),
    Mutant(
        id="unscale-listed-twice",
        exercise="2.6",
        bug="BUGS 25: a tied parameter is divided once per mention",
        find="        parameters = list(dict.fromkeys(parameters))\n        gradients",
        replace="        parameters = list(parameters)\n        gradients",
        killed_by=ONCE,
        cause="scaled",
    ),
    Mutant(
        id="unscale-forgotten",
        exercise="2.6",
        bug="the gradients are looked at, but not divided",
        find=DIVIDE,
        replace="",
        killed_by=ONCE,
        cause="unchanged",
    ),
    Mutant(
        id="scaler-state-scale-only",
        exercise="2.6",
        bug="BUGS 41: only the scale is saved",
        find=SAVED,
        replace="",
        patches=[(LOADED, "")],
        killed_by=STATE,
        cause="state-lost",
    ),
    Mutant(
        id="scaler-state-not-loaded",
        exercise="2.6",
        bug="BUGS 41: the state is saved, but a resumed run begins with the first scale",
        find='        self.scale = float(state["scale"])\n' + LOADED,
        replace="        state = dict(state)\n",
        killed_by=STATE,
        cause="state-lost",
    ),
    Mutant(
        id="scaler-takes-anything",
        exercise="2.6",
        bug="a growth factor of 1 is taken: the scale never grows",
        find="        if not growth_factor > 1:\n",
        replace="        if not growth_factor > 0:\n",
        killed_by=SETTINGS,
        cause="accepted",
    ),
    Mutant(
        id="scaled-norm-refused-late",
        exercise="2.6",
        bug="a bad limit is refused after the gradients were sent and divided",
        find="    if max_norm is not None and not max_norm > 0:\n",
        replace="    if max_norm is not None and math.isnan(max_norm):\n",
        killed_by=LIMIT,
        cause="too-late",
    ),
    Mutant(
        id="scaled-clip-first",
        exercise="2.6",
        bug="BUGS 38: the gradient is clipped before it is unscaled",
        find=UNSCALE + CLIP,
        replace=CLIP + UNSCALE,
        killed_by=SCALED,
        cause="norm-scaled",
    ),
    Mutant(
        id="scaled-unscaled-twice",
        exercise="2.6",
        bug="the gradient is divided by the scale twice",
        find=UNSCALE,
        replace=UNSCALE
        + "    for p in trainable:\n        p.grad.div_(scaler.scale)\n",
        killed_by=SCALED,
        cause="norm",
    ),
    Mutant(
        id="scaled-after-backward",
        exercise="2.6",
        bug="the gradients are scaled after backward, when the small ones are 0 already",
        find=LOSS,
        replace=LOSS.replace("loss_scale=scaler.scale, ", "") + "    for p in model.parameters():\n"
        "        if p.grad is not None:\n            p.grad.mul_(scaler.scale)\n",
        killed_by=SURVIVE,
        cause="underflow",
    ),
    Mutant(
        id="scaled-steps-anyway",
        exercise="2.6",
        bug="the optimizer steps with infinite gradients",
        find="    if finite:\n        optimizer.step()\n",
        replace="    if trainable:\n        optimizer.step()\n",
        killed_by=OVERFLOW,
        cause="half-skipped",
    ),
    Mutant(
        id="scaled-zeroes-instead",
        exercise="2.6",
        bug="infinite gradients are set to zero: Adam steps all the same",
        find=TAKE,
        replace="    if not finite:\n        for p in trainable:\n            p.grad.zero_()\n"
        "    optimizer.step()\n    model.write_back()\n    scaler.update()\n",
        killed_by=OVERFLOW,
        cause="half-skipped",
    ),
    Mutant(
        id="scaled-update-forgotten",
        exercise="2.6",
        bug="update is called after a step only: after an overflow the scale stays",
        find=TAKE,
        replace=TAKE.replace("    scaler.update()\n", "        scaler.update()\n"),
        killed_by=OVERFLOW,
        cause="exception",
    ),
    Mutant(
        id="scaled-nothing-counts",
        exercise="2.6",
        bug="a window without targets counts as a quiet step",
        find="    if not total:\n        return 0.0, 0.0, False\n",
        replace="    if not total:\n        scaler.unscale(model.parameters(), group)\n"
        "        scaler.update()\n        return 0.0, 0.0, False\n",
        killed_by=NOTHING,
        cause="stepped",
    ),
]
