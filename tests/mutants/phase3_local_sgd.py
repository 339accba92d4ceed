"""Wrong implementations of exercise 3.25."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="local-sgd-summed",
        exercise="3.25",
        mistake="the models are added up and not divided",
        text=".div_(world_size)",
        becomes="",
        caught_by="test_buffers_agree",
        told_as="summed",
    ),
    Mutant(
        id="local-sgd-never-agrees",
        exercise="3.25",
        mistake="nothing is sent, every rank keeps a model of its own",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        flat *= world_size\n",
        caught_by="test_buffers_agree",
        told_as="only-own",
    ),
    Mutant(
        id="local-sgd-all-gathered",
        exercise="3.25",
        mistake="every rank gets all models and takes the mean itself",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="""        every = [torch.empty_like(flat) for _ in range(world_size)]
        dist.all_gather(every, flat, group=group)
        flat = torch.stack(every).sum(0)
""",
        caught_by="test_bytes_of_a_round",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="local-sgd-one-by-one",
        exercise="3.25",
        mistake="a message per parameter",
        text="        means = mean_over_ranks(self.parameters, self.group)\n",
        becomes="        means = [mean_over_ranks([p], self.group)[0] for p in self.parameters]\n",
        more=(
            (
                "        deltas = mean_over_ranks(differences, self.group)\n",
                "        deltas = [mean_over_ranks([d], self.group)[0] for d in differences]\n",
            ),
        ),
        caught_by="test_bytes_of_a_round",
        told_as="too-many-messages",
    ),
    Mutant(
        id="local-sgd-every-step",
        exercise="3.25",
        mistake="the ranks agree in every step: H saves nothing",
        text="""        if self.since < self.every:
            return False
        return self.finish()
""",
        becomes="""        self._agree_now()
        return self.since == 0
""",
        more=(
            (
                "    def finish(self) -> bool:\n",
                """    def _agree_now(self) -> None:
        since = self.since
        self.finish()
        self.since = since % self.every

    def finish(self) -> bool:
""",
            ),
        ),
        caught_by="test_bytes_of_a_round",
        told_as="not-at-the-end",
    ),
    Mutant(
        id="local-sgd-round-too-long",
        exercise="3.25",
        mistake="off by one: rounds of H + 1 steps",
        text="        if self.since < self.every:\n",
        becomes="        if self.since <= self.every:\n",
        caught_by="test_rounds_of_local_sgd",
        told_as="rounds",
    ),
    Mutant(
        id="local-sgd-frozen-sent",
        exercise="3.25",
        mistake="frozen parameters travel in every round",
        text="        self.parameters = [p for p in model.parameters() if p.requires_grad]\n",
        becomes="        self.parameters = list(model.parameters())\n",
        caught_by="test_bytes_of_a_round",
        told_as="too-many-bytes",
    ),
    Mutant(
        id="local-sgd-starts-apart",
        exercise="3.25",
        mistake="every rank begins with weights of its own",
        text="        self._take_from_first(state)\n",
        becomes="",
        caught_by="test_buffers_agree",
        told_as="wrong",
    ),
    Mutant(
        id="local-sgd-buffers-forgotten",
        exercise="3.25",
        mistake="running statistics stay the rank's own",
        text="""            means = mean_over_ranks(self.statistics, self.group)
            for statistic, mean in zip(self.statistics, means, strict=True):
                statistic.copy_(mean)
""",
        becomes="",
        caught_by="test_buffers_agree",
        told_as="only-own",
    ),
    Mutant(
        id="local-sgd-counters-forgotten",
        exercise="3.25",
        mistake="counters and masks stay the rank's own",
        text="        self._take_from_first(self.counters)\n",
        becomes="",
        caught_by="test_buffers_agree",
        told_as="wrong",
    ),
    Mutant(
        id="local-sgd-empty-round",
        exercise="3.25",
        mistake="finish() ends a round without steps: the outer momentum moves the model",
        text="""        if self.since == 0:
            return False
