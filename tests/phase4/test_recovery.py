"""Checks of exercise 4.14: leaving at the same step, and going on after ranks were killed."""

from __future__ import annotations

import copy
import os
import signal
import time
from itertools import pairwise

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from tests.phase4.job_runs import folder_of, run_jobs, told
from tests.phase4.jobs import PATIENCE, SAVE_EVERY, STEPS
from tests.phase4.memory_checkpoints import fake_saved


# -- restarts -------------------------------------------------------------------------------------
@exercise("4.14", "gloo", asserts="newest alone life resources")
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


@exercise("4.14", "gloo", asserts="leaving alone")
def test_told_to_leave(impl, run, seed):
    """SIGTERM on one rank: all ranks save and leave at the same step, and no step is done again."""
    scenario = {"faults": {(seed % 2, 6): "told"}, "timeout": PATIENCE}
    (result,) = run_jobs(impl, run, scenario)
    leaving = [entry for entry in result["ends"] if not entry["done"]]
    expect_equal(len(leaving), 2, what="ranks that left because one was told", cause="one-alone")
    reached = [max(e["step"] for e in result["attempts"][0] if e["rank"] == r) for r in (0, 1)]
    expect_equal(reached, [6, 6], what="the ranks' last steps", cause="another-step")
    first = min(entry["step"] for entry in result["attempts"][1])
    expect_equal(first, 7, what="the first step of the next attempt", cause="not-saved")


# -- leaving --------------------------------------------------------------------------------------
@exercise("4.14", "virtual gloo cuda", nccl=True, asserts="agreed noted bytes cost dtype")
def test_leaving_is_agreed_on(impl, run, seed, cases):
    """A signal on any rank is every rank's answer; 4 bytes in one message."""
    for world_size in cases(3, 2, 4, 1):

        def body(ctx):
            guard = impl.PreemptionGuard(device=ctx.device)
            answers, requested = [], []
            for number, leaver in enumerate((None, 0, world_size - 1)):
                guard.requested = ctx.rank == leaver
                with ctx.region(f"call{number}"):
                    answers.append(guard.agreed())
                requested.append(guard.requested)
            return answers, requested

        results = run(body, world_size)
        for rank, (answers, requested) in enumerate(results):
            want = [rank == leaver for leaver in (None, 0, world_size - 1)]
            what = "requested after agreed() when no rank, rank 0, the last one was told"
            expect_equal(requested, want, what=what, rank=rank, cause="not-noted")
            what = "agreed() when no rank, rank 0, the last one was told"
            expect_equal(answers, [False, True, True], what=what, rank=rank, cause="not-agreed")
        for log in results.logs:
            sent = [(e.op, e.payload) for e in log.select(region="call1").events]
            if sent != [("all_reduce", 4)]:
                message = f"expected one all-reduce of 4 bytes, got {sent}"
                fail(message, cause="too-many-bytes", rank=log.rank)


@exercise("4.14", "virtual", asserts="agreed group alone")
def test_a_group_agrees_for_itself(impl, run, seed):
    """Ranks 1 and 2, then 3 and 1: a signal to another rank does not concern them."""

    def body(ctx):
        answers = []
        for members, leaver in (([1, 2], 0), ([3, 1], 3), ([3, 1], 2), ([1, 2], 1)):
            group = dist.new_group(members)
            guard = impl.PreemptionGuard(group=group)
            guard.requested = ctx.rank == leaver
            answers.append(guard.agreed() if ctx.rank in members else None)
        return answers

    wants = [([1, 2], False), ([3, 1], True), ([3, 1], False), ([1, 2], True)]
    for rank, answers in enumerate(run(body, 4)):
        for (members, want), got in zip(wants, answers, strict=True):
            if rank in members:
                what = f"agreed() of group {members}, where rank {rank}"
                expect_equal(got, want, what=what, rank=rank, cause="group")


