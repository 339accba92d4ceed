"""Checks of exercise 3.16: messages beside compute, in the right order, and never too many."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import nn

from distlab.grading import exercise, expect_close, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.fsdp_models import (
    ROOT,
    UNIT,
    Net,
    Stack,
    batch,
    compare_training,
    loss_of,
    net,
    traced,
    train,
    use_of_freed_is_told,
    values_of,
)

DEPTH = 12
WHOLE = DEPTH * UNIT + ROOT
WORLD = 4
SLACK = 10_000  # bytes of activations of one sample, and of what is in hand


def stack(seed: int) -> Stack:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Stack(depth=DEPTH)


def step(model: nn.Module) -> None:
    """One training step without an optimizer."""
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()


@exercise("3.16", "virtual gloo cuda")
@use_of_freed_is_told()
def test_training_equals_one_process(impl, run, seed, cases):
    """Clipping, accumulation, evaluation between the steps: the same as one process."""

    def body(ctx):
        inner = net(seed, ctx.device)
        model = impl.PrefetchFSDP(inner, [] if ctx.world_size == 2 else inner.units())
        return train(ctx, model, inner, seed, impl.module("fsdp").clip_by_global_norm)

    sizes = cases(3, 2, 4, 1)
    for world_size, results in zip(sizes, run.worlds(body, sizes), strict=True):
        compare_training(results, seed, f"{world_size} ranks, 3 steps")
        for log in results.logs:
            log.all_waited()


@exercise("3.16", "virtual gloo")
@use_of_freed_is_told()
def test_next_unit_is_on_its_way(impl, run, seed):
    """While a unit computes, the next one's all-gather is issued already, and no other."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PrefetchFSDP(inner, list(inner.layers))
        issued: dict[str, list[int]] = {"forward": [], "backward": []}
        step(model)
        start = 0

        def tell(point: str) -> None:
            nonlocal start
            count = sum(e.op == "all_gather" for e in ctx.ledger.events)
            if point == "backward" and not issued["backward"]:
                start = issued["forward"][-1]
            issued[point].append(count if point == "forward" else count - start)

        for layer in inner.layers:
            layer.tell = tell
        before = sum(e.op == "all_gather" for e in ctx.ledger.events)
        step(model)
        return [count - before for count in issued["forward"]], issued["backward"]

    for rank, (forward, back) in enumerate(run(body, 3)):
        # forward of layer k: root, layers 0 … k and the next; backward: the last one was kept
        for k, count in enumerate(forward):
            judge("forward", k, count, min(k + 3, DEPTH + 1), rank)
        for k, count in enumerate(back):
            judge("backward", DEPTH - 1 - k, count, min(k + 1, DEPTH - 1), rank)


def judge(pass_name: str, layer: int, count: int, want: int, rank: int) -> None:
    what = f"when the {pass_name} of unit {layer} of {DEPTH} computes, rank {rank} has issued"
    if count < want:
        fail(
            f"{what} {count} all-gathers in this {pass_name}, expected {want}: the next unit is "
            "not on its way",
            cause="no-prefetch",
            rank=rank,
        )
    if count > want:
        fail(
            f"{what} {count} all-gathers in this {pass_name}, expected {want}: more than one unit "
            "ahead, or one that was there already",
            cause="too-early",
            rank=rank,
        )


@exercise("3.16", "virtual")
@use_of_freed_is_told()
def test_communication_hides_behind_compute(impl, run, seed):
    """Units that compute longer than they travel: little of the virtual time is exposed."""
    forward, back = 1e-3, 2e-3  # seconds of each unit

    def body(ctx):
        inner = stack(seed)
        model = impl.PrefetchFSDP(inner, list(inner.layers))
        step(model)
        for layer in inner.layers:
            layer.tell = lambda point: time.sleep(forward if point == "forward" else back)
        with ctx.region("step"):
            begin = time.perf_counter()
            step(model)
            return time.perf_counter() - begin

    results = run(body, WORLD)
    for rank, (seconds, log) in enumerate(zip(results, results.logs, strict=True)):
        exposed = seconds - DEPTH * (forward + back)
        each = [e.end - e.start for e in log.select(region="step").events]
        most = 8 * sum(each) / len(each)
        if exposed > most:
            fail(
                f"rank {rank} waits {1e3 * exposed:.2f} ms of a step for {len(each)} messages of "
                f"{1e3 * sum(each) / len(each):.2f} ms on average; {1e3 * most:.2f} ms should do: "
                "the first, the last and the root's",
                cause="exposed",
                rank=rank,
            )


