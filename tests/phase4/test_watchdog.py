"""Checks of exercise 4.5: ranks that hang, are stopped or fail are named, and their job ends."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from distlab.host.program_clock import ProgramClock, until
from tests.phase4.disk import Disk, in_child, without_waiting
from tests.phase4.job_runs import folder_of, told, watched_jobs
from tests.phase4.jobs import PATIENCE

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT  # look whether it has ended, and leave it as it is
WATCH = 2.0  # seconds: the timeout of watchdogs without a job
ME = "me"  # the rank that is watched


# -- jobs -----------------------------------------------------------------------------------------
@exercise(
    "4.5",
    "gloo",
    asserts="hung-blamed stacks all-end one-report slow-stay report-lines alone output cost",
)
def test_hung_ranks(impl, run, seed):
    """A rank that sleeps, one that is stopped: blamed in a report, all end, and the job goes on."""
    who = seed % 2
    sleeps = {"faults": {(who, 6): "sleeps"}, "timeout": PATIENCE}
    stopped = {"faults": {(who, 6): "stopped"}, "timeout": PATIENCE}
    slow = {"faults": {(who, k): "slow" for k in (5, 6, 7)}, "timeout": PATIENCE}
    alone = {"faults": {(0, 6): "sleeps"}, "timeout": PATIENCE, "ranks": 1}

    def judge(scenario, result):
        if scenario is not slow:
            expect_report(told(scenario), result, 0 if scenario is alone else who)
        if scenario in (sleeps, alone):
            expect_stack(told(scenario), result["reports"][0])
        if scenario is slow and (result["reports"] or len(result["attempts"]) > 1):
            fail(
                f"rank {who} needs three eighths of the timeout for each of three steps. It is "
                "slow, but it gets on, and the watchdog ended the job",
                cause="slow-blamed",
            )

    watched_jobs(impl, run, judge, sleeps, stopped, slow, alone)


def expect_stack(what: str, report: str) -> None:
    if "oversleep" not in report:
        fail(f"{what}: the report shows no stack of where it sleeps:\n{report}", cause="no-stack")
    if "step 6" not in report.split("stack of")[0]:
        fail(f"{what}: the report does not say step 6:\n{report}", cause="no-step")


def expect_report(what: str, result: dict, who: int) -> None:
    if len(result["reports"]) != 1:
        number = len(result["reports"])
        fail(f"{what}: expected one report, there are {number}", cause="report")
    first = result["reports"][0].splitlines()[0]
    if f"rank {who}" not in first or f"rank {1 - who}" in first:
        fail(f"{what}: the report's first line blames another one: {first}", cause="wrong-rank")
    times = result["stderr"].count(result["reports"][0].strip())
    if times != 1:
        fail(
            f"{what}: one rank writes the report on standard error, too: it is there {times} times",
            cause="stderr",
        )


@exercise("4.5", "gloo", asserts="failed-blamed stacks all-end one-report alone output")
def test_failed_ranks(impl, run, seed):
    """An exception on one rank ends the other ranks, also one that computes; the report has it."""
    who = seed % 2
    scenario = {"faults": {(who, 6): "raises", (1 - who, 6): "sleeps"}}

    def judge(scenario, result):
        expect_report(told(scenario), result, who)
        (report,) = result["reports"]
        if "ZeroDivisionError" not in report:
            fail(f"the report doesn't say what rank {who} failed with:\n{report}", cause="no-stack")

    watched_jobs(impl, run, judge, scenario)


# -- heartbeats -----------------------------------------------------------------------------------
@exercise("4.5", "gloo", asserts="counts published-only attempt each-rank")
def test_heartbeats(impl, run, seed):
    """Beats count, other ranks read them once they are published, and none
    comes from another attempt."""

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


@exercise("4.5", "gloo", asserts="whole two-threads no-other-file life resources")
def test_beats_are_whole(impl, run, seed):
    """Killed at every operation of publish, or two threads at once: the old beat or the new one."""

    def body(ctx, folder):
        without_waiting()
        mine = impl.Heartbeat(folder, 1, 2, "now")
        reader = impl.Heartbeat(folder, 0, 2, "now")
        mine.beat(0, "begin")
        mine.publish()
        seen = []
        for at in range(1, 12):
            mine.beat(at, "step" * 999)

            def work(at: int = at) -> None:
                Disk(folder, at)
                mine.publish()

            status = in_child(work)
            try:
                beat = reader.read()[1]
                seen.append((at, status, beat and beat.step))
            except Exception as error:
                seen.append((at, status, f"{type(error).__name__}: {error}"))
            if status == 0:
                break
        problems = publish_at_once(mine)
        names = {path.name.split(".")[0] for path in folder.iterdir()}
        mine.publish()
        return seen, problems, len(names), reader.read()[1].step

    for seen, problems, _, last in folder_of(run, body, 1):
        before = 0
        for at, _, step in seen:
            what = f"publish killed at its operation {at} on the disk"
            if step not in (before, at):
                fail(
                    f"{what}: read gives {step!r}, not the beat of step {before} or {at}",
                    cause="half-a-beat",
                    rank=0,
                )
            before = step
        if seen[-1][1] != 0:
            fail("publish was not over after 11 operations on the disk", cause="endless", rank=0)
        expect_equal(problems, [], what="two threads publish at once", cause="two-threads")
        expect_equal(last, seen[-1][0], what="the step read at last", cause="published")


def publish_at_once(beats) -> list[str]:
    """Errors of two threads of which one publishes between the other's write and its rename."""
    reached, go, problems = threading.Event(), threading.Event(), []
    real = os.replace, os.rename
    first = []

    def held(move):
        def call(*args, **kwargs):
            if threading.current_thread() in first:
                reached.set()
                go.wait(5)
            return move(*args, **kwargs)

        return call

    def publish() -> None:
        try:
            beats.publish()
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        reached.set()

    os.replace, os.rename = held(os.replace), held(os.rename)
    thread = threading.Thread(target=publish)
    first.append(thread)
    thread.start()
    reached.wait(5)
    publish()
    go.set()
    thread.join()
    os.replace, os.rename = real
    return problems


