"""Checks of exercise 3.10: means of gradients, in buckets, while backward runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refusals,
    fail,
    refusal,
)
from tests.phase3.bad_input import check_models_that_differ
from tests.phase3.raised import reworded

CLASSES = 3


class Odd(nn.Module):
    """Tied, frozen, empty and transposed parameters, a scalar, four dtypes, a buffer.

    They are used in no particular order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES).float()
        self.first = nn.Linear(4, 4).double()
        self.second = nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.turned = nn.Parameter(torch.rand(4, 5, dtype=torch.float64).t())
        self.nothing = nn.Parameter(torch.rand(0, 3))
        self.narrow = nn.Parameter(torch.rand(4, dtype=torch.float16))
        self.coarse = nn.Parameter(torch.rand(4, dtype=torch.bfloat16))
        self.register_buffer("shift", torch.rand(4, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.frozen(x) + self.shift)) * self.scale
        x = torch.tanh(x * self.narrow) @ self.turned.t() @ self.turned + self.nothing.sum()
        x = x * self.coarse
        return self.head(torch.tanh(self.second(x)).float())


def net(seed: int) -> Odd:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Odd()


def loss_of(model: nn.Module, seed: int, rank: int, step: int = 0) -> torch.Tensor:
    """The loss on the rank's own five samples of a step."""
    generator = torch.Generator().manual_seed(seed * 1009 + 31 * step + rank)
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (5,), generator=generator)
    device = next(model.parameters()).device
    return F.cross_entropy(model(inputs.to(device)), targets.to(device))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def local(
    seed: int, ranks: Iterable[int], step: int = 0, data: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Each rank's gradients of its own samples (of seed ``data``), by the first rank's weights."""
    alone, found = net(seed), []
    for rank in ranks:
        alone.zero_grad()
        loss_of(alone, seed if data is None else data, rank, step).backward()
        found.append(gradients(alone))
    return found


DELEGATED = "torch's own DistributedDataParallel did the work"


def only_ones_own() -> None:
    """From here on torch's own DDP refuses to work in this process."""

    def refuse(*_, **__):
        raise RuntimeError(DELEGATED)

    nn.parallel.DistributedDataParallel.__init__ = refuse
    dist.Reducer.__init__ = refuse


def compare(
    got: dict, parts: list[dict], rank: int, what: str, times: float = 1.0, device: str = "cpu"
) -> None:
    """Each gradient is ``times`` the mean of the ranks' ``parts``.

    All come through a float32 layer, which a GPU rounds otherwise than the CPU that makes parts.
    """
    for name in sorted(
        parts[0], key=lambda name: -parts[0][name].numel()
    ):  # the telling ones first
        each = [part[name] * times for part in parts]
        single = each[0].dtype == torch.float32 or device == "cuda"
        fits = {"rtol": 1e-5, "atol": 1e-6} if single else {"rtol": 1e-10, "atol": 1e-12}
        expect_close(
            got.get(name),
            torch.stack(each).double().mean(0).to(each[0].dtype),
            what=f"{what}: gradient of {name}",
            rank=rank,
            contributions=each,
            **({} if each[0].dtype in (torch.float16, torch.bfloat16) else fits),
        )


# -- values ---------------------------------------------------------------------------------------
@exercise("3.10", "virtual", asserts="start start-cost same-tensors parameters dtype")
def test_all_ranks_start_with_the_first_ranks_state(impl, run, seed):
    """Parameters, frozen ones and buffers are equal before the first forward, in few messages."""

    def body(ctx):
        model = net(seed + ctx.rank)
        before = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
        impl.BucketedDDP(model)
        after = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
        named = (*model.named_parameters(), *model.named_buffers())
        return before == after, {n: t.detach().clone() for n, t in named}

    results = run(body, 3)
    for rank, (same, state) in enumerate(results):
        expect_equal(same, True, what="the tensors are the same ones", rank=rank)
        for name, value in results[0][1].items():
            if not torch.equal(state[name], value):
                fail(f"{name} on rank {rank} is not rank 0's", cause="start-differs", rank=rank)
        if results.logs[rank].messages > 5:
            fail(
                f"rank {rank} sent {results.logs[rank].messages} messages for a state of four "
                "dtypes: four are enough, and one before them to compare",
                cause="too-many-messages",
                rank=rank,
            )


@exercise("3.10", "virtual gloo cuda", asserts="mean frozen tied zero-grad dtype layout parameters")
def test_gradients_are_means_over_the_ranks(impl, run, seed, cases):
    """Tied, frozen and mixed parameters, several steps, both ways of zero_grad, any bucket size."""
    for world_size, limit in cases((3, 40), (2, 1), (1, 40), (5, 10_000)):

        def body(ctx):
            only_ones_own()
            model = net(seed + ctx.rank).to(ctx.device)
            wrapped = impl.BucketedDDP(
                model, bucket_bytes=limit, first_bucket_bytes=max(1, limit // 2)
            )
            got = []
            stale = torch.full_like(model.frozen.weight, ctx.rank + 3.0)
            for step in range(3):
                wrapped.zero_grad(set_to_none=step != 2)
                model.frozen.weight.grad = stale.clone()
                model.train(step != 2)
                called = model if step == 1 else wrapped  # past the wrapper counts as well
                loss_of(called, seed, ctx.rank, step).backward()
                got.append(gradients(model))
                got[-1].pop("frozen.weight", None)
            kept = model.frozen.bias.grad is None and torch.equal(model.frozen.weight.grad, stale)
            return got, kept, ctx.device.type

        with reworded(DELEGATED, DELEGATED, "delegated"):
            results = run(body, world_size)
        parts = [local(seed, range(world_size), step) for step in range(3)]
        for rank in reversed(range(world_size)):
            got, frozen, device = results[rank]
            what = "frozen parameters keep the gradient that they had, or none"
            expect_equal(frozen, True, what=what, rank=rank, cause="frozen-changed")
            for step in range(3):
                what = f"{world_size} ranks, buckets of {limit} bytes, step {step}"
                compare(got[step], parts[step], rank, what, device=device)


@exercise("3.10", "gloo", asserts="mean same-bits")
def test_weights_follow_torchs_ddp(impl, run, seed):
    """After six steps with momentum the weights are those of torch's DDP, on all ranks alike."""

    def trained(ctx, model, wrapped):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step).backward()
            optimizer.step()
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    def body(ctx):
        model = net(seed + ctx.rank)
        wrapped = impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=50)
        return trained(ctx, model, wrapped)

    def reference(ctx):
        model = net(seed)
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
        return trained(ctx, model, wrapped)

    results = run(body, 3)
    torchs = run(reference, 3)
    start = dict(net(seed).named_parameters())
    for rank, mine in enumerate(results):
        for name, want in torchs[rank].items():
            before = None if name.startswith("frozen") else start[name].detach()
            what = f"{name} after six steps"
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
            expect_close(mine[name], want, what=what, rank=rank, before=before, **tolerance)
            if not torch.equal(mine[name], results[0][name]):
                fail(
                    f"{what} differs between ranks 0 and {rank}: they drift apart",
                    cause="ranks-differ",
                    rank=rank,
                )


