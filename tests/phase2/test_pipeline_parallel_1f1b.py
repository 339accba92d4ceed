"""Checks of exercises 2.11 and 2.12: 1F1B and interleaved 1F1B."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.distributed.pipelining imports it: once here, not per rank
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
from distlab.observe.log import readable
from distlab.observe.memory import PeakMemory
from tests.phase2.pipeline_orders import plain
from tests.phase2.pipeline_runs import (
    PER,
    UNIT,
    check_bubble,
    check_executed,
    check_order,
    check_peaks,
    check_run,
    paced_scenario,
)
from tests.phase2.pipelines import batch, boundaries, compare, cut, gradients, layers, squares

COSTS = ({"F": 1.0, "B": 2.0}, {"F": 1.0, "B": 1.0})


def torch_pipeline(ctx, schedule, seed: int, m: int, chunks: int):
    """Gradients and loss of this rank's stages by torch's own schedule class."""
    found = layers(seed, straight=True)  # it passes on contiguous tensors only
    parts = cut(found, ctx.world_size * chunks)
    x, y = batch(seed, m * PER)
    count = len(parts)
    own = range(ctx.rank, count, ctx.world_size)
    stages = [pipelining.PipelineStage(parts[s], s, count, torch.device("cpu")) for s in own]
    runs = schedule(stages if chunks > 1 else stages[0], m, loss_fn=F.cross_entropy)
    losses: list[torch.Tensor] = []
    target = y if ctx.rank == ctx.world_size - 1 else None
    runs.step(*([x] if ctx.rank == 0 else []), target=target, losses=losses)
    loss = float(torch.stack(losses).mean()) if losses else None
    return gradients(found, [parts[s] for s in own]), loss


def check_against_torch(run, impl, seed, name: str, schedule, ranks: int, m: int, chunks: int):
    """The same gradients and loss as ``schedule`` of torch.distributed.pipelining."""

    def reference(ctx):
        return torch_pipeline(ctx, schedule, seed, m, chunks)

    def body(ctx):
        found = layers(seed)
        parts = cut(found, ranks * chunks)
        x, y = batch(seed, m * PER)
        mine = parts[ctx.rank :: ranks]
        plan = impl.make_schedule(name, ranks, m, chunks)
        pipeline = impl.Pipeline(mine, plan, F.cross_entropy, boundaries(parts, x[:PER]))
        loss = pipeline.step(x, y)
        return gradients(found, mine), loss

    results, theirs = run(body, ranks), run(reference, ranks)
    want: dict[str, torch.Tensor] = {}
    for found, _ in theirs:
        want |= found
    loss = next(loss for _, loss in theirs if loss is not None)
    compare(results, [want], loss, f"against {schedule.__name__}")


# -- 2.11 -----------------------------------------------------------------------------------------
@exercise("2.11", "gloo", asserts="order turns few-kept bubble resources")
def test_1f1b_keeps_few_micro_batches(impl, run):
    """Complete, the bubble of theory, and at most min(m, p-r) micro-batches on rank r; any m."""
    sizes = [(4, 8), (3, 2), (2, 1), (1, 4), (8, 5), (5, 5)]

    def body(ctx):
        complete = [plain(impl.make_schedule("1f1b", p, m)) for p, m in sizes]
        return list(zip([plain(impl.one_f_one_b(p, m)) for p, m in sizes], complete, strict=True))

    found = run(body, 1, process_group=False, ledger=False)[0]
    for (p, m), (order, schedule) in zip(sizes, found, strict=True):
        what = f"1F1B with {p} ranks and {m} micro-batches"
        check_order(order, schedule, p, m, what)
        check_peaks(order, [min(m, p - r) for r in range(p)], what)
        check_bubble(order, COSTS, (p - 1) / (m + p - 1), what)


@exercise("2.11", "virtual gloo cuda", asserts="order parameters layout life")
def test_1f1b_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss on all ranks, also with fewer micro-batches than p."""
    for ranks, m, frozen in cases((3, 5, True), (4, 2, False), (2, 4, False)):
        make = lambda module: module.make_schedule("1f1b", ranks, m)
        check_run(run, impl, seed, ranks, m, make, frozen=frozen, steps=2)


