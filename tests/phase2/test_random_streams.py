"""Checks of exercise 2.19: random numbers equal where replicated, different where sharded."""

from __future__ import annotations

import torch
import torch._dynamo  # torch's checkpoint imports it when it is called: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace

KINDS = ("replicated", "sharded")


def dropped(device: torch.device, n: int = 64) -> list[int]:
    """Which of ``n`` elements dropout kills: what a layer would draw."""
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


@exercise("2.19", "virtual gloo cuda")
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


@exercise("2.19", "virtual")
def test_streams_of_neighbouring_seeds_differ(impl, run, seed):
    """No stream of seed s is one of seed s+1 or s+2 on another rank, and a seed repeats itself."""

    def body(ctx):
        out = []
        for chosen in (seed, seed + 1, seed + 2, seed):
            streams = impl.RandomStreams(chosen)
            out.append([draw(streams, kind, ctx.device) for kind in KINDS])
        return out

    results = run(body, 3)
    seen: dict[tuple[int, ...], str] = {}
    for rank, drawn in enumerate(results):
        what = "replicated, then sharded, of the same seed again"
        expect_draws(drawn[3], drawn[0], what=what, rank=rank, cause="not-from-the-seed")
        for offset, pair in enumerate(drawn[:3]):
            for kind, numbers in zip(KINDS, pair, strict=True):
                name = f"seed {seed + offset}, {kind}" + f" of rank {rank}" * (kind == "sharded")
                other = seen.setdefault(tuple(numbers), name)
                if other != name:
                    fail(f"{name} and {other} are the same stream", cause="seeds-collide")


@exercise("2.19", "virtual gloo cuda")
def test_callers_numbers_are_left_alone(impl, run, seed):
    """Making and using streams draws nothing from the default generator, also after an error."""

    def body(ctx):
        torch.manual_seed(seed)
        out = [dropped(ctx.device)]
        streams = impl.RandomStreams(seed + 1, device=ctx.device)
        draw(streams, "replicated", ctx.device)
        out.append(dropped(ctx.device))
        try:
            with streams.sharded():
                dropped(ctx.device)
                raise KeyError("in a layer")
        except KeyError:
            pass
        return [*out, dropped(ctx.device)]

    def reference(ctx):  # in a rank: random numbers depend on the device
        torch.manual_seed(seed)
        return [dropped(ctx.device) for _ in range(3)]

    results = run(body, 2)
    (want,) = run(reference, 1, process_group=False)
    for rank, got in enumerate(results):
        for place, when in ((1, "after a region"), (2, "after an exception in a region")):
            if got[place] != want[place]:
                text = f"{when} the caller's random numbers are not what they would have been"
                fail(f"{text} on rank {rank}", cause="caller-disturbed", rank=rank)


@exercise("2.19", "virtual")
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
        return out

    for rank, (want, got) in enumerate(run(body, 2)):
        for kind in KINDS:
            what = f"the {kind} stream in nested regions"
            expect_draws(got[kind], want[kind], what=what, rank=rank, cause="nesting")


def layer(streams, device: torch.device, seen: list):
    """A function with dropout of all three kinds that notes what was dropped."""

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


@exercise("2.19", "virtual gloo cuda")
def test_recomputation_drops_the_same(impl, run, seed):
    """With activation checkpointing the same elements are dropped, and nothing after it changes."""

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
            y.sum().backward()
            after = [draw(streams, kind, ctx.device) for kind in KINDS]
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
                        "is that of another function: contexts() has to rewind the streams",
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


@exercise("2.19", "virtual gloo cuda")
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
        fresh.load_state_dict(state)
        return want, [draw(fresh, kind, ctx.device) for kind in KINDS], saveable(state)

    for rank, (want, got, plain) in enumerate(run(body, 2)):
        what = "replicated, then sharded, after load_state_dict"
        expect_draws(got, want, what=what, rank=rank, cause="state-lost")
        expect_equal(plain, True, what="state_dict holds tensors and plain data only", rank=rank)


def saveable(state: object) -> bool:
    """Whether ``torch.load(…, weights_only=True)`` would read it."""
    if isinstance(state, dict):
        return all(isinstance(k, str) and saveable(v) for k, v in state.items())
    if isinstance(state, (list, tuple)):
        return all(map(saveable, state))
    return state is None or isinstance(state, (torch.Tensor, int, float, str))


@exercise("2.19", "virtual")
def test_streams_of_a_group(impl, run, seed):
    """Ranks are those of the group; a rank outside of it is refused."""

    def body(ctx):
        group = dist.new_group([1, 2])
        if ctx.rank == 0:
            return refusal(impl.RandomStreams, seed, group=group)
        streams = impl.RandomStreams(seed, group=group)
        return [draw(streams, kind, ctx.device) for kind in KINDS]

    outside, first, second = run(body, 3)
    if outside.startswith("!"):
        text = f"a rank outside of the group: expected a ValueError, but {outside[1:]}"
        fail(text, cause="accepted", rank=0)
    what = "replicated in the group of ranks 1 and 2"
    expect_draws(second[:1], first[:1], what=what, rank=2, cause="replicated-differs")
    if first[1] == second[1]:
        fail("ranks 1 and 2 share a sharded stream", cause="sharded-equal", rank=2)


@exercise("2.19", "virtual")
def test_streams_refuse_bad_input(impl, run, seed):
    """A negative seed, and loading inside of a region: ValueError."""

    def body(ctx):
        streams = impl.RandomStreams(seed)
        state = streams.state_dict()
        with streams.replicated():
            inside = refusal(streams.load_state_dict, state)
        return [refusal(impl.RandomStreams, -1), inside]

    expect_refused(run(body, 2), [("seed -1", (-1,)), ("load_state_dict inside of a region", ())])


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