@exercise("3.10", "virtual", asserts="before")
def test_every_backward_adds_its_mean(impl, run, seed):
    """Two backward passes without zero_grad between them: the sum of two means."""

    def body(ctx):
        model = net(seed)
        wrapped = impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=50)
        got = []
        for _ in range(2):  # before and after the order is known
            wrapped.zero_grad()
            for _ in range(2):
                loss_of(wrapped, seed, ctx.rank).backward()
            got.append(gradients(model))
        return got

    parts = local(seed, range(3))
    for rank, got in enumerate(run(body, 3)):
        for round_, each in enumerate(got):
            compare(each, parts, rank, f"two backward passes, round {round_}", times=2.0)


class Branches(nn.Module):
    """Two branches: the rank decides which comes first, or which one is used at all."""

    def __init__(self, uses: tuple[str, ...]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(8, 3)
        self.nobodys = nn.Parameter(torch.ones(2))
        self.uses = uses
        for p in self.parameters():
            nn.init.constant_(p, 0.5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = {"a": lambda: self.a(x), "b": lambda: self.b(torch.cat([x, x], 1))}
        return sum(taken[name]() for name in self.uses)


def local_branches(
    seed: int, taken: dict[int, Sequence[str]], step: int
) -> list[dict[str, torch.Tensor]]:
    """Each rank's gradients of its own samples, by the branches that it takes; zeros elsewhere."""
    found = []
    for rank, uses in taken.items():
        alone = Branches(tuple(uses))
        loss_of(alone, seed, rank, step).backward()
        zeros = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
        found.append(zeros | gradients(alone))
    return found


@exercise("3.10", "virtual", asserts="zeros alone parameters")
def test_missing_gradients_count_as_zero(impl, run, seed, cases):
    """A branch that one rank takes and another does not, and one that no rank takes."""
    for uses in cases(("a", "b", "ab"), ("ab", "a", "a"), ("b", "b", "b")):

        def body(ctx):
            got = []
            model = Branches(tuple(uses[ctx.rank]))
            wrapped = impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=1)
            for step in range(3):
                wrapped.zero_grad()
                loss_of(wrapped, seed, ctx.rank, step).backward()
                got.append(gradients(model))
            return got

        parts = local_branches(seed, dict(enumerate(uses)), 2)
        for rank, got in enumerate(run(body, 3)):
            compare(got[2], parts, rank, f"ranks use branches {uses}")


@exercise("3.10", "virtual", asserts="group mean start first-ranks-order")
def test_group_of_some_ranks(impl, run, seed):
    """Ranks 1 and 3 train one model while 0 and 2 train another one for more steps."""

    def body(ctx):
        groups = [dist.new_group([2, 0]), dist.new_group([3, 1])]
        own = ctx.rank % 2
        model = net(seed + ctx.rank) if own else Branches(("b", "a") if ctx.rank else ("a",))
        wrapped = impl.BucketedDDP(model, group=groups[own], bucket_bytes=100)
        got = []
        for step in range(3 - own):
            wrapped.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step).backward()
            got.append(gradients(model))
        return got

    results = run(body, 4)
    for rank in (1, 3):
        parts = local(seed + 1, (1, 3), 1, seed)
        compare(results[rank][1], parts, rank, "a group of ranks 1 and 3")
    parts = local_branches(seed, {0: ("a",), 2: ("b", "a")}, 2)
    for rank in (0, 2):
        compare(results[rank][2], parts, rank, "a group of ranks 0 and 2")


