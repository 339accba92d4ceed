"""Checks of exercise 4.5: jobs whose ranks are killed, stopped, told to leave, or fail."""

from __future__ import annotations

from itertools import pairwise

import torch._dynamo  # noqa: F401 (torch.optim imports it: once here, not per rank)
from jobs import PATIENCE, SAVE_EVERY, STEPS, job, uninterrupted

from distlab.grading import exercise, expect_equal, fail


def run_jobs(impl, run, *scenarios: dict) -> list[dict]:
    """Jobs at once, each by a rank of its own; they must end well and with the right weights."""

    def body(ctx):
        return job(impl, **scenarios[ctx.rank])

    options = {"process_group": False, "ledger": False, "timeout": 65.0}
    results = run(body, len(scenarios), **options)
    for scenario, result in zip(scenarios, results, strict=True):
        expect_job(scenario, result)
    return results


def expect_job(scenario: dict, result: dict) -> None:
    what = told(scenario)
    attempts, ranks = result["attempts"], scenario.get("ranks", 2)
    if result["ended"] == "not":
        fail(f"{what}: the job does not end", cause="not-ended")
    if result["ended"] == "badly":
        fail(f"{what}: the job used up its restarts: every attempt failed", cause="used-up")
    samples, weight = uninterrupted()
    for number, attempt in enumerate(attempts, 1):
        for step in sorted({entry["step"] for entry in attempt}):
            parts = [e["samples"] for e in attempt if e["step"] == step]
            if len(parts) == ranks:
                got = sorted(i for part in parts for i in part)
                message = f"{what}: samples of step {step} in attempt {number}"
                expect_equal(got, samples[step - 1], what=message, cause="wrong-samples")
        for entry in attempt:
            if not entry["beaten"]:
                fail(
                    f"{what}: step {entry['step']} begins without a beat: a rank that hangs in it "
                    "is taken to be in the place before",
                    cause="no-beat",
                    rank=entry["rank"],
                )
    last = [entry for entry in result["ends"] if entry["done"]]
    expect_equal(len(last), ranks, what=f"{what}: ranks that came to the end", cause="no-end")
    for entry in last:
        rank = entry["rank"]
        expect_equal(entry["weight"], weight, what=f"{what}: weights", rank=rank, cause="weights")


def told(scenario: dict) -> str:
    faults = [f"rank {rank} {what} in step {k}" for (rank, k), what in scenario["faults"].items()]
    return ", ".join(faults) or "nothing happens"


# -- restarts -------------------------------------------------------------------------------------
@exercise("4.5", "gloo")
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


@exercise("4.5", "gloo")
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


# -- the watchdog ---------------------------------------------------------------------------------
@exercise("4.5", "gloo")
def test_hung_ranks(impl, run, seed):
    """A rank that sleeps, one that is stopped: blamed in a report, all end, and the job goes on."""
    who = seed % 2
    sleeps = {"faults": {(who, 6): "sleeps"}, "timeout": PATIENCE}
    stopped = {"faults": {(who, 6): "stopped"}, "timeout": PATIENCE}
    slow = {"faults": {(who, k): "slow" for k in (5, 6, 7)}, "timeout": PATIENCE}
    alone = {"faults": {(0, 6): "sleeps"}, "timeout": PATIENCE, "ranks": 1}
    results = run_jobs(impl, run, sleeps, stopped, slow, alone)
    for scenario, result in zip((sleeps, stopped), results, strict=False):
        expect_report(told(scenario), result, who)
    (report,) = results[0]["reports"]
    if "oversleep" not in report:
        fail(f"the report shows no stack of where rank {who} sleeps:\n{report}", cause="no-stack")
    if "step 6" not in report.split("stack of")[0]:
        fail(f"the report does not say step 6:\n{report}", cause="no-step")
    if results[2]["reports"] or len(results[2]["attempts"]) > 1:
        fail(
            f"rank {who} needs half of the timeout for each of three steps: it is slow, but it "
            "gets on, and the watchdog ended the job",
            cause="slow-blamed",
        )


def expect_report(what: str, result: dict, who: int) -> None:
    if len(result["reports"]) != 1:
        number = len(result["reports"])
        fail(f"{what}: expected one report, there are {number}", cause="report")
    first = result["reports"][0].splitlines()[0]
    if f"rank {who}" not in first or f"rank {1 - who}" in first:
        fail(f"{what}: the report's first line blames another one: {first}", cause="wrong-rank")


@exercise("4.5", "gloo")
def test_failed_ranks(impl, run, seed):
    """An exception on one rank ends the others, also one that computes; the report has it."""
    who = seed % 2
    scenario = {"faults": {(who, 6): "raises", (1 - who, 6): "sleeps"}}
    (result,) = run_jobs(impl, run, scenario)
    expect_report(told(scenario), result, who)
    if "ZeroDivisionError" not in result["reports"][0]:
        report = result["reports"][0]
        fail(f"the report does not say what rank {who} failed with:\n{report}", cause="no-stack")
