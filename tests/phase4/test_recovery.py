"""Checks of exercise 4.14: leaving at the same step, and going on after ranks were killed."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from tests.phase4.job_runs import folder_of, run_jobs, told
from tests.phase4.jobs import PATIENCE, SAVE_EVERY, STEPS


# -- restarts -------------------------------------------------------------------------------------
@exercise("4.14", "gloo")
def test_killed_ranks(impl, run, seed):
    """SIGKILL in a step, in the middle of a save: on from the newest checkpoint, same result."""
    place = seed % 4 + 1
    early = {"faults": {(1, 6): "killed", (0, 8): f"killed in save {place}"}}
    late = {"faults": {(0, STEPS): f"killed in save {place}"}, "ranks": 3}
    for scenario, result in zip((early, late), run_jobs(impl, run, early, late), strict=True):
        what = told(scenario)
        steps = [{entry["step"] for entry in attempt} for attempt in result["attempts"]]
        expect_equal(
            len(steps), 1 + len(result["faults"]), what=f"{what}: attempts", cause="attempts"
        )
        for number, (before, after) in enumerate(pairwise(steps), 2):
            again = len(before & after)
            if again > SAVE_EVERY:
                fail(
                    f"{what}: attempt {number} begins with step {min(after)}, so {again} steps are "
                    f"done again; it is saved every {SAVE_EVERY} steps",
                    cause="too-much-lost",
                )


@exercise("4.14", "gloo")
def test_told_to_leave(impl, run, seed):
    """SIGTERM on one rank: all save and leave at the same step, and nothing is done again."""
    scenario = {"faults": {(seed % 2, 6): "told"}, "timeout": PATIENCE}
    (result,) = run_jobs(impl, run, scenario)
    leaving = [entry for entry in result["ends"] if not entry["done"]]
    expect_equal(len(leaving), 2, what="ranks that left because one was told", cause="one-alone")
    reached = [max(e["step"] for e in result["attempts"][0] if e["rank"] == r) for r in (0, 1)]
    expect_equal(reached, [6, 6], what="the ranks' last steps", cause="another-step")
    first = min(entry["step"] for entry in result["attempts"][1])
    expect_equal(first, 7, what="the first step of the next attempt", cause="not-saved")


# -- leaving --------------------------------------------------------------------------------------
@exercise("4.14", "virtual gloo cuda")
def test_leaving_is_agreed_on(impl, run, seed, cases):
    """A signal on any rank is every rank's answer; 4 bytes in one message."""
    for world_size in cases(3, 2, 4, 1):

        def body(ctx):
            guard = impl.PreemptionGuard(device=ctx.device)
            answers = []
            for number, leaver in enumerate((None, 0, world_size - 1)):
                guard.requested = ctx.rank == leaver
                with ctx.region(f"call{number}"):
                    answers.append(guard.agreed())
            return answers

        results = run(body, world_size)
        for rank, answers in enumerate(results):
            what = "agreed() when no rank, rank 0, the last one was told"
            expect_equal(answers, [False, True, True], what=what, rank=rank, cause="not-agreed")
        for log in results.logs:
            sizes = [event.payload for event in log.select(region="call1").events]
            if len(sizes) != 1 or sizes[0] > 8:
                fail(f"messages of {sizes} bytes, expected one of 4", cause="too-many-bytes")


@exercise("4.14", "gloo")
def test_signals(impl, run, seed):
    """SIGTERM and SIGUSR1 are noted, nothing else happens; afterwards they mean what they meant."""

    def body(ctx):
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        noted = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with impl.PreemptionGuard() as guard:
                noted.append(guard.requested)
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                noted.append(guard.requested)
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
        return noted, before == after

    noted, same = run(body, 1, process_group=False)[0]
    expect_equal(noted, [False, True] * 2, what="requested before and after", cause="not-noted")
    expect_equal(same, True, what="the handlers afterwards are those before", cause="handlers")


@exercise("4.14", "gloo")
def test_bad_arguments(impl, run, seed):
    """A save every 0 steps: ValueError."""

    def body(ctx, folder):
        beats = impl.module("watchdog").Heartbeat(folder, 0, 1)
        nothing = dict.fromkeys(("store", "state", "guard"))
        return [refusal(impl.train, print, [], epochs=1, save_every=0, heartbeat=beats, **nothing)]

    expect_refused(folder_of(run, body, 1), [("a save every 0 steps", [0])])


@trace("4.14")
def trace_recovery(impl):
    """Steps after each of which the ranks agree whether to leave; rank 1 is told in the third."""

    def body(ctx):
        guard = impl.PreemptionGuard()
        ctx.start_picture()
        for step in range(6):
            with ctx.span("step", str(step)):
                time.sleep(0.01)
            guard.requested = ctx.rank == 1 and step >= 2
            if guard.agreed():
                break

    return body
