"""Wrong implementations of exercise 3.25."""

from distlab.grading.wrong import Mutant

LOCAL, OUTER = "test_rounds_of_local_sgd", "test_rounds_of_diloco"
BYTES, BUFFERS = "test_bytes_of_a_round", "test_buffers_agree"
EMPTY, GROUP = "test_finishing_twice_changes_nothing", "test_a_group_keeps_to_itself"
REFUSED, TRAIN = "test_bad_settings_are_refused", "test_train_counts_empty_batches"
H1 = "test_one_step_per_round_is_data_parallelism"

REDUCE = "        dist.all_reduce(flat, group=group)\n"
DIVIDE = "flat.div_(world_size)"
AGREE = "        means = mean_over_ranks(self.parameters, self.group)\n"
NOTE = (
    "        if self.since < self.every:\n            return False\n        return self.finish()\n"
)
NOTHING = "        if self.since == 0:\n            return False\n"
STATISTICS = """            means = mean_over_ranks(self.statistics, self.group)
            for statistic, mean in zip(self.statistics, means, strict=True):
                statistic.copy_(mean)
"""
VELOCITY = "            velocity.mul_(self.momentum).add_(delta)\n"
STEP = "            common.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)\n"
DELTAS = "        deltas = mean_over_ranks(differences, self.group)\n"

