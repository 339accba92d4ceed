"""Wrong implementations of exercises 2.10 to 2.12."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="gpipe-empty",
        exercise="2.10",
        mistake="the schedule has no steps",
        text=(
            '    return [[Step(k, r, i) for k in "FB" for i in range(micro_batches)] for r in '
            "range(ranks)]\n"
        ),
        becomes="    return [[] for _ in range(ranks)]\n",
        caught_by="test_gpipe_is_complete_and_forwards_come_first",
        told_as="empty",
    ),
    Mutant(
        id="gpipe-last-micro-batch-missing",
        exercise="2.10",
        mistake="one micro-batch too few",
        text=(
            '    return [[Step(k, r, i) for k in "FB" for i in range(micro_batches)] for r in '
            "range(ranks)]\n"
        ),
        becomes="""    count = max(1, micro_batches - 1)
    return [[Step(k, r, i) for k in "FB" for i in range(count)] for r in range(ranks)]
""",
        caught_by="test_gpipe_is_complete_and_forwards_come_first",
        told_as="incomplete",
    ),
    Mutant(
        id="gpipe-one-after-another",
        exercise="2.10",
        mistake="each micro-batch goes all the way before the next one starts: no pipelining",
        text=(
            '    return [[Step(k, r, i) for k in "FB" for i in range(micro_batches)] for r in '
            "range(ranks)]\n"
        ),
        becomes=(
            "    return [[Step(k, r, i) for i in range(micro_batches) for k in 'FB'] for r in "
            "range(ranks)]\n"
        ),
        caught_by="test_gpipe_is_complete_and_forwards_come_first",
        told_as="order",
    ),
    Mutant(
        id="pipeline-loss-not-divided",
        exercise="2.10",
        mistake="the micro-batches' losses are summed",
        text="            output = self.loss_fn(output, self.targets[i]) / self.micro_batches\n",
        becomes="            output = self.loss_fn(output, self.targets[i])\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="not-divided",
    ),
    Mutant(
        id="pipeline-divided-at-each-stage",
        exercise="2.10",
        mistake="every stage divides by the number of micro-batches",
        text="            torch.autograd.backward(output, gradient)\n",
        becomes="""            if gradient is not None:
                gradient = gradient / self.micro_batches
            torch.autograd.backward(output, gradient)
""",
        caught_by="test_gpipe_equals_one_process",
        told_as="divided-again",
    ),
    Mutant(
        id="pipeline-received-without-grad",
        exercise="2.10",
        mistake="a received activation does not want a gradient",
        text='            x = self.arrived(Step("recv F", stage, i)).requires_grad_()\n',
        becomes='            x = self.arrived(Step("recv F", stage, i))\n',
        caught_by="test_gpipe_equals_one_process",
        told_as="zeros",
    ),
    Mutant(
        id="pipeline-backward-from-a-sum",
        exercise="2.10",
        mistake="a middle stage starts from its own output instead of the gradient it received",
        text="            torch.autograd.backward(output, gradient)\n",
        becomes="            torch.autograd.backward(output.sum())\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="pipeline-last-saved-input",
        exercise="2.10",
        mistake="backward uses the input and output that were saved last",
        text="        x, output = self.kept.pop((stage, i))\n",
        becomes="""        last = max(key for key in self.kept if key[0] == stage)
        x, output = self.kept.pop((stage, i) if stage == self.last else last)
""",
        caught_by="test_gpipe_equals_one_process",
        told_as="wrong",
    ),
    Mutant(
        id="pipeline-zeroed-between",
        exercise="2.10",
        mistake="gradients are cleared before each micro-batch's backward",
        text="        x, output = self.kept.pop((stage, i))\n",
        becomes="""        self.chunks[stage].zero_grad()
        x, output = self.kept.pop((stage, i))
""",
        caught_by="test_gpipe_equals_one_process",
        told_as="micro-batch-lost",
    ),
    Mutant(
        id="pipeline-zeroed-at-step",
        exercise="2.10",
        mistake="every step clears what was there",
        text="""        for step in self.steps:
            self.take(step)