@exercise("4.14", "gloo", asserts="takes-over noted handlers life")
def test_signals(impl, run, seed):
    """SIGTERM and SIGUSR1 are noted, nothing else happens; afterwards the old handlers are back."""

    numbers = (signal.SIGTERM, signal.SIGUSR1)

    def body(ctx):
        others = (signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        before = [signal.getsignal(number) for number in numbers]
        noted, kept = [], []
        for number in numbers:
            with impl.PreemptionGuard() as guard:
                noted.append(guard.requested)
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                noted.append(guard.requested)
                noted.append(guard.agreed())
        after = [[signal.getsignal(number) for number in numbers] == before]
        meant = [signal.getsignal(number) for number in others]
        outer = impl.PreemptionGuard()
        try:
            with outer:
                kept.append([signal.getsignal(number) for number in others] == meant)
                with impl.PreemptionGuard(signals=[signal.SIGUSR2]) as inner:
                    os.kill(os.getpid(), signal.SIGUSR2)
                    time.sleep(0.01)
                    kept.append([inner.requested, outer.requested])
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.01)
                    kept.append([inner.requested, outer.requested])
                with impl.PreemptionGuard() as third:  # nested: takes over from the outer one
                    os.kill(os.getpid(), signal.SIGUSR1)
                    time.sleep(0.01)
                    kept.append(third.requested)
                raise KeyError("training failed")
        except KeyError:
            kept.append("raised")
        after.append([signal.getsignal(number) for number in numbers] == before)
        after.append([signal.getsignal(number) for number in others] == meant)
        return noted, after, kept

    noted, after, kept = run(body, 1, process_group=False)[0]
    want = [False, True, True] * 2
    expect_equal(noted, want, what="requested before and after, agreed()", cause="not-noted")
    what = "the handlers after a block, after one left by an exception, and of other signals"
    expect_equal(after, [True] * 3, what=what, cause="handlers")
    what = "other signals stay; requested of a guard for SIGUSR2 within one, after SIGUSR2, after "
    what += "SIGTERM; of a third one after SIGUSR1; the exception"
    want = [True, [True, False], [True, True], True, "raised"]
    expect_equal(kept, want, what=what, cause="handlers")


# -- the loop -------------------------------------------------------------------------------------
class Notes:
    """A store, a heartbeat and a train_step that note in which order they are called."""

    def __init__(self, saved=None, fails_at: int = 0) -> None:
        self.events: list[list] = []
        self.saved, self.fails_at, self.latest = saved, fails_at, None

    def load(self, step=None, **options):
        return self.saved

    def save(self, step, shared, own=None, **options):
        self.events.append(["save", step, shared["position"]["step"]])
        self.latest = copy.deepcopy((shared, own))

    def beat(self, step, place):
        self.events.append(["beat", step])

    def step(self, batch, position):
        self.events.append(["train", position.step, sorted(batch)])
        if position.step == self.fails_at:
            raise ZeroDivisionError("the loss is not a number")


# save_every, the step in which the guard is told, the step that raises
LOOPS = {
    "saves every 3 steps": (3, 0, 0),
    "saves every 4 steps": (4, 0, 0),
    "saves every 100 steps": (100, 0, 0),
    "told in step 5": (3, 5, 0),
    "told in step 6": (3, 6, 0),
    "told in the last step": (3, 8, 0),
    "step 5 raises": (3, 0, 5),
}
SIZE, BATCH = 14, 4  # four steps per epoch, two epochs


