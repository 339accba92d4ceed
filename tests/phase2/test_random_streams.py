"""Checks of exercise 2.19: random numbers equal where replicated, different where sharded."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch._dynamo  # torch's checkpoint imports it when it is called: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace

KINDS = ("replicated", "sharded")


def dropped(device: torch.device, n: int = 64) -> list[int]:
    """Which of ``n`` elements dropout kills: the draw of a layer."""
    return (F.dropout(torch.ones(n, device=device), 0.5) == 0).int().tolist()


def draw(streams, kind: str, device: torch.device) -> list[int]:
    with getattr(streams, kind)():
        return dropped(device)


def expect_draws(got: list, want: list, *, what: str, rank: int, cause: str) -> None:
    """Fail at the first draw of ``got`` that kills other elements than that of ``want``."""
    for number, (a, b) in enumerate(zip(got, want, strict=True), 1):
        if a != b:
            message = (
                f"{what}, draw {number} on rank {rank}: not the elements that should be dropped"
            )
            fail(message, cause=cause, rank=rank)


@exercise("2.19", "virtual gloo cuda", asserts="replicated sharded goes-on")
def test_equal_where_replicated_different_where_sharded(impl, run, seed, cases):
    """The ranks drop the same elements in replicated regions, their own in sharded ones."""
    worlds = cases(3, 1, 2, 4)

    def body(ctx):
        torch.manual_seed(seed + 17 * ctx.rank)  # the caller's numbers differ, as they often do
        streams = impl.RandomStreams(seed, device=ctx.device)
        if ctx.rank == 1:
            torch.rand(5, device=ctx.device)
        return [[draw(streams, kind, ctx.device) for kind in KINDS] for _ in range(3)]

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, rounds in enumerate(results):
            for number, (replicated, sharded) in enumerate(rounds):
                if replicated != results[0][number][0]:
                    fail(
                        f"{w} ranks: rank {rank} drops other elements of a replicated tensor than "
                        "rank 0: the replicas drift apart",
                        cause="replicated-differs",
                        rank=rank,
                    )
                twins = [r for r in range(rank) if sharded == results[r][number][1]]
                if twins:
                    fail(
                        f"{w} ranks: rank {rank} drops the same elements of its shard as rank "
                        f"{twins[0]}",
                        cause="sharded-equal",
                        rank=rank,
                    )
                if sharded == replicated:
                    text = "the replicated and the sharded stream are the same numbers"
                    fail(f"{text} on rank {rank}", cause="streams-equal", rank=rank)
            for place, kind in enumerate(KINDS):
                seen = [tuple(each[place]) for each in rounds]
                if len(set(seen)) < len(seen):
                    fail(
                        f"the {kind} stream begins again at every use: each layer and step drops "
                        "the same elements",
                        cause="stream-restarts",
                        rank=rank,
                    )


def long_draw(count: int = 200) -> list[int]:
    """Numbers that do not come twice by chance."""
    return torch.randint(2**62, (count,)).tolist()


@exercise("2.19", "virtual", asserts="from-the-seed independent randomness")
def test_streams_of_all_seeds_are_apart(impl, run, seed):
    """No stream shares a number with one of another seed or rank, nor with the caller's."""
    steps = (1, 2, 7, 100, 1000, 1024, 2718, 10_007, 1_000_003, 2**31, 2**32, 2**33)
    fixed = (0, 1, 2, 3, seed, seed + 2**63)
    chosen = sorted({*fixed, *(seed + k * step for step in steps for k in (1, 2))})

    def body(ctx):
        out = []
        for number in (*chosen, seed):
            streams = impl.RandomStreams(number)
            torch.manual_seed(number)
            for kind in KINDS:
                with getattr(streams, kind)():
                    out.append(long_draw())
            out.append(long_draw())
        return out

    results = run(body, 4)
    seen: dict[int, str] = {}
    names = ("replicated", "sharded", "caller")
    for rank, drawn in enumerate(results):
        at = 3 * chosen.index(seed)
        expect_draws(
            drawn[-3:-1],
            drawn[at : at + 2],
            what="replicated, then sharded, of the same seed again",
            rank=rank,
            cause="not-from-the-seed",
        )
        for place, numbers in enumerate(drawn[:-3]):
            kind = names[place % 3]
            name = f"{kind}, seed {chosen[place // 3]}" + f", rank {rank}" * (kind == "sharded")
            for number in numbers:
                other = seen.setdefault(number, name)
                both = {other.split(",")[0], name.split(",")[0]}
                if other != name and both != {"caller"}:  # torch reads 32 bits of a caller's seed
                    text = f"the streams ({name}) and ({other}) have numbers in common"
                    fail(text, cause="seeds-collide", rank=rank)


