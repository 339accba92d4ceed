"""Checks of exercise 3.11: gradients that don't come, buffers, windows, checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_few_waits, fail
from distlab.host.program_clock import until
from distlab.observe.memory import PeakMemory

CLASSES = 3


class Undefined(torch.autograd.Function):
    """Uses a parameter, and leaves its gradient undefined."""

    @staticmethod
    def forward(ctx, x, parameter):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Switch(nn.Module):
    """A stem, and two branches of which a call takes one, both or none.

    It also has a norm with buffers, two dtypes and a layer that is used twice. Of its parameters
    one is transposed, one unused, one frozen, and one has an undefined gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.a, self.b = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES, bias=False)
        self.nobodys = nn.Parameter(torch.ones(2))
        self.undefined = nn.Parameter(torch.ones(3))
        self.zeros = nn.Parameter(torch.ones(2))  # its gradient is zero, and not None
        self.last = self.again = nn.Linear(CLASSES, CLASSES)
        self.double()
        self.shift = nn.Parameter(torch.randn(CLASSES, 5, dtype=torch.float64).t())
        self.scale = nn.Parameter(torch.full((CLASSES,), 1.5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: torch.Tensor, taken: str) -> torch.Tensor:
        h = torch.tanh(self.norm(self.stem(x)))
        h = sum((getattr(self, name)(h) for name in taken), h @ self.shift)
        h = Undefined.apply(self.last(torch.tanh(self.last(h))), self.undefined)
        return h * self.scale.double() + 0.0 * self.zeros.sum()


UNUSED = ("nobodys", "undefined")


def switch(seed: int) -> Switch:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Switch()


def batch(seed: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1009 + 31 * step + rank)
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (5,), generator=generator)


def loss_of(model: nn.Module, seed: int, rank: int, step: int, taken: str) -> torch.Tensor:
    device = next(model.parameters()).device
    inputs, targets = (t.to(device) for t in batch(seed, rank, step))
    return F.cross_entropy(model(inputs, taken), targets)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The sum over trained parameters."""
    return {
        n: None if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def with_zeros(found: dict[str, torch.Tensor | None], model: Switch) -> dict[str, torch.Tensor]:
    """The gradients of ranks that don't agree: zeros where one process has None."""
    return {
        n: torch.zeros_like(model.get_parameter(n)) if g is None else g for n, g in found.items()
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay move a parameter whose gradient is zero, but
    not one without gradient."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def mean_gradients(
    model: Switch, seed: int, step: int, taken: tuple[str, ...]
) -> dict[str, torch.Tensor | None]:
    """One process: the mean over the ranks' losses; None where no rank has a gradient."""
    model.zero_grad()
    for rank, name in enumerate(taken):
        (loss_of(model, seed, rank, step, name) / len(taken)).backward()
    return gradients(model)


def compare(
    got: dict, want: dict, rank: int, what: str, parts: Sequence[dict] = (), *, loose: bool = False
) -> None:
    """Gradients or weights by name, the largest first; None must be None.

    ``parts``: the summands of each rank, for the diagnosis. ``loose``: float32 gradients have gone
    into weights of every dtype.
    """
    size_of = lambda name: 0 if want[name] is None else want[name].numel()
    for name in sorted(want, key=size_of, reverse=True):
        value = want[name]
        if value is None:
            if got[name] is not None:
                size = "zeros" if not got[name].any() else "numbers"
                fail(
                    f"{what}: {name} has a gradient ({size}) on rank {rank}, although no rank "
                    "has one: weight decay and momentum would move it",
                    cause="not-none",
                    rank=rank,
                )
            continue
        if got[name] is None:
            fail(
                f"{what}: {name} has no gradient on rank {rank}, although some rank had one to "
                "give. Whether it stays None is not for one rank, or one micro-batch, to decide",
                cause="none-alone",
                rank=rank,
            )
        double = not loose and value.dtype == torch.float64
        expect_close(
            got[name],
            value,
            what=f"{what}: {name}",
            rank=rank,
            contributions=[part[name] for part in parts],
            rtol=1e-9 if double else 1e-6 if loose else 1e-4,
            atol=1e-11 if double else 1e-7 if loose else 1e-5,
        )


# the branches that three ranks take in each step
TAKEN = [("a", "b", "a"), ("a", "a", "a"), ("ab", "b", ""), ("b", "b", "b"), ("a", "ab", "b")]


