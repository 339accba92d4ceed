"""Wrong implementations of exercises 2.9 and 2.21."""

from distlab.grading.wrong import Mutant

RUNNABLE, REFUSED = "test_messages_make_an_order_runnable", "test_broken_schedules_are_refused"
IMPOSSIBLE = "test_impossible_orders_are_refused"
ACCEPTED = "test_valid_schedules_are_accepted"
TIMES, PEAK = "test_replay_gives_the_bubble", "test_peak_counts_what_is_kept"
REPLAY_REFUSES = "test_replay_refuses_impossible_orders"

ENDS = """                for end in message:
                    out[rank_of[end.stage]].append(end)
"""
STEPS = "        for step in [*forwards, *others]:\n"
COUNTS = "    for rank, step in [*(want - have), *(have - want)]:\n"
WALK = "    _run_through(schedule, rank_of, dict(crossing))\n"
MEET = """                    if not peer or peer[-1] != receive:
                        break
                    done.add(peer.pop())
"""
EVERY = "    every = [Step(k, s, i) for k in kinds for s in range(stages) for i in range(micro_batches)]\n"

MUTANTS = [
    Mutant(
        id="schedule-sends-first",
        exercise="2.9",
        bug="BUGS 54: every rank sends before it receives: rendezvous sends deadlock",
        find=ENDS,
        replace="                out[rank_of[message[0].stage]].append(message[0])\n"
        "                late.append(message[1])\n"
        "        for end in late:\n"
        "            out[rank_of[end.stage]].append(end)\n",
        patches=((STEPS, "        late = []\n" + STEPS),),
        killed_by=RUNNABLE,
        cause="deadlock",
    ),
    Mutant(
        id="schedule-gradients-not-sent",
        exercise="2.9",
        bug="BUGS 52: activations are sent, gradients are not",
        find="            if message and rank_of[message[0].stage] != rank_of[message[1].stage]:\n",
        replace='            if message and step.kind == "F" and (\n'
        "                rank_of[message[0].stage] != rank_of[message[1].stage]\n"
        "            ):\n",
        killed_by=RUNNABLE,
        cause="message-missing",
    ),
    Mutant(
        id="schedule-sends-to-itself",
        exercise="2.9",
        bug="stages on one rank send each other messages",
        find="            if message and rank_of[message[0].stage] != rank_of[message[1].stage]:\n",
        replace="            if message:\n",
        killed_by=RUNNABLE,
        cause="message-too-often",
    ),
    Mutant(
        id="schedule-order-sorted",
        exercise="2.9",
        bug="takes the steps in an order of its own: one micro-batch after another",
        find="    left = [list(reversed(steps)) for steps in order]\n",
        replace="    sign = {'F': 1, 'B': -1, 'W': 0}\n"
        "    place = lambda s: (s.micro_batch, 'FBW'.index(s.kind), sign[s.kind] * s.stage)\n"
        "    left = [sorted(steps, key=place, reverse=True) for steps in order]\n",
        killed_by=RUNNABLE,
        cause="order-changed",
    ),
    Mutant(
        id="schedule-impossible-loops",
        exercise="2.9",
        bug="an impossible order is returned without the steps that nobody reaches",
        find='            raise ValueError(f"the order is impossible, ranks wait for each other: {stuck}")\n',
        replace="            return out\n",
        killed_by=IMPOSSIBLE,
        cause="accepted",
    ),
    Mutant(
        id="validate-empty",
        exercise="2.9",
        bug="BUGS 56: the sizes are read from the schedule, so an empty one is complete",
        find="    if sorted(rank_of) != list(range(stages)):\n",
        replace="    if not rank_of:\n        return\n    if sorted(rank_of) != list(range(stages)):\n",
        killed_by=REFUSED,
        cause="empty",
    ),
    Mutant(
        id="validate-incomplete",
        exercise="2.9",
        bug="BUGS 56: only what is too much is found, not what is missing",
        find=COUNTS,
        replace="    for rank, step in have - want:\n",
        killed_by=REFUSED,
        cause="backward-missing",
    ),
    Mutant(
        id="validate-counts-micro-batches-it-finds",
        exercise="2.9",
        bug="BUGS 56: a micro-batch that is nowhere is not missed",
        find=EVERY,
        replace="    found = {step.micro_batch for steps in schedule for step in steps}\n"
        "    every = [Step(k, s, i) for k in kinds for s in range(stages) for i in found]\n",
        killed_by=REFUSED,
        cause="micro-batch-missing",
    ),
    Mutant(
        id="validate-doubled",
        exercise="2.9",
        bug="compares sets: a step that is there twice counts once",
        find=COUNTS,
        replace="    for rank, step in [*(want - have), *(set(have) - set(want))]:\n",
        killed_by=REFUSED,
        cause="backward-twice",
    ),
    Mutant(
        id="validate-no-deadlock",
        exercise="2.9",
        bug="BUGS 54: counts steps, and never lets the ranks run",
        find=WALK,
        replace="",
        killed_by=REFUSED,
        cause="sent-before-computed",
    ),
    Mutant(
        id="validate-buffered-sends",
        exercise="2.9",
        bug="BUGS 54: a send is done at once, as if it were buffered",
        find=MEET,
        replace="                    for steps_of_peer in (peer,):\n"
        "                        if receive in steps_of_peer:\n"
        "                            steps_of_peer.remove(receive)\n"
        "                            done.add(receive)\n",
        killed_by=REFUSED,
        cause="received-after-use",
    ),
    Mutant(
        id="validate-messages-by-name",
        exercise="2.9",
        bug="a receive anywhere at the peer will do: messages that cross or overtake are accepted",
        find=MEET,
        replace="                    waiting = [s for s in reversed(peer)]\n"
        "                    heads = []\n"
        "                    for s in waiting:\n"
        "                        if len(s.kind) == 1:\n"
        "                            break\n"
        "                        heads.append(s)\n"
        "                    if receive not in heads:\n"
        "                        break\n"
        "                    peer.remove(receive)\n"
        "                    done.add(receive)\n",
        killed_by=REFUSED,
        cause="deadlock",
    ),
    Mutant(
        id="validate-refuses-other-orders",
        exercise="2.9",
        bug="expects the micro-batches in rising order",
        find=WALK,
        replace=WALK + "    for steps in schedule:\n"
        "        seen = [s.micro_batch for s in steps if s.kind == 'B']\n"
        "        if seen != sorted(seen):\n"
        "            raise ValueError('the micro-batches are not in order')\n",
        killed_by=ACCEPTED,
        cause="refused",
    ),
    Mutant(
        id="replay-without-dependencies",
        exercise="2.21",
        bug="a rank starts its next step when it is free, whether the input is there or not",
        find="                    start = max(start, ends[before] + away)\n",
        replace="                    start = max(start, away)\n",
        killed_by=TIMES,
        cause="times",
    ),
    Mutant(
        id="replay-message-within-rank",
        exercise="2.21",
        bug="what a rank hands to itself takes the time of a message",
        find="                    away = message if rank_of[before.stage] != rank else 0.0\n",
        replace="                    away = message\n",
        killed_by=TIMES,
        cause="times",
    ),
    Mutant(
        id="replay-impossible-ends",
        exercise="2.21",
        bug="an impossible order is timed up to the step at which nobody can go on",
        find='            raise ValueError(f"nobody can go on after {count} steps: the order is impossible")\n',
        replace="            break\n",
        killed_by=REPLAY_REFUSES,
        cause="accepted",
    ),
    Mutant(
        id="bubble-of-one-rank",
        exercise="2.21",
        bug="the idle time of all ranks over the time of one",
        find="        return 1 - busy / (len(self.spans) * self.seconds)\n",
        replace="        return len(self.spans) - busy / self.seconds\n",
        killed_by=TIMES,
        cause="bubble",
    ),
    Mutant(
        id="bubble-relative-to-work",
        exercise="2.21",
        bug="idle time over busy time instead of over all time",
        find="        return 1 - busy / (len(self.spans) * self.seconds)\n",
        replace="        return len(self.spans) * self.seconds / busy - 1\n",
        killed_by=TIMES,
        cause="bubble",
    ),
    Mutant(
        id="peak-freed-at-input-gradient",
        exercise="2.21",
        bug="what W still reads counts as freed by B",
        find='        frees = "W" if any(step.kind == "W" for step in steps) else "B"\n',
        replace='        frees = "B"\n',
        killed_by=PEAK,
        cause="peak",
    ),
    Mutant(
        id="peak-is-the-number-of-forwards",
        exercise="2.21",
        bug="never counts down",
        find='            live += (step.kind == "F") - (step.kind == frees)\n',
        replace='            live += step.kind == "F"\n',
        killed_by=PEAK,
        cause="peak",
    ),
]