@exercise("2.19", "virtual gloo cuda", asserts="callers-stay goes-on life resources")
def test_callers_numbers_are_left_alone(impl, run, seed):
    """Making and using streams draws nothing from the default generator, also after an error."""

    def body(ctx):
        torch.manual_seed(seed)
        out = [dropped(ctx.device)]
        others = random.getstate(), np.random.get_state()[1].tolist()
        streams = impl.RandomStreams(seed + 1, device=ctx.device)
        draw(streams, "replicated", ctx.device)
        out.append(dropped(ctx.device))
        try:
            with streams.sharded():
                dropped(ctx.device)
                raise KeyboardInterrupt("in a layer")
        except KeyboardInterrupt:
            pass
        out.append(dropped(ctx.device))
        same = others == (random.getstate(), np.random.get_state()[1].tolist())
        beside = impl.RandomStreams(seed + 1, device=ctx.device)
        went = [draw(beside, kind, ctx.device) for kind in (*KINDS, "sharded", "replicated")]
        more = [draw(streams, kind, ctx.device) for kind in ("sharded", "replicated")]
        return out, same, went[2:], more

    def reference(ctx):  # in a rank: random numbers depend on the device
        torch.manual_seed(seed)
        return [dropped(ctx.device) for _ in range(3)]

    results = run(body, 2)
    (want,) = run(reference, 1, process_group=False)
    for rank, (got, same, went, more) in enumerate(results):
        text = "the state of Python's and NumPy's own random numbers is kept"
        expect_equal(same, True, what=text, rank=rank, cause="caller-disturbed")
        what = "sharded, then replicated, after an exception in a region"
        expect_draws(more, went, what=what, rank=rank, cause="after-exception")
        for place, when in ((1, "after a region"), (2, "after an exception in a region")):
            if got[place] != want[place]:
                text = f"{when} the caller's random numbers differ from those without the call"
                fail(f"{text} on rank {rank}", cause="caller-disturbed", rank=rank)


@exercise("2.19", "virtual", asserts="nests goes-on several life")
def test_regions_nest(impl, run, seed):
    """A region inside another, also of the same kind, goes on where its stream was left."""

    def body(ctx):
        out = []
        for nested in (False, True):
            streams, drawn = impl.RandomStreams(seed), {kind: [] for kind in KINDS}
            if not nested:
                drawn = {
                    kind: [draw(streams, kind, ctx.device) for _ in range(3)] for kind in KINDS
                }
            else:
                drawn = {"replicated": [], "sharded": []}
                with streams.sharded():
                    drawn["sharded"].append(dropped(ctx.device))
                    with streams.replicated():
                        drawn["replicated"].append(dropped(ctx.device))
                        with streams.sharded():
                            drawn["sharded"].append(dropped(ctx.device))
                        drawn["replicated"].append(dropped(ctx.device))
                    drawn["sharded"].append(dropped(ctx.device))
                drawn["replicated"].append(draw(streams, "replicated", ctx.device))
            out.append(drawn)
        first, second = impl.RandomStreams(seed), impl.RandomStreams(seed + 1)
        apart = [draw(streams, "sharded", ctx.device) for streams in (first, second, first)]
        first, second = impl.RandomStreams(seed), impl.RandomStreams(seed + 1)
        with first.sharded():
            within = [dropped(ctx.device), draw(second, "sharded", ctx.device)]
            within.append(dropped(ctx.device))
        once, later = impl.RandomStreams(seed), impl.RandomStreams(seed)
        apart += [draw(once, "sharded", ctx.device) for _ in range(2)]
        made = later.sharded()  # entered later
        within.append(draw(later, "sharded", ctx.device))
        with made:
            within.append(dropped(ctx.device))
        return *out, apart, within

    for rank, (want, got, apart, within) in enumerate(run(body, 2)):
        what = "the sharded streams of two objects, one inside the other, and of a third one, where"
        what += " a context is made before another one is used"
        expect_draws(within, apart, what=what, rank=rank, cause="objects-mixed")
        for kind in KINDS:
            what = f"the {kind} stream in nested regions"
            expect_draws(got[kind], want[kind], what=what, rank=rank, cause="nesting")