""",
        becomes="""        for chunk in self.chunks.values():
            chunk.zero_grad()
        for step in self.steps:
            self.take(step)
""",
        caught_by="test_gradients_add_up_over_steps",
        told_as="scaled",
    ),
    Mutant(
        id="pipeline-loss-on-last-only",
        exercise="2.10",
        mistake="the other ranks report 0",
        text=(
            "        dist.broadcast(self.loss, group=self.group, "
            "group_src=self.rank_of[self.last])\n"
        ),
        becomes="",
        caught_by="test_gpipe_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="pipeline-loss-of-last-micro-batch",
        exercise="2.10",
        mistake="the loss returned is that of the last micro-batch",
        text="            self.loss += output.detach()\n",
        becomes="            self.loss.copy_(output.detach() * self.micro_batches)\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="loss-value",
    ),
    Mutant(
        id="pipeline-logs-on-last-only",
        exercise="2.10",
        mistake="only the last stage enters the collective of the loss",
        text=(
            "        dist.broadcast(self.loss, group=self.group, "
            "group_src=self.rank_of[self.last])\n"
        ),
        becomes="""        if self.last in self.chunks:
            dist.broadcast(self.loss, group=self.group, group_src=self.rank_of[self.last])
""",
        caught_by="test_gpipe_equals_one_process",
        told_as="hang",
    ),
    Mutant(
        id="pipeline-loss-reduced-each-time",
        exercise="2.10",
        mistake="a collective for every micro-batch's loss",
        text="""        for step in self.steps:
            self.take(step)
""",
        becomes="""        for step in self.steps:
            self.take(step)
        for _ in range(m - 1):
            dist.broadcast(self.loss, group=self.group, group_src=self.rank_of[self.last])
""",
        caught_by="test_messages_and_bytes_are_those_of_the_schedule",
        told_as="collectives",
    ),
    Mutant(
        id="pipeline-sends-unfinished",
        exercise="2.10",
        mistake="the last sends are never waited for",
        text="""        while self.sending:
            self.sending.popleft()[1].wait()
""",
        becomes="",
        caught_by="test_gpipe_equals_one_process",
        told_as="never-waited",
    ),
    Mutant(
        id="pipeline-receive-not-waited",
        exercise="2.10",
        mistake="a receive's buffer is used before the data is there",
        text="""        handle.wait()
        return buffer
""",
        becomes="        return buffer\n",
        caught_by="test_gpipe_equals_one_process",
        told_as="never-waited",
    ),
    Mutant(
        id="pipeline-global-ranks",
        exercise="2.10",
        mistake="ranks of the schedule are taken for global ranks",
        text=(
            "        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])\n"
        ),
        becomes="        handle = dist.isend(tensor, self.rank_of[stage], group=self.group)\n",
        caught_by="test_two_pipelines_side_by_side",
        told_as="exception",
    ),
    Mutant(
        id="pipeline-world-group",
        exercise="2.10",
        mistake="sends in the world instead of the pipeline's group",
        text=(
            "        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])\n"
        ),
        becomes="        handle = dist.isend(tensor, self.rank_of[stage])\n",
        caught_by="test_two_pipelines_side_by_side",
        told_as="hang",
    ),
    Mutant(
        id="pipeline-neighbours-are-other-ranks",
        exercise="2.10",
        mistake="the next stage is always taken to be on another rank",
        text="        elif stage + 1 in self.chunks:\n",
        becomes="        elif False:\n",
        caught_by="test_any_valid_schedule_runs",
        told_as="exception",
    ),
    Mutant(
        id="pipeline-graph-kept",
        exercise="2.10",
        mistake="the graphs of all micro-batches are kept",
        text="            torch.autograd.backward(output, gradient)\n",
        becomes="""            torch.autograd.backward(output, gradient, retain_graph=True)
            self.kept[stage, i] = x, output
