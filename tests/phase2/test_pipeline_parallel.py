"""Checks of exercise 2.10: GPipe, and the interpreter that runs any schedule."""

from __future__ import annotations

import dataclasses
import re
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.virtual import load_cluster
from tests.phase2.pipeline_orders import (
    any_order,
    as_steps,
    bubble,
    completed,
    early_receives,
    placement,
    plain,
    problem_of,
    times,
)
from tests.phase2.pipeline_runs import PER, UNIT, check_run, paced_scenario
from tests.phase2.pipelines import (
    Meter,
    Paced,
    batch,
    boundaries,
    compare,
    cut,
    gradients,
    layers,
    one_process,
    paced_batch,
    paced_boundaries,
    squares,
)


# -- order --------------------------------------------------------------------------
@exercise("2.10", "gloo")
def test_gpipe_is_complete_and_forwards_come_first(impl, run):
    """Each stage and micro-batch once, all forwards first, the bubble of theory, any m and p."""
    sizes = [(4, 8), (1, 3), (2, 1), (3, 2), (5, 5)]

    def body(ctx):
        complete = [plain(impl.make_schedule("gpipe", p, m)) for p, m in sizes]
        return list(zip([plain(impl.gpipe(p, m)) for p, m in sizes], complete, strict=True))

    for (p, m), (order, schedule) in zip(
        sizes, run(body, 1, process_group=False, ledger=False)[0], strict=True
    ):
        what = f"GPipe with {p} ranks and {m} micro-batches"
        cause, text = problem_of(schedule, p, m)
        if cause:
            fail(f"{what}: {text}", cause=cause)
        compute = [[step for step in steps if len(step[0]) == 1] for steps in schedule]
        expect_equal(compute, order, what=f"{what}: compute steps of the schedule", cause="order")
        for rank, steps in enumerate(order):
            kinds = "".join(kind for kind, _, _ in steps)
            expect_equal(kinds, "F" * m + "B" * m, what=f"{what}: steps", rank=rank, cause="order")
            expect_equal({s for _, s, _ in steps}, {rank}, what=f"{what}: stages", rank=rank)
        got, want = bubble(order, {"F": 1.0, "B": 2.0}), (p - 1) / (m + p - 1)
        if got > want + 1e-9:
            fail(f"{what}: bubble {got:.3f}, (p-1)/(m+p-1) = {want:.3f}", cause="bubble")