def layer(streams, device: torch.device, seen: list):
    """A function with dropout of all three kinds that notes the dropped elements."""

    def run_layer(x: torch.Tensor) -> torch.Tensor:
        masks = [dropped(device)]
        seen.append(masks)  # now: a recomputation ends early, with the last tensor it needs
        for kind in KINDS:
            with getattr(streams, kind)():
                kept = F.dropout(torch.ones_like(x), 0.5)
                masks.append((kept == 0).int().tolist())
            x = torch.sin(x * kept)
        return x

    return run_layer


@exercise("2.19", "virtual gloo cuda", asserts="recomputed streams-stay callers-stay life")
def test_recomputation_drops_the_same(impl, run, seed):
    """With activation checkpointing the same elements are dropped, and later draws don't change."""

    def body(ctx):
        x0 = torch.linspace(0.5, 2, 64, device=ctx.device)
        out = []
        for checkpointed in (False, True):
            torch.manual_seed(seed)
            streams, seen = impl.RandomStreams(seed, device=ctx.device), []
            run_layer = layer(streams, ctx.device, seen)
            x = x0.clone().requires_grad_()
            y = x
            for number in range(2):
                if checkpointed:
                    options = {"use_reentrant": False, "context_fn": streams.contexts}
                    if number:  # the second layer runs inside a region
                        with streams.sharded():
                            y = checkpoint(run_layer, y, **options)
                    else:
                        y = checkpoint(run_layer, y, **options)
                elif number:
                    with streams.sharded():
                        y = run_layer(y)
                else:
                    y = run_layer(y)
            before = [draw(streams, kind, ctx.device) for kind in KINDS]
            y.sum().backward(retain_graph=True)
            with streams.replicated():  # backward inside a region
                first = dropped(ctx.device)
                y.sum().backward()
                within = [first, dropped(ctx.device)]
            after = [*within, *[draw(streams, kind, ctx.device) for kind in KINDS]]
            out.append([x.grad.tolist(), before, after, dropped(ctx.device), seen])
        return out

    for rank, (plain, again) in enumerate(run(body, 2)):
        seen = again[4]
        for number, masks in enumerate(seen[2:]):  # backward: the second layer first, twice
            forward = seen[1 - number % 2]
            for kind, a, b in zip(("caller's", *KINDS), masks, forward, strict=True):
                if a != b:
                    fail(
                        f"recomputation {number // 2 + 1} drops other elements than forward did "
                        f"({kind} stream, layer {2 - number % 2}, rank {rank}), so the gradient "
                        "is that of another function. contexts() has to rewind the streams",
                        cause="recomputed-differs",
                        rank=rank,
                    )
        if len(seen) < 4:
            fail("nothing was recomputed", cause="not-recomputed", rank=rank)
        expect_equal(again[0], plain[0], what="gradient of x, checkpointed", rank=rank)
        for place, when, cause in (
            (1, "both streams after forward", "stream-moved"),
            (2, "both streams after backward with its recomputation", "stream-rewound"),
        ):
            expect_draws(again[place], plain[place], what=when, rank=rank, cause=cause)
        what = "the caller's numbers after recomputation"
        expect_draws([again[3]], [plain[3]], what=what, rank=rank, cause="caller-disturbed")


@exercise("2.19", "virtual gloo cuda", asserts="state loaded life")
def test_state_continues(impl, run, seed):
    """state_dict, also taken inside a region, makes other streams go on with the same numbers."""

    def body(ctx):
        streams = impl.RandomStreams(seed, device=ctx.device)
        draw(streams, "replicated", ctx.device)
        with streams.sharded():
            dropped(ctx.device)
            state = streams.state_dict()
            inside = dropped(ctx.device)
        want = [draw(streams, "replicated", ctx.device), inside]
        fresh = impl.RandomStreams(seed + 1, device=ctx.device)
        draw(fresh, "sharded", ctx.device)
        got = []
        for _ in range(2):  # a state is a copy, which does not move on
            fresh.load_state_dict(state)
            got += [draw(fresh, kind, ctx.device) for kind in KINDS]
        return [*want, *want], got, saveable(state)

    for rank, (want, got, plain) in enumerate(run(body, 2)):
        what = "replicated, then sharded, after load_state_dict, twice"
        expect_draws(got, want, what=what, rank=rank, cause="state-lost")
        expect_equal(plain, True, what="state_dict holds tensors and plain data only", rank=rank)


def saveable(state: object) -> bool:
    """Whether ``torch.load(…, weights_only=True)`` would read it."""
    if isinstance(state, dict):
        return all(isinstance(k, str) and saveable(v) for k, v in state.items())
    if isinstance(state, (list, tuple)):
        return all(map(saveable, state))
    return state is None or isinstance(state, (torch.Tensor, int, float, str))


