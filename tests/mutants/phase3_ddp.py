"""Wrong implementations of exercise 3.11."""

from distlab.grading.wrong import Mutant

NONE, ONE = "test_what_no_rank_uses_stays_none", "test_training_equals_one_process"
NO_MORE = "test_without_agreement_nothing_more_is_sent"
BUFFERS = "test_training_forward_reads_the_first_ranks_buffers"
WINDOW, COPY = "test_no_sync_sends_nothing_and_loses_nothing", "test_no_sync_needs_no_second_copy"
WANTED = "test_backward_where_the_user_wants_it"
CHECKPOINTS = "test_checkpoints_reduce_once"
TWICE = "test_a_gradient_that_is_complete_twice_is_an_error"
FAILED, GIVEN_UP = (
    "test_a_failed_step_is_left_out_on_all_ranks",
    "test_a_rank_gives_up_without_backward",
)
SUBGROUP = "test_a_step_fails_in_a_group"
NAN, LEFT = "test_without_agreement_the_others_find_nan", "test_abort_leaves_no_gradient"

ABORT = "        if self.running:\n            self.abort()\n"
SEND_BUFFERS = """        if self.sync and self.module.training:
            broadcast_tensors(list(self.module.buffers()), self.limits[0], self.group)
"""
OUTPUTS = """        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._outermost)
"""
LOCAL = """            bucket, place = self.home[index]
            bucket.take(place)
            return
"""
HAS = "        has_gradient = [p.grad is not None for p in self.trainable]\n"
QUITTER = "        quitter = dist.get_rank(self.group) + 1 if self.given_up else 0\n"
FLUSH = "        self._flush()\n"
TOLD = """        super()._finish()
        told.wait()
"""
CLEAR = """            if quitter or not wanted:
                p.grad = None
"""
FILL = """                p.grad = torch.full_like(p, float("nan"))
"""
GIVE_UP = """        try:
            with contextlib.suppress(StepAborted):
                self._finish()
        finally:
            self.given_up = False
"""