@exercise("4.5", "gloo", asserts="how-left life resources exception-goes-on")
def test_how_the_block_is_left(impl, run, seed):
    """Normally, by sys.exit with several codes, by exceptions: done or failed; no thread stays."""
    ways = [None, SystemExit(), SystemExit(0), "preempted", SystemExit(1), SystemExit("no")]
    ways += [KeyboardInterrupt(), ZeroDivisionError("by nought")]

    def body(ctx, folder):
        found = []
        for number, way in enumerate(ways):
            way = SystemExit(impl.EXIT_PREEMPTED) if way == "preempted" else way
            beats = impl.Heartbeat(folder / str(number), 0, 1, "now")
            before, raised = threading.active_count(), None
            try:
                with impl.Watchdog(beats, timeout=600.0, interval=0.01):
                    beats.beat(1, "step")
                    if way is not None:
                        raise way
            except BaseException as error:
                raised = error
            beat = beats.read()[0]
            left = threading.active_count() - before
            reports = [path.read_text() for path in beats.folder.glob("report*.txt")]
            found.append((beat and beat.status, raised is way, left, reports))
        return found

    for found in folder_of(run, body, 1):
        for number, (way, entry) in enumerate(zip(ways, found, strict=True)):
            status, same, left, reports = entry
            what = "the block is left normally" if way is None else f"the block is left by {way!r}"
            want = "done" if number < 4 else "failed"
            expect_equal(status, want, what=f"{what}: status", rank=0, cause="how-left")
            expect_equal(same, True, what=f"{what}: the exception goes on", cause="exception-lost")
            expect_equal(left, 0, what=f"{what}: threads that are left", rank=0, cause="left-over")
            expect_equal(len(reports), int(number >= 4), what=f"{what}: reports", cause="report")
            if number == 7 and "by nought" not in reports[0]:
                fail(f"the report doesn't say with what it failed:\n{reports[0]}", cause="no-stack")


def judged(impl, folder: Path, ranks, killed) -> tuple[int | None, str, list[int]]:
    """One rank is watched while the others stand still: its status, the report, and which of them
    live.

    ``ranks``: ME is the watched rank. Every other rank has its points, host and status ("gone": it
    has ended, and no rank knows); None: it never begins. ``killed``: processes whose end is waited
    for a little, because a killed process does not end at once.
    """
    pids = {}
    for rank, other in enumerate(ranks):
        if other is ME:
            continue
        pids[rank] = pid = os.fork()
        if not pid:
            time.sleep(600)
            os._exit(0)
        if other is not None:
            points, host, status = other
            if status == "gone":
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pids.pop(rank), 0)
                status = "running"
            beats = impl.Heartbeat(folder, rank, len(ranks), "now")
            for point in range(points):
                beats.beat(40 + rank, f"point{point}")
            told = {"pid": pid, "status": status, "note": "lost its GPU"}
            if host:  # of the same name, as containers may be, and with process ids of its own
                host = f"{beats.latest.host.partition(' ')[0]} {host}"
            beats.latest = replace(beats.latest, **told, host=host or beats.latest.host)
            beats.publish()
    watched = os.fork()
    if not watched:
        try:
            beats = impl.Heartbeat(folder, ranks.index(ME), len(ranks), "now")
            for _ in range(50):  # it is ahead of the others, however busy the machine is
                beats.beat(77, "onwards")
            with impl.Watchdog(beats, timeout=0.4, interval=0.05):
                while True:
                    beats.beat(77, "onwards")
                    time.sleep(0.01)
        finally:
            os._exit(1)
    status = status_of(watched, 8.0)
    ends = [pids[rank] for rank in killed]
    until(lambda: all(os.waitid(os.P_PID, pid, ENDED) for pid in ends), 2.0)
    dead = [rank for rank, pid in pids.items() if os.waitpid(pid, os.WNOHANG)[0]]
    for rank in pids.keys() - dead:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    reports = sorted(folder.glob("report-now.txt"))
    return status, reports[0].read_text() if reports else "", dead