""",
        becomes="",
        caught_by="test_finishing_twice_changes_nothing",
        told_as="empty-round",
    ),
    Mutant(
        id="local-sgd-whole-world",
        exercise="3.25",
        mistake="the mean is over all ranks, not over those of the group",
        text="        dist.all_reduce(flat, group=group)\n",
        becomes="        dist.all_reduce(flat)\n",
        caught_by="test_a_group_keeps_to_itself",
        told_as="wrong-group",
    ),
    Mutant(
        id="local-sgd-empty-batch-skipped",
        exercise="3.25",
        mistake="a rank without data does not count the step, and comes too late",
        text="""            sums[1] += len(targets)
        rounds.step()
""",
        becomes="""            sums[1] += len(targets)
            rounds.step()
""",
        caught_by="test_train_counts_empty_batches",
        told_as="mismatch",
    ),
    Mutant(
        id="local-sgd-last-round-lost",
        exercise="3.25",
        mistake="the round in which training ends is not ended",
        text="""    rounds.finish()
    dist.all_reduce(sums, group=rounds.group)
""",
        becomes="    dist.all_reduce(sums, group=rounds.group)\n",
        caught_by="test_train_counts_empty_batches",
        told_as="wrong",
    ),
    Mutant(
        id="local-sgd-own-loss",
        exercise="3.25",
        mistake="the loss is the rank's own",
        text="    dist.all_reduce(sums, group=rounds.group)\n",
        becomes="    sums[1] = dist.get_world_size(rounds.group) * sums[1]\n",
        caught_by="test_train_counts_empty_batches",
        told_as="wrong",
    ),
    Mutant(
        id="local-sgd-accepts-zero",
        exercise="3.25",
        mistake="a round of 0 steps is accepted",
        text="        if every < 1:\n",
        becomes="        if every < 0:\n",
        caught_by="test_bad_settings_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="local-sgd-late-refusal",
        exercise="3.25",
        mistake="the outer settings are refused after the model was sent",
        text="        if not lr > 0:\n",
        becomes="""        super().__init__(model, every=every, group=group)
        if not lr > 0:
""",
        caught_by="test_bad_settings_are_refused",
        told_as="late-check",
    ),
    Mutant(
        id="diloco-classic-momentum",
        exercise="3.25",
        mistake="heavy-ball momentum instead of Nesterov's",
        text="            common.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)\n",
        becomes="            common.sub_(velocity, alpha=self.lr)\n",
        caught_by="test_rounds_of_diloco",
        told_as="classic-momentum",
    ),
    Mutant(
        id="diloco-velocity-lost",
        exercise="3.25",
        mistake="the outer state does not last: plain averaging with a learning rate",
        text="""            velocity.mul_(self.momentum).add_(delta)
            common.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)
""",
        becomes="            common.sub_(delta, alpha=self.lr)\n",
        caught_by="test_rounds_of_diloco",
        told_as="outer-momentum-lost",
    ),
    Mutant(
        id="diloco-uphill",
        exercise="3.25",
        mistake="the difference has the wrong sign: the outer optimizer climbs",
        text="        differences = [c - p for",
        becomes="        differences = [p - c for",
        caught_by="test_rounds_of_diloco",
        told_as="uphill",
    ),
    Mutant(
        id="diloco-common-is-the-first",
        exercise="3.25",
        mistake="θ stays at the first model: differences grow from round to round",
        text="""            common.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)
            p.copy_(common)