MUTANTS = [
    Mutant(
        id="ddp-unused-gets-zeros",
        exercise="3.11",
        bug="BUGS 24: what nobody uses gets a zero gradient: weight decay moves it",
        find=CLEAR,
        replace="            if quitter:\n                p.grad = None\n",
        killed_by=NONE,
        cause="not-none",
    ),
    Mutant(
        id="ddp-none-decided-alone",
        exercise="3.11",
        bug="BUGS 24: each rank decides from its own backward which gradients are None",
        find="        quitter, *anyone_has = facts.tolist()\n",
        replace="        quitter, *_ = facts.tolist()\n        anyone_has = has_gradient\n",
        killed_by=NONE,
        cause="none-alone",
    ),
    Mutant(
        id="ddp-first-rank-decides",
        exercise="3.11",
        bug="BUGS 24: what the first rank does not use is nobody's",
        find="        told = dist.all_reduce(facts, dist.ReduceOp.MAX, group=self.group, async_op=True)\n",
        replace="        told = dist.broadcast(facts, group=self.group, group_src=0, async_op=True)\n",
        killed_by=NONE,
        cause="none-alone",
    ),
    Mutant(
        id="ddp-agrees-before-buckets",
        exercise="3.11",
        bug="the message about gradients overtakes the buckets of a rank that lacks one",
        find=FLUSH,
        replace="        if self.agree:\n"
        "            early = torch.zeros(1, dtype=torch.int32)\n"
        "            dist.all_reduce(early, group=self.group)\n" + FLUSH,
        killed_by=NONE,
        cause="mismatch",
    ),
    Mutant(
        id="ddp-agreement-never-waited",
        exercise="3.11",
        bug="BUGS 22: the message about gradients is read before it has arrived",
        find=TOLD,
        replace="        super()._finish()\n",
        killed_by=NONE,
        cause="never-waited",
    ),
    Mutant(
        id="ddp-unused-drifts",
        exercise="3.11",
        bug="BUGS 30: ranks that have no gradient of their own skip the parameter, the others don't",
        find=CLEAR,
        replace="            if quitter or not wanted:\n"
        "                p.grad = None\n"
        "        for p, mine in zip(self.trainable, has_gradient, strict=True):\n"
        "            if not mine:\n"
        "                p.grad = None\n",
        killed_by=ONE,
        cause="wrong",
    ),
    Mutant(
        id="ddp-always-agrees",
        exercise="3.11",
        bug="the message is sent although agree is False",
        find="        if not self.agree:\n            super()._finish()\n            return\n",
        replace="",
        killed_by=NO_MORE,
        cause="zeros-expected",
    ),
    Mutant(
        id="ddp-searches-every-time",
        exercise="3.11",
        bug="without agreement the ranks still ask each other who has what",
        find="        if not self.agree:\n            super()._finish()\n            return\n",
        replace="        if not self.agree:\n"
        "            dist.all_reduce(torch.tensor([float(len(self.arrived))]), group=self.group)\n"
        "            super()._finish()\n            return\n",
        killed_by=NO_MORE,
        cause="too-many-messages",
    ),
    Mutant(
        id="ddp-buffers-own",
        exercise="3.11",
        bug="BUGS 19: every rank keeps its own buffers",
        find=SEND_BUFFERS,
        replace="",
        killed_by=BUFFERS,
        cause="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-averaged",
        exercise="3.11",
        bug="BUGS 31: running statistics are averaged, as if BatchNorm had seen all ranks' samples",
        find="            broadcast_tensors(list(self.module.buffers()), self.limits[0], self.group)\n",
        replace="            for b in self.module.buffers():\n"
        "                mean = b.double()\n"
        "                dist.all_reduce(mean, group=self.group)\n"
        "                b.copy_(mean.mul_(self.share))\n",
        killed_by=BUFFERS,
        cause="buffers-mixed",
    ),
    Mutant(
        id="ddp-buffers-of-the-world",
        exercise="3.11",
        bug="the buffers are broadcast in the default group: the ranks outside never come",
        find="            broadcast_tensors(list(self.module.buffers()), self.limits[0], self.group)\n",
        replace="            broadcast_tensors(list(self.module.buffers()), self.limits[0])\n",
        killed_by=SUBGROUP,
        cause="hang",
    ),
    Mutant(
        id="ddp-agrees-in-the-world",
        exercise="3.11",
        bug="the ranks of a group agree with everybody: the ranks outside never come",
        find="dist.ReduceOp.MAX, group=self.group, async_op=True)\n",
        replace="dist.ReduceOp.MAX, async_op=True)\n",
        killed_by=SUBGROUP,
        cause="hang",
    ),
    Mutant(
        id="ddp-names-global-rank",
        exercise="3.11",
        bug="BUGS 1: the rank that gave up is counted in the world, not in the group",
        find=QUITTER,
        replace="        quitter = dist.get_rank() + 1 if self.given_up else 0\n",
        killed_by=SUBGROUP,
        cause="failure-not-told",
    ),
    Mutant(
        id="ddp-buffers-after-forward",
        exercise="3.11",
        bug="BUGS 19: the buffers are made equal after forward: what no_sync has changed stays",
        find=SEND_BUFFERS + "        outputs = self.module(*args, **kwargs)\n",
        replace="        outputs = self.module(*args, **kwargs)\n" + SEND_BUFFERS,
        killed_by=BUFFERS,
        cause="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-of-state-dict",
        exercise="3.11",
        bug="BUGS 19: buffers that state_dict() leaves out are left out",
        find="            broadcast_tensors(list(self.module.buffers()), self.limits[0], self.group)\n",
        replace="            kept = set(self.module.state_dict())\n"
        "            chosen = [b for n, b in self.module.named_buffers() if n in kept]\n"
        "            broadcast_tensors(chosen, self.limits[0], self.group)\n",
        killed_by=BUFFERS,
        cause="buffers-differ",
    ),
    Mutant(
        id="ddp-buffers-one-by-one",
        exercise="3.11",
        bug="a message per buffer",
        find="            broadcast_tensors(list(self.module.buffers()), self.limits[0], self.group)\n",
        replace="            for b in self.module.buffers():\n"
        "                broadcast_tensors([b], self.limits[0], self.group)\n",
        killed_by=BUFFERS,
        cause="too-many-messages",
    ),
    Mutant(
        id="ddp-buffers-in-evaluation",
        exercise="3.11",
        bug="BUGS 7: the buffers travel in evaluation too, where ranks have unequal numbers of batches",
        find="        if self.sync and self.module.training:\n",
        replace="        if self.sync:\n",
        killed_by=BUFFERS,
        cause="mismatch",
    ),
    Mutant(
        id="ddp-buffers-in-no-sync",
        exercise="3.11",
        bug="the buffers travel inside no_sync",
        find="        if self.sync and self.module.training:\n",
        replace="        if self.module.training:\n",
        killed_by=BUFFERS,
        cause="sends-alone",
    ),
    Mutant(
        id="ddp-no-sync-syncs",
        exercise="3.11",
        bug="BUGS 33: no_sync changes nothing",
        find="        before, self.sync = self.sync, False\n",
        replace="        before = self.sync\n",
        killed_by=WINDOW,
        cause="sends-inside",
    ),
    Mutant(
        id="ddp-no-sync-for-ever",
        exercise="3.11",
        bug="after an exception inside no_sync nothing is ever sent again",
        find="        try:\n            yield\n        finally:\n            self.sync = before\n",
        replace="        yield\n        self.sync = before\n",
        killed_by=WINDOW,
        cause="only-own",
    ),
    Mutant(
        id="ddp-no-sync-not-nested",
        exercise="3.11",
        bug="the end of an inner no_sync ends the outer one",
        find="            self.sync = before\n",
        replace="            self.sync = True\n",
        killed_by=WINDOW,
        cause="sends-inside",
    ),
    Mutant(
        id="ddp-no-sync-at-forward",
        exercise="3.11",
        bug="BUGS 34: what counts is where forward ran: no_sync round backward sends",
        find="        if not self.sync:\n" + LOCAL,
        replace="        if not self.armed:\n" + LOCAL,
        patches=[
            (ABORT, "        self.armed = self.sync\n" + ABORT),
            (
                "        if self.sync:\n            self._begin()\n",
                "        if self.armed:\n            self._begin()\n",
            ),
        ],
        killed_by=WANTED,
        cause="sends-inside",
    ),
    Mutant(
        id="ddp-window-forgotten",
        exercise="3.11",
        bug="BUGS 24: a parameter that only an earlier micro-batch used counts as unused",
        find=HAS,
        replace="        has_gradient = [k in self.arrived for k in range(len(self.trainable))]\n",
        killed_by=WINDOW,
        cause="none-alone",
    ),
    Mutant(
        id="ddp-window-zeroed",
        exercise="3.11",
        bug="what the last micro-batch did not use is sent as zeros",
        find=HAS,
        replace=HAS + "        for k, p in enumerate(self.trainable):\n"
        "            if k not in self.arrived and not self.given_up:\n"
        "                p.grad = None\n",
        killed_by=WINDOW,
        cause="zeros",
    ),
    Mutant(
        id="ddp-window-beside-buckets",
        exercise="3.11",
        bug="local gradients live beside the buckets: 2N bytes",
        find=LOCAL,
        replace="            return\n",
        killed_by=COPY,
        cause="copies",
    ),
    Mutant(
        id="ddp-window-divided",
        exercise="3.11",
        bug="BUGS 21: local gradients are divided by W in every micro-batch",
        find="            bucket.take(place)\n",
        replace="            bucket.take(place, self.share)\n",
        killed_by=WINDOW,
        cause="wrong",
    ),
    Mutant(
        id="ddp-inner-backward-ends",
        exercise="3.11",
        bug="the end of a checkpoint's own backward is taken for the end: everything travels again",
        find=OUTPUTS,
        replace="",
        killed_by=CHECKPOINTS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="ddp-outputs-tensor-only",
        exercise="3.11",
        bug="outputs in a dict are not found",
        find=OUTPUTS,
        replace="        if isinstance(outputs, Tensor):\n"
        "            outputs.register_hook(self._outermost)\n",
        killed_by=CHECKPOINTS,
        cause="too-many-bytes",
    ),
    Mutant(
        id="ddp-twice-accepted",
        exercise="3.11",
        bug="a gradient that comes twice is counted twice, and its bucket never leaves",
        find="        if index in self.arrived:\n",
        replace="        if index < 0:\n",
        killed_by=TWICE,
        cause="twice-accepted",
    ),
    Mutant(
        id="ddp-twice-ignored",
        exercise="3.11",
        bug="the second time is dropped without a word: half of the gradient is missing",
        find="        if index in self.arrived:\n",
        replace="        if index in self.arrived:\n            return\n        if index < 0:\n",
        killed_by=TWICE,
        cause="twice-accepted",
    ),
    Mutant(
        id="ddp-failure-forgotten",
        exercise="3.11",
        bug="BUGS 8: after an exception the rank begins anew; the others wait for its buckets",
        find=ABORT,
        replace="        if self.running:\n            self._reset()\n",
        killed_by=FAILED,
        cause="mismatch",
    ),
    Mutant(
        id="ddp-failure-goes-on",
        exercise="3.11",
        bug="BUGS 8: the next backward goes on where the one that raised has stopped",
        find=ABORT,
        replace="",
        killed_by=FAILED,
        cause="mismatch",
    ),
    Mutant(
        id="ddp-failure-untold",
        exercise="3.11",
        bug="BUGS 8: the failing rank sends what is missing, but nobody is told",
        find=QUITTER,
        replace="        quitter = 0\n",
        killed_by=FAILED,
        cause="failure-not-told",
    ),
    Mutant(
        id="ddp-failure-gradients-stay",
        exercise="3.11",
        bug="the ranks are told, and keep gradients that are partly NaN",
        find=CLEAR,
        replace="            if not wanted:\n                p.grad = None\n",
        killed_by=FAILED,
        cause="failure-not-told",
    ),
    Mutant(
        id="ddp-failure-raises-first",
        exercise="3.11",
        bug="the error is raised before everything has arrived: the next step begins in a mess",
        find=TOLD,
        replace="        told.wait()\n"
        "        if facts[0] and not self.given_up:\n"
        "            self._reset()\n"
        "            raise StepAborted\n"
        "        super()._finish()\n",
        killed_by=FAILED,
        cause="mismatch",
    ),
    Mutant(
        id="ddp-gives-up-for-ever",
        exercise="3.11",
        bug="a rank that gave up once gives up every step",
        find=GIVE_UP,
        replace="        with contextlib.suppress(StepAborted):\n            self._finish()\n",
        killed_by=FAILED,
        cause="next-step-broken",
    ),
    Mutant(
        id="ddp-abort-raises",
        exercise="3.11",
        bug="the rank that gave up is told of itself: its next forward raises",
        find=GIVE_UP,
        replace="        try:\n            self._finish()\n"
        "        finally:\n            self.given_up = False\n",
        killed_by=GIVEN_UP,
        cause="failure-not-told",
    ),
    Mutant(
        id="ddp-abort-sends-zeros",
        exercise="3.11",
        bug="a rank that gave up sends zeros: the others step with a gradient that lacks its part",
        find=FILL,
        replace="                p.grad = torch.zeros_like(p)\n",
        killed_by=NAN,
        cause="failure-not-told",
    ),
    Mutant(
        id="ddp-abort-keeps-gradients",
        exercise="3.11",
        bug="after abort() the rank still has gradients and steps with them",
        find=GIVE_UP + "        for p in self.trainable:\n            p.grad = None\n",
        replace=GIVE_UP,
        patches=[
            (
                CLEAR,
                "            if not wanted or (quitter and not self.given_up):\n                p.grad = None\n",
            )
        ],
        killed_by=LEFT,
        cause="gradient-left",
    ),
]