@exercise("3.16", "virtual gloo")
@use_of_freed_is_told()
def test_last_unit_and_root_are_gathered_once(impl, run, seed):
    """The bytes of a step: 3(W-1)/W·P, less one all-gather of the root and of the last unit."""

    def body(ctx):
        inner = stack(seed)
        model = impl.PrefetchFSDP(inner, list(inner.layers))
        step(model)
        with ctx.region("step"):
            step(model)

    for log in run(body, WORLD).logs:
        log = log.select(region="step")
        share = (WORLD - 1) / WORLD
        padding = 3 * 4 * (DEPTH + 1) * WORLD
        formula = "(W-1)/W·(3P - P_root - P_last): what backward begins with is still there"
        log.sent_at_most(share * (3 * WHOLE - ROOT - UNIT) + padding, formula)
        log.sent_at_least(share * (3 * WHOLE - ROOT - UNIT) - padding, formula)


@exercise("3.16", "virtual")
@use_of_freed_is_told()
def test_one_unit_ahead_and_no_more(impl, run, seed):
    """Live bytes: two units in full, and two vectors of gradients in backward."""

    def body(ctx):
        points: dict[str, int] = {}

        def tell(point: str) -> None:
            points[point] = max(points.get(point, 0), memory.current)

        with PeakMemory() as memory:
            inner = stack(seed)
            model = impl.PrefetchFSDP(inner, list(inner.layers))
            for layer in inner.layers:
                layer.tell = tell
            for _ in range(2):
                step(model)
                tell("after backward")
            model.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 2))
            tell("after evaluation")
        return points

    shards = WHOLE / WORLD + SLACK
    limits = {
        "forward": shards + ROOT + 2 * UNIT,
        "backward": 2 * shards + 2 * ROOT + 4 * UNIT,
        "after backward": 2 * shards,
        "after evaluation": shards,
    }
    for rank, points in enumerate(run(body, WORLD)):
        for point, limit in limits.items():
            if points.get(point, 0) > limit:
                fail(
                    f"{point}: rank {rank} has {points[point]:,} B of tensors, expected at most "
                    f"{limit:,.0f} B (all {DEPTH} units: {WHOLE:,} B): more than one unit ahead, "
                    "or something was not freed",
                    cause="never-freed",
                    rank=rank,
                )


class Changing(Net):
    """Runs the blocks in the order that it is told, some perhaps not at all."""

    plan = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"head.weight": self.head.weight.detach().clone()}
        x = self.inside(x)
        for k in self.plan:
            x = self.blocks[k](x)
        return self.head(x) + self.offset


def changing(seed: int) -> Changing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Changing().double()


PLANS = ((0, 1, 2), (2, 0), (1,), (1, 2, 0), (0, 1, 2))


@exercise("3.16", "virtual")
def test_wrong_guesses_cost_no_value(impl, run, seed):
    """The order of the units changes with every forward, also one between forward and backward."""

    def steps(model: nn.Module, inner: Changing, ranks: range) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for number, plan in enumerate(PLANS):
            inner.plan = plan
            optimizer.zero_grad()
            pairs = [batch(seed, rank, number) for rank in ranks]
            loss = loss_of(model, tuple(map(torch.cat, zip(*pairs, strict=True))))
            inner.plan = PLANS[number - 1]
            values_of(model, inner)  # an evaluation
            loss.backward()
            optimizer.step()
        return values_of(model, inner)

    def body(ctx):
        inner = changing(seed)
        with PeakMemory() as memory:
            model = impl.PrefetchFSDP(inner, inner.units())
            got = steps(model, inner, range(ctx.rank, ctx.rank + 1))
            held = []
            for plan in (PLANS[0], PLANS[2], PLANS[1]):
                inner.plan = plan
                values_of(model, inner)
                held.append(memory.current)
        return got, held

    alone = changing(seed)
    want = steps(alone, alone, range(2))
    results = run(body, 2)
    for rank, (got, held) in enumerate(results):
        if max(held) > held[0]:
            fail(
                f"rank {rank} holds {held[0]} B after evaluating units {PLANS[0]}, but {max(held)} "
                "B after others: a unit that was gathered on a wrong guess was not freed",
                cause="never-freed",
                rank=rank,
            )
        for name, value in want.items():
            what = f"{name} after steps with the units {PLANS}"
            expect_close(got[name], value, what=what, rank=rank, rtol=1e-6, atol=1e-8)
    for log in results.logs:
        log.all_waited()


@trace("3.16")
def trace_prefetch(impl):
    """Two steps of a small GPT, a unit for each block."""
    return traced(lambda *args: impl.PrefetchFSDP(*args))
