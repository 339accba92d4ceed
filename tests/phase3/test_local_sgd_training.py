"""Checks of exercise 3.25: buffers, short rounds, groups, bad input, whole trainings."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.reference.workloads import build_model, digits
from tests.phase3.bad_input import check_models_that_differ, check_non_members
from tests.phase3.rounds import OUTER, Net, batches, compare, gradient_step, sgd, simulated, tensors

# Accuracy on the test digits that fewer rounds may cost, mean of two models. With one model, in
# 24 runs, local SGD was 0.3 points better than H=1, DiLoCo 0.6; standard deviations 1.0 and 1.7.
MARGIN = 0.04


FLOATS = {"seen": 1e-9, "wide": 1e-5, "hidden": 1e-5}  # tolerances
OTHERS = ("steps", "mask", "large")


class Buffers(Net):
    """More of them: a float32 one of 400 B, a hidden one, an int64 beyond what floats hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("wide", torch.arange(100.0) * (seed % 100))
        self.register_buffer("large", torch.tensor([2**53 + 1 + seed]))
        self.register_buffer("hidden", torch.tensor(float(seed % 100)), persistent=False)


@exercise("3.25", "virtual", asserts="buffers start round-cost same-bits cost dtype layout")
def test_buffers_agree(impl, run, seed):
    """Running statistics become their mean, counters and masks those of the group's rank 0."""

    def body(ctx):
        found = []
        for kind in (impl.LocalSGD, impl.DiLoCo):
            model = Buffers(seed + ctx.rank)
            rounds = kind(model, every=2)
            start = tensors(model)
            for step in range(2):
                for name in FLOATS:
                    model.get_buffer(name).add_(ctx.rank + 1)
                for name in ("steps", "large"):
                    model.get_buffer(name).add_(10 * ctx.rank)
                model.mask.logical_xor_(torch.tensor(ctx.rank > 0))
                with ctx.region(f"{kind.__name__} {step}"):
                    rounds.step()
            found.append([start, tensors(model)])
        return found

    want = tensors(Buffers(seed))
    results = run(body, 3)
    trained = sum(p.nbytes for p in Net(seed).parameters() if p.requires_grad)
    share = 4 / 3 * (trained + sum(want[name].nbytes for name in FLOATS))
    share += sum(want[name].nbytes for name in OTHERS) + 100  # padding
    for rank, found in enumerate(results):
        for kind, (start, end) in zip(("LocalSGD", "DiLoCo"), found, strict=True):
            for name in want:
                what = f"{kind}: {name} that all ranks start from"
                expect_close(start[name], want[name], what=what, rank=rank, rtol=0, atol=0)
            for name, tolerance in FLOATS.items():
                expect_close(
                    end[name],
                    want[name] + 4,
                    what=f"{kind}: floating-point buffer {name} after a round",
                    rank=rank,
                    contributions=[want[name] + 2 * (r + 1) for r in range(3)],
                    rtol=tolerance,
                    atol=tolerance,
                )
                if not torch.equal(end[name], results[0][kind == "DiLoCo"][1][name]):
                    said = f"{kind}: {name} differs between ranks 0 and {rank}"
                    fail(said, cause="ranks-differ", rank=rank)
            for name in OTHERS:
                what = f"{kind}: {name}, which is not floating-point, after a round"
                expect_close(end[name], want[name], what=what, rank=rank, rtol=0, atol=0)
            part = results.logs[rank].select(region=f"{kind} 1")
            part.sent_at_most(share, "2(W-1)/W of parameters and float buffers, and the counters")
            most = 2 * (2 + 2) + 3  # a reduce-scatter and an all-gather count as two
            if part.messages > most:
                fail(
                    f"{kind}: rank {rank} issued {part.messages} messages at the end of a round, "
                    f"expected {most} at most: join the tensors of a dtype",
                    cause="too-many-messages",
                    rank=rank,
                )


