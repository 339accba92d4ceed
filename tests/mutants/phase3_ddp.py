"""Wrong implementations of exercise 3.11."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="ddp-unused-gets-zeros",
        exercise="3.11",
        mistake="what nobody uses gets a zero gradient: weight decay moves it",
        text="""            if quitter or not wanted:
                p.grad = None
""",
        becomes="""            if quitter:
                p.grad = None
""",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="not-none",
    ),
    Mutant(
        id="ddp-none-decided-alone",
        exercise="3.11",
        mistake="each rank decides from its own backward which gradients are None",
        text="        quitter, *anyone_has = facts.tolist()\n",
        becomes="""        quitter, *_ = facts.tolist()
        anyone_has = has_gradient
""",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="none-alone",
    ),
    Mutant(
        id="ddp-first-rank-decides",
        exercise="3.11",
        mistake="what the first rank does not use is nobody's",
        text="            dist.all_reduce(facts, dist.ReduceOp.MAX, group=self.group)\n",
        becomes="            dist.broadcast(facts, group=self.group, group_src=0)\n",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="none-alone",
    ),
    Mutant(
        id="ddp-agrees-before-buckets",
        exercise="3.11",
        mistake="the message about gradients overtakes the buckets of a rank that lacks one",
        text="        self._flush()\n",
        becomes="""        if self.agree:
            early = torch.zeros(1, dtype=torch.int32)
            dist.all_reduce(early, group=self.group)
        self._flush()
""",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="mismatch",
    ),
    Mutant(
        id="ddp-agreement-never-waited",
        exercise="3.11",
        mistake="the message about gradients is read before it has arrived",
        text="            dist.all_reduce(facts, dist.ReduceOp.MAX, group=self.group)\n",
        becomes=(
            "            dist.all_reduce(\n"
            "                facts, dist.ReduceOp.MAX, group=self.group, async_op=True\n"
            "            )\n"
        ),
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="never-waited",
    ),
    Mutant(
        id="ddp-unused-drifts",
        exercise="3.11",
        mistake="ranks that have no gradient of their own skip the parameter, the others don't",
        text="""            if quitter or not wanted:
                p.grad = None
""",
        becomes="""            if quitter or not wanted:
                p.grad = None
        for p, mine in zip(self.trainable, has_gradient, strict=True):
            if not mine:
                p.grad = None
""",
        caught_by="test_training_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="ddp-always-agrees",
        exercise="3.11",
        mistake="the message is sent although agree is False",
        text="""        if self.agree:
            facts =""",
        becomes="""        if True:
            facts =""",
        more=(("        if not self.agree:\n            return\n", ""),),
        caught_by="test_without_agreement_nothing_more_is_sent",
        told_as="zeros-expected",
    ),
    Mutant(
        id="ddp-searches-every-time",
        exercise="3.11",
        mistake="without agreement the ranks still ask each other who has what",
        text="""        if self.agree:
            facts =""",
        becomes="""        if True:
            facts =""",
        caught_by="test_without_agreement_nothing_more_is_sent",
        told_as="too-many-messages",
    ),
    Mutant(
        id="ddp-buffers-own",
        exercise="3.11",
        mistake="every rank keeps its own buffers",
        text="""        if self.sync and self.module.training:
            buffers = [b.data for b in self.module.buffers()]  # autograd counts no change of these
            broadcast_tensors(buffers, self.limits[0], self.group)
""",
        becomes="",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-averaged",
        exercise="3.11",
        mistake="running statistics are averaged, as if BatchNorm had seen all ranks' samples",
        text=("            broadcast_tensors(buffers, self.limits[0], self.group)\n"),
        becomes="""            for b in self.module.buffers():
                mean = b.double()
                dist.all_reduce(mean, group=self.group)
                b.copy_(mean.mul_(self.share))