# -- the interpreter ------------------------------------------------------------------------------
@exercise("2.10", "virtual gloo cuda")
def test_gpipe_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss, on all ranks, for several m and numbers of stages."""
    for ranks, m, frozen in cases((3, 4, False), (2, 1, False), (4, 2, True), (1, 3, False)):
        schedule = lambda module: module.make_schedule("gpipe", ranks, m)
        check_run(run, impl, seed, ranks, m, schedule, frozen=frozen)


@exercise("2.10", "virtual")
def test_gradients_add_up_over_steps(impl, run, seed):
    """Two steps without clearing give twice the gradient, and nothing of the first is left over."""
    schedule = lambda module: module.make_schedule("gpipe", 2, 3)
    check_run(run, impl, seed, 2, 3, schedule, steps=2)


@exercise("2.10", "virtual gloo")
def test_any_valid_schedule_runs(impl, run, seed, cases):
    """Orders and places of messages by chance, several stages per rank, neighbours on one rank."""
    sizes = cases(("v", 2, 2, 3), ("round", 3, 1, 4), ("block", 2, 2, 2), ("v", 1, 3, 2))
    for number, (kind, ranks, chunks, m) in enumerate(sizes):
        order = any_order(seed + number, placement(kind, ranks, chunks), m)
        chosen = completed(seed + number, order)
        schedule = lambda module: as_steps(module, chosen)
        check_run(run, impl, seed, ranks, m, schedule, chunks=chunks, kind=kind)


@exercise("2.10", "virtual")
def test_two_pipelines_side_by_side(impl, run, seed):
    """Each runs in its own group, whose ranks are not those of the world."""

    def body(ctx):
        groups = [dist.new_group([0, 2, 3]), dist.new_group([1, 4])]
        group = groups[0] if ctx.rank in (0, 2, 3) else groups[1]
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        own = seed + ranks
        found = layers(own)
        parts = cut(found, ranks)
        x, y = batch(own, 4 * PER)
        schedule = impl.make_schedule("gpipe", ranks, 4)
        shapes = boundaries(parts, x[:PER])
        pipeline = impl.Pipeline([parts[rank]], schedule, F.cross_entropy, shapes, group=group)
        loss = pipeline.step(x, y)
        return gradients(found, [parts[rank]]), loss

    results = run(body, 5)
    for members in ([0, 2, 3], [1, 4]):
        own = seed + len(members)
        parts, loss = one_process(own, 4 * PER, 4)
        what = f"the pipeline of ranks {members}"
        compare([results[r] for r in members], parts, loss, what)


@exercise("2.10", "virtual gloo")
def test_messages_and_bytes_are_those_of_the_schedule(impl, run, seed):
    """Each boundary is crossed once forward and once back per micro-batch, and no more is sent."""
    ranks, m, width = 3, 4, 50

    def body(ctx):
        part = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        shapes = [torch.empty(PER, width, device="meta")] * (ranks - 1)
        schedule = impl.make_schedule("gpipe", ranks, m)
        pipeline = impl.Pipeline([part], schedule, squares, shapes)
        x = torch.ones(m * PER, width)
        with ctx.region("step"):
            pipeline.step(x, x)

    results = run(body, ranks)
    for log in results.logs:
        log = log.select(region="step")
        log.all_waited()
        crossings = (log.rank < ranks - 1) + (log.rank > 0)
        sends, nbytes = crossings * m, crossings * m * PER * width * 4
        formula = "an activation or gradient per boundary and micro-batch"
        messages_sent = log.select(op="send").messages
        if messages_sent != sends:
            text = f"rank {log.rank} sends {messages_sent} messages, the schedule has {sends}"
            fail(text, cause="messages", rank=log.rank)
        if sum(count for op, count in log.ops().items() if op not in ("send", "recv")) > 2:
            text = f"rank {log.rank} used {dict(log.ops())}: one collective for the loss will do"
            fail(text, cause="collectives", rank=log.rank)
        log.sent_at_most(nbytes + 100, formula)
        log.sent_at_least(nbytes, formula)


@exercise("2.10", "virtual")
def test_messages_travel_while_ranks_compute(impl, run):
    """Nobody waits for a send, and for a receive only who needs its data: the time of theory."""
    ranks, m, message = 4, 6, UNIT / 2
    schedule = early_receives(ranks, m)
    assert problem_of(schedule, ranks, m) == ("", "")
    laptop = load_cluster("laptop")
    link = dataclasses.replace(laptop.inside, alpha=message, bandwidth=1e15)

    def body(ctx):
        meter = Meter()
        stage = Paced((UNIT, UNIT, UNIT), meter)
        chosen = as_steps(impl, schedule)
        pipeline = impl.Pipeline([stage], chosen, squares, paced_boundaries(ranks))
        begin = time.perf_counter()
        pipeline.step(*paced_batch(m))
        return meter.end - begin

    cluster = dataclasses.replace(laptop, inside=link)
    took = max(run.simulate(body, ranks, cluster=cluster)) / UNIT
    want = max(times(schedule, {"F": 1.0, "B": 2.0}, message / UNIT).values())
    if took > want * 1.001:
        text = f"{ranks} ranks, {m} micro-batches, messages of half a forward: the last backward "
        text += f"ends after {took:.2f} forwards, {want:.2f} can be had: somebody waits for a "
        fail(text + "send, or for a receive before its data is needed", cause="slower")


@exercise("2.10", "virtual")
def test_nothing_is_kept_after_a_step(impl, run):
    """All activations are freed; GPipe keeps m micro-batches at most while it runs."""
    ranks, m = 3, 5

    def body(ctx):
        meter = Meter()
        schedule = impl.make_schedule("gpipe", ranks, m)
        stage = Paced((0.0, 0.0, 0.0), meter)
        pipeline = impl.Pipeline([stage], schedule, squares, paced_boundaries(ranks))
        pipeline.step(*paced_batch(m))
        return [meter.peak, meter.live]

    for rank, (peak, live) in enumerate(run(body, ranks)):
        if live:
            text = f"{live} micro-batches are still kept after the step: free each after its B"
            fail(text, cause="not-freed", rank=rank)
        expect_equal(peak, m, what="most micro-batches kept", rank=rank, cause="peak")


# -- bad input ------------------------------------------------------------------------------------
def refusals(run, impl, calls, ranks=3):
    """Per rank and call: the ValueError's text ("" if there was none), and whether it sent."""

    def body(ctx):
        out = []
        for call in calls:
            try:
                with ctx.region("refused"):
                    call(ctx)
                out.append("")
            except ValueError as error:
                out.append(str(error) or "no reason")
        return out

    results = run(body, ranks)
    return [(said, bool(log.select(region="refused").events))
            for said, log in zip(results, results.logs, strict=True)]


