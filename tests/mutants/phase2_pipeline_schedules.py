"""Wrong implementations of exercises 2.9 and 2.21."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="schedule-sends-first",
        exercise="2.9",
        mistake="every rank sends before it receives: rendezvous sends deadlock",
        text="""                for end in message:
                    out[rank_of[end.stage]].append(end)
""",
        becomes="""                out[rank_of[message[0].stage]].append(message[0])
                late.append(message[1])
        for end in late:
            out[rank_of[end.stage]].append(end)
""",
        more=(
            (
                "        for step in [*forwards, *others]:\n",
                """        late = []
        for step in [*forwards, *others]:
""",
            ),
        ),
        caught_by="test_messages_make_an_order_runnable",
        told_as="deadlock",
    ),
    Mutant(
        id="schedule-gradients-not-sent",
        exercise="2.9",
        mistake="activations are sent, gradients are not",
        text="            if message and rank_of[message[0].stage] != rank_of[message[1].stage]:\n",
        becomes="""            if message and step.kind == "F" and (
                rank_of[message[0].stage] != rank_of[message[1].stage]
            ):
""",
        caught_by="test_messages_make_an_order_runnable",
        told_as="message-missing",
    ),
    Mutant(
        id="schedule-sends-to-itself",
        exercise="2.9",
        mistake="stages on one rank send each other messages",
        text="            if message and rank_of[message[0].stage] != rank_of[message[1].stage]:\n",
        becomes="            if message:\n",
        caught_by="test_messages_make_an_order_runnable",
        told_as="message-too-often",
    ),
    Mutant(
        id="schedule-order-sorted",
        exercise="2.9",
        mistake="takes the steps in an order of its own: one micro-batch after another",
        text="    left = [list(reversed(steps)) for steps in order]\n",
        becomes="""    sign = {'F': 1, 'B': -1, 'W': 0}
    place = lambda s: (s.micro_batch, 'FBW'.index(s.kind), sign[s.kind] * s.stage)
    left = [sorted(steps, key=place, reverse=True) for steps in order]
""",
        caught_by="test_messages_make_an_order_runnable",
        told_as="order-changed",
    ),
    Mutant(
        id="schedule-impossible-loops",
        exercise="2.9",
        mistake="an impossible order is returned without the steps that nobody reaches",
        text=(
            '            raise ValueError(f"the order is impossible, ranks wait for each '
            'other: {stuck}")\n'
        ),
        becomes="            return out\n",
        caught_by="test_impossible_orders_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="validate-empty",
        exercise="2.9",
        mistake="the sizes are read from the schedule, so an empty one is complete",
        text="    if not rank_of or sorted(rank_of) != list(range(stages)):\n",
        becomes="""    if not rank_of:
        return
    if sorted(rank_of) != list(range(stages)):
""",
        caught_by="test_broken_schedules_are_refused",
        told_as="empty",
    ),
    Mutant(
        id="validate-incomplete",
        exercise="2.9",
        mistake="only what is too much is found, not what is missing",
        text="    for rank, step in [*(want - have), *(have - want)]:\n",
        becomes="    for rank, step in have - want:\n",
        caught_by="test_broken_schedules_are_refused",
        told_as="backward-missing",
    ),
    Mutant(
        id="validate-counts-micro-batches-it-finds",
        exercise="2.9",
        mistake="a micro-batch that is nowhere is not missed",
        text=(
            "    every = [Step(k, s, i) for k in kinds for s in range(stages) for i in "
            "range(micro_batches)]\n"
        ),
        becomes="""    found = {step.micro_batch for steps in schedule for step in steps}
    every = [Step(k, s, i) for k in kinds for s in range(stages) for i in found]
