"""Checks of exercise 4.5, continued: its parts one by one."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch._dynamo  # noqa: F401 (torch.optim imports it: once here, not per rank)
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from distlab.host.program_clock import ProgramClock

PATIENCE = 2.0  # seconds: the timeout of watchdogs
BARE = {"process_group": False, "ledger": False}


def folder_of(run, body, world_size: int, **options):
    """Ranks without process group that share a folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        return run(body, world_size, Path(name), **BARE, **options)


# -- joining --------------------------------------------------------------------------------------
@exercise("4.5", "gloo")
def test_a_store_full_of_old_keys(impl, run, seed):
    """After attempts of 4, 2 and 3 ranks that ended anyhow: one empty store, the same for all."""
    joined = joins(impl, run, patience=5.0)
    if any("gave up" in attempt for attempt in zip(*(found[1:] for found in joined), strict=True)):
        joined = joins(impl, run, patience=12.0)  # a busy machine may be slow once
    expect_joined(joined)


def joins(impl, run, patience: float) -> list:
    """For each rank what it found in each of four attempts to join."""

    def body(ctx, folder):
        store = dist.FileStore(str(folder / "store"), 3)
        found = []
        for attempt, world_size in enumerate((4, 2, 3, 3)):
            if attempt == 0:  # rank 3 never came: the others have given up
                try:
                    impl.fresh_store(store, ctx.rank, 4, 0.3)
                    found.append("!a store without rank 3")
                except TimeoutError:
                    found.append("gave up")
            elif ctx.rank < world_size:
                rank_0_is_late = attempt == 3
                time.sleep(0.2 if (ctx.rank == 0) == rank_0_is_late else 0.0)
                try:
                    fresh, name = impl.fresh_store(store, ctx.rank, world_size, patience)
                    empty = not fresh.check(["address"])
                    if ctx.rank == 0:
                        fresh.set("address", name)
                    found.append((name, fresh.get("address").decode(), empty or ctx.rank > 0))
                except TimeoutError:
                    found.append("gave up")
            else:
                found.append(None)
            (folder / f"{attempt} {ctx.rank}").touch()
            while len(list(folder.glob(f"{attempt} *"))) < 3:
                time.sleep(0.01)
        return found

    return folder_of(run, body, 3, timeout=10 + 4 * patience)


def expect_joined(results: list) -> None:
    names = set()
    for attempt, world_size in enumerate((4, 2, 3, 3)):
        ranks = [found[attempt] for found in results][:world_size]
        if attempt == 0:
            expect_equal(
                ranks, ["gave up"] * 3, what="without rank 3, a TimeoutError", cause="no-timeout"
            )
            continue
        what = f"attempt {attempt} of {world_size} ranks"
        if "gave up" in ranks:
            rank = ranks.index("gave up")
            fail(f"{what}: rank {rank} waits in vain for the others", cause="old-keys", rank=rank)
        for rank, (name, address, empty) in enumerate(ranks):
            expect_equal(name, ranks[0][0], what=f"{what}: its name", rank=rank, cause="old-keys")
            expect_equal(
                address, ranks[0][0], what=f"{what}: rank 0's key", rank=rank, cause="old-keys"
            )
            expect_equal(empty, True, what=f"{what}: the store is empty", cause="old-keys")
        names.add(ranks[0][0])
    expect_equal(len(names), 3, what="names of three attempts", cause="old-keys")


# -- heartbeats -----------------------------------------------------------------------------------
@exercise("4.5", "gloo")
def test_heartbeats(impl, run, seed):
    """Beats count, are read by the others once published, and not from another attempt."""

    def body(ctx, folder):
        beats = [impl.Heartbeat(folder, rank, 3, "now") for rank in (0, 1)]
        old = impl.Heartbeat(folder, 2, 3, "before")
        old.beat(9, "save")
        old.publish()
        beats[0].beat(4, "forward")
        silent = beats[1].read()[0] is None
        beats[0].publish()
        one = beats[1].read()[0]
        beats[0].beat(4, "backward")
        beats[0].beat(5, "forward")
        unpublished = beats[1].read()[0] == one
        beats[0].end("failed", "out of memory")
        after = beats[1].read()
        two = after[0]
        return (
            (silent, unpublished, after[2] is None),
            (one.step, one.place, one.status, one.pid == os.getpid()),
            (two.step, two.place, two.status, two.note, two.count - one.count),
        )

    flags, one, two = folder_of(run, body, 1)[0]
    names = ("nothing before it is published", "beats are not written", "an old attempt's is None")
    for name, flag in zip(names, flags, strict=True):
        expect_equal(flag, True, what=name, cause="published")
    expect_equal(one, (4, "forward", "running", True), what="the first beat", cause="beat")
    want = (5, "forward", "failed", "out of memory", 2)
    expect_equal(two, want, what="the last beat, two places later", cause="beat")


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
    """A process of its own that stays at one place; its id. Ends with status 0.

    With ``hangs`` it goes on from place to place until there is that file.
    """
    pid, began = os.fork(), folder.with_suffix(".began")
    if not pid:
        try:
            beats = impl.Heartbeat(folder, 0, 1, "now")
            with impl.Watchdog(beats, timeout=PATIENCE):
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
        stopped = watched(impl, folder / "one", 2.6 * PATIENCE)
        time.sleep(0.4 * PATIENCE)  # its watchdog has looked
        os.kill(stopped, signal.SIGSTOP)
        (folder / "two").rename(folder / "away")
        time.sleep(0.5 * PATIENCE)
        (folder / "away").rename(folder / "two")
        (folder / "hang").touch()  # no sooner: a report has a folder, however busy the machine is
        time.sleep(1.0 * PATIENCE)
        os.kill(stopped, signal.SIGCONT)
        return status_of(stopped, 5 * PATIENCE), status_of(hangs, 5 * PATIENCE), impl.EXIT_HUNG

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


# -- leaving --------------------------------------------------------------------------------------
@exercise("4.5", "virtual gloo cuda")
def test_leaving_is_agreed_on(impl, run, seed, cases):
    """A signal on any rank is every rank's answer; 4 bytes in one message."""
    for world_size in cases(3, 2, 4, 1):

        def body(ctx):
            guard = impl.PreemptionGuard(device=ctx.device)
            answers = []
            for number, told in enumerate((None, 0, world_size - 1)):
                guard.requested = ctx.rank == told
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


@exercise("4.5", "gloo")
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


@exercise("4.5", "gloo")
def test_bad_arguments(impl, run, seed):
    """A time-out of 0, a rank that isn't there, a save every 0 steps: ValueError."""

    def body(ctx, folder):
        beats = impl.Heartbeat(folder, 0, 1)
        nothing = dict.fromkeys(("store", "state", "guard"))
        return [
            refusal(impl.Watchdog, beats, 0),
            refusal(impl.Heartbeat, folder, 2, 2),
            refusal(impl.train, print, [], epochs=1, save_every=0, heartbeat=beats, **nothing),
        ]

    calls = [("a timeout of 0", [0]), ("rank 2 of 2", [2]), ("a save every 0 steps", [0])]
    expect_refused(folder_of(run, body, 1), calls)


@trace("4.5")
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
