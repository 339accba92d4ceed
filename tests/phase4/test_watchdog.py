"""Checks of exercise 4.5: ranks that hang, are stopped or fail are named, and their job ends."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from distlab.host.program_clock import ProgramClock
from tests.phase4.job_runs import folder_of, run_jobs, told
from tests.phase4.jobs import PATIENCE

WATCH = 2.0  # seconds: the timeout of watchdogs without a job


# -- jobs -----------------------------------------------------------------------------------------
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


# -- heartbeats -----------------------------------------------------------------------------------
@exercise("4.5", "gloo")
def test_heartbeats(impl, run, seed):
    """Beats count, are read by the others once published, and not from another attempt."""

    def plain(beat):
        names = ("step", "place", "status", "note", "count", "pid")
        return None if beat is None else tuple(getattr(beat, name) for name in names)

    def body(ctx, folder):
        beats = [impl.Heartbeat(folder, rank, 3, "now") for rank in (0, 1)]
        read = lambda: [plain(beat) for beat in beats[1].read()]
        old = impl.Heartbeat(folder, 2, 3, "before")
        old.beat(9, "save")
        old.publish()
        beats[0].beat(4, "forward")
        seen = [read()]
        beats[0].publish()
        seen.append(read())
        beats[0].beat(4, "backward")
        beats[0].beat(5, "forward")
        seen.append(read())
        beats[0].end("failed", "out of memory")
        seen.append(read())
        return seen, os.getpid()

    (before, first, meanwhile, last), process = folder_of(run, body, 1)[0]
    one, two = first[0], last[0]
    flags = before[0] is None, meanwhile[0] == one, last[2] is None
    names = ("nothing before it is published", "beats are not written", "an old attempt's is None")
    for name, flag in zip(names, flags, strict=True):
        expect_equal(flag, True, what=name, cause="published")
    for number, beat in (("first", one), ("last", two)):
        if beat is None:
            fail(f"the {number} beat is not read after it was published", cause="beat")
    *fields, _, count, pid = one
    got = (*fields, pid == process)
    expect_equal(got, (4, "forward", "running", True), what="the first beat", cause="beat")
    got, want = (*two[:4], two[4] - count), (5, "forward", "failed", "out of memory", 2)
    expect_equal(got, want, what="the last beat, two points later", cause="beat")


@exercise("4.5", "gloo")
def test_who_is_done_is_not_waited_for(impl, run, seed):
    """One rank is done at once, one leaves by sys.exit; the third goes on for long, and ends."""

    def body(ctx, folder):
        beats = impl.Heartbeat(folder, ctx.rank, 3, "now")
        try:
            with impl.Watchdog(beats, timeout=2.5):
                for step in range(7 if ctx.rank == 2 else 1):
                    beats.beat(step, "step")
                    time.sleep(0.5 if ctx.rank == 2 else 0.0)
                if ctx.rank == 1:
                    raise SystemExit(impl.EXIT_PREEMPTED)
        except SystemExit:
            pass
        return beats.latest.status, len(list(folder.glob("report*")))

    for rank, found in enumerate(folder_of(run, body, 3)):
        expect_equal(found, ("done", 0), what="status, reports", rank=rank, cause="not-done")


def watched(impl, folder: Path, seconds: float, hangs: Path | None = None) -> int:
    """A process of its own that stays at one point; its id. Ends with status 0.

    With ``hangs`` it goes on from point to point until there is that file.
    """
    pid, began = os.fork(), folder.with_suffix(".began")
    if not pid:
        try:
            beats = impl.Heartbeat(folder, 0, 1, "now")
            with impl.Watchdog(beats, timeout=WATCH):
                beats.beat(1, "step")
                began.touch()
                while hangs and not hangs.exists():
                    beats.beat(1, "step")
                    time.sleep(0.05)
                end = time.monotonic() + seconds
                while time.monotonic() < end:
                    time.sleep(0.05)
                os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    while not began.exists():
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError("the process ended as soon as it was to be watched")
        time.sleep(0.01)
    return pid


def status_of(pid: int, seconds: float) -> int | None:
    """How a process ended; None and killed if it didn't in so many seconds of its own time."""
    clock = ProgramClock([pid])
    while clock.read() < seconds:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@exercise("4.5", "gloo")
def test_what_passes_by(impl, run, seed):
    """Stopped and continued: nobody hung. The folder was away for a moment: it still watches."""

    def body(ctx, folder):
        impl.Heartbeat(folder / "three", 0, 1).beat(0, "step")  # if it raises: here, not there
        hangs = watched(impl, folder / "two", 600.0, folder / "hang")
        stopped = watched(impl, folder / "one", 2.6 * WATCH)
        time.sleep(0.4 * WATCH)  # its watchdog has looked
        os.kill(stopped, signal.SIGSTOP)
        (folder / "two").rename(folder / "away")
        time.sleep(0.5 * WATCH)
        (folder / "away").rename(folder / "two")
        (folder / "hang").touch()  # no sooner: a report has a folder, however busy the machine is
        time.sleep(1.0 * WATCH)
        os.kill(stopped, signal.SIGCONT)
        return status_of(stopped, 5 * WATCH), status_of(hangs, 5 * WATCH), impl.EXIT_HUNG

    stopped, hung, want = folder_of(run, body, 1, timeout=50.0)[0]
    if stopped != 0:
        fail(
            "a process was stopped for longer than the timeout and went on: its watchdog ended it, "
            f"with status {stopped}",
            cause="paused-blamed",
        )
    if hung != want:
        fail(
            "the folder of the beats was away for a moment, then the rank hung: expected status "
            f"{want}, got {hung} (None: it never ends, nobody watches any more)",
            cause="stopped-watching",
        )


@exercise("4.5", "gloo")
def test_bad_arguments(impl, run, seed):
    """A time-out of 0, a rank that isn't there: ValueError."""

    def body(ctx, folder):
        beats = impl.Heartbeat(folder, 0, 1)
        return [refusal(impl.Watchdog, beats, 0), refusal(impl.Heartbeat, folder, 2, 2)]

    calls = [("a timeout of 0", [0]), ("rank 2 of 2", [2])]
    expect_refused(folder_of(run, body, 1), calls)


@trace("4.5")
def trace_watchdog(impl):
    """Steps of 10 ms under a watchdog; each point is a beat. Rank 1 is slow in the third step."""

    def body(ctx):
        with tempfile.TemporaryDirectory() as folder:
            beats = impl.Heartbeat(folder, ctx.rank, ctx.world_size)
            with impl.Watchdog(beats, timeout=600.0, interval=0.02):
                dist.barrier()
                ctx.start_picture()
                for step in range(5):
                    beats.beat(step, "compute")
                    with ctx.span("step", str(step)):
                        time.sleep(0.05 if ctx.rank == 1 and step == 2 else 0.01)
                    beats.beat(step, "communicate")
                    dist.all_reduce(torch.ones(4))

    return body
