"""Checks of exercise 3.10: means of gradients, in buckets, while backward runs."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from bad_input import check_models_that_differ
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refusals, fail, refusal

CLASSES = 3


class Odd(nn.Module):
    """Tied and frozen parameters, a scalar, two dtypes, a buffer; used in no particular order."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, CLASSES).float()
        self.first = nn.Linear(4, 4).double()
        self.second = nn.Linear(4, 4).double()
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.register_buffer("shift", torch.rand(4, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.frozen(x) + self.shift)) * self.scale
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


def local(seed: int, rank: int, step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The gradients of the rank's own samples, by the first rank's weights."""
    alone = net(seed).to(device)
    loss_of(alone, seed, rank, step).backward()
    return gradients(alone)


def only_ones_own() -> None:
    """From here on torch's own DDP refuses to work in this process."""

    def refuse(*_, **__):
        fail("torch's own DistributedDataParallel did the work", cause="delegated")

    nn.parallel.DistributedDataParallel.__init__ = refuse
    dist.Reducer.__init__ = refuse


def compare(got: dict, parts: list[dict], rank: int, what: str, times: float = 1.0) -> None:
    """Each gradient is ``times`` the mean of the ranks' ``parts``."""
    for name in sorted(
        parts[0], key=lambda name: -parts[0][name].numel()
    ):  # the telling ones first
        each = [part[name] * times for part in parts]
        single = each[0].dtype == torch.float32
        expect_close(
            got.get(name),
            torch.stack(each).mean(0),
            what=f"{what}: gradient of {name}",
            rank=rank,
            contributions=each,
            rtol=1e-5 if single else 1e-10,
            atol=1e-6 if single else 1e-12,
        )


# -- values ---------------------------------------------------------------------------------------
@exercise("3.10", "virtual")
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
        if results.logs[rank].messages > 3:
            fail(
                f"rank {rank} sent {results.logs[rank].messages} messages for a state of two "
                "dtypes: two are enough, and one before them to compare",
                cause="too-many-messages",
                rank=rank,
            )


@exercise("3.10", "virtual gloo cuda")
def test_gradients_are_means_over_the_ranks(impl, run, seed, cases):
    """Tied, frozen and mixed parameters, several steps, both ways of zero_grad, any bucket size."""
    for world_size, limit in cases((3, 40), (2, 1), (1, 40), (5, 10_000)):

        def body(ctx):
            only_ones_own()
            model = net(seed + ctx.rank).to(ctx.device)
            wrapped = impl.BucketedDDP(
                model, bucket_bytes=limit, first_bucket_bytes=max(1, limit // 2)
            )
            got, parts = [], []
            for step in range(3):
                wrapped.zero_grad(set_to_none=step != 2)
                called = model if step == 1 else wrapped  # past the wrapper counts as well
                loss_of(called, seed, ctx.rank, step).backward()
                got.append(gradients(model))
                parts.append(local(seed, ctx.rank, step, ctx.device))
            frozen = [p.grad is None for p in model.frozen.parameters()]
            return got, parts, all(frozen)

        results = run(body, world_size)
        for rank in reversed(range(world_size)):
            got, _, frozen = results[rank]
            expect_equal(frozen, True, what="frozen parameters stay without gradient", rank=rank)
            for step in range(3):
                what = f"{world_size} ranks, buckets of {limit} bytes, step {step}"
                compare(got[step], [r[1][step] for r in results], rank, what)


@exercise("3.10", "gloo")
def test_weights_follow_torchs_ddp(impl, run, seed):
    """After six steps with momentum the weights are those of torch's DDP, on all ranks alike."""

    def body(ctx):
        trained = []
        for mine in (True, False):
            model = net(seed + ctx.rank) if mine else net(seed)
            wrapped = (
                impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=50)
                if mine
                else nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
            )
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            for step in range(6):
                optimizer.zero_grad()
                loss_of(wrapped, seed, ctx.rank, step).backward()
                optimizer.step()
            trained.append({n: p.detach().clone() for n, p in model.named_parameters()})
        return trained

    results = run(body, 3)
    start = dict(net(seed).named_parameters())
    for rank, (mine, torchs) in enumerate(results):
        for name, want in torchs.items():
            before = None if name.startswith("frozen") else start[name].detach()
            what = f"{name} after six steps"
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
            expect_close(mine[name], want, what=what, rank=rank, before=before, **tolerance)
            if not torch.equal(mine[name], results[0][0][name]):
                fail(
                    f"{what} differs between ranks 0 and {rank}: they drift apart",
                    cause="ranks-differ",
                    rank=rank,
                )


@exercise("3.10", "virtual")
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
        return got, local(seed, ctx.rank, 0, ctx.device)

    results = run(body, 3)
    for rank, (got, _) in enumerate(results):
        for round_, each in enumerate(got):
            what = f"two backward passes, round {round_}"
            compare(each, [r[1] for r in results], rank, what, times=2.0)


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


@exercise("3.10", "virtual")
def test_missing_gradients_count_as_zero(impl, run, seed, cases):
    """A branch that one rank does not take, another rank does, and one that nobody takes."""
    for uses in cases(("a", "b", "ab"), ("ab", "a", "a"), ("b", "b", "b")):

        def body(ctx):
            got = []
            model = Branches(tuple(uses[ctx.rank]))
            wrapped = impl.BucketedDDP(model, bucket_bytes=100, first_bucket_bytes=1)
            for step in range(3):
                wrapped.zero_grad()
                loss_of(wrapped, seed, ctx.rank, step).backward()
                got.append(gradients(model))
            alone = Branches(tuple(uses[ctx.rank]))
            loss_of(alone, seed, ctx.rank, 2).backward()
            zeros = {n: torch.zeros_like(p) for n, p in alone.named_parameters()}
            return got, zeros | gradients(alone)

        results = run(body, 3)
        for rank, (got, _) in enumerate(results):
            compare(got[2], [r[1] for r in results], rank, f"ranks use branches {uses}")


@exercise("3.10", "virtual")
def test_group_of_some_ranks(impl, run, seed):
    """A group without global rank 0: its first rank's weights, its own mean, nobody else's."""

    def body(ctx):
        group = dist.new_group([1, 2])
        if ctx.rank == 0:
            return None
        model = net(seed + ctx.rank - 1)
        wrapped = impl.BucketedDDP(model, group=group, bucket_bytes=100)
        got = []
        for step in range(2):
            wrapped.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step).backward()
            got.append(gradients(model))
        return got, local(seed, ctx.rank, 1, ctx.device)

    results = run(body, 3)
    for rank in (1, 2):
        parts = [results[r][1] for r in (1, 2)]
        compare(results[rank][0][1], parts, rank, "a group of ranks 1 and 2")