@exercise("2.10", "virtual")
def test_bad_input_is_refused_on_all_ranks(impl, run, seed):
    """The same ValueError, with the numbers, on every rank, before anything is sent: no hang."""

    def step(size, targets=None):
        def call(ctx):
            stage, schedule = Paced((0.0, 0.0, 0.0)), impl.make_schedule("gpipe", 3, 4)
            pipeline = impl.Pipeline([stage], schedule, squares, paced_boundaries(3))
            pipeline.step(torch.zeros(size, 1), torch.zeros(targets or size, 1))

        return call

    def made(stages, schedule, boundary_count=2):
        def call(ctx):
            chunks = [Paced((0.0, 0.0, 0.0)) for _ in range(stages)]
            impl.Pipeline(chunks, schedule(), squares, paced_boundaries(boundary_count + 1))

        return call

    weights = completed(seed, [[(k, r, 0) for k in "FBW"] for r in range(3)])
    plan = lambda ranks: lambda: impl.make_schedule("gpipe", ranks, 4)
    calls = {
        "a schedule for 4 ranks on 3": (made(1, plan(4), 3), ("4", "3")),
        "a schedule with 3 stages for 5": (made(1, plan(3), 4), ("4",)),
        "2 modules for 1 stage": (made(2, plan(3)), ("2", "1")),
        "an empty schedule": (made(1, lambda: [[], [], []]), ("0",)),
        "steps W in a plain pipeline": (made(1, lambda: as_steps(impl, weights)), ("W",)),
        "a batch of 10 for 4 micro-batches": (step(10), ("10", "4")),
        "8 inputs and 6 targets for 4 micro-batches": (step(8, 6), ("6", "4")),
        "an empty batch for 4 micro-batches": (step(0), ("0", "4")),
        "0 micro-batches": (lambda ctx: impl.make_schedule("gpipe", 3, 0), ("0",)),
        "0 ranks": (lambda ctx: impl.gpipe(0, 2), ("0",)),
        "the schedule 'zigzag'": (lambda ctx: impl.make_schedule("zigzag", 3, 3), ("zigzag",)),
        "GPipe with 2 chunks": (lambda ctx: impl.make_schedule("gpipe", 3, 3, 2), ("2",)),
    }
    results = refusals(run, impl, [call for call, _ in calls.values()])
    for number, (what, (_, words)) in enumerate(calls.items()):
        texts = [said[number] for said, _ in results]
        for rank, text in enumerate(texts):
            if not text:
                fail(f"{what} is accepted: raise ValueError", cause="accepted", rank=rank)
            if not all(re.search(rf"(?<!\d){word}(?!\d)", text) for word in words):
                named = " and ".join(words)
                fail(f"{what}: the message does not name {named}: {text}", cause="vague", rank=rank)
        if len(set(texts)) > 1:
            fail(f"{what}: the ranks raise different errors: {texts}", cause="uneven")
    for rank, (_, sent) in enumerate(results):
        expect_equal(sent, False, what="something was sent before the error", rank=rank)


@exercise("2.10", "virtual")
def test_a_wrong_boundary_is_named(impl, run, seed):
    """A stage whose output is not what its boundary says: ValueError with both shapes."""

    def body(ctx):
        stages = [nn.Linear(1, 7), nn.Linear(7, 1)]
        schedule = as_steps(impl, [[("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)]])
        shapes = [torch.empty(1, 5, device="meta")]
        x = torch.ones(1, 1)
        try:
            impl.Pipeline(stages, schedule, squares, shapes).step(x, x)
        except ValueError as error:
            return str(error)
        return ""

    (text,) = run(body, 1)
    if "5" not in text or "7" not in text:
        fail(f"expected a ValueError with shapes (1, 7) and (1, 5), got {text!r}", cause="vague")


# -- traces ---------------------------------------------------------------------------------------
@trace("2.10", bubble=3 / 11)
def trace_gpipe(impl):
    """GPipe with 8 micro-batches."""
    return paced_scenario(lambda module: module.make_schedule("gpipe", 4, 8))(impl)
