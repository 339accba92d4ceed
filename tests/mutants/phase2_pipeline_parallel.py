"""Wrong implementations of exercises 2.10 to 2.12."""

from distlab.grading.wrong import Mutant

EQUAL, ADD = "test_gpipe_equals_one_process", "test_gradients_add_up_over_steps"
COMPLETE = "test_gpipe_is_complete_and_forwards_come_first"
OVERLAP = "test_messages_travel_while_ranks_compute"
ANY, SIDE = "test_any_valid_schedule_runs", "test_two_pipelines_side_by_side"
BYTES, KEPT = (
    "test_messages_and_bytes_are_those_of_the_schedule",
    "test_nothing_is_kept_after_a_step",
)
BAD, BOUNDARY = "test_bad_input_is_refused_on_all_ranks", "test_a_wrong_boundary_is_named"
FEW, TIME = "test_1f1b_keeps_few_micro_batches", "test_1f1b_takes_the_time_of_theory"
MEMORY = "test_memory_does_not_grow_with_micro_batches"
DIVIDES, LOOPED = "test_interleaving_divides_the_bubble", "test_interleaved_equals_one_process"
UNEVEN = "test_interleaved_refuses_what_does_not_divide"

BACKWARD = "            torch.autograd.backward(output, gradient)\n"
POP = "        x, output = self.kept.pop((stage, i))\n"
ARRIVED = '            x = self.arrived(Step("recv F", stage, i)).requires_grad_()\n'
LOSS = "            output = self.loss_fn(output, self.targets[i]) / self.micro_batches\n"
BROADCAST = (
    "        dist.broadcast(self.loss, group=self.group, group_src=self.rank_of[self.last])\n"
)
GPIPE = '    return [[Step(k, r, i) for k in "FB" for i in range(micro_batches)] for r in range(ranks)]\n'
DRAIN = "        while self.sending:\n            self.sending.popleft()[1].wait()\n"
REFUSE = "        if not len(inputs) or len(inputs) % m or len(targets) % m:\n"
ISEND = "        handle = dist.isend(tensor, group=self.group, group_dst=self.rank_of[stage])\n"
ONE = "        order.append(alternate(forwards, backwards, warm_up=ranks - rank - 1))\n"
WARM = "        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks\n"
PLACE = "            own, micro_batch = position // ranks, group * ranks + position % ranks\n"