""",
        caught_by="test_broken_schedules_are_refused",
        told_as="micro-batch-missing",
    ),
    Mutant(
        id="validate-doubled",
        exercise="2.9",
        mistake="compares sets: a step that is there twice counts once",
        text="    for rank, step in [*(want - have), *(have - want)]:\n",
        becomes="    for rank, step in [*(want - have), *(set(have) - set(want))]:\n",
        caught_by="test_broken_schedules_are_refused",
        told_as=("backward-twice", "exception"),
    ),
    Mutant(
        id="validate-no-deadlock",
        exercise="2.9",
        mistake="counts steps, and never lets the ranks run",
        text="    _run_through(schedule, rank_of, dict(crossing))\n",
        becomes="",
        caught_by="test_broken_schedules_are_refused",
        told_as="sent-before-computed",
    ),
    Mutant(
        id="validate-buffered-sends",
        exercise="2.9",
        mistake="a send is done at once, as if it were buffered",
        text="""                    if peer[-1] != receive:
                        break
                    done.add(peer.pop())
""",
        becomes="""                    for steps_of_peer in (peer,):
                        if receive in steps_of_peer:
                            steps_of_peer.remove(receive)
                            done.add(receive)
""",
        caught_by="test_broken_schedules_are_refused",
        told_as="received-after-use",
    ),
    Mutant(
        id="validate-messages-by-name",
        exercise="2.9",
        mistake=(
            "a receive anywhere at the peer will do: messages that cross or overtake are accepted"
        ),
        text="""                    if peer[-1] != receive:
                        break
                    done.add(peer.pop())
""",
        becomes="""                    waiting = [s for s in reversed(peer)]
                    heads = []
                    for s in waiting:
                        if len(s.kind) == 1:
                            break
                        heads.append(s)
                    if receive not in heads:
                        break
                    peer.remove(receive)
                    done.add(receive)
""",
        caught_by="test_broken_schedules_are_refused",
        told_as="deadlock",
    ),
    Mutant(
        id="validate-refuses-other-orders",
        exercise="2.9",
        mistake="expects the micro-batches in rising order",
        text="    _run_through(schedule, rank_of, dict(crossing))\n",
        becomes="""    _run_through(schedule, rank_of, dict(crossing))
    for steps in schedule:
        seen = [s.micro_batch for s in steps if s.kind == 'B']
        if seen != sorted(seen):
            raise ValueError('the micro-batches are not in order')