""",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-mixed",
    ),
    Mutant(
        id="ddp-buffers-of-the-world",
        exercise="3.11",
        mistake="the buffers are broadcast in the default group: those of rank 0",
        text=("            broadcast_tensors(buffers, self.limits[0], self.group)\n"),
        becomes="            broadcast_tensors(buffers, self.limits[0])\n",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-mixed",
    ),
    Mutant(
        id="ddp-agrees-in-the-world",
        exercise="3.11",
        mistake="the ranks of a group agree with everybody: a step that failed elsewhere is lost",
        text="dist.ReduceOp.MAX, group=self.group)\n",
        becomes="dist.ReduceOp.MAX)\n",
        caught_by="test_a_step_fails_in_a_group",
        told_as="next-step-broken",
    ),
    Mutant(
        id="ddp-names-global-rank",
        exercise="3.11",
        mistake="the rank that gave up is counted in the world, not in the group",
        text="        quitter = dist.get_rank(self.group) + 1 if self.given_up else 0\n",
        becomes="        quitter = dist.get_rank() + 1 if self.given_up else 0\n",
        caught_by="test_a_step_fails_in_a_group",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-buffers-after-forward",
        exercise="3.11",
        mistake="the buffers are made equal after forward: what no_sync has changed stays",
        text="""        if self.sync and self.module.training:
            buffers = [b.data for b in self.module.buffers()]  # autograd counts no change of these
            broadcast_tensors(buffers, self.limits[0], self.group)
        outputs = self.module(*args, **kwargs)
""",
        becomes="""        outputs = self.module(*args, **kwargs)
        if self.sync and self.module.training:
            buffers = [b.data for b in self.module.buffers()]  # autograd counts no change of these
            broadcast_tensors(buffers, self.limits[0], self.group)
""",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-of-state-dict",
        exercise="3.11",
        mistake="buffers that state_dict() leaves out are left out",
        text=("            broadcast_tensors(buffers, self.limits[0], self.group)\n"),
        becomes="""            kept = set(self.module.state_dict())
            chosen = [b for n, b in self.module.named_buffers() if n in kept]
            broadcast_tensors(chosen, self.limits[0], self.group)
""",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-one-by-one",
        exercise="3.11",
        mistake="a message per buffer",
        text=("            broadcast_tensors(buffers, self.limits[0], self.group)\n"),
        becomes="""            for b in self.module.buffers():
                broadcast_tensors([b], self.limits[0], self.group)
""",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="too-many-messages",
    ),
    Mutant(
        id="ddp-buffers-in-evaluation",
        exercise="3.11",
        mistake="the buffers travel in evaluation too, where ranks have unequal numbers of batches",
        text="        if self.sync and self.module.training:\n",
        becomes="        if self.sync:\n",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="sends-alone",
    ),
    Mutant(
        id="ddp-buffers-in-no-sync",
        exercise="3.11",
        mistake="the buffers travel inside no_sync",
        text="        if self.sync and self.module.training:\n",
        becomes="        if self.module.training:\n",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="sends-alone",
    ),
    Mutant(
        id="ddp-no-sync-syncs",
        exercise="3.11",
        mistake="no_sync changes nothing",
        text="        before, self.sync = self.sync, False\n",
        becomes="        before = self.sync\n",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="sends-inside",
    ),
    Mutant(
        id="ddp-no-sync-for-ever",
        exercise="3.11",
        mistake="after an exception inside no_sync nothing is ever sent again",
        text="""        try:
            yield
        finally:
            self.sync = before
""",
        becomes="""        yield
        self.sync = before
""",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="only-own",
    ),
    Mutant(
        id="ddp-no-sync-not-nested",
        exercise="3.11",
        mistake="the end of an inner no_sync ends the outer one",
        text="            self.sync = before\n",
        becomes="            self.sync = True\n",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="sends-inside",
    ),
    Mutant(
        id="ddp-no-sync-at-forward",
        exercise="3.11",
        mistake="what counts is where forward ran: no_sync round backward sends",
        text="""        if not self.sync:
            bucket, k = self.home[index]
            bucket.take(k)
            return
""",
        becomes="""        if not self.armed:
            bucket, k = self.home[index]
            bucket.take(k)
            return
""",
        more=(
            (
                """        if self.running:
            self.abort()
""",
                """        self.armed = self.sync
        if self.running:
            self.abort()
""",
            ),
            (
                """        if self.sync:
            self._begin()
""",
                """        if self.armed:
            self._begin()
""",
            ),
        ),
        caught_by="test_backward_where_the_user_wants_it",
        told_as="sends-inside",
    ),
    Mutant(
        id="ddp-window-forgotten",
        exercise="3.11",
        mistake="a parameter that only an earlier micro-batch used counts as unused",
        text="        has_gradient = [p.grad is not None for p in self.trainable]\n",
        becomes="        has_gradient = [k in self.arrived for k in range(len(self.trainable))]\n",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="none-alone",
    ),
    Mutant(
        id="ddp-window-zeroed",
        exercise="3.11",
        mistake="what the last micro-batch did not use is sent as zeros",
        text="        has_gradient = [p.grad is not None for p in self.trainable]\n",
        becomes="""        has_gradient = [p.grad is not None for p in self.trainable]
        for k, p in enumerate(self.trainable):
            if k not in self.arrived and not self.given_up:
                p.grad = None