@exercise("3.10", "virtual")
def test_ranks_agree_on_the_order(impl, run, seed):
    """Gradients that come in another order on each rank: the buckets leave in the same one."""

    def body(ctx):
        model = Branches(("a", "b") if ctx.rank % 2 == 0 else ("b", "a"))
        wrapped = impl.BucketedDDP(model, bucket_bytes=1, first_bucket_bytes=1)
        for step in range(3):
            wrapped.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step).backward()
        alone = Branches(("a", "b"))
        loss_of(alone, seed, ctx.rank, 2).backward()
        return gradients(model), gradients(alone)

    results = run(body, 3)
    for rank, (got, _) in enumerate(results):
        compare(got, [r[1] for r in results], rank, "branches in another order on odd ranks")


# -- bad input -------------------------------------------------------------------------------------
@exercise("3.10", "virtual")
def test_bad_input_is_refused_before_any_message(impl, run):
    """No trainable parameter, sizes of 0, sparse gradients, two devices, a group of others."""
    frozen = lambda: nn.Linear(2, 2).requires_grad_(False)
    two = lambda: nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    cases = [
        ("a module without trainable parameters", frozen, {}),
        ("buckets of 0 bytes", lambda: nn.Linear(2, 2), {"bucket_bytes": 0}),
        ("a first bucket of -1 bytes", lambda: nn.Linear(2, 2), {"first_bucket_bytes": -1}),
        ("sparse gradients", lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), {}),
        ("parameters on two devices", two, {}),
    ]

    def body(ctx):
        others = dist.new_group([1])
        refused = [refusal(impl.BucketedDDP, make(), **options) for _, make, options in cases]
        if ctx.rank == 0:
            refused.append(refusal(impl.BucketedDDP, nn.Linear(2, 2), group=others))
        return refused

    results = run(body, 2)
    calls = [(what, ()) for what, *_ in cases] + [("a group that the rank is not in", ())]
    for rank, refused in enumerate(results):
        expect_refusals(refused, calls[: len(refused)], rank=rank)
        sent = [e for e in results.logs[rank].events if e.op != "store"]
        if sent:
            fail(
                f"rank {rank} communicated before it refused: {sent[0]}",
                cause="too-late",
                rank=rank,
            )


@exercise("3.10", "virtual")
def test_modules_that_differ_are_refused(impl, run):
    """One rank has another module: a ValueError on every rank, before any parameter is sent."""
    check_models_that_differ(run, lambda model: impl.BucketedDDP(model))
