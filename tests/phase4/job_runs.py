"""What checks of 4.5, 4.13 and 4.14 share: a folder for ranks, and what jobs must come to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 (torch.optim imports it: once here, not per rank)

from distlab.grading import CheckFailed, expect_equal, fail
from distlab.ranks import RankContext, RankResults
from tests.phase4.jobs import KEPT, SLOW_PACE, job, uninterrupted

BARE: dict[str, Any] = {"process_group": False, "ledger": False}
Scenario = dict[str, Any]  # arguments of `job`, without impl


def folder_of(
    run: Callable[..., RankResults], body: Callable[..., Any], world_size: int, **options: Any
) -> RankResults:
    """Ranks without process group that share a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        return run(body, world_size, Path(name), **BARE, **options)


def run_jobs(impl: Any, run: Callable[..., RankResults], *scenarios: Scenario) -> RankResults:
    """Jobs at once, each by a rank of its own; they must end well and with the right weights."""
    results = jobs_at_once(impl, run, scenarios)
    for scenario, result in zip(scenarios, results, strict=True):
        expect_job(scenario, result)
    return results


def jobs_at_once(
    impl: Any, run: Callable[..., RankResults], scenarios: Sequence[Scenario], pace: int = 1
) -> RankResults:
    """Jobs, each by a rank of its own."""

    def body(ctx: RankContext) -> dict[str, Any]:
        return job(impl, **scenarios[ctx.rank], pace=pace)

    options = {"process_group": False, "ledger": False, "timeout": 65.0 * pace}
    return run(body, len(scenarios), **options)


def watched_jobs(
    impl: Any,
    run: Callable[..., RankResults],
    judge: Callable[[Scenario, dict[str, Any]], None],
    *scenarios: Scenario,
) -> None:
    """``run_jobs`` for jobs that watchdogs end; ``judge`` says what else each must come to.

    A machine that is busy may keep a right watchdog from its work until the others' patience ends.
    So a job that was kept waiting for KEPT seconds is wrong only if it is so at SLOW_PACE, too. A
    job that does not end is wrong at once: of other programs' time neither of its limits counts.
    """
    results = jobs_at_once(impl, run, scenarios)
    for scenario, result in zip(scenarios, results, strict=True):
        try:
            expect_job(scenario, result)
            judge(scenario, result)
        except CheckFailed:
            if result["kept"] < KEPT or result["ended"] == "not":
                raise
            (slowly,) = jobs_at_once(impl, run, [scenario], SLOW_PACE)
            expect_job(scenario, slowly)
            judge(scenario, slowly)


def expect_job(scenario: Scenario, result: dict[str, Any]) -> None:
    """The job ended well, no sample was lost or taken twice, and the weights are right."""
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
                    "is taken to be at the point before",
                    cause="no-beat",
                    rank=entry["rank"],
                )
    last = [entry for entry in result["ends"] if entry["done"]]
    expect_equal(len(last), ranks, what=f"{what}: ranks that came to the end", cause="no-end")
    for entry in last:
        rank = entry["rank"]
        expect_equal(entry["weight"], weight, what=f"{what}: weights", rank=rank, cause="weights")


def told(scenario: Scenario) -> str:
    """What happens in a scenario, in words."""
    faults = [f"rank {rank} {what} in step {k}" for (rank, k), what in scenario["faults"].items()]
    return ", ".join(faults) or "nothing happens"