@exercise("2.11", "virtual", asserts="bubble few-kept cost")
def test_1f1b_takes_the_time_of_theory(impl, run):
    """Run with up to 16 stages under a virtual clock: bubble (p-1)/(m+p-1), p-r kept on rank r."""
    for ranks, m in ((4, 8), (16, 20), (5, 3)):
        make = lambda module: module.make_schedule("1f1b", ranks, m)
        limits = [min(m, ranks - r) for r in range(ranks)]
        check_executed(run, impl, make, ranks, m, 1, 3 * UNIT * (m + ranks - 1), limits)


@exercise("2.11", "gloo", asserts="few-kept resources")
def test_memory_does_not_grow_with_micro_batches(impl, run):
    """Bytes at the peak are the same for 4 and for 16 micro-batches of the same size."""
    ranks, size, width = 2, 64, 128

    def body(ctx):
        peaks = []
        for m in (4, 4, 16):
            part = nn.Sequential(*[nn.Linear(width, width) for _ in range(3)])
            shapes = [torch.empty(size, width, device="meta")]
            schedule = impl.make_schedule("1f1b", ranks, m)
            pipeline = impl.Pipeline([part], schedule, squares, shapes)
            x = torch.ones(m * size, width)
            with PeakMemory() as memory:
                pipeline.step(x, x)
            peaks.append(memory.peak)
        return peaks[1:]

    for rank, (few, many) in enumerate(run(body, ranks, ledger=False)):
        if many > 1.2 * few:
            text = f"16 micro-batches need {readable(many)} at the peak, 4 need {readable(few)}"
            fail(f"{text}: something is kept for each", cause="memory-grows", rank=rank)


@exercise("2.11", "gloo", asserts="order")
def test_1f1b_agrees_with_torch(impl, run, seed):
    """The same gradients and loss as torch.distributed.pipelining's GPipe and 1F1B."""
    for name, schedule in (("1f1b", pipelining.Schedule1F1B), ("gpipe", pipelining.ScheduleGPipe)):
        check_against_torch(run, impl, seed, name, schedule, 2, 4, 1)


@exercise("2.11", "gloo", asserts="numbers refusals")
def test_1f1b_refuses_bad_numbers(impl, run):
    """No ranks or no micro-batches: ValueError, from the order and from make_schedule."""
    check_refused(run, impl, "one_f_one_b", [(0, 3), (3, 0), (2, -4), (-1, 2)])
    check_refused(run, impl, "make_schedule", [("1f1b", 0, 3), ("1f1b", 2, 0), ("1f1b", 2, 2, 2)])


def check_refused(run, impl, name: str, calls: list[tuple]) -> None:
    """Each call raises ValueError."""

    def body(ctx):
        return [refusal(getattr(impl, name), *arguments) for arguments in calls]

    (refused,) = run(body, 1, process_group=False, ledger=False)
    expect_refusals(refused, [f"{name}{arguments}" for arguments in calls])