@exercise("2.19", "virtual", asserts="group from-the-seed refused refusals no-messages cost alone")
def test_streams_of_a_group(impl, run, seed):
    """Ranks are those of the group, here 1 and 3 and, with another seed, 0 and 2 of five."""

    def body(ctx):
        ours, theirs = dist.new_group([3, 1]), dist.new_group([0, 2])
        if ctx.rank == 4:
            return [refusal(impl.RandomStreams, seed, group=group) for group in (ours, theirs)]
        mine = (seed, ours) if ctx.rank in (1, 3) else (seed + 1, theirs)
        streams = impl.RandomStreams(mine[0], group=mine[1])
        alone = impl.RandomStreams(seed + 5)
        both = [draw(streams, kind, ctx.device) for kind in KINDS]
        world = [impl.RandomStreams(seed + k) for k in (0, 1)]
        world = [draw(streams, "sharded", ctx.device) for streams in world]
        return [*both, draw(alone, "replicated", ctx.device), world]

    results = run(body, 5)
    expect_refusals(results[4], ["a rank outside of ranks 1 and 3", "one outside of ranks 0 and 2"])
    for first, second in ((1, 3), (0, 2)):
        a, b = results[first], results[second]
        what = f"replicated in the group of ranks {first} and {second}"
        expect_draws(b[:1], a[:1], what=what, rank=second, cause="replicated-differs")
        if a[1] == b[1]:
            text = f"ranks {first} and {second} share a sharded stream"
            fail(text, cause="sharded-equal", rank=second)
        for place, rank in enumerate((first, second)):
            if results[rank][1] != results[place][3][first == 0]:
                text = f"rank {rank}, number {place} of its group, has not the sharded stream that"
                text += f" rank {place} of all has with the same seed: the rank in the group counts"
                fail(text, cause="group", rank=rank)
    for rank in (1, 2, 3):
        what = "replicated on all ranks"
        expect_draws(results[rank][2:3], results[0][2:3], what=what, rank=rank, cause="group")
    sent = [len(log.events) for log in results.logs]
    expect_equal(sent, [0] * 5, what="messages of each rank", cause="communicates")


@exercise("2.19", "virtual", asserts="refused load-refused refusals")
def test_streams_refuse_bad_input(impl, run, seed):
    """A negative seed, loading inside of a region or of other generators: ValueError."""

    def body(ctx):
        streams, beside = impl.RandomStreams(seed), impl.RandomStreams(seed)
        state = impl.RandomStreams(seed + 1).state_dict()
        refused = [refusal(impl.RandomStreams, -1), refusal(impl.RandomStreams, -(2**40))]
        for kind in KINDS:
            with getattr(streams, kind)():
                refused.append(refusal(streams.load_state_dict, state))
        for name in state:  # one stream of a process with two generators
            if isinstance(state[name], list):
                other = state | {name: [*state[name], *state[name]]}
                refused.append(refusal(streams.load_state_dict, other))
        draws = [[draw(each, kind, ctx.device) for kind in KINDS] for each in (streams, beside)]
        return refused, draws

    results = run(body, 2)
    for rank, (refused, (got, want)) in enumerate(results):
        calls = ["seed -1", "seed -2^40", "load inside replicated", "load inside sharded"]
        calls += ["load of two generators' states"] * (len(refused) - 4)
        expect_refusals(refused, calls, rank=rank)
        what = "replicated, then sharded, after a refused load, which changes nothing"
        expect_draws(got, want, what=what, rank=rank, cause="late-check")


@trace("2.19")
def trace_streams(impl):
    """Two steps of a layer with dropout of both kinds, recomputed in backward."""

    class Layer(torch.nn.Module):
        def __init__(self, streams) -> None:
            super().__init__()
            self.streams = streams

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with self.streams.sharded():
                x = F.dropout(torch.sin(x), 0.1)
            with self.streams.replicated():
                return F.dropout(x, 0.1).square()

    def body(ctx):
        streams = impl.RandomStreams(1)
        model, x = Layer(streams), torch.ones(500_000, requires_grad=True)
        for step in range(3):
            if step == 1:
                dist.barrier()
                ctx.start_picture()
            y = checkpoint(model, x, use_reentrant=False, context_fn=streams.contexts)
            with ctx.region(f"loss {step}"):
                dist.all_reduce(y.detach().sum())
            y.sum().backward()

    return body
