"""Wrong implementations of exercise 4.14."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="recovery-from-scratch",
        exercise="4.14",
        mistake="a restart begins from scratch",
        text="""    position = Position() if saved is None else state.restore(adapt(saved, world_size, seed))
""",
        becomes="    position = Position()\n",
        caught_by="test_killed_ranks",
        told_as="too-much-lost",
    ),
    Mutant(
        id="recovery-position-forgotten",
        exercise="4.14",
        mistake="the state is restored, and the epoch begins anew with it",
        text="""    position = Position() if saved is None else state.restore(adapt(saved, world_size, seed))
""",
        becomes="""    position = Position()
    if saved is not None:
        state.restore(adapt(saved, world_size, seed))
""",
        caught_by="test_killed_ranks",
        told_as="wrong-samples",
    ),
    Mutant(
        id="recovery-saves-at-the-end-only",
        exercise="4.14",
        mistake="there is no checkpoint to restart from before training ends",
        text="        if leaving or position.step % save_every == 0:\n",
        becomes="        if leaving:\n",
        caught_by="test_killed_ranks",
        told_as="too-much-lost",
    ),
    Mutant(
        id="recovery-saves-after-exit",
        exercise="4.14",
        mistake="a rank that is to leave returns before the state is saved",
        text="""        if leaving or position.step % save_every == 0:
            save()
            kept = position.step
        if leaving:
            return False
""",
        becomes="""        if leaving:
            return False
        if position.step % save_every == 0:
            save()
            kept = position.step
""",
        caught_by="test_told_to_leave",
        told_as="not-saved",
    ),
    Mutant(
        id="recovery-one-leaves-alone",
        exercise="4.14",
        mistake="the rank that got the signal saves alone, the others are in the next step",
        text="        leaving = guard.agreed()\n",
        becomes="        leaving = guard.requested\n",
        caught_by="test_told_to_leave",
        told_as="one-alone",
    ),
    Mutant(
        id="recovery-not-agreed",
        exercise="4.14",
        mistake="every rank answers for itself",
        text="            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)\n",
        becomes="            dist.barrier(group=self.group)\n",
        caught_by="test_leaving_is_agreed_on",
        told_as="not-agreed",
    ),
    Mutant(
        id="recovery-everyone-must-be-told",
        exercise="4.14",
        mistake="ranks leave only when all of them have got the signal",
        text="            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)\n",
        becomes="            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self.group)\n",
        caught_by="test_leaving_is_agreed_on",
        told_as="not-agreed",
    ),
    Mutant(
        id="recovery-exits-in-the-handler",
        exercise="4.14",
        mistake="the handler ends the process, in the middle of whatever it does",
        text="        self.requested = True\n",
        becomes="""        self.requested = True
        raise SystemExit(75)
""",
        caught_by="test_signals",
        told_as="crash",
    ),
    Mutant(
        id="recovery-handlers-kept",
        exercise="4.14",
        mistake="after training, SIGTERM is still only noted: nobody can end the program any more",
        text="""        for number, handler in self._before.items():
            signal.signal(number, handler)
""",
        becomes="        self.requested = False\n",
        caught_by="test_signals",
        told_as="handlers",
    ),
    Mutant(
        id="recovery-steps-do-not-beat",
        exercise="4.14",
        mistake="nothing beats before a step: a step that hangs is taken for the save before it",
        text='        heartbeat.beat(position.step, "step")\n',
        becomes="",
        caught_by="test_told_to_leave",
        told_as="no-beat",
    ),
    Mutant(
        id="recovery-done-saves-again",
        exercise="4.14",
        mistake="a job that was done saves once more, each time that it is started",
        text="    if kept < position.step:\n",
        becomes="    if kept <= position.step:\n",
        caught_by="test_what_the_loop_does",
        told_as="saves",
    ),
    Mutant(
        id="recovery-world-for-group",
        exercise="4.14",
        mistake="the checkpoint is cut for all ranks of the world, the group has fewer",
        text="dist.get_world_size(group) if dist",
        becomes="dist.get_world_size() if dist",
        caught_by="test_what_the_loop_does",
        told_as="exception",
    ),
    Mutant(
        id="recovery-counts-from-the-restart",
        exercise="4.14",
        mistake="steps are counted from the restart: checkpoints come at other steps each time",
        text="        if leaving or position.step % save_every == 0:\n",
        becomes="        if leaving or (position.step - begun) % save_every == 0:\n",
        more=(
            ("    def save() -> None:\n", "    begun = position.step\n\n    def save() -> None:\n"),
        ),
        caught_by="test_what_the_loop_does",
        told_as="saves",
    ),
    Mutant(
        id="recovery-saves-after-a-failure",
        exercise="4.14",
        mistake="a step that failed is saved",
        text="        train_step(batch, position)\n",
        becomes="""        try:
            train_step(batch, position)
        except Exception:
            save()
            raise
""",
        caught_by="test_what_the_loop_does",
        told_as="saves",
    ),
    Mutant(
        id="recovery-all-requested",
        exercise="4.14",
        mistake="a rank that was told of another one's signal notes it as its own",
        text="        return bool(flag)\n",
        becomes="""        self.requested = bool(flag)
        return self.requested
""",
        caught_by="test_leaving_is_agreed_on",
        told_as="not-noted",
    ),
]
