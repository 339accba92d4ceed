"""Wrong implementations of exercise 4.14."""

from distlab.grading.wrong import mutants_of

KILLED = "test_killed_ranks"
TOLD = "test_told_to_leave"
AGREED = "test_leaving_is_agreed_on"
SIGNALS = "test_signals"

RESTORE = "        position = state.restore(adapt(saved, world_size, seed))\n"
SAVE = """        if leaving or position.step % save_every == 0:
            save()
            kept = position.step
        if leaving:
            return False
"""
REDUCE = "            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)\n"
NOTE = "        self.requested = True\n"

mutant = mutants_of("4.14", "recovery")

MUTANTS = [
    mutant(
        "from-scratch",
        "BUGS 93: a restart begins from scratch",
        RESTORE,
        "        pass\n",
        KILLED,
        "too-much-lost",
    ),
    mutant(
        "position-forgotten",
        "BUGS 84: the state is restored, and the epoch begins anew with it",
        RESTORE,
        "        state.restore(adapt(saved, world_size, seed))\n",
        KILLED,
        "wrong-samples",
    ),
    mutant(
        "saves-at-the-end-only",
        "BUGS 93: there is no checkpoint to restart from before training ends",
        "        if leaving or position.step % save_every == 0:\n",
        "        if leaving:\n",
        KILLED,
        "too-much-lost",
    ),
    mutant(
        "saves-after-exit",
        "a rank that is to leave returns before the state is saved",
        SAVE,
        "        if leaving:\n            return False\n"
        "        if position.step % save_every == 0:\n"
        "            save()\n            kept = position.step\n",
        TOLD,
        "not-saved",
    ),
    mutant(
        "one-leaves-alone",
        "BUGS 7: the rank that got the signal saves alone, the others are in the next step",
        "        leaving = guard.agreed()\n",
        "        leaving = guard.requested\n",
        TOLD,
        "one-alone",
    ),
    mutant(
        "not-agreed",
        "BUGS 7: every rank answers for itself",
        REDUCE,
        "            dist.barrier(group=self.group)\n",
        AGREED,
        "not-agreed",
    ),
    mutant(
        "everyone-must-be-told",
        "ranks leave only when all of them have got the signal",
        REDUCE,
        REDUCE.replace("MAX", "MIN"),
        AGREED,
        "not-agreed",
    ),
    mutant(
        "exits-in-the-handler",
        "the handler ends the process, in the middle of whatever it does",
        NOTE,
        NOTE + "        raise SystemExit(75)\n",
        SIGNALS,
        "crash",
    ),
    mutant(
        "handlers-kept",
        "after training, SIGTERM is still only noted: nobody can end the program any more",
        "        for number, handler in self._before.items():\n            signal.signal(number, handler)\n",
        "        self.requested = False\n",
        SIGNALS,
        "handlers",
    ),
    mutant(
        "steps-do-not-beat",
        "nothing beats before a step: a step that hangs is taken for the save before it",
        '        heartbeat.beat(position.step, "step")\n',
        "",
        TOLD,
        "no-beat",
    ),
]