@exercise("3.25", "virtual", asserts="mean mean-kept mean-cost same-bits dtype layout group")
def test_means_of_any_tensors(impl, run, seed):
    """mean_over_ranks: all dtypes, strided, empty and 0-d, in a group; the inputs are kept."""
    groups = [1, 3], [0, 2]

    def inputs(rank):
        wave = torch.arange(6.0).view(2, 3) + rank
        return [
            nn.Parameter(wave.double().t()),
            (wave[:, 1] * 20_000).half(),
            wave[::2] / 3,
            torch.tensor(rank / 7),
            torch.zeros(0, 3),
            torch.complex(wave, -wave),
            wave.bfloat16(),
        ]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        mine = inputs(ctx.rank)
        with ctx.region("means"):
            means = impl.mean_over_ranks(mine, made[ctx.rank % 2 == 0])
        for mean in means:
            mean.detach().add_(1)  # whoever shares memory with an input changes it
        with ctx.region("none"):
            none = impl.mean_over_ranks([], made[ctx.rank % 2 == 0])
        kept = [torch.equal(a, b) for a, b in zip(mine, inputs(ctx.rank), strict=True)]
        history = [mean.requires_grad for mean in means]
        return [mean.detach() for mean in means], kept, history, len(none)

    results = run(body, 4)
    for rank, (means, kept, history, none) in enumerate(results):
        members = groups[rank % 2 == 0]
        parts = [[t.detach() for t in inputs(member)] for member in members]
        own = sum(part[0] for part in parts)
        if torch.allclose(means[0] - 1, own / 4, rtol=1e-9):
            said = f"the sum over ranks {members} is divided by the 4 ranks of the world"
            fail(said, cause="divided-by-world", rank=rank)
        for k, mean in enumerate(means):
            want, rough = (parts[0][k] / 2 + parts[1][k] / 2) + 1, parts[0][k].dtype.itemsize == 2
            what = f"mean of {want.dtype}, shape {tuple(want.shape)}, over ranks {members}, + 1"
            if mean.dtype != want.dtype:
                fail(f"{what}: it is {mean.dtype}", cause="wrong-dtype", rank=rank)
            if want.is_complex():
                mean, want = torch.view_as_real(mean), torch.view_as_real(want)
            loose = 2e-2 if rough else 1e-6
            expect_close(mean, want, what=what, rank=rank, rtol=loose, atol=loose)
            if not torch.equal(means[k], results[members[0]][0][k]):
                fail(f"{what}: ranks differ", cause="ranks-differ", rank=rank)
        n = len(means)
        expect_equal(kept, [True] * n, what="inputs kept", rank=rank, cause="input-changed")
        expect_equal(history, [False] * n, what="requires_grad", rank=rank, cause="history")
        expect_equal(none, 0, what="means of no tensors", rank=rank)
        log = results.logs[rank]
        if log.select(region="none").events:
            fail("without tensors something is sent", cause="too-many-messages", rank=rank)
        sent = log.select(region="means").messages
        if sent > 2 * 5:
            fail(f"{sent} messages for 5 dtypes", cause="too-many-messages", rank=rank)


@exercise("3.25", "virtual", asserts="finish life")
def test_finishing_twice_changes_nothing(impl, run, seed):
    """finish() without a step since the last round: False, no message, no outer step."""

    def body(ctx):
        found = []
        for kind in (impl.LocalSGD, impl.DiLoCo):
            model = Net(seed)
            more = {"lr": 1.5, "momentum": 0.0} if kind is impl.DiLoCo else {}
            optimizer, rounds = sgd(model), kind(model, every=3, **more)
            for batch in batches(seed, ctx.rank, 2):
                gradient_step(model, optimizer, batch)
                rounds.step()
            ended, before = rounds.finish(), tensors(model)
            again, after = rounds.finish(), tensors(model)
            later = [bool(rounds.step()) for _ in range(4)]
            found.append([bool(ended), bool(again), *later, before, after])
        return found

    for rank, found in enumerate(run(body, 2)):
        for kind, (*ends, before, after) in zip(("LocalSGD", "DiLoCo"), found, strict=True):
            kept = all(torch.equal(before[name], t) for name, t in after.items())
            got = [*ends, kept]
            what = f"{kind}: finish() after 2 of 3 steps, again, four steps after that; model kept "
            what += "by the second finish()"
            want = [True, False, False, False, True, False, True]
            expect_equal(got, want, what=what, rank=rank, cause="empty-round")