""",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="zeros",
    ),
    Mutant(
        id="ddp-window-beside-buckets",
        exercise="3.11",
        mistake="local gradients live beside the buckets: 2N bytes",
        text="""            bucket, k = self.home[index]
            bucket.take(k)
            return
""",
        becomes="            return\n",
        caught_by="test_no_sync_needs_no_second_copy",
        told_as="copies",
    ),
    Mutant(
        id="ddp-window-divided",
        exercise="3.11",
        mistake="local gradients are divided by W in every micro-batch",
        text="            bucket.take(k)\n",
        becomes="            bucket.take(k, self.share)\n",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="wrong",
    ),
    Mutant(
        id="ddp-inner-backward-ends",
        exercise="3.11",
        mistake=(
            "the end of a checkpoint's own backward is taken for the end: everything travels again"
        ),
        text="""        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._outermost)
""",
        becomes="",
        caught_by="test_checkpoints_reduce_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="ddp-outputs-tensor-only",
        exercise="3.11",
        mistake="outputs in a dict are not found",
        text="""        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._outermost)
""",
        becomes="""        if isinstance(outputs, Tensor):
            outputs.register_hook(self._outermost)
""",
        caught_by="test_checkpoints_reduce_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="ddp-twice-accepted",
        exercise="3.11",
        mistake="a gradient that comes twice is counted twice, and its bucket never leaves",
        text="        if index in self.arrived:\n",
        becomes="        if index < 0:\n",
        caught_by="test_a_gradient_that_is_complete_twice_is_an_error",
        told_as="twice-accepted",
    ),
    Mutant(
        id="ddp-twice-ignored",
        exercise="3.11",
        mistake="the second time is dropped without a word: half of the gradient is missing",
        text="        if index in self.arrived:\n",
        becomes="""        if index in self.arrived:
            return
        if index < 0:
""",
        caught_by="test_a_gradient_that_is_complete_twice_is_an_error",
        told_as="twice-accepted",
    ),
    Mutant(
        id="ddp-failure-forgotten",
        exercise="3.11",
        mistake="after an exception the rank begins anew; the others wait for its buckets",
        text="""        if self.running:
            self.abort()
""",
        becomes="""        if self.running:
            self._reset()
""",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="mismatch",
    ),
    Mutant(
        id="ddp-failure-goes-on",
        exercise="3.11",
        mistake="the next backward goes on where the one that raised has stopped",
        text="""        if self.running:
            self.abort()
""",
        becomes="",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="mismatch",
    ),
    Mutant(
        id="ddp-failure-untold",
        exercise="3.11",
        mistake="the failing rank sends what is missing, but nobody is told",
        text="        quitter = dist.get_rank(self.group) + 1 if self.given_up else 0\n",
        becomes="        quitter = 0\n",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-failure-gradients-stay",
        exercise="3.11",
        mistake="the ranks are told, and keep gradients that are partly NaN",
        text="""            if quitter or not wanted:
                p.grad = None
""",
        becomes="""            if not wanted:
                p.grad = None
""",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-failure-raises-first",
        exercise="3.11",
        mistake="the error is raised before everything has arrived: the next step begins in a mess",
        text="        super()._finish()\n",
        becomes="""        if self.agree and facts[0] and not self.given_up:
            self._reset()
            raise StepAborted(int(facts[0]) - 1)
        super()._finish()
""",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="mismatch",
    ),
    Mutant(
        id="ddp-gives-up-for-ever",
        exercise="3.11",
        mistake="a rank that gave up once gives up every step",
        text="""        with contextlib.suppress(StepAborted):
            self._finish()
        self.given_up = False
""",
        becomes="""        with contextlib.suppress(StepAborted):
            self._finish()
""",
        caught_by="test_a_failed_step_is_left_out_on_all_ranks",
        told_as="next-step-broken",
    ),
    Mutant(
        id="ddp-abort-raises",
        exercise="3.11",
        mistake="the rank that gave up is told of itself: its next forward raises",
        text="""        with contextlib.suppress(StepAborted):
            self._finish()
        self.given_up = False
""",
        becomes="""        try:
            self._finish()
        finally:
            self.given_up = False