@exercise("3.10", "virtual", asserts="before alone")
def test_gradients_from_before_take_part(impl, run, seed):
    """A gradient that only one rank has in p.grad is in the mean, also if its
    own backward gives none."""
    uses = ("ab", "a", "ab")  # rank 1 does not use b

    def body(ctx):
        model = Branches(tuple(uses[ctx.rank]))
        give_stale(model, ctx.rank)
        wrapped = impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=1)
        got = []
        for step in range(2):
            if step:
                give_stale(model, ctx.rank)  # others than the views into the buckets
            loss_of(wrapped, seed, ctx.rank, step).backward()
            got.append(gradients(model))
        return got

    for rank, got in enumerate(run(body, 3)):
        for step in range(2):
            parts = []
            for other, own in enumerate(local_branches(seed, dict(enumerate(uses)), step)):
                alone = Branches(())
                give_stale(alone, other)
                parts.append({n: g + own[n] for n, g in gradients(alone).items()})
            compare(got[step], parts, rank, f"gradients from before, step {step}")


def give_stale(model: nn.Module, rank: int) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0 + rank)


def single() -> nn.Module:
    """A module of one parameter."""
    model = nn.Linear(4, CLASSES, bias=False).double()
    nn.init.constant_(model.weight, 0.5)
    return model


@exercise("3.10", "virtual", asserts="life dropped refused resources")
def test_wrappers_live_and_die_one_by_one(impl, run, seed):
    """Three at once; a dropped one is freed; a module has one living wrapper at a time."""

    def body(ctx):
        models = [net(seed), Branches(("a", "b")), single()]
        wrapped = [impl.BucketedDDP(m, bucket_bytes=100, first_bucket_bytes=9) for m in models]
        for step in range(2):
            losses = [loss_of(w, seed, ctx.rank, step) for w in wrapped]
            for w, loss in zip(wrapped, losses, strict=True):
                w.zero_grad()
                loss.backward()
        apart = [gradients(m) for m in models]
        for w in wrapped:
            w.zero_grad()
        sum(loss_of(w, seed, ctx.rank, 1) for w in wrapped).backward()
        together = [gradients(m) for m in models]
        with ctx.region("wrapped again"):
            refused = refusal(impl.BucketedDDP, models[1])
        known = [weakref.ref(w) for w in wrapped]
        del w, wrapped
        gc.collect()
        freed = [each() is None for each in known]
        models[1].zero_grad()
        with ctx.region("dropped"):
            loss_of(models[1], seed, ctx.rank, 1).backward()
        alone = gradients(models[1])
        if all(freed):
            again = impl.BucketedDDP(models[1], bucket_bytes=100)
            again.zero_grad()
            loss_of(again, seed, ctx.rank, 1).backward()
        return [*apart, *together, gradients(models[1])], refused, freed, alone

    results = run(body, 2)
    branches = local_branches(seed, {0: "ab", 1: "ab"}, 1)
    one = []
    for rank in range(2):
        alone = single()
        loss_of(alone, seed, rank, 1).backward()
        one.append(gradients(alone))
    parts = [local(seed, range(2), 1), branches, one] * 2 + [branches]
    names = [f"wrapper {k} of 3, {how}" for how in ("in turn", "in one backward") for k in range(3)]
    for rank, (found, refused, freed, alone) in enumerate(results):
        what = "wrappers freed when no variable holds them"
        expect_equal(freed, [True] * 3, what=what, rank=rank, cause="kept-alive")
        for name, got, want in zip([*names, "wrapped anew"], found, parts, strict=True):
            compare(got, want, rank, name)
        expect_refusals([refused], ["a module that a living wrapper has"], rank=rank)
        own = {n: branches[rank][n] for n in alone}
        compare(alone, [own], rank, "the module after its wrapper was dropped")
        for name in ("wrapped again", "dropped"):
            sent = results.logs[rank].select(region=name).events
            if sent:
                fail(f"{name}: rank {rank} issued {sent[0]}", cause="messages", rank=rank)


