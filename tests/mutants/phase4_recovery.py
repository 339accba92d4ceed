"""Wrong implementations of exercise 4.5."""

from distlab.grading.wrong import mutants_of

KILLED, TOLD, HUNG, FAILED = (
    "test_killed_ranks",
    "test_told_to_leave",
    "test_hung_ranks",
    "test_failed_ranks",
)
STORE, BEATS, DONE, AGREED, SIGNALS = (
    "test_a_store_full_of_old_keys",
    "test_heartbeats",
    "test_who_is_done_is_not_waited_for",
    "test_leaving_is_agreed_on",
    "test_signals",
)

PASSES = "test_what_passes_by"

RESTORE = "        position = state.restore(adapt(saved, world_size, seed))\n"
SAVE = """        if leaving or position.step % save_every == 0:
            save()
            kept = position.step
        if leaving:
            return False
"""
PUBLISH = """                self.heartbeat.publish()
                beats, now"""
SEEN = "                    last[rank], since[rank] = beat, now\n"
END = "        os._exit(EXIT_HUNG)\n"
FEWEST = "if count == fewest]\n"
REDUCE = "            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)\n"
NOTE = "        self.requested = True\n"
MINE = "            if len(hellos) == world_size and hellos[rank] == me:\n"

mutant = mutants_of("4.5", "recovery")

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
        NOTE + "        sys.exit(EXIT_PREEMPTED)\n",
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
        "thread-beats",
        "the watchdog's thread beats by itself: it lives on when the main thread hangs",
        PUBLISH,
        "                self.heartbeat.beat(self.heartbeat.latest.step, self.heartbeat.latest.place)\n"
        + PUBLISH,
        HUNG,
        "not-ended",
    ),
    mutant(
        "raises-in-the-thread",
        "the watchdog raises an exception: it ends its own thread only",
        END,
        "        raise RuntimeError(what)\n",
        HUNG,
        "not-ended",
    ),
    mutant(
        "stopped-left-alone",
        "a stopped process is left to its agent, whose SIGTERM it does not get",
        "                    os.kill(beat.pid, signal.SIGKILL)\n",
        "                    os.kill(beat.pid, signal.SIGTERM)\n",
        HUNG,
        "not-ended",
    ),
    mutant(
        "all-blamed",
        "every rank that is silent is blamed, also those that only wait",
        FEWEST,
        "if count >= fewest]\n",
        HUNG,
        "wrong-rank",
    ),
    mutant(
        "slow-is-hung",
        "the time-out is counted from the beginning, not from the last beat",
        SEEN,
        "                    last[rank] = beat\n",
        HUNG,
        "slow-blamed",
    ),
    mutant(
        "no-stack",
        "the report does not say where the rank hangs",
        "            faulthandler.dump_traceback(file, all_threads=True)\n",
        "            faulthandler.dump_traceback(file, all_threads=False)\n",
        HUNG,
        "no-stack",
    ),
    mutant(
        "steps-do-not-beat",
        "nothing beats before a step: a step that hangs is taken for the save before it",
        '        heartbeat.beat(position.step, "step")\n',
        "",
        TOLD,
        "no-beat",
    ),
    mutant(
        "paused-is-hung",
        "who was stopped counts that time as the others' silence",
        "if beat != last[rank] or now - awake > self.timeout / 2:\n",
        "if beat != last[rank]:\n",
        PASSES,
        "paused-blamed",
    ),
    mutant(
        "disk-ends-the-watch",
        "a shared folder that is away for a moment ends the watchdog's thread",
        "            except OSError:",
        "            except EOFError:",
        PASSES,
        "stopped-watching",
    ),
    mutant(
        "done-is-silent",
        "a rank that is done beats no more, and is taken for hung",
        'if not b or b.status != "done"\n',
        "\n",
        DONE,
        "crash",
    ),
    mutant(
        "failure-not-told",
        "BUGS 8: a rank that fails just ends; who does not wait for it computes on",
        '        self.heartbeat.end("failed", note)\n',
        "",
        FAILED,
        "not-ended",
    ),
    mutant(
        "old-call",
        "what rank 0 wrote in an earlier attempt is taken for its call",
        MINE,
        "            if len(hellos) == world_size and all(hellos):\n",
        STORE,
        "old-keys",
    ),
    mutant(
        "no-prefix",
        "the store is used as it is, with the addresses of dead processes in it",
        '                store.set(f"complete/{me}", "")\n                return dist.PrefixStore(me, store), me\n',
        '                store.set(f"complete/{me}", "")\n                return store, me\n',
        STORE,
        "old-keys",
        ("return dist.PrefixStore(hellos[0], store), hellos[0]\n", "return store, hellos[0]\n"),
    ),
    mutant(
        "old-beats",
        "the last attempt's beats are read as this one's",
        "if beat and beat.attempt == self.latest.attempt else None)\n",
        "if beat else None)\n",
        BEATS,
        "published",
    ),
]