""",
        caught_by="test_nothing_is_kept_after_a_step",
        told_as="not-freed",
    ),
    Mutant(
        id="pipeline-uneven-accepted",
        exercise="2.10",
        mistake="a batch that does not divide is cut all the same",
        text="        if not all(sizes) or any(size % m for size in sizes):\n",
        becomes="        if not all(sizes):\n",
        caught_by="test_bad_input_is_refused_on_all_ranks",
        told_as="accepted",
    ),
    Mutant(
        id="pipeline-first-rank-refuses",
        exercise="2.10",
        mistake="only the first stage looks at the batch; the others wait for it",
        text="        if not all(sizes) or any(size % m for size in sizes):\n",
        becomes=(
            "        if 0 in self.chunks and (not all(sizes) or any(n % m for n in sizes)):\n"
        ),
        caught_by="test_bad_input_is_refused_on_all_ranks",
        told_as="hang",
    ),
    Mutant(
        id="pipeline-unknown-name",
        exercise="2.10",
        mistake="an unknown name means GPipe",
        text='    if name not in ("gpipe", "1f1b"):\n',
        becomes="    if not name:\n",
        more=(
            (
                '    order = gpipe if name == "gpipe" else one_f_one_b\n',
                '    order = one_f_one_b if name == "1f1b" else gpipe\n',
            ),
        ),
        caught_by="test_bad_input_is_refused_on_all_ranks",
        told_as="accepted",
    ),
    Mutant(
        id="pipeline-boundary-ignored",
        exercise="2.10",
        mistake="an output that the receiver does not expect is sent",
        text="            if (output.shape, output.dtype) != (want.shape, want.dtype):\n",
        becomes="            if output.dtype != want.dtype:\n",
        caught_by="test_a_wrong_boundary_is_named",
        told_as=("accepted", "exception"),
    ),
    Mutant(
        id="pipeline-from-any-rank",
        exercise="2.10",
        mistake="a receive takes whatever comes first, from whichever rank",
        text="group=self.group, group_src=self.rank_of[source])",
        becomes="group=self.group)",
        caught_by="test_messages_are_told_apart_by_their_rank",
        told_as=("exception", "mismatch", "wrong", "hang"),
    ),
    Mutant(
        id="pipeline-sends-pile-up",
        exercise="2.10",
        mistake="no send is waited for before the step ends: all activations stay in memory",
        text="        while len(self.sending) >= 2 * len(self.chunks):\n",
        becomes="        while len(self.sending) >= 2 * len(self.chunks) * self.micro_batches:\n",
        caught_by="test_few_sends_are_unfinished",
        told_as="too-many-in-flight",
    ),
    Mutant(
        id="pipeline-frozen-cleared",
        exercise="2.10",
        mistake="gradients are cleared before the first step of an object, also frozen ones",
        text="        sizes = len(inputs), len(targets)\n",
        becomes="""        if not hasattr(self, "loss"):
            for chunk in self.chunks.values():
                chunk.zero_grad()
        sizes = len(inputs), len(targets)