# -- gradients that don't come --------------------------------------------------------------------
@exercise(
    "3.11",
    "virtual gloo cuda",
    asserts="none-agreed frozen dtype layout parameters alone mean buffers-unseen",
)
def test_what_no_rank_uses_stays_none(impl, run, seed, cases):
    """Branches by rank and step: the mean where any rank has a gradient, None where none has."""
    for limit in cases(60, 1, 10_000):

        def body(ctx):
            model = switch(seed + ctx.rank).to(ctx.device)
            wrapped = impl.DDP(model, bucket_bytes=limit, first_bucket_bytes=limit, agree=True)
            got = []
            for step, taken in enumerate(TAKEN):
                wrapped.zero_grad()
                model.frozen.grad = torch.full_like(model.frozen, 7.0 + ctx.rank)
                loss_of(wrapped, seed, ctx.rank, step, taken[ctx.rank]).backward()
                got.append(gradients(model))
            return got, model.frozen.grad.tolist()

        alone = switch(seed)
        want = [mean_gradients(alone, seed, step, taken) for step, taken in enumerate(TAKEN)]
        for rank, (got, stale) in enumerate(run(body, 3)):
            for step, taken in enumerate(TAKEN):
                compare(got[step], want[step], rank, f"ranks take {taken}, gradient")
            what = "a stale gradient of a frozen parameter"
            expect_equal(stale, [7.0 + rank] * 2, what=what, rank=rank, cause="frozen-touched")


GROUPS = [1, 3, 4], [0, 2]  # both train at the same time, and take other branches


@exercise("3.11", "virtual", asserts="none-agreed group mean")
def test_training_equals_one_process(impl, run, seed):
    """Momentum and weight decay in two groups with unused branches: the weights of one process."""

    def body(ctx):
        groups = [dist.new_group(members) for members in GROUPS]
        k = int(ctx.rank in GROUPS[1])
        number = GROUPS[k].index(ctx.rank)
        model = switch(seed + ctx.rank)
        sizes = {"bucket_bytes": 100 + 80 * k, "first_bucket_bytes": 50}
        wrapped = impl.DDP(model, group=groups[k], agree=True, **sizes)
        optimizer = optimizer_of(model)
        for step in range(len(TAKEN)):
            optimizer.zero_grad()
            taken = TAKEN[step - k][number]
            loss_of(wrapped, seed, number, step, taken).backward()
            optimizer.step()
        return weights(model)

    results = run(body, 5)
    for k, members in enumerate(GROUPS):
        alone = switch(seed + members[0])
        optimizer = optimizer_of(alone)
        for step in range(len(TAKEN)):
            mean_gradients(alone, seed, step, TAKEN[step - k][: len(members)])
            optimizer.step()
        for rank in members:
            what = f"after {len(TAKEN)} steps of ranks {members} of 5"
            compare(results[rank], weights(alone), rank, what, loose=True)
            for name, value in results[members[0]].items():
                if not torch.equal(results[rank][name], value):
                    said = f"{name} differs between ranks {members[0]} and {rank}"
                    fail(said, cause="ranks-differ", rank=rank)


@exercise("3.11", "gloo", asserts="none-agreed")
def test_weights_follow_torchs_ddp(impl, run, seed):
    """The same steps under torch's DDP, which is told to find unused parameters."""

    def trained(ctx, model, wrapped):
        optimizer = optimizer_of(model)
        for step, taken in enumerate(TAKEN):
            optimizer.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step, taken[ctx.rank]).backward()
            optimizer.step()
        return weights(model)

    def body(ctx):
        model = switch(seed)
        wrapped = impl.DDP(model, bucket_bytes=100, first_bucket_bytes=50, agree=True)
        return trained(ctx, model, wrapped)

    def reference(ctx):
        model = switch(seed)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        return trained(ctx, model, wrapped)

    results = run(body, 3)
    for rank, torchs in enumerate(run(reference, 3)):
        compare(results[rank], torchs, rank, "beside torch's DDP", loose=True)