MUTANTS = [
    Mutant(
        id="gpipe-empty",
        exercise="2.10",
        bug="BUGS 56: the schedule has no steps",
        find=GPIPE,
        replace="    return [[] for _ in range(ranks)]\n",
        killed_by=COMPLETE,
        cause="empty",
    ),
    Mutant(
        id="gpipe-last-micro-batch-missing",
        exercise="2.10",
        bug="BUGS 56: one micro-batch too few",
        find=GPIPE,
        replace="    count = max(1, micro_batches - 1)\n"
        '    return [[Step(k, r, i) for k in "FB" for i in range(count)] for r in range(ranks)]\n',
        killed_by=COMPLETE,
        cause="incomplete",
    ),
    Mutant(
        id="gpipe-one-after-another",
        exercise="2.10",
        bug="each micro-batch goes all the way before the next one starts: no pipelining",
        find=GPIPE,
        replace="    return [[Step(k, r, i) for i in range(micro_batches) for k in 'FB'] for r in range(ranks)]\n",
        killed_by=COMPLETE,
        cause="order",
    ),
    Mutant(
        id="pipeline-loss-not-divided",
        exercise="2.10",
        bug="BUGS 51: the micro-batches' losses are summed",
        find=LOSS,
        replace="            output = self.loss_fn(output, self.targets[i])\n",
        killed_by=EQUAL,
        cause="not-divided",
    ),
    Mutant(
        id="pipeline-divided-at-each-stage",
        exercise="2.10",
        bug="BUGS 51: every stage divides by the number of micro-batches",
        find=BACKWARD,
        replace="            if gradient is not None:\n"
        "                gradient = gradient / self.micro_batches\n" + BACKWARD,
        killed_by=EQUAL,
        cause="divided-again",
    ),
    Mutant(
        id="pipeline-received-without-grad",
        exercise="2.10",
        bug="BUGS 52: a received activation does not want a gradient",
        find=ARRIVED,
        replace='            x = self.arrived(Step("recv F", stage, i))\n',
        killed_by=EQUAL,
        cause="zeros",
    ),
    Mutant(
        id="pipeline-backward-from-a-sum",
        exercise="2.10",
        bug="BUGS 52: a middle stage starts from its own output instead of the gradient it received",
        find=BACKWARD,
        replace="            torch.autograd.backward(output.sum())\n",
        killed_by=EQUAL,
        cause="wrong",
    ),
    Mutant(
        id="pipeline-last-saved-input",
        exercise="2.10",
        bug="BUGS 53: backward uses the input and output that were saved last",
        find=POP,
        replace="        last = max(key for key in self.kept if key[0] == stage)\n"
        "        x, output = self.kept.pop((stage, i) if stage == self.last else last)\n",
        killed_by=EQUAL,
        cause="wrong",
    ),
    Mutant(
        id="pipeline-zeroed-between",
        exercise="2.10",
        bug="BUGS 57: gradients are cleared before each micro-batch's backward",
        find=POP,
        replace="        self.chunks[stage].zero_grad()\n" + POP,
        killed_by=EQUAL,
        cause="micro-batch-lost",
    ),
    Mutant(
        id="pipeline-zeroed-at-step",
        exercise="2.10",
        bug="BUGS 57: every step clears what was there",
        find="        for step in self.steps:\n            self.take(step)\n",
        replace="        for chunk in self.chunks.values():\n            chunk.zero_grad()\n"
        "        for step in self.steps:\n            self.take(step)\n",
        killed_by=ADD,
        cause="scaled",
    ),
    Mutant(
        id="pipeline-loss-on-last-only",
        exercise="2.10",
        bug="BUGS 59: the other ranks report 0",
        find=BROADCAST,
        replace="",
        killed_by=EQUAL,
        cause="loss-value",
    ),
    Mutant(
        id="pipeline-loss-of-last-micro-batch",
        exercise="2.10",
        bug="the loss returned is that of the last micro-batch",
        find="            self.loss += output.detach()\n",
        replace="            self.loss.copy_(output.detach() * self.micro_batches)\n",
        killed_by=EQUAL,
        cause="loss-value",
    ),
    Mutant(
        id="pipeline-logs-on-last-only",
        exercise="2.10",
        bug="BUGS 59: only the last stage enters the collective of the loss",
        find=BROADCAST,
        replace="        if self.last in self.chunks:\n    " + BROADCAST,
        killed_by=EQUAL,
        cause="hang",
    ),
    Mutant(
        id="pipeline-loss-reduced-each-time",
        exercise="2.10",
        bug="a collective for every micro-batch's loss",
        find="        for step in self.steps:\n            self.take(step)\n",
        replace="        for step in self.steps:\n            self.take(step)\n"
        "        for _ in range(m - 1):\n    " + BROADCAST,
        killed_by=BYTES,
        cause="collectives",
    ),
    Mutant(
        id="pipeline-sends-unfinished",
        exercise="2.10",
        bug="the last sends are never waited for",
        find=DRAIN,
        replace="",
        killed_by=EQUAL,
        cause="never-waited",
    ),
    Mutant(
        id="pipeline-receive-not-waited",
        exercise="2.10",
        bug="a receive's buffer is used before the data is there",
        find="        handle.wait()\n        return buffer\n",
        replace="        return buffer\n",
        killed_by=EQUAL,
        cause="never-waited",
    ),
    Mutant(
        id="pipeline-global-ranks",
        exercise="2.10",
        bug="ranks of the schedule are taken for global ranks",
        find=ISEND,
        replace="        handle = dist.isend(tensor, self.rank_of[stage], group=self.group)\n",
        killed_by=SIDE,
        cause="exception",
    ),
    Mutant(
        id="pipeline-world-group",
        exercise="2.10",
        bug="sends in the world instead of the pipeline's group",
        find=ISEND,
        replace="        handle = dist.isend(tensor, self.rank_of[stage])\n",
        killed_by=SIDE,
        cause="hang",
    ),
    Mutant(
        id="pipeline-neighbours-are-other-ranks",
        exercise="2.10",
        bug="the next stage is always taken to be on another rank",
        find="            local = stage + 1 in self.chunks\n",
        replace="            local = False\n",
        killed_by=ANY,
        cause="exception",
    ),
    Mutant(
        id="pipeline-graph-kept",
        exercise="2.10",
        bug="the graphs of all micro-batches are kept",
        find=BACKWARD,
        replace="            torch.autograd.backward(output, gradient, retain_graph=True)\n"
        "            self.kept[stage, i] = x, output\n",
        killed_by=KEPT,
        cause="not-freed",
    ),
    Mutant(
        id="pipeline-uneven-accepted",
        exercise="2.10",
        bug="a batch that does not divide is cut all the same",
        find=REFUSE,
        replace="        if not len(inputs):\n",
        killed_by=BAD,
        cause="hang",
    ),
    Mutant(
        id="pipeline-first-rank-refuses",
        exercise="2.10",
        bug="only the first stage looks at the batch; the others wait for it",
        find=REFUSE,
        replace="        if 0 in self.chunks and (not len(inputs) or len(inputs) % m or len(targets) % m):\n",
        killed_by=BAD,
        cause="hang",
    ),
    Mutant(
        id="pipeline-unknown-name",
        exercise="2.10",
        bug="an unknown name means GPipe",
        find='    if name not in ("gpipe", "1f1b"):\n',
        replace="    if not name:\n",
        patches=(
            (
                '    order = gpipe if name == "gpipe" else one_f_one_b\n',
                '    order = one_f_one_b if name == "1f1b" else gpipe\n',
            ),
        ),
        killed_by=BAD,
        cause="accepted",
    ),
    Mutant(
        id="pipeline-boundary-ignored",
        exercise="2.10",
        bug="an output that the receiver does not expect is sent",
        find="            if (output.shape, output.dtype) != (want.shape, want.dtype):\n",
        replace="            if output.dtype != want.dtype:\n",
        killed_by=BOUNDARY,
        cause="vague",
    ),
    Mutant(
        id="1f1b-is-gpipe",
        exercise="2.11",
        bug="BUGS 55: all forwards first: all activations are alive",
        find=ONE,
        replace="        order.append(alternate(forwards, backwards, warm_up=micro_batches))\n",
        killed_by=FEW,
        cause="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-too-long",
        exercise="2.11",
        bug="BUGS 54: one forward too many in the warm-up",
        find=ONE,
        replace="        order.append(alternate(forwards, backwards, warm_up=ranks - rank))\n",
        killed_by=FEW,
        cause="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-alike",
        exercise="2.11",
        bug="BUGS 55: every rank warms up like the first",
        find=ONE,
        replace="        order.append(alternate(forwards, backwards, warm_up=ranks - 1))\n",
        killed_by=FEW,
        cause="too-many-kept",
    ),
    Mutant(
        id="1f1b-warm-up-too-short",
        exercise="2.11",
        bug="BUGS 54: one forward too few in the warm-up: a rank waits for its own micro-batch",
        find=ONE,
        replace="        order.append(alternate(forwards, backwards, warm_up=max(0, ranks - rank - 2)))\n",
        killed_by=FEW,
        cause="bubble",
    ),
    Mutant(
        id="1f1b-more-ranks-than-micro-batches",
        exercise="2.11",
        bug="BUGS 54: m < p: the warm-up is longer than there are forwards",
        find="    warm_up = min(warm_up, len(forwards))\n",
        replace="",
        killed_by=FEW,
        cause="exception",
    ),
    Mutant(
        id="1f1b-no-cool-down",
        exercise="2.11",
        bug="BUGS 56: the backwards of the warm-up's micro-batches are forgotten",
        find="    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]\n",
        replace="    return [*forwards[:warm_up], *steady]\n",
        killed_by=FEW,
        cause="incomplete",
    ),
    Mutant(
        id="1f1b-outputs-kept",
        exercise="2.11",
        bug="BUGS 55: inputs and outputs of all micro-batches are kept until the step ends",
        find=POP,
        replace="        x, output = self.kept[stage, i]\n",
        killed_by=MEMORY,
        cause="memory-grows",
    ),
    Mutant(
        id="1f1b-barrier-after-each-step",
        exercise="2.11",
        bug="all ranks meet after every step of the schedule: nobody is ahead of anybody",
        find="        for step in self.steps:\n            self.take(step)\n",
        replace="        for number in range(4 * len(self.rank_of) * m):\n"
        "            if number < len(self.steps):\n"
        "                self.take(self.steps[number])\n"
        "            dist.barrier(group=self.group)\n",
        killed_by=TIME,
        cause="hang",
    ),
    Mutant(
        id="pipeline-waits-for-each-send",
        exercise="2.10",
        bug="a send is waited for at once: the sender stands still while the receiver computes",
        find=ISEND,
        replace=ISEND + "        handle.wait()\n        return\n",
        killed_by=OVERLAP,
        cause="slower",
    ),
    Mutant(
        id="pipeline-waits-at-the-receive",
        exercise="2.10",
        bug="a receive is waited for where it is posted: nothing comes in during compute",
        find="            self.arriving[step] = buffer, handle\n",
        replace="            handle.wait()\n            self.arriving[step] = buffer, handle\n",
        patches=(
            (
                "        buffer, handle = self.arriving.pop(receive)\n        handle.wait()\n",
                "        buffer, _ = self.arriving.pop(receive)\n",
            ),
        ),
        killed_by=OVERLAP,
        cause="slower",
    ),
    Mutant(
        id="interleaved-in-blocks",
        exercise="2.12",
        bug="rank r holds the neighbouring stages r·v … r·v + v-1",
        find='            forwards.append(Step("F", own * ranks + rank, micro_batch))\n',
        replace='            forwards.append(Step("F", rank * chunks + own, micro_batch))\n',
        patches=(
            (
                '            backwards.append(Step("B", (chunks - 1 - own) * ranks + rank, micro_batch))\n',
                '            backwards.append(Step("B", rank * chunks + chunks - 1 - own, micro_batch))\n',
            ),
        ),
        killed_by=DIVIDES,
        cause="exception",
    ),
    Mutant(
        id="interleaved-backward-first-chunk-first",
        exercise="2.12",
        bug="BUGS 54: backward takes the own stages in the order of forward: the ranks wait for ever",
        find='            backwards.append(Step("B", (chunks - 1 - own) * ranks + rank, micro_batch))\n',
        replace='            backwards.append(Step("B", own * ranks + rank, micro_batch))\n',
        killed_by=DIVIDES,
        cause="exception",
    ),
    Mutant(
        id="interleaved-warm-up-too-long",
        exercise="2.12",
        bug="BUGS 55: the warm-up is that of all ranks' stages",
        find=WARM,
        replace="        warm_up = 2 * (ranks - 1) + (chunks - 1) * ranks\n",
        killed_by=DIVIDES,
        cause="bubble",
    ),
    Mutant(
        id="interleaved-warm-up-of-1f1b",
        exercise="2.12",
        bug="BUGS 54: warms up as if there were one stage per rank: waits for its own later stage",
        find=WARM,
        replace="        warm_up = ranks - rank - 1\n",
        killed_by=DIVIDES,
        cause="exception",
    ),
    Mutant(
        id="interleaved-all-through-each-chunk",
        exercise="2.12",
        bug="BUGS 55: all micro-batches go through a chunk before the next chunk starts",
        find="            group, position = divmod(k, ranks * chunks)\n" + PLACE,
        replace="            chunk, micro_batch = divmod(k, micro_batches)\n",
        patches=(
            (WARM, "        warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * micro_batches\n"),
        ),
        killed_by=DIVIDES,
        cause="too-many-kept",
    ),
    Mutant(
        id="interleaved-remainder-accepted",
        exercise="2.12",
        bug="m need not be a multiple of p: the last group has micro-batches that do not exist",
        find="    if micro_batches % ranks:\n",
        replace="    if micro_batches < 1:\n",
        killed_by=UNEVEN,
        cause="accepted",
    ),
    Mutant(
        id="interleaved-chunks-swapped",
        exercise="2.12",
        bug="the chunks of a rank are taken in the wrong order",
        find="        self.chunks = dict(zip(mine, chunks, strict=True))  # by stage\n",
        replace="        self.chunks = dict(zip(mine, reversed(chunks), strict=True))  # by stage\n",
        killed_by=LOOPED,
        cause="exception",
    ),
]