""",
        caught_by="test_gradients_add_up_over_steps",
        told_as=("scaled", "wrong"),
    ),
    Mutant(
        id="pipeline-zero-gradient-missing",
        exercise="2.10",
        mistake="a stage that does not use its input has no gradient to send",
        text="torch.zeros_like(x) if x.grad is None else x.grad",
        becomes="x.grad",
        caught_by="test_a_stage_that_stops_the_gradient",
        told_as="exception",
    ),
    Mutant(
        id="1f1b-is-gpipe",
        exercise="2.11",
        mistake="all forwards first: all activations are alive",
        text="        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))\n",
        becomes="        order.append(alternate(forwards, backwards, warm_up=micro_batches))\n",
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-too-long",
        exercise="2.11",
        mistake="one forward too many in the warm-up",
        text="        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))\n",
        becomes="        order.append(alternate(forwards, backwards, warm_up=ranks - rank))\n",
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-alike",
        exercise="2.11",
        mistake="every rank warms up like the first",
        text="        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))\n",
        becomes="        order.append(alternate(forwards, backwards, warm_up=ranks - 1))\n",
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-too-short",
        exercise="2.11",
        mistake="one forward too few in the warm-up: a rank waits for its own micro-batch",
        text="        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))\n",
        becomes=(
            "        order.append(alternate(forwards, backwards, warm_up=max(0, ranks - rank - "
            "2)))\n"
        ),
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="bubble",
    ),
    Mutant(
        id="1f1b-more-ranks-than-micro-batches",
        exercise="2.11",
        mistake="m < p: the warm-up is longer than there are forwards",
        text="    warm_up = min(warm_up, len(forwards))\n",
        becomes="",
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="exception",
    ),
    Mutant(
        id="1f1b-no-cool-down",
        exercise="2.11",
        mistake="the backwards of the warm-up's micro-batches are forgotten",
        text="    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]\n",
        becomes="    return [*forwards[:warm_up], *steady]\n",
        caught_by="test_1f1b_keeps_few_micro_batches",
        told_as="incomplete",
    ),
    Mutant(
        id="1f1b-outputs-kept",
        exercise="2.11",
        mistake="inputs and outputs of all micro-batches are kept until the step ends",
        text="        x, output = self.kept.pop((stage, i))\n",
        becomes="        x, output = self.kept[stage, i]\n",
        caught_by="test_memory_does_not_grow_with_micro_batches",
        told_as="memory-grows",
    ),
    Mutant(
        id="1f1b-barrier-after-each-step",
        exercise="2.11",
        mistake="all ranks meet after every step of the schedule: nobody is ahead of anybody",
        text="""        for step in self.steps:
            self.take(step)
""",
        becomes="""        for number in range(4 * len(self.rank_of) * m):
            if number < len(self.steps):
                self.take(self.steps[number])
            dist.barrier(group=self.group)
""",
        caught_by="test_1f1b_takes_the_time_of_theory",
        told_as="hang",
    ),
    Mutant(
        id="pipeline-waits-for-each-send",
        exercise="2.10",
        mistake="a send is waited for at once: the sender stands still while the receiver computes",
        text=(
            "        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])\n"
        ),
        becomes=(
            "        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])\n"
            "        handle.wait()\n"
            "        return\n"
        ),
        caught_by="test_messages_travel_while_ranks_compute",
        told_as="slower",
    ),
    Mutant(
        id="pipeline-waits-at-the-receive",
        exercise="2.10",
        mistake="a receive is waited for where it is posted: nothing comes in during compute",
        text="            self.arriving[step] = buffer, handle\n",
        becomes="""            handle.wait()
            self.arriving[step] = buffer, handle
""",
        more=(
            (
                """        buffer, handle = self.arriving.pop(receive)
        handle.wait()
""",
                "        buffer, _ = self.arriving.pop(receive)\n",
            ),
        ),
        caught_by="test_messages_travel_while_ranks_compute",
        told_as="slower",
    ),
    Mutant(
        id="interleaved-in-blocks",
        exercise="2.12",
        mistake="rank r holds the neighbouring stages r·v … r·v + v-1",
        text='            forwards.append(Step("F", own * ranks + rank, micro_batch))\n',
        becomes='            forwards.append(Step("F", rank * chunks + own, micro_batch))\n',
        more=(
            (
                (
                    '            backwards.append(Step("B", (chunks - 1 - own) * ranks + rank, '
                    "micro_batch))\n"
                ),
                (
                    '            backwards.append(Step("B", rank * chunks + chunks - 1 - own, '
                    "micro_batch))\n"
                ),
            ),
        ),
        caught_by="test_interleaving_divides_the_bubble",
        told_as="exception",
    ),
    Mutant(
        id="interleaved-backward-first-chunk-first",
        exercise="2.12",
        mistake="backward takes the own stages in the order of forward: the ranks wait for ever",
        text=(
            '            backwards.append(Step("B", (chunks - 1 - own) * ranks + rank, '
            "micro_batch))\n"
        ),
        becomes='            backwards.append(Step("B", own * ranks + rank, micro_batch))\n',
        caught_by="test_interleaving_divides_the_bubble",
        told_as="exception",
    ),
    Mutant(
        id="interleaved-warm-up-too-long",
        exercise="2.12",
        mistake="the warm-up is that of all ranks' stages",
        text="        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks\n",
        becomes="        warm_up = 2 * (ranks - 1) + (chunks - 1) * ranks\n",
        caught_by="test_interleaving_divides_the_bubble",
        told_as="bubble",
    ),
    Mutant(
        id="interleaved-warm-up-of-1f1b",
        exercise="2.12",
        mistake="warms up as if there were one stage per rank: waits for its own later stage",
        text="        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks\n",
        becomes="        warm_up = ranks - rank - 1\n",
        caught_by="test_interleaving_divides_the_bubble",
        told_as="exception",
    ),
    Mutant(
        id="interleaved-all-through-each-chunk",
        exercise="2.12",
        mistake="all micro-batches go through a chunk before the next chunk starts",
        text="""            group, position = divmod(k, ranks * chunks)
            own, micro_batch = position // ranks, group * ranks + position % ranks