@exercise("3.11", "virtual", asserts="zeros agree-cost cost")
def test_without_agreement_nothing_more_is_sent(impl, run, seed):
    """An unused parameter gets zeros, and only buckets travel; with agree=True 4 bytes for each."""

    def body(ctx):
        both = []
        for agree in (False, True):
            model = switch(seed)
            limit = 10_000
            wrapped = impl.DDP(model, bucket_bytes=limit, first_bucket_bytes=limit, agree=agree)
            for step in range(3):
                wrapped.zero_grad()
                loss = loss_of(wrapped, seed, ctx.rank, step, TAKEN[step][ctx.rank])
                with ctx.region(f"{agree} {step}"):
                    loss.backward()
            both.append(gradients(model))
        return both

    results = run(body, 3)
    alone = switch(seed)
    want = mean_gradients(alone, seed, 2, TAKEN[2])
    numbers = len(want) + 1
    for rank, (got, agreed) in enumerate(results):
        for name in UNUSED:
            if got[name] is None:
                fail(
                    "without agreement no rank can know that nobody uses a parameter: expected "
                    f"zeros, the gradient of {name} is None",
                    cause="zeros-expected",
                    rank=rank,
                )
        compare(got, with_zeros(want, alone), rank, "without agreement")
        compare(agreed, want, rank, "with agreement")
        log = results.logs[rank]
        for agree in (False, True):
            what = f"messages for a bucket per dtype, agree={agree}"
            sent = log.select(region=f"{agree} 2").messages
            expect_equal(sent, 2 + agree, what=what, rank=rank, cause="too-many-messages")
        least = sorted(event.payload for event in log.select(region="True 2").events)
        buckets = sorted(event.payload for event in log.select(region="False 2").events)
        told = sum(least) - sum(buckets)
        if told > 4 * numbers:
            fail(
                f"rank {rank} sends {told} B to tell who has which of {numbers - 1} gradients: "
                f"{4 * numbers} B are enough, 4 for each and 4 more",
                cause="too-many-bytes",
                rank=rank,
            )


@exercise("3.11", "virtual", asserts="overlap cost")
def test_buckets_leave_during_backward(impl, run, cases):
    """Two of three buckets are on their way when the first layer is reached, with and without."""
    for agree in cases(True, False):

        def body(ctx):
            model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)])
            flying = []

            def look(_):
                now = time.monotonic()
                flying.append(sum(e.end is None or e.end > now for e in ctx.ledger.events))

            model[0].weight.register_post_accumulate_grad_hook(look)
            wrapped = impl.DDP(model, bucket_bytes=256, first_bucket_bytes=256, agree=agree)
            for _ in range(2):  # before and after the order is known
                wrapped(torch.ones(2, 8)).sum().backward()
            with wrapped.no_sync():
                wrapped(torch.ones(2, 8)).sum().backward()
            wrapped(torch.ones(2, 8)).sum().backward()
            return flying

        for rank, flying in enumerate(run(body, 2)):
            for backward in (0, 1, 3):
                if len(flying) < 4 or flying[backward] < 3:
                    fail(
                        f"backward {backward}, agree={agree}: when the gradient of the first of "
                        f"four layers came, {flying[backward : backward + 1]} of the other three "
                        f"buckets were on their way on rank {rank}. Let each leave when its last "
                        "gradient comes, and wait at the end of backward",
                        cause="no-overlap",
                        rank=rank,
                    )


# -- windows of micro-batches ---------------------------------------------------------------------
def window_sum(seed: int, rank: int, first: int, agree: bool) -> dict[str, torch.Tensor | None]:
    """A rank's own gradient of three micro-batches, of which the last takes another branch."""
    alone = switch(seed)
    for step, name in enumerate("aab"):
        loss_of(alone, seed, rank, first + step, name).backward()
    return gradients(alone) if agree else with_zeros(gradients(alone), alone)


@exercise("3.11", "virtual gloo", asserts="no-sync nested agree-cost life")
def test_no_sync_sends_nothing_and_loses_nothing(impl, run, seed, cases):
    """Two backward passes inside, one outside: one reduction of the sum, agreed on or not."""
    for agree in cases(True, False):

        def body(ctx):
            model = switch(seed)
            wrapped = impl.DDP(model, bucket_bytes=60, first_bucket_bytes=60, agree=agree)
            got = []
            for window in range(2):  # before and after the order is known
                wrapped.zero_grad()
                with ctx.region("inside"), wrapped.no_sync():
                    loss_of(wrapped, seed, ctx.rank, 3 * window, "a").backward()
                    with wrapped.no_sync():
                        pass
                    loss_of(wrapped, seed, ctx.rank, 3 * window + 1, "a").backward()
                try:
                    with wrapped.no_sync():
                        raise KeyboardInterrupt
                except KeyboardInterrupt:
                    pass
                loss_of(wrapped, seed, ctx.rank, 3 * window + 2, "b").backward()
                got.append(gradients(model))
            return got

        results = run(body, 3)
        for rank, got in enumerate(results):
            part = results.logs[rank].select(region="inside")
            if part.events:
                fail(
                    f"rank {rank} sends inside no_sync: {part.events[0]}",
                    rank=rank,
                    cause="sends-inside",
                    line=part.events[0].line,
                )
            for window in range(2):
                parts = [window_sum(seed, other, 3 * window, agree) for other in range(3)]
                want = {
                    name: None if value is None else torch.stack([p[name] for p in parts]).mean(0)
                    for name, value in parts[0].items()
                }
                compare(got[window], want, rank, f"window {window}, agree={agree}, gradient", parts)