""",
        caught_by="test_valid_schedules_are_accepted",
        told_as="refused",
    ),
    Mutant(
        id="replay-without-dependencies",
        exercise="2.21",
        mistake="a rank starts its next step when it is free, whether the input is there or not",
        text="                    start = max(start, ends[before] + away)\n",
        becomes="                    start = max(start, away)\n",
        caught_by="test_replay_gives_the_bubble",
        told_as="times",
    ),
    Mutant(
        id="replay-message-within-rank",
        exercise="2.21",
        mistake="what a rank hands to itself takes the time of a message",
        text="                    away = message if rank_of[before.stage] != rank else 0.0\n",
        becomes="                    away = message\n",
        caught_by="test_replay_gives_the_bubble",
        told_as="times",
    ),
    Mutant(
        id="replay-impossible-ends",
        exercise="2.21",
        mistake="an impossible order is timed up to the step at which nobody can go on",
        text=(
            '            raise ValueError(f"nobody can go on after {count} steps: the order is '
            'impossible")\n'
        ),
        becomes="            break\n",
        caught_by="test_replay_refuses_impossible_orders",
        told_as="accepted",
    ),
    Mutant(
        id="bubble-of-one-rank",
        exercise="2.21",
        mistake="the idle time of all ranks over the time of one",
        text="        return 1 - busy / (len(self.spans) * self.seconds)\n",
        becomes="        return len(self.spans) - busy / self.seconds\n",
        caught_by="test_replay_gives_the_bubble",
        told_as="bubble",
    ),
    Mutant(
        id="bubble-relative-to-work",
        exercise="2.21",
        mistake="idle time over busy time instead of over all time",
        text="        return 1 - busy / (len(self.spans) * self.seconds)\n",
        becomes="        return len(self.spans) * self.seconds / busy - 1\n",
        caught_by="test_replay_gives_the_bubble",
        told_as="bubble",
    ),
    Mutant(
        id="peak-freed-at-input-gradient",
        exercise="2.21",
        mistake="what W still reads counts as freed by B",
        text='        frees = "W" if any(step.kind == "W" for step in steps) else "B"\n',
        becomes='        frees = "B"\n',
        caught_by="test_peak_counts_what_is_kept",
        told_as="peak",
    ),
    Mutant(
        id="peak-is-the-number-of-forwards",
        exercise="2.21",
        mistake="never counts down",
        text='            live += (step.kind == "F") - (step.kind == frees)\n',
        becomes='            live += step.kind == "F"\n',
        caught_by="test_peak_counts_what_is_kept",
        told_as="peak",
    ),
    Mutant(
        id="messages-eat-the-order",
        exercise="2.9",
        mistake="the lists that were given are emptied",
        text="    left = [list(reversed(steps)) for steps in order]\n    out: list[list[Step]]",
        becomes="""    left = list(order)
    for steps in left:
        steps.reverse()
    out: list[list[Step]]""",
        caught_by="test_messages_make_an_order_runnable",
        told_as="exception",
    ),
    Mutant(
        id="replay-idle-ranks-left-out",
        exercise="2.21",
        mistake="a rank without steps is not counted as idle",
        text="        return 1 - busy / (len(self.spans) * self.seconds)\n",
        becomes="        return 1 - busy / (sum(map(bool, self.spans)) * self.seconds)\n",
        caught_by="test_replay_gives_the_bubble",
        told_as="bubble",
    ),
    Mutant(
        id="replay-missing-step-ignored",
        exercise="2.21",
        mistake="what is nowhere is not waited for",
        text="            while steps and all(before in ends for before in needs(steps[-1], last)):\n",
        becomes="            there = {s for each in schedule for s in each}\n"
        "            while steps and all(\n"
        "                s in ends for s in needs(steps[-1], last) if s in there\n"
        "            ):\n",
        more=(
            (
                "                for before in needs(step, last):\n",
                "                for before in (s for s in needs(step, last) if s in ends):\n",
            ),
        ),
        caught_by="test_replay_refuses_impossible_orders",
        told_as="accepted",
    ),
    Mutant(
        id="messages-stage-nowhere",
        exercise="2.9",
        mistake="a stage that is on no rank is looked up: KeyError",
        text="    if len(rank_of) <= last:\n",
        becomes="    if False:\n",
        caught_by="test_impossible_orders_are_refused",
        told_as="accepted",
    ),
    Mutant(
        id="peak-weights-of-all-ranks",
        exercise="2.21",
        mistake="W on any rank frees, also on a rank that has none",
        text='        frees = "W" if any(step.kind == "W" for step in steps) else "B"\n',
        becomes=(
            '        frees = "W" if any(s.kind == "W" for each in schedule for s in each) else "B"\n'
        ),
        caught_by="test_peak_counts_what_is_kept",
        told_as="peak",
    ),
    Mutant(
        id="schedule-idle-end-dropped",
        exercise="2.9",
        mistake="ranks without steps at the end are left out",
        text="    out: list[list[Step]] = [[] for _ in order]\n",
        becomes="""    ranks = 1 + max(rank_of.values()) if rank_of else len(order)
    out: list[list[Step]] = [[] for _ in range(ranks)]
""",
        caught_by="test_messages_make_an_order_runnable",
        told_as="order-changed",
    ),
    Mutant(
        id="replay-idle-end-uncounted",
        exercise="2.21",
        mistake="ranks without steps at the end don't count as idle",
        text="(len(self.spans) * self.seconds)",
        becomes="(max(r + 1 for r, s in enumerate(self.spans) if s) * self.seconds)",
        caught_by="test_replay_gives_the_bubble",
        told_as="bubble",
    ),
]