""",
        caught_by="test_a_rank_gives_up_without_backward",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-abort-sends-zeros",
        exercise="3.11",
        mistake=(
            "a rank that gave up sends zeros: the others step with a gradient that lacks its part"
        ),
        text='            p.grad = torch.full_like(p, float("nan"))\n',
        becomes="            p.grad = torch.zeros_like(p)\n",
        caught_by="test_without_agreement_the_others_find_nan",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-abort-keeps-gradients",
        exercise="3.11",
        mistake="after abort() the rank still has gradients and steps with them",
        text="""        with contextlib.suppress(StepAborted):
            self._finish()
        self.given_up = False
        for p in self.trainable:
            p.grad = None
""",
        becomes="""        with contextlib.suppress(StepAborted):
            self._finish()
        self.given_up = False
""",
        more=(
            (
                """            if quitter or not wanted:
                p.grad = None
""",
                """            if not wanted or (quitter and not self.given_up):
                p.grad = None
""",
            ),
        ),
        caught_by="test_abort_leaves_no_gradient",
        told_as="gradient-left",
    ),
    Mutant(
        id="ddp-buffers-seen-by-autograd",
        exercise="3.11",
        mistake="buffers change under autograd's eyes: two forwards and one backward raise",
        text="[b.data for b in self.module.buffers()]",
        becomes="[b for b in self.module.buffers()]",
        caught_by="test_backward_where_the_user_wants_it",
        told_as="exception",
    ),
    Mutant(
        id="ddp-undefined-gets-zeros",
        exercise="3.11",
        mistake="a gradient that backward leaves undefined becomes zeros, although ranks agree",
        text="""        if p.grad is None:
            return
""",
        becomes="",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="not-none",
    ),
    Mutant(
        id="ddp-all-leave-at-the-end",
        exercise="3.11",
        mistake="buckets are filled and sent when backward is over",
        text="        super()._ready(index, p)\n",
        becomes="        self._begin()\n",
        caught_by="test_buckets_leave_during_backward",
        told_as="no-overlap",
    ),
    Mutant(
        id="ddp-own-mode",
        exercise="3.11",
        mistake="the wrapper's own mode decides, not that of the module",
        text="        if self.sync and self.module.training:\n",
        becomes="        if self.sync and self.training:\n",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as=("sends-alone", "mismatch", "hang"),
    ),
    Mutant(
        id="ddp-abort-keeps-accumulated",
        exercise="3.11",
        mistake="abort() fills NaN in only where there is no gradient: what had accumulated is sent",
        text='            p.grad = torch.full_like(p, float("nan"))\n',
        becomes="""            if p.grad is None:
                p.grad = torch.full_like(p, float("nan"))
""",
        caught_by="test_abort_leaves_no_gradient",
        told_as="failure-not-told",
    ),
    Mutant(
        id="ddp-first-buffers",
        exercise="3.11",
        mistake="the buffers of the first forward are sent for ever, also if the module has new ones",
        text="            buffers = [b.data for b in self.module.buffers()]",
        becomes="""            if not hasattr(self, "kept"):
                self.kept = list(self.module.buffers())
            buffers = [b.data for b in self.kept]""",
        caught_by="test_training_forward_reads_the_first_ranks_buffers",
        told_as="buffers-differ",
    ),
    Mutant(
        id="ddp-only-dictionaries",
        exercise="3.11",
        mistake="outputs in a mapping that is no dictionary are not found",
        text="    elif isinstance(outputs, (list, tuple, Mapping)):\n",
        becomes="    elif isinstance(outputs, (list, tuple, dict)):\n",
        caught_by="test_checkpoints_reduce_once",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="ddp-zero-counts-as-none",
        exercise="3.11",
        mistake="a gradient of zeros counts as none: weight decay leaves its parameter alone",
        text="        has_gradient = [p.grad is not None for p in self.trainable]",
        becomes="        has_gradient = [p.grad is not None and bool(p.grad.any()) for p in self.trainable]",
        caught_by="test_what_no_rank_uses_stays_none",
        told_as="none-alone",
    ),
    Mutant(
        id="ddp-interrupt-in-no-sync",
        exercise="3.11",
        mistake="no_sync ends for an Exception, not for an interrupt",
        text="        try:\n            yield\n        finally:\n            self.sync = before",
        becomes="        try:\n            yield\n        except Exception:\n            self.sync = before\n            raise\n        self.sync = before",
        caught_by="test_no_sync_sends_nothing_and_loses_nothing",
        told_as="only-own",
    ),
]