@exercise("3.11", "gloo", asserts="no-copy resources")
def test_no_sync_needs_no_second_copy(impl, run):
    """Local gradients of a window lie in their buckets, and no step leaves activations: N bytes."""
    need = 6 * 256 * 256 * 4

    def body(ctx):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        x = torch.ones(256, 256)  # activations take as much as gradients
        alive = []
        with PeakMemory() as memory:
            wrapped = impl.DDP(model, bucket_bytes=600_000, first_bucket_bytes=300_000)
            for inside in (True, False):
                with wrapped.no_sync() if inside else contextlib.nullcontext():
                    wrapped(x).sum().backward()
                until(lambda: memory.current <= need, 0.5)  # a thread of gloo is a little later
                alive.append(memory.current)
        return alive

    for rank, each in enumerate(run(body, 2, ledger=False)):
        for where, alive in zip(("inside no_sync", "after a step"), each, strict=True):
            if alive > 1.05 * need:
                fail(
                    f"{where} {alive / 1e6:.2f} MB are alive on rank {rank} for "
                    f"{need / 1e6:.2f} MB of gradients",
                    cause="copies",
                    rank=rank,
                )


@exercise("3.11", "virtual", asserts="mean several buffers-unseen no-sync life")
def test_backward_where_the_user_wants_it(impl, run, seed):
    """Two forwards, one backward; two backwards, one graph; two wrappers; no_sync for backward."""

    def body(ctx):
        model = switch(seed)
        wrapped = impl.DDP(model, bucket_bytes=60, first_bucket_bytes=60)
        got = []

        def done():
            got.append(gradients(model))
            wrapped.zero_grad()

        losses = [loss_of(wrapped, seed, ctx.rank, step, "ab") for step in range(2)]
        sum(losses).backward()
        done()
        loss = loss_of(wrapped, seed, ctx.rank, 0, "ab")
        loss.backward(retain_graph=True)
        loss.backward()
        done()
        losses = [loss_of(wrapped, seed, ctx.rank, step, "ab") for step in range(2)]
        with ctx.region("inside"), wrapped.no_sync():  # forward was outside
            losses[0].backward()
        losses[1].backward()
        done()
        second = switch(seed)
        other = impl.DDP(second, bucket_bytes=100, first_bucket_bytes=100)
        for _ in range(2):
            other.zero_grad()
            losses = [loss_of(m, seed, ctx.rank, k, "ab") for k, m in enumerate((other, wrapped))]
            sum(losses).backward()
        got.append(gradients(second))
        return got

    results = run(body, 3)
    for rank, got in enumerate(results):
        if results.logs[rank].select(region="inside").events:
            fail(f"rank {rank} sends in a backward inside no_sync", cause="sends-inside", rank=rank)
        for name, each, steps in zip(
            (
                "two forwards, one backward",
                "two backwards through one graph",
                "one backward inside no_sync, one outside",
                "one backward through two wrappers",
            ),
            got,
            ((0, 1), (0, 0), (0, 1), (0,)),
            strict=True,
        ):
            alone = switch(seed)
            for step in steps:
                for other in range(3):
                    (loss_of(alone, seed, other, step, "ab") / 3).backward()
            compare(each, with_zeros(gradients(alone), alone), rank, name)


@exercise("3.11", "nccl", asserts="host")
def test_only_agreeing_waits_for_the_gpu(impl, run, seed):
    """The host waits for its GPU twice at most in a backward if the ranks agree, else never."""

    def body(ctx):
        for agree in (False, True):
            model = impl.DDP(switch(seed).to(ctx.device), agree=agree)
            for step in range(3):
                loss = loss_of(model, seed, ctx.rank, step, "a")
                with ctx.region(f"agree={agree}" if step == 2 else "first"):
                    loss.backward()

    results = run(body, 2)
    for agree, most in ((False, 0), (True, 2)):
        expect_few_waits(results, most, f"a backward, agree={agree}", f"agree={agree}")
