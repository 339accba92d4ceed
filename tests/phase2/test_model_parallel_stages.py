"""Checks of exercise 2.8: parameters that stages share, their messages, memory and refusals."""

from __future__ import annotations

import gc
import weakref

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refused, fail, refusal
from distlab.observe.memory import PeakMemory, held_by
from distlab.reference.workloads import GPT

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "reduce")
VOCABULARY, LENGTH, WIDTH, BATCH = 13, 6, 8, 4
ACTIVATION = BATCH * LENGTH * WIDTH * 4  # bytes in float32
TIED = VOCABULARY * WIDTH * 4
BOUNDS = {2: [0, 2, 5], 3: [0, 2, 4, 5]}


def gpt(seed: int, device="cpu") -> GPT:
    """Embedding, three blocks, head that shares the embedding's weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(VOCABULARY, LENGTH, 3, WIDTH, 2).to(device)


def batch(seed: int, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:].flatten()


@exercise("2.8", "virtual gloo cuda", asserts="start-equal summed ties life")
def test_tied_copies_stay_equal(impl, run, seed):
    """Ranks that start from different seeds: the copies start as the first one and stay equal."""

    def body(ctx):
        layers = impl.layers_of(gpt(seed + ctx.rank, ctx.device))
        mine = {0: layers[0].tokens, 1: layers[2].qkv, 2: layers[-1].head}[ctx.rank].weight
        copies = [mine.detach().clone().cpu()]
        stage = impl.Stage(layers, BOUNDS[3])
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)
        copies.append(mine.detach().clone().cpu())
        for step in range(3):
            impl.train_step(stage, optimizer, *batch(seed + step, ctx.device))
            copies.append(mine.detach().clone().cpu())
        return copies

    results = run(body, 3)
    original, *first = results[0]
    expect_close(first[0], original, what="the first stage's weight at the start", rank=0)
    for step, (a, b) in enumerate(zip(first, results[2][1:], strict=True)):
        if not torch.equal(a, b):
            when = f"after {step} steps" if step else "at the start"
            apart = float((a - b).abs().max())
            fail(
                f"the copies of the tied weight on stages 0 and 2 differ by up to {apart:.3g} "
                f"{when}. They must start equal and get the same (summed) gradient",
                cause="copies-differ" if step else "copies-start-differently",
                rank=2,
            )


@exercise("2.8", "virtual gloo", asserts="cost announced neighbours tied-stages-only")
def test_one_activation_and_one_gradient_per_boundary(impl, run, seed):
    """Point-to-point between neighbours, each byte once; tied weights between their stages only."""

    def body(ctx):
        stage = impl.Stage(impl.layers_of(gpt(seed)), BOUNDS[3])
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        inputs, targets = batch(seed)
        smaller = inputs[:1], targets[:LENGTH]
        every = {"first": (inputs, targets), "smaller": smaller, "second": (inputs, targets)}
        for step, given in every.items():
            with ctx.region(step):
                impl.train_step(stage, optimizer, *given)

    # stage 0 sends an activation, stage 1 one and a gradient, stage 2 a gradient; tied: 2(W-1)/W·N
    want = [ACTIVATION + TIED, 2 * ACTIVATION, ACTIVATION + TIED]
    for log, nbytes, sends in zip(run(body, 3, delays=True).logs, want, (1, 2, 1), strict=True):
        first, second = log.select(region="first"), log.select(region="second")
        for step, slack in ((first, 200), (second, 32)):
            why = "send activations and gradients to the neighbour only"
            step.forbid(*COLLECTIVES, "barrier", why=why)
            step.all_waited()
            formula = "an activation or a gradient per boundary, and the tied weight's gradient"
            step.sent_at_most(nbytes + slack, formula)
            step.sent_at_least(nbytes, formula)
            for event in step.events:
                if event.op in ("send", "recv") and abs((event.peer or 0) - log.rank) != 1:
                    text = f"rank {log.rank}: {event}, but only neighbours share a boundary"
                    fail(text, cause="not-a-neighbour", rank=log.rank, line=event.line)
        got = second.select("send").messages
        if got != sends:
            text = f"rank {log.rank} sent {got} messages in a step, expected {sends}"
            cause = "too-many-messages" if got > sends else "too-few-messages"
            fail(text, cause=cause, rank=log.rank)


@exercise("2.8", "virtual", asserts="own-layers not-kept resources")
def test_only_the_own_stage_is_held(impl, run, seed):
    """A rank holds weights, gradients, optimizer state and activations of its own
    layers; others are freed."""

    def inputs():
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(16)])
        model[13].weight = model[2].weight  # tied: stages 0 and 3 hold it
        return model, torch.ones(256, 64), torch.zeros(256, dtype=torch.int64)

    def body(ctx):
        model, x, y = inputs()
        stage = impl.Stage(impl.layers_of(model), [0, 4, 8, 12, 16])
        own = {id(p) for p in stage.parameters()}
        others = [weakref.ref(p) for p in model.parameters() if id(p) not in own]
        del model
        gc.collect()
        alive = sum(other() is not None for other in others)
        optimizer = torch.optim.Adam(stage.parameters())
        impl.train_step(stage, optimizer, x, y)
        optimizer.zero_grad(set_to_none=True)
        with PeakMemory() as split:
            impl.forward_backward(stage, x, y)
        seen = []
        for module in stage.modules():
            module.register_forward_hook(
                lambda _, given, out: seen.append((len(given[0]), weakref.ref(out)))
            )
        impl.forward_backward(stage, x[:9], y[:9])
        gc.collect()
        kept = sum(ref() is not None for _, ref in seen)
        return alive, vars(held_by(stage, optimizer)), split.peak, kept

    results = run(body, 4)
    model, x, y = inputs()
    with PeakMemory() as alone:
        F.cross_entropy(model(x), y).backward()
    for rank, (alive, held, peak, kept) in enumerate(results):
        if kept:
            text = f"rank {rank} still holds {kept} activations after forward_backward"
            fail(text, cause="activations-kept", rank=rank)
        if alive:
            text = f"rank {rank} still holds {alive} parameters of other stages' layers"
            fail(text, cause="too-much-memory", rank=rank)
        nbytes = 4 * (64 * 64 + 64) * 4
        for kind, limit in {"parameters": 1, "gradients": 1, "optimizer": 2.01}.items():
            if not nbytes <= held[kind] <= limit * nbytes:
                text = f"rank {rank} holds {held[kind]:,} B of {kind}, its layers have {nbytes:,} B"
                cause = "too-much-memory" if held[kind] > nbytes else "too-little-memory"
                fail(text, cause=cause, rank=rank)
        share = peak / alone.peak
        if share > 0.55:
            text = f"a step on rank {rank} takes {share:.0%} of the memory of all 4 stages together"
            fail(text, cause="too-much-memory", rank=rank)


@exercise("2.8", "virtual", asserts="group")
def test_stages_in_a_subgroup(impl, run, seed):
    """Stages are ranks of the group, not global ones: ranks 1 and 3 of four train together."""

    def body(ctx):
        group, layers = dist.new_group([1, 3]), impl.layers_of(gpt(seed))
        groups = impl.tie_groups(layers, BOUNDS[2], [[3, 1]])
        if ctx.rank not in (1, 3):
            return []
        stage = impl.Stage(layers, BOUNDS[2], group, groups)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        return [float(impl.train_step(stage, optimizer, *batch(seed))) for _ in range(2)]

    results = run(body, 4)
    model, want = gpt(seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(seed)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        want.append(loss.item())
    for rank in (1, 3):
        got, right = torch.tensor(results[rank]), torch.tensor(want)
        expect_close(got, right, what="losses in the group of ranks 1 and 3", rank=rank, atol=1e-5)


def sharing() -> list[nn.Module]:
    """Six layers that share parameters: within a stage, between stages, and a frozen one."""
    layers = [nn.Module() for _ in range(6)]

    def share(name: str, *numbers: int, trained: bool = True) -> None:
        p = nn.Parameter(torch.zeros(2), requires_grad=trained)
        for number in numbers:
            layers[number].register_parameter(name, p)

    share("own", 0, 1)
    share("near", 0, 2)
    share("far", 0, 4)
    share("frozen", 1, 5, trained=False)
    share("last", 3, 5)
    return layers


@exercise("2.8", "virtual cuda", asserts="tie-groups group life")
def test_every_rank_makes_the_groups_of_tied_stages(impl, run, seed):
    """tie_groups: one per set of stages, made by all ranks of the world, in the same order."""
    pipelines = [[3, 1, 4], [0, 5, 2]]  # rank 6 has no stage
    sets = [(1, 3), (1, 4), (3, 4), (0, 2), (0, 5), (2, 5)]

    def body(ctx):
        with ctx.region("made"):
            found = impl.tie_groups(sharing(), [0, 2, 4, 6], pipelines)
        sums = {}
        for ranks, group in found.items():
            if ctx.rank in ranks:
                x = torch.tensor([ctx.rank], device=ctx.device)
                dist.all_reduce(x, group=group)
                sums[",".join(map(str, ranks))] = x.item()
        everybody = torch.tensor([1], device=ctx.device)
        dist.all_reduce(everybody, group=dist.new_group(range(7)))  # as many groups on all ranks
        return sums, everybody.item(), sorted(",".join(map(str, ranks)) for ranks in found)

    names = {ranks: ",".join(map(str, ranks)) for ranks in sets}
    results = run(body, 7)
    for log in results.logs:
        for event in log.select(region="made").events:
            text = f"rank {log.rank} sent {event} while it made groups"
            fail(text, cause="sent", rank=log.rank, line=event.line)
    for rank, (sums, everybody, found) in enumerate(results):
        right = {names[ranks]: sum(ranks) for ranks in sets if rank in ranks}
        what = f"the sums of the ranks in the groups of rank {rank}"
        expect_equal(sums, right, what=what, rank=rank, cause="tie-groups")
        expect_equal(everybody, 7, what="a group that is made afterwards", rank=rank)
        what = f"the ranks of the groups that rank {rank} knows"
        expect_equal(found, sorted(names.values()), what=what, rank=rank, cause="tie-groups")


@exercise("2.8", "virtual gloo cuda", asserts="tie-groups group")
def test_ranks_outside_come_to_the_groups_of_a_pipeline(impl, run, seed):
    """tie_groups of one pipeline whose stages all share a parameter; rank 0 has no stage."""

    def body(ctx):
        (group,) = impl.tie_groups(sharing(), [0, 3, 6], [[2, 1]]).values()
        x = torch.tensor([ctx.rank], device=ctx.device)
        if ctx.rank:
            dist.all_reduce(x, group=group)
        return x.item()

    got = [*run(body, 3)]
    expect_equal(got, [0, 3, 3], what="sums over the ranks of the group", cause="tie-groups")


@exercise("2.8", "virtual", asserts="refused refusals")
def test_stage_refuses_a_group_that_nobody_has_made(impl, run, seed):
    """A tied parameter without its group, in a part of the world:
    ValueError, and nothing is sent."""

    def body(ctx):
        layers = impl.layers_of(gpt(seed))
        group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][ctx.rank // 2]
        others = impl.tie_groups(layers, BOUNDS[2], [[0, 2], [1, 3]])
        found = [refusal(impl.Stage, layers, BOUNDS[2], group)]
        return [*found, refusal(impl.Stage, layers, BOUNDS[2], group, others)]

    what = ["no groups of tied stages", "the groups of other pipelines' tied stages"]
    expect_refused(run(body, 4), what)


@exercise("2.8", "virtual", asserts="refused refusals")
def test_stage_refuses_bad_bounds(impl, run, seed):
    """Bounds that lose layers, make empty stages or don't fit the ranks: ValueError, unsent."""
    wrong = [[0, 5], [0, 2, 2, 5], [1, 2, 3, 5], [0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 3, 2, 5]]
    wrong += [[0, 2, -1, 5], [0, 2, 5, 6], [-5, 2, 4, 5], [0, 2, 4, 6]]
    wrong += [[0, 0, 3, 5], [0, 3, 5, 5], []]

    def body(ctx):
        layers = impl.layers_of(gpt(seed))
        return [refusal(impl.Stage, layers, bounds) for bounds in wrong]

    expect_refused(run(body, 3), [f"5 layers on 3 ranks by the bounds {b}" for b in wrong])
