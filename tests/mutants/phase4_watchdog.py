"""Wrong implementations of exercise 4.5."""

from distlab.grading.wrong import Mutant

MUTANTS = [
    Mutant(
        id="watchdog-thread-beats",
        exercise="4.5",
        mistake="the watchdog's thread beats by itself: it lives on when the main thread hangs",
        text="""                self.heartbeat.publish()
                beats, now""",
        becomes=(
            "                self.heartbeat.beat(self.heartbeat.latest.step, "
            "self.heartbeat.latest.place)\n"
            "                self.heartbeat.publish()\n"
            "                beats, now"
        ),
        caught_by="test_hung_ranks",
        told_as="not-ended",
    ),
    Mutant(
        id="watchdog-raises-in-the-thread",
        exercise="4.5",
        mistake="the watchdog raises an exception: it ends its own thread only",
        text="        os._exit(EXIT_HUNG)\n",
        becomes="        raise RuntimeError(what)\n",
        caught_by="test_hung_ranks",
        told_as="not-ended",
    ),
    Mutant(
        id="watchdog-stopped-left-alone",
        exercise="4.5",
        mistake="a stopped process is left to its agent, whose SIGTERM it does not get",
        text="                    os.kill(beat.pid, signal.SIGKILL)\n",
        becomes="                    os.kill(beat.pid, signal.SIGTERM)\n",
        caught_by="test_hung_ranks",
        told_as="not-ended",
    ),
    Mutant(
        id="watchdog-all-blamed",
        exercise="4.5",
        mistake="every rank that is silent is blamed, also those that only wait",
        text="if count == fewest]\n",
        becomes="if count >= fewest]\n",
        caught_by="test_hung_ranks",
        told_as="wrong-rank",
    ),
    Mutant(
        id="watchdog-slow-is-hung",
        exercise="4.5",
        mistake="the time-out is counted from the beginning, not from the last beat",
        text="                    last[rank], since[rank] = beat, now\n",
        becomes="                    last[rank] = beat\n",
        caught_by="test_hung_ranks",
        told_as="slow-blamed",
    ),
    Mutant(
        id="watchdog-no-stack",
        exercise="4.5",
        mistake="the report does not say where the rank hangs",
        text="            faulthandler.dump_traceback(file, all_threads=True)\n",
        becomes="            faulthandler.dump_traceback(file, all_threads=False)\n",
        caught_by="test_hung_ranks",
        told_as="no-stack",
    ),
    Mutant(
        id="watchdog-paused-is-hung",
        exercise="4.5",
        mistake="who was stopped counts that time as the others' silence",
        text="if beat != last[rank] or now - awake > self.timeout / 2:\n",
        becomes="if beat != last[rank]:\n",
        caught_by="test_what_passes_by",
        told_as="paused-blamed",
    ),
    Mutant(
        id="watchdog-disk-ends-the-watch",
        exercise="4.5",
        mistake="a shared folder that is away for a moment ends the watchdog's thread",
        text="            except OSError:",
        becomes="            except EOFError:",
        caught_by="test_what_passes_by",
        told_as="stopped-watching",
    ),
    Mutant(
        id="watchdog-done-is-silent",
        exercise="4.5",
        mistake="a rank that is done beats no more, and is taken for hung",
        text='if not b or b.status != "done"\n',
        becomes="\n",
        caught_by="test_who_is_done_is_not_waited_for",
        told_as="crash",
    ),
    Mutant(
        id="watchdog-failure-not-told",
        exercise="4.5",
        mistake="a rank that fails just ends; who does not wait for it computes on",
        text='        self.heartbeat.end("failed", note)\n',
        becomes="",
        caught_by="test_failed_ranks",
        told_as="not-ended",
    ),
    Mutant(
        id="watchdog-old-beats",
        exercise="4.5",
        mistake="the last attempt's beats are read as this one's",
        text="if beat and beat.attempt == self.latest.attempt else None)\n",
        becomes="if beat else None)\n",
        caught_by="test_heartbeats",
        told_as="published",
    ),
]