@exercise("3.25", "virtual gloo", asserts="rounds outer trained group alone")
def test_a_group_keeps_to_itself(impl, run, seed):
    """Two groups of two ranks of four: each agrees on a model of its own; a single sample."""
    groups = [0, 2], [1, 3]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        k = ctx.rank % 2
        number = groups[k].index(ctx.rank)
        base = seed + 100 * k
        found = []
        with ctx.region("rounds"):
            for outer in (None, OUTER):
                model = Net(base + number)
                optimizer = sgd(model, momentum=0.9 if outer else 0.5)
                kind = impl.DiLoCo if outer else impl.LocalSGD
                rounds = kind(model, every=2, group=made[k], **(outer or {}))
                for batch in batches(base, number, 3):
                    gradient_step(model, optimizer, batch)
                    rounds.step()
                rounds.finish()
                found.append(tensors(model))
            none = impl.train(Net(base), sgd(Net(base)), [], rounds)
            one = [(x[: 1 - number], y[: 1 - number]) for x, y in batches(base, 0, 1)]
            single = impl.train(model, sgd(model, lr=0.0), one, rounds)
        return found, list(none), list(single)

    results = run(body, 4)
    for log in results.logs:
        for event in log.select(region="rounds").events:
            if len(event.group) > 2:
                problem = f"{event} is for all 4 ranks, not for the group of 2 that was given"
                fail(problem, cause="wrong-group", rank=log.rank, line=event.line)
    for rank, (found, none, single) in enumerate(results):
        base = seed + 100 * (rank % 2)
        for outer, got in zip((None, OUTER), found, strict=True):
            wanted = simulated(base, 2, 3, 2, outer)[-1:]
            what = f"{'DiLoCo' if outer else 'local SGD'} in a group of 2"
            compare([got], wanted, what=what, rank=rank)
        expect_equal(none, [0.0, 0], what="train() without a batch", rank=rank, cause="loss-value")
        [(x, y)] = batches(base, 0, 1)
        loss = loss_sum(found[1], [(x[:1], y[:1])])
        if single[1] != 1 or not abs(single[0] - loss) < 1e-4 * loss:
            said = f"train() with a single sample on both ranks together: expected {loss:.6g}, 1; "
            fail(f"{said}got {single}", cause="loss-value", rank=rank)


@exercise("3.25", "virtual", asserts="refused refusals")
def test_bad_settings_are_refused(impl, run, seed):
    """ValueError on every rank, before anything is sent."""
    wrong = [
        ("LocalSGD", {"every": 0}),
        ("LocalSGD", {"every": -3}),
        ("DiLoCo", {"every": 0}),
        ("DiLoCo", {"every": 2, "lr": 0.0}),
        ("DiLoCo", {"every": 2, "lr": float("nan")}),
        ("DiLoCo", {"every": 2, "momentum": 1.0}),
        ("DiLoCo", {"every": 2, "momentum": -0.1}),
        ("DiLoCo", {"every": 2, "momentum": float("nan")}),
    ]

    def body(ctx):
        said = [refusal(getattr(impl, name), Net(seed), **more) for name, more in wrong]
        real, whole = torch.ones(2), torch.ones(2).int()
        said.append(refusal(impl.mean_over_ranks, [real, whole]))
        said.append(refusal(impl.mean_over_ranks, [whole, real]))
        return [*said, refusal(impl.mean_over_ranks, [whole.bool()])]

    calls = [f"{name}({settings})" for name, settings in wrong]
    means = [f"a mean of {what}" for what in ("floats, integers", "integers, floats", "bools")]
    expect_refused(run(body, 2), [*calls, *means])