# -- 2.12 -----------------------------------------------------------------------------------------
def check_groups(order, ranks: int, chunks: int, what: str) -> None:
    """Groups of p micro-batches: first stage first in forward, last stage first in backward."""
    for rank, steps in enumerate(order):
        for kind in "FB":
            mine = [(s, i) for k, s, i in steps if k == kind]
            for number in range(0, len(mine), ranks):
                group, own = divmod(number // ranks, chunks)
                own = own if kind == "F" else chunks - 1 - own
                members = range(group * ranks, (group + 1) * ranks)
                want = [(own * ranks + rank, i) for i in members]
                got = sorted(mine[number : number + ranks])
                text = f"{what}: steps {kind} from number {number} on, as (stage, micro-batch)"
                expect_equal(got, want, what=text, rank=rank, cause="groups")


@exercise("2.12", "gloo", asserts="order groups bubble kept resources")
def test_interleaving_divides_the_bubble(impl, run):
    """Stages r, r+p, … on rank r, the bubble (p-1)/(vm+p-1), and no more kept than warm-up + 1."""
    sizes = [(4, 8, 2), (2, 4, 3), (3, 3, 2), (8, 16, 2), (4, 4, 1), (1, 2, 3)]

    def body(ctx):
        complete = [plain(impl.make_schedule("interleaved", *size)) for size in sizes]
        return list(zip([plain(impl.interleaved(*s)) for s in sizes], complete, strict=True))

    found = run(body, 1, process_group=False, ledger=False)[0]
    for (p, m, v), (order, schedule) in zip(sizes, found, strict=True):
        what = f"interleaved with {p} ranks, {m} micro-batches, {v} chunks per rank"
        check_order(order, schedule, p * v, m, what)
        for rank, steps in enumerate(order):
            stages = sorted({s for _, s, _ in steps})
            want = list(range(rank, p * v, p))
            expect_equal(stages, want, what=f"{what}: stages", rank=rank, cause="placement")
        check_groups(order, p, v, what)
        check_bubble(order, COSTS, (p - 1) / (v * m + p - 1), what)
        check_peaks(order, [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)], what)


@exercise("2.12", "virtual gloo cuda", asserts="order parameters layout life")
def test_interleaved_equals_one_process(impl, run, seed, cases):
    """Gradients of every layer and the loss on all ranks, with 2 and 3 chunks per rank."""
    for ranks, m, chunks in cases((2, 4, 2), (3, 3, 2), (2, 2, 3), (1, 2, 2)):
        make = lambda module: module.make_schedule("interleaved", ranks, m, chunks)
        check_run(run, impl, seed, ranks, m, make, chunks=chunks, frozen=m == 3, steps=2)


@exercise("2.12", "virtual", asserts="bubble kept cost")
def test_interleaved_takes_the_time_of_theory(impl, run):
    """Run under a virtual clock, 16 ranks with 2 chunks too: the bubble's time is divided by v."""
    for ranks, m, chunks in ((4, 8, 2), (16, 16, 2), (3, 6, 3)):
        make = lambda module: module.make_schedule("interleaved", ranks, m, chunks)
        seconds = 3 * UNIT * (m + (ranks - 1) / chunks)
        limits = [2 * (ranks - r - 1) + (chunks - 1) * ranks + 1 for r in range(ranks)]
        check_executed(run, impl, make, ranks, m, chunks, seconds, limits)


@exercise("2.12", "gloo", asserts="order")
def test_interleaved_agrees_with_torch(impl, run, seed):
    """The same gradients and loss as torch.distributed.pipelining's ScheduleInterleaved1F1B."""
    schedule = pipelining.ScheduleInterleaved1F1B
    check_against_torch(run, impl, seed, "interleaved", schedule, 2, 4, 2)


@exercise("2.12", "gloo", asserts="numbers refusals")
def test_interleaved_refuses_what_does_not_divide(impl, run):
    """m no multiple of p, or a number below 1: ValueError, also from make_schedule."""
    calls = [(4, 6, 2), (4, 3, 2), (2, 0, 2), (2, 2, 0), (0, 2, 1), (2, -4, 1), (2, 4, -1)]
    check_refused(run, impl, "interleaved", calls)
    check_refused(run, impl, "make_schedule", [("interleaved", *call) for call in calls])


@trace("2.11", bubble=3 / 11)
def trace_1f1b(impl):
    """1F1B with 8 micro-batches."""
    return paced_scenario(lambda module: module.make_schedule("1f1b", 4, 8))(impl)


@trace("2.12", bubble=3 / 19)
def trace_interleaved(impl):
    """Interleaved 1F1B with 8 micro-batches and 2 chunks per rank."""
    make = lambda module: module.make_schedule("interleaved", 4, 8, 2)
    return paced_scenario(make, chunks=2)(impl)