""",
        becomes="            p.copy_(common - self.lr * (delta + self.momentum * velocity))\n",
        caught_by="test_rounds_of_diloco",
        told_as="wrong",
    ),
    Mutant(
        id="diloco-common-is-no-copy",
        exercise="3.25",
        mistake="θ shares memory with the parameters: every difference is zero",
        text="        self.common = [p.detach().clone() for p in self.parameters]\n",
        becomes="        self.common = [p.detach() for p in self.parameters]\n",
        caught_by="test_rounds_of_diloco",
        told_as="outer-state",
    ),
    Mutant(
        id="diloco-own-velocity",
        exercise="3.25",
        mistake="the velocity is fed with the rank's own difference",
        text="            velocity.mul_(self.momentum).add_(delta)\n",
        becomes="            velocity.mul_(self.momentum).add_(common - p)\n",
        caught_by="test_rounds_of_diloco",
        told_as="outer-state",
    ),
    Mutant(
        id="local-sgd-models-differ",
        exercise="3.25",
        mistake="the ranks' models are not compared before they are sent",
        text="        expect_alike(state, group)\n",
        becomes="",
        caught_by="test_models_that_differ_are_refused",
        told_as="mismatch",
    ),
    Mutant(
        id="local-sgd-stranger",
        exercise="3.25",
        mistake="on a rank outside the group the size is -1: the mean is the negative of its own",
        text="""    rank_in(group)
    for t in tensors:
""",
        becomes="    for t in tensors:\n",
        caught_by="test_who_is_no_member_is_refused",
        told_as="accepted",
    ),
    Mutant(
        id="local-sgd-loss-per-batch",
        exercise="3.25",
        mistake="the loss of a batch of one counts like that of a batch of four",
        text="            sums[0] += loss.detach().double() * len(targets)\n",
        becomes="            sums[0] += loss.detach().double() * 4\n",
        caught_by="test_train_counts_empty_batches",
        told_as="loss-value",
    ),
    Mutant(
        id="local-sgd-gradients-pile-up",
        exercise="3.25",
        mistake="the gradients of the batches before are still there",
        text="            optimizer.zero_grad()\n",
        becomes="",
        caught_by="test_train_counts_empty_batches",
        told_as="old-gradients",
    ),
    Mutant(
        id="local-sgd-half-overflows",
        exercise="3.25",
        mistake="the sum is divided afterwards: in float16 it overflows",
        text="for index in indices]).div_(world_size)\n        dist.all_reduce(flat, group=group)\n",
        becomes=(
            "for index in indices])\n        dist.all_reduce(flat, group=group)\n"
            "        flat.div_(world_size)\n"
        ),
        caught_by="test_means_of_any_tensors",
        told_as="nan",
    ),
    Mutant(
        id="local-sgd-hidden-buffers",
        exercise="3.25",
        mistake="buffers that state_dict leaves out stay the rank's own",
        text="        self.statistics = [b for b in model.buffers() if b.is_floating_point()]\n",
        becomes="""        kept = model.state_dict()
        self.statistics = [
            b for n, b in model.named_buffers() if n in kept and b.is_floating_point()
        ]
""",
        caught_by="test_buffers_agree",
        told_as="only-own",
    ),
    Mutant(
        id="local-sgd-gradients-of-before",
        exercise="3.25",
        mistake="gradients are cleared after a step: those from before training are in the first",
        text="            optimizer.zero_grad()\n",
        becomes="",
        more=(
            (
                "            optimizer.step()\n",
                "            optimizer.step()\n            optimizer.zero_grad()\n",
            ),
        ),
        caught_by="test_train_counts_empty_batches",
        told_as="old-gradients",
    ),
    Mutant(
        id="local-sgd-statistics-of-first",
        exercise="3.25",
        mistake="running statistics are those of rank 0, no mean",
        text="                statistic.copy_(mean)\n",
        becomes="                self._take_from_first([statistic])\n                del mean\n",
        caught_by="test_rounds_of_local_sgd",
        told_as="statistics-of-first",
    ),
    Mutant(
        id="local-counts-on",
        exercise="3.25",
        mistake="a round that finish() has ended does not begin anew: steps are counted from the start",
        text="        self.since += 1\n        if self.since < self.every:\n            return False\n",
        becomes='        self.since += 1\n        self.total = getattr(self, "total", 0) + 1\n        if self.total % self.every:\n            return False\n',
        caught_by="test_finishing_twice_changes_nothing",
        told_as="empty-round",
    ),
]