@exercise("3.25", "virtual", asserts="refused refusals")
def test_who_is_no_member_is_refused(impl, run, seed):
    """A rank outside the group gets a ValueError, not a model of its own
    that no other rank shares."""
    calls = {
        "LocalSGD": lambda group: impl.LocalSGD(Net(seed), every=2, group=group),
        "DiLoCo": lambda group: impl.DiLoCo(Net(seed), every=2, group=group),
        "mean_over_ranks": lambda group: impl.mean_over_ranks([torch.ones(2)], group),
    }
    check_non_members(run, calls)


@exercise("3.25", "virtual", asserts="refused refusals")
def test_models_that_differ_are_refused(impl, run):
    """One rank has another model: a ValueError on every rank, before any parameter is sent."""
    check_models_that_differ(run, lambda model: impl.LocalSGD(model, every=2))


@exercise("3.25", "virtual gloo cuda", nccl=True, asserts="trained train-cost alone")
def test_train_counts_empty_batches(impl, run, seed, cases):
    """train(): a rank with an empty batch takes part in the round; loss over all samples."""
    for world_size, outer in cases((3, True), (2, False), (1, True)):
        check_train(run, impl, seed, world_size, OUTER if outer else None)


def uneven(seed: int, rank: int) -> list:
    """Five batches; the second is short, the fourth, which ends a round, empty but on rank 0."""
    own = batches(seed, rank, 5)
    own[1] = own[1][0][:1], own[1][1][:1]
    if rank:
        own[3] = own[3][0][:0], own[3][1][:0]
    return own


def loss_sum(trained: dict[str, Tensor], own: list[tuple[Tensor, Tensor]]) -> float:
    """The loss of a model with these values on a rank's batches."""
    model = Net(0)
    model.load_state_dict(trained, strict=False)  # a tied parameter has one name only
    with torch.no_grad():
        losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in own if len(y)]
    return float(sum(losses))


def check_train(run, impl, seed, world_size, outer) -> None:
    """The model after training, then the loss of that model, by a step of length 0."""

    def body(ctx):
        model = Net(seed + ctx.rank).to(ctx.device)
        own = [(x.to(ctx.device), y.to(ctx.device)) for x, y in uneven(seed, ctx.rank)]
        kind, settings = impl.DiLoCo if outer else impl.LocalSGD, {"every": 2, **(outer or {})}
        optimizer = sgd(model, momentum=0.9 if outer else 0.5)
        trained, first = optimizer.param_groups[0]["params"], []
        for p in trained:
            p.grad = torch.ones_like(p)  # of before: it counts in no step

        def look(*_):
            if not first:
                first.extend(p.grad.clone().cpu() for p in trained)

        optimizer.register_step_pre_hook(look)
        impl.train(model, optimizer, iter(own), kind(model, **settings))
        after = tensors(model)
        still = sgd(model, lr=0.0)
        rounds = kind(model, **settings)
        with ctx.region("train"):
            mean, samples = impl.train(model, still, iter(own), rounds)
        return float(mean), int(samples), after, first

    results = run(body, world_size)
    data = [uneven(seed, rank) for rank in range(world_size)]
    model = simulated(seed, world_size, 5, 2, outer, data=data)[-1]
    wanted = {name: model[name] for name, _ in Net(seed).named_parameters()}
    count = sum(len(y) for own in data for _, y in own)
    pairs = zip(results, data, strict=True)
    loss = sum(loss_sum(trained, own) for (_, _, trained, _), own in pairs) / count
    for rank, (mean, samples, trained, first) in enumerate(results):
        alone, (x, y) = Net(seed), data[rank][0]
        F.cross_entropy(alone(x), y).backward()
        own = [p.grad for p in alone.parameters() if p.requires_grad]
        if all(torch.allclose(a, b + 1, rtol=1e-4) for a, b in zip(first, own, strict=True)):
            said = "the first step's gradients are those of its batch and those from before train()"
            fail(f"{said}: clear them first", cause="old-gradients", rank=rank)
        compare([trained], [wanted], what=f"train() on {world_size} ranks", rank=rank)
        expect_equal(samples, count, what="number of samples of all ranks", rank=rank)
        if not abs(mean - loss) < 1e-4 * loss:
            message = f"the mean loss over all {count} samples of all ranks is {loss:.5f}, not "
            fail(f"{message}{mean:.5f}", cause="loss-value", rank=rank)
        sent = results.logs[rank].select(region="train").events
        if sent[-1].numel > 2:
            said = f"train() ends with {sent[-1]}: one all-reduce of two numbers is enough"
            fail(said, cause="too-many-messages", rank=rank)