""",
        becomes="            own, micro_batch = divmod(k, micro_batches)\n",
        more=(
            (
                "        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks\n",
                "        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * micro_batches\n",
            ),
        ),
        caught_by="test_interleaving_divides_the_bubble",
        told_as=("groups", "too-many-kept"),
    ),
    Mutant(
        id="interleaved-remainder-accepted",
        exercise="2.12",
        mistake="m need not be a multiple of p: the last group has micro-batches that do not exist",
        text="    if micro_batches % ranks:\n",
        becomes="    if micro_batches < 1:\n",
        caught_by="test_interleaved_refuses_what_does_not_divide",
        told_as="accepted",
    ),
    Mutant(
        id="interleaved-chunks-swapped",
        exercise="2.12",
        mistake="the chunks of a rank are taken in the wrong order",
        text="        self.chunks = dict(zip(mine, chunks, strict=True))  # by stage\n",
        becomes=(
            "        self.chunks = dict(zip(mine, reversed(chunks), strict=True))  # by stage\n"
        ),
        caught_by="test_interleaved_equals_one_process",
        told_as="exception",
    ),
    Mutant(
        id="interleaved-groups-of-chunks",
        exercise="2.12",
        mistake="the micro-batches of a group are not the same in all stages",
        text="            own, micro_batch = position // ranks, group * ranks + position % ranks\n",
        becomes="""            own, micro_batch = position // ranks, group * ranks + position % ranks
            if own % 2:
                micro_batch = micro_batches - 1 - micro_batch
""",
        caught_by="test_interleaving_divides_the_bubble",
        told_as=("groups", "exception", "bubble", "deadlock"),
    ),
    Mutant(
        id="1f1b-zero-ranks",
        exercise="2.11",
        mistake="no ranks give an empty order instead of an error",
        text="    check_sizes(ranks, micro_batches)\n    order = []\n    for rank in range(ranks):\n"
        "        forwards = [Step",
        becomes="    order = []\n    for rank in range(ranks):\n        forwards = [Step",
        caught_by="test_1f1b_refuses_bad_numbers",
        told_as="accepted",
    ),
    Mutant(
        id="pipeline-all-kept",
        exercise="2.10",
        mistake="inputs and outputs of all micro-batches stay until the next step",
        text="        x, output = self.kept.pop((stage, i))\n",
        becomes="        x, output = self.kept[stage, i]\n",
        caught_by="test_inputs_and_outputs_are_freed",
        told_as="not-freed",
    ),
    Mutant(
        id="pipeline-as-many-targets",
        exercise="2.10",
        mistake="a batch with more targets than inputs is refused",
        text="any(size % m for size in sizes):",
        becomes="any(size % m for size in sizes) or sizes[0] != sizes[1]:",
        caught_by="test_a_stage_that_stops_the_gradient",
        told_as="exception",
    ),
    Mutant(
        id="pipeline-unlimited-sends-of-two-stages",
        exercise="2.10",
        mistake="a rank with several stages waits for no send",
        text="while len(self.sending) >= 2 * len(self.chunks):",
        becomes="while len(self.chunks) == 1 and len(self.sending) >= 2:",
        caught_by="test_few_sends_are_unfinished",
        told_as="too-many-in-flight",
    ),
]