@exercise(
    "4.14",
    "virtual",
    asserts="loop saves leaving done-again exception beats group newest adapted life",
)
def test_what_the_loop_does(impl, run, seed):
    """The saved steps and the beats; resumed by another number of ranks; done once more."""

    def body(ctx):
        group = dist.new_group([2, 1])
        if ctx.rank == 0:
            return None
        me, out = dist.get_rank(group), {}

        def trained(notes, save_every, leaves=0, rank=me, ranks=2, within=group):
            sampler = impl.module("elastic_sampler").ElasticSampler(
                SIZE, global_batch_size=BATCH, rank=rank, world_size=ranks, seed=seed
            )
            loader = torch.utils.data.DataLoader(
                range(SIZE), batch_sampler=sampler, collate_fn=list
            )
            state = impl.module("resume").TrainingState(sampler=sampler, group=within)
            guard = impl.PreemptionGuard(group=within)

            def step(batch, position):
                guard.requested = position.step == leaves and rank == 1
                notes.step(batch, position)

            try:
                done = impl.train(
                    step,
                    loader,
                    epochs=2,
                    save_every=save_every,
                    store=notes,
                    state=state,
                    guard=guard,
                    heartbeat=notes,
                    seed=seed,
                    group=within,
                )
            except ZeroDivisionError:
                done = "raised"
            return done

        for what, (save_every, leaves, fails_at) in LOOPS.items():
            notes = Notes(fails_at=fails_at)
            done = trained(notes, save_every, leaves)
            again = None
            if notes.latest is not None:  # by 2 ranks, and as if 3 had saved it
                shared, own = notes.latest
                again = []
                for ranks in (2, 3):
                    more = Notes(fake_saved([own] * ranks, shared["position"]["step"], shared)[0])
                    again.append([trained(more, save_every), more.events])
            out[what] = done, notes.events, again
        return out

    def alone(ctx):
        """Without process group: one step, and a run of two ranks resumed by one."""
        sampler = impl.module("elastic_sampler").ElasticSampler(
            3, global_batch_size=BATCH, rank=0, world_size=1, seed=seed
        )
        loader = torch.utils.data.DataLoader(range(3), batch_sampler=sampler, collate_fn=list)
        state, guard = impl.module("resume").TrainingState(sampler=sampler), impl.PreemptionGuard()
        options = {"save_every": 5, "state": state, "guard": guard, "seed": seed}
        first, done = Notes(), []
        done.append(
            impl.train(first.step, loader, epochs=1, store=first, heartbeat=first, **options)
        )
        shared, own = first.latest or ({"position": {"step": 0}}, None)
        step = shared["position"]["step"]
        more = Notes(fake_saved([own, own], step, shared)[0] if own else None)
        done.append(impl.train(more.step, loader, epochs=2, store=more, heartbeat=more, **options))
        return done, first.events, more.events

    [[done, first, more]] = run(alone, 1, process_group=False)
    what = "a single process without process group: "
    expect_equal(done, [True, True], what=f"{what}train, twice", rank=0, cause="returned")
    expect_loop(f"{what}one step; ", first, 0, 1, [1], 0)
    expect_loop(f"{what}resumed from step 1, saved by 2 ranks; ", more, 1, 2, [2], 0)
    results = run(body, 3)
    draws = [torch.Generator().manual_seed(seed + epoch) for epoch in (0, 1)]
    epochs = [torch.randperm(SIZE, generator=draw).split(BATCH) for draw in draws]
    order = [sorted(part.tolist()) for epoch in epochs for part in epoch]
    for what, (save_every, leaves, fails_at) in LOOPS.items():
        last = leaves or fails_at or 8
        saves = [k for k in range(1, last + 1) if k % save_every == 0]
        saves += [last] if not fails_at and last not in saves else []
        done = "raised" if fails_at else not leaves
        for rank in (1, 2):
            got, events, again = results[rank][what]
            expect_equal(got, done, what=f"{what}: train", rank=rank, cause="returned")
            expect_loop(f"{what}: ", events, 0, last, saves, rank)
            for number, (answer, more) in enumerate(again or []):
                first = saves[-1]
                later = [k for k in range(first + 1, 9) if k % save_every == 0 or k == 8]
                where = f"{what}, then resumed from step {first}, saved by {2 + number} ranks: "
                expect_equal(answer, True, what=f"{where}train", rank=rank, cause="returned")
                expect_loop(where, more, first, 8, later, rank)
        for mine, theirs in zip(results[1][what][1], results[2][what][1], strict=True):
            if mine[0] == "train":
                union = sorted(mine[2] + theirs[2])
                said = f"{what}: samples of step {mine[1]}"
                expect_equal(union, order[mine[1] - 1], what=said, cause="wrong-samples")


def expect_loop(what: str, events, first: int, last: int, saves: list[int], rank: int) -> None:
    """Steps ``first`` + 1 … ``last`` are trained, ``saves`` are saved, each after a beat."""
    steps = [event[1] for event in events if event[0] == "train"]
    want = [*range(first + 1, last + 1)]
    expect_equal(steps, want, what=f"{what}steps", rank=rank, cause="steps")
    saved = [event[1:] for event in events if event[0] == "save"]
    want = [[k, k] for k in saves]
    said = f"{what}saves, the step given and that of the position"
    expect_equal(saved, want, what=said, rank=rank, cause="saves")
    for before, event in pairwise([["nothing"], *events]):
        if event[0] != "beat" and before != ["beat", event[1]]:
            message = f"{what}before {event[0]} {event[1]} comes {before}, no beat of that step"
            fail(message, cause="no-beat", rank=rank)


@exercise("4.14", "gloo", asserts="refusals")
def test_bad_arguments(impl, run, seed):
    """A save every 0 or -1 steps: ValueError."""

    def body(ctx, folder):
        beats = impl.module("watchdog").Heartbeat(folder, 0, 1)
        nothing = dict.fromkeys(("store", "state", "guard"))
        options = nothing | {"epochs": 1, "heartbeat": beats}
        return [refusal(impl.train, print, [], save_every=k, **options) for k in (0, -1)]

    expect_refused(folder_of(run, body, 1), ["a save every 0 steps", "a save every -1 steps"])


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