@exercise("3.10", "virtual", asserts="order-of-buckets first-ranks-order")
def test_ranks_agree_on_the_order(impl, run, seed):
    """Gradients come in another order on each rank: the buckets leave in the same order."""

    def body(ctx):
        model = Branches(("a", "b") if ctx.rank % 2 == 0 else ("b", "a"))
        wrapped = impl.BucketedDDP(model, bucket_bytes=1, first_bucket_bytes=1)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step).backward()
        return gradients(model)

    parts = local_branches(seed, dict.fromkeys(range(3), "ab"), 2)
    for rank, got in enumerate(run(body, 3)):
        compare(got, parts, rank, "branches in another order on odd ranks")


# -- bad input -------------------------------------------------------------------------------------
@exercise("3.10", "virtual", asserts="refused refusals group")
def test_bad_input_is_refused_before_any_message(impl, run):
    """No trainable parameter, sizes of 0, sparse gradients, two devices, a group of other ranks."""
    frozen = lambda: nn.Linear(2, 2).requires_grad_(False)
    two = lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    cases = [
        ("a module without trainable parameters", frozen, {}),
        ("buckets of 0 bytes", lambda: nn.Linear(2, 2), {"bucket_bytes": 0}),
        ("buckets of -5 bytes", lambda: nn.Linear(2, 2), {"bucket_bytes": -5}),
        ("a first bucket of 0 bytes", lambda: nn.Linear(2, 2), {"first_bucket_bytes": 0}),
        ("a first bucket of -1 bytes", lambda: nn.Linear(2, 2), {"first_bucket_bytes": -1}),
        ("sparse gradients", lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), {}),
        ("sparse gradients of a bag", lambda: nn.EmbeddingBag(3, 2, sparse=True), {}),
        ("parameters on two devices", two, {}),
    ]

    def body(ctx):
        others = dist.new_group([1])
        refused = [refusal(impl.BucketedDDP, make(), **options) for _, make, options in cases]
        if ctx.rank == 0:
            refused.append(refusal(impl.BucketedDDP, nn.Linear(2, 2), group=others))
        return refused

    results = run(body, 2)
    calls = [*(what for what, *_ in cases), "a group that the rank is not in"]
    for rank, refused in enumerate(results):
        expect_refusals(refused, calls[: len(refused)], rank=rank)
        sent = [e for e in results.logs[rank].events if e.op != "store"]
        if sent:
            fail(
                f"rank {rank} communicated before it refused: {sent[0]}",
                cause="too-late",
                rank=rank,
            )


@exercise("3.10", "virtual", asserts="differ refusals layout")
def test_modules_that_differ_are_refused(impl, run):
    """One rank has another module: a ValueError on every rank, before any parameter is sent."""
    check_models_that_differ(run, lambda model: impl.BucketedDDP(model))
    conv = lambda: nn.Sequential(nn.Conv2d(3, 2, 4), nn.BatchNorm2d(2))
    other = {
        "channels-last weights": lambda: conv().to(memory_format=torch.channels_last),
        "a transposed shape": lambda: nn.Sequential(nn.Conv2d(2, 3, 4), nn.BatchNorm2d(3)),
        "a frozen weight": lambda: freeze_first(conv()),
        "no buffers": lambda: nn.Sequential(nn.Conv2d(3, 2, 4), nn.GroupNorm(1, 2)),
    }

    def body(ctx):
        models = [make() if ctx.rank == 1 else conv() for make in other.values()]
        return [refusal(impl.BucketedDDP, model) for model in models]

    for rank, refused in enumerate(run(body, 2)):
        expect_refusals(refused, [f"rank 1 alone has {what}" for what in other], rank=rank)


def freeze_first(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


@exercise("3.10", "nccl", asserts="host")
def test_backward_does_not_wait_for_the_gpu(impl, run, seed):
    """From the third backward on the host never waits for its GPU."""

    def body(ctx):
        model = impl.BucketedDDP(net(seed).to(ctx.device), bucket_bytes=200)
        for step in range(3):
            loss = loss_of(model, seed, ctx.rank, step)
            with ctx.region("step" if step == 2 else "first"):
                loss.backward()

    expect_few_waits(run(body, 2), 0, "the third backward")
