"""Wrong implementations of exercise 4.5."""

from distlab.grading.wrong import mutants_of

HUNG = "test_hung_ranks"
FAILED = "test_failed_ranks"
BEATS = "test_heartbeats"
DONE = "test_who_is_done_is_not_waited_for"
PASSES = "test_what_passes_by"

PUBLISH = """                self.heartbeat.publish()
                beats, now"""
SEEN = "                    last[rank], since[rank] = beat, now\n"
END = "        os._exit(EXIT_HUNG)\n"
FEWEST = "if count == fewest]\n"

mutant = mutants_of("4.5", "watchdog")

MUTANTS = [
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
        "old-beats",
        "the last attempt's beats are read as this one's",
        "if beat and beat.attempt == self.latest.attempt else None)\n",
        "if beat else None)\n",
        BEATS,
        "published",
    ),
]