MUTANTS = [
    Mutant(
        id="local-sgd-summed",
        exercise="3.25",
        bug="BUGS 20: the models are added up and not divided",
        find=DIVIDE,
        replace="flat",
        killed_by=BUFFERS,
        cause="summed",
    ),
    Mutant(
        id="local-sgd-never-agrees",
        exercise="3.25",
        bug="BUGS 30: nothing is sent, every rank keeps a model of its own",
        find=REDUCE,
        replace="        flat *= world_size\n",
        killed_by=BUFFERS,
        cause="only-own",
    ),
    Mutant(
        id="local-sgd-all-gathered",
        exercise="3.25",
        bug="BUGS 29: every rank gets all models and takes the mean itself",
        find=REDUCE,
        replace="        every = [torch.empty_like(flat) for _ in range(world_size)]\n"
        "        dist.all_gather(every, flat, group=group)\n"
        "        flat = torch.stack(every).sum(0)\n",
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="local-sgd-one-by-one",
        exercise="3.25",
        bug="a message per parameter",
        find=AGREE,
        replace="        means = [mean_over_ranks([p], self.group)[0] for p in self.parameters]\n",
        killed_by=BYTES,
        cause="too-many-messages",
        patches=[
            (
                DELTAS,
                "        deltas = [mean_over_ranks([d], self.group)[0] for d in differences]\n",
            )
        ],
    ),
    Mutant(
        id="local-sgd-every-step",
        exercise="3.25",
        bug="the ranks agree in every step: H saves nothing",
        find=NOTE,
        replace="        self._agree_now()\n        return self.since == 0\n",
        killed_by=BYTES,
        cause="not-at-the-end",
        patches=[
            (
                "    def finish(self) -> bool:\n",
                "    def _agree_now(self) -> None:\n"
                "        since = self.since\n"
                "        self.finish()\n"
                "        self.since = since % self.every\n\n"
                "    def finish(self) -> bool:\n",
            )
        ],
    ),
    Mutant(
        id="local-sgd-round-too-long",
        exercise="3.25",
        bug="off by one: rounds of H + 1 steps",
        find="        if self.since < self.every:\n",
        replace="        if self.since <= self.every:\n",
        killed_by=LOCAL,
        cause="rounds",
    ),
    Mutant(
        id="local-sgd-frozen-sent",
        exercise="3.25",
        bug="BUGS 26: frozen parameters travel in every round",
        find="        self.parameters = [p for p in model.parameters() if p.requires_grad]\n",
        replace="        self.parameters = list(model.parameters())\n",
        killed_by=BYTES,
        cause="too-many-bytes",
    ),
    Mutant(
        id="local-sgd-starts-apart",
        exercise="3.25",
        bug="BUGS 18: every rank begins with weights of its own",
        find="        self._take_from_first(state)\n",
        replace="",
        killed_by=BUFFERS,
        cause="wrong",
    ),
    Mutant(
        id="local-sgd-buffers-forgotten",
        exercise="3.25",
        bug="BUGS 19: running statistics stay the rank's own",
        find=STATISTICS,
        replace="",
        killed_by=BUFFERS,
        cause="only-own",
    ),
    Mutant(
        id="local-sgd-counters-forgotten",
        exercise="3.25",
        bug="BUGS 19: counters and masks stay the rank's own",
        find="        self._take_from_first(self.counters)\n",
        replace="",
        killed_by=BUFFERS,
        cause="wrong",
    ),
    Mutant(
        id="local-sgd-empty-round",
        exercise="3.25",
        bug="finish() ends a round without steps: the outer momentum moves the model",
        find=NOTHING,
        replace="",
        killed_by=EMPTY,
        cause="empty-round",
    ),
    Mutant(
        id="local-sgd-whole-world",
        exercise="3.25",
        bug="the mean is over all ranks, not over those of the group",
        find=REDUCE,
        replace="        dist.all_reduce(flat)\n",
        killed_by=GROUP,
        cause="wrong-group",
    ),
    Mutant(
        id="local-sgd-empty-batch-skipped",
        exercise="3.25",
        bug="BUGS 13: a rank without data does not count the step, and comes too late",
        find="            sums[1] += len(targets)\n        rounds.step()\n",
        replace="            sums[1] += len(targets)\n            rounds.step()\n",
        killed_by=TRAIN,
        cause="mismatch",
    ),
    Mutant(
        id="local-sgd-last-round-lost",
        exercise="3.25",
        bug="BUGS 37: the round that the end cuts short is not ended",
        find="    rounds.finish()\n    dist.all_reduce(sums, group=rounds.group)\n",
        replace="    dist.all_reduce(sums, group=rounds.group)\n",
        killed_by=TRAIN,
        cause="wrong",
    ),
    Mutant(
        id="local-sgd-own-loss",
        exercise="3.25",
        bug="BUGS 96: the loss is the rank's own",
        find="    dist.all_reduce(sums, group=rounds.group)\n",
        replace="    sums[1] = dist.get_world_size(rounds.group) * sums[1]\n",
        killed_by=TRAIN,
        cause="wrong",
    ),
    Mutant(
        id="local-sgd-accepts-zero",
        exercise="3.25",
        bug="a round of 0 steps is accepted",
        find="        if every < 1:\n",
        replace="        if every < 0:\n",
        killed_by=REFUSED,
        cause="accepted",
    ),
    Mutant(
        id="local-sgd-late-refusal",
        exercise="3.25",
        bug="the outer settings are refused after the model was sent",
        find="        if not lr > 0:\n",
        replace="        super().__init__(model, every=every, group=group)\n        if not lr > 0:\n",
        killed_by=REFUSED,
        cause="late-check",
    ),
    Mutant(
        id="diloco-classic-momentum",
        exercise="3.25",
        bug="heavy-ball momentum instead of Nesterov's",
        find=STEP,
        replace="            common.sub_(velocity, alpha=self.lr)\n",
        killed_by=OUTER,
        cause="classic-momentum",
    ),
    Mutant(
        id="diloco-velocity-lost",
        exercise="3.25",
        bug="the outer state does not last: plain averaging with a learning rate",
        find=VELOCITY + STEP,
        replace="            common.sub_(delta, alpha=self.lr)\n",
        killed_by=OUTER,
        cause="outer-momentum-lost",
    ),
    Mutant(
        id="diloco-uphill",
        exercise="3.25",
        bug="the difference has the wrong sign: the outer optimizer climbs",
        find="        differences = [c - p for",
        replace="        differences = [p - c for",
        killed_by=OUTER,
        cause="uphill",
    ),
    Mutant(
        id="diloco-common-is-the-first",
        exercise="3.25",
        bug="θ stays at the first model: differences grow from round to round",
        find=STEP + "            p.copy_(common)\n",
        replace="            p.copy_(common - self.lr * (delta + self.momentum * velocity))\n",
        killed_by=OUTER,
        cause="wrong",
    ),
    Mutant(
        id="diloco-common-is-no-copy",
        exercise="3.25",
        bug="θ shares memory with the parameters: every difference is zero",
        find="        self.common = [p.detach().clone() for p in self.parameters]\n",
        replace="        self.common = [p.detach() for p in self.parameters]\n",
        killed_by=OUTER,
        cause="outer-state",
    ),
    Mutant(
        id="diloco-own-velocity",
        exercise="3.25",
        bug="BUGS 30: the velocity is fed with the rank's own difference",
        find=VELOCITY,
        replace="            velocity.mul_(self.momentum).add_(common - p)\n",
        killed_by=OUTER,
        cause="outer-state",
    ),
    Mutant(
        id="local-sgd-models-differ",
        exercise="3.25",
        bug="the ranks' models are not compared before they are sent",
        find="        expect_alike(state, group)\n",
        replace="",
        killed_by="test_models_that_differ_are_refused",
        cause="mismatch",
    ),
    Mutant(
        id="local-sgd-stranger",
        exercise="3.25",
        bug="on a rank outside the group the size is -1: the mean is the negative of its own",
        find="    rank_in(group)\n    for t in tensors:\n",
        replace="    for t in tensors:\n",
        killed_by="test_who_is_no_member_is_refused",
        cause="accepted",
    ),
    Mutant(
        id="local-sgd-loss-per-batch",
        exercise="3.25",
        bug="BUGS 35: the loss of a batch of one counts like that of a batch of four",
        find="            sums[0] += loss.detach().double() * len(targets)\n",
        replace="            sums[0] += loss.detach().double() * 4\n",
        killed_by=TRAIN,
        cause="loss-value",
    ),
    Mutant(
        id="local-sgd-gradients-pile-up",
        exercise="3.25",
        bug="the gradients of the batches before are still there",
        find="            optimizer.zero_grad()\n",
        replace="",
        killed_by=TRAIN,
        cause="wrong",
    ),
]