def accuracy(trained: dict[str, Tensor]) -> float:
    """The share of the test digits on which a model with these values is right."""
    model = build_model("mlp", 0)
    model.load_state_dict(trained)
    images, labels = digits(train=False)[:]
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def parts(start: int, ranks: int) -> list[list]:
    """For each rank 44 batches of 16 training images."""
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(start))
    chosen = [digits()[order[rank::ranks][:704]] for rank in range(ranks)]
    return [[*zip(x.split(16), y.split(16), strict=True)] for x, y in chosen]


def inner(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


@exercise("3.25", "gloo", asserts="trained")
def test_as_accurate_on_the_digits(impl, run, seed):
    """Rounds of 8 steps cost at most 4 points of test accuracy against agreeing in every step."""
    digits()
    digits(train=False)
    seeds, epochs = (seed, seed + 1), 4

    def body(ctx):
        few = {"lr": 0.7, "momentum": 0.5}  # 22 rounds: the paper's 0.9 would overshoot
        found = []
        for kind, more in ((impl.LocalSGD, {}), (impl.DiLoCo, few)):
            for start in seeds:
                model = build_model("mlp", start)
                own = parts(start, ctx.world_size)[ctx.rank] * epochs
                impl.train(model, inner(model), own, kind(model, every=8, **more))
                found.append(model.state_dict())
        return found

    every_step = 0.0
    for start in seeds:  # what data parallelism does, in one process
        model = build_model("mlp", start)
        optimizer = inner(model)
        for batch in [*zip(*parts(start, 2), strict=True)] * epochs:
            x, y = (torch.cat(part) for part in zip(*batch, strict=True))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        every_step += accuracy(model.state_dict()) / len(seeds)
    for rank, (*local, first, second) in enumerate(run(body, 2, ledger=False, timeout=25)):
        for kind, models in (("local SGD", local), ("DiLoCo", (first, second))):
            got = sum(map(accuracy, models)) / len(seeds)
            if got < every_step - MARGIN:
                fail(
                    f"{kind} with H=8 is right on {got:.1%} of the test digits, H=1 on "
                    f"{every_step:.1%}: fewer rounds may cost {MARGIN:.0%}",
                    cause="less-accurate",
                    rank=rank,
                )


@trace("3.25", measures="waiting")
def trace_rounds(impl):
    """Two rounds of DiLoCo with four steps each on the digits."""
    digits()

    def body(ctx):
        images, labels = digits()[ctx.rank :: ctx.world_size]
        own = list(zip(images.split(32), labels.split(32), strict=True))
        model = build_model("mlp", 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = impl.DiLoCo(model, every=4)
        impl.train(model, optimizer, own[:1], rounds)
        ctx.start_picture()
        impl.train(model, optimizer, own[1:9], rounds)

    return body