# of each rank points, host, status; whom the report blames, whom it kills
JUDGED = {
    "rank 1 never begins, rank 2 stands still": ([ME, None, (1, "", "running")], [1], []),
    "ranks 0 and 2 stand still at one point, 2 elsewhere": (
        [(3, "", "running"), ME, (3, "elsewhere 1 pid:[2]", "running"), (4, "", "running")],
        [0, 2],
        [0],
    ),
    "rank 1 is done, rank 2 stands still": ([ME, (0, "", "done"), (2, "", "running")], [2], [2]),
    "rank 1 has ended unnoticed": ([ME, (2, "", "gone")], [1], []),
    "rank 2 has failed, rank 1 stands still": (
        [ME, (0, "", "running"), (5, "x", "failed")],
        [2],
        [],
    ),
    "rank 0 has failed, rank 1 stands still": (
        [(5, "x", "failed"), (0, "", "running"), ME],
        [0],
        [],
    ),
}


@exercise(
    "4.5",
    "gloo",
    asserts="hung-blamed failed-blamed kills-own-host report-lines "
    "each-rank all-end watches never-began done alone output resources",
)
def test_who_is_blamed_and_killed(impl, run, seed):
    """Ranks that never began, stand still, are done, failed, or are on another host:
    which of them are blamed."""

    def body(ctx, folder):  # each rank has a scenario of its own
        ranks, _, killed = [*JUDGED.values()][ctx.rank]
        return (*judged(impl, folder / str(ctx.rank), ranks, killed), impl.EXIT_HUNG)

    results = folder_of(run, body, len(JUDGED), timeout=50.0)
    for (what, (ranks, blamed, killed)), found in zip(JUDGED.items(), results, strict=True):
        status, report, dead, want = found
        me = ranks.index(ME)
        expect_equal(status, want, what=f"{what}: how rank {me} ends", rank=me, cause="not-ended")
        if not report and "failed" in what:
            continue  # the rank that failed may be the one to write it, and here it can't
        if not report:
            fail(f"{what}: there is no report", cause="report", rank=me)
        first, _, rest = report.partition("\n")
        named = [r for r in range(len(ranks)) if re.search(rf"rank {r}\b", first)]
        said = f"{what}: ranks named in the report's first line ({first})"
        expect_equal(named, blamed, what=said, rank=me, cause="wrong-rank")
        said = f"{what}: ranks whose processes were killed"
        expect_equal(dead, killed, what=said, rank=me, cause="killed")
        points = [
            f"point{o[0] - 1}" for o in ranks if o and o is not ME and o[0] and o[2] != "failed"
        ]
        missing = [text for text in (*points, "onwards") if text not in rest]
        said = f"{what}: points that the report leaves out"
        expect_equal(missing, [], what=said, rank=me, cause="no-step")
        if "failed" in what and "lost its GPU" not in rest:
            fail(f"{what}: the report doesn't say with what:\n{report}", cause="no-stack")


@exercise("4.5", "gloo", asserts="done life")
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


@exercise("4.5", "gloo", asserts="folder-away stopped-blames-nobody watches life alone")
def test_what_passes_by(impl, run, seed):
    """A rank was stopped and continued: none hung. The folder was away for a moment: the
    watchdog still watches."""

    def body(ctx, folder):
        impl.Heartbeat(folder / "three", 0, 1).beat(0, "step")  # if it raises: here, not there
        hangs = watched(impl, folder / "two", 600.0, folder / "hang")
        (folder / "two").rename(folder / "away")  # for its watchdog's first look
        stopped = watched(impl, folder / "one", 2.3 * WATCH)  # it runs for 0.8 of the timeout
        time.sleep(0.4 * WATCH)  # its watchdog has looked
        os.kill(stopped, signal.SIGSTOP)
        (folder / "away").rename(folder / "two")
        time.sleep(0.2 * WATCH)
        (folder / "two").rename(folder / "away")
        time.sleep(0.3 * WATCH)
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
            "the folder of the beats was away for a moment, then the rank hung. Expected status "
            f"{want}, got {hung} (None: it never ends, nobody watches any more)",
            cause="stopped-watching",
        )


@exercise("4.5", "gloo", asserts="refusals")
def test_bad_arguments(impl, run, seed):
    """A time-out of 0, a rank that isn't there: ValueError."""

    def body(ctx, folder):
        beats = impl.Heartbeat(folder, 0, 1)
        return [
            refusal(impl.Watchdog, beats, 0),
            refusal(impl.Watchdog, beats, -1.5),
            refusal(impl.Heartbeat, folder, 2, 2),
            refusal(impl.Heartbeat, folder, -1, 2),
        ]

    calls = ["a timeout of 0", "a timeout of -1.5", "rank 2 of 2", "rank -1 of 2"]
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
