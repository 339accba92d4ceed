"""Checks of exercise 3.11: gradients that don't come, buffers, windows, checkpoints."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, fail
from distlab.host.program_clock import until
from distlab.observe.memory import PeakMemory

CLASSES = 3


class Switch(nn.Module):
    """A stem, two branches of which a call takes one, both or none, and a parameter of nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.a, self.b = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES, bias=False)
        self.nobodys = nn.Parameter(torch.ones(2))
        self.last = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: torch.Tensor, taken: str) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        nothing = x.new_zeros(len(x), CLASSES)
        return self.last(sum((getattr(self, name)(h) for name in taken), nothing))


def switch(seed: int) -> Switch:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Switch().double()


def batch(seed: int, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 1009 + 31 * step + rank)
    inputs = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (5,), generator=generator)


def loss_of(model: nn.Module, seed: int, rank: int, step: int, taken: str) -> torch.Tensor:
    device = next(model.parameters()).device
    inputs, targets = (t.to(device) for t in batch(seed, rank, step))
    return F.cross_entropy(model(inputs, taken), targets)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Momentum and weight decay move a parameter whose gradient is zero, not one without."""
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def mean_gradients(
    model: Switch, seed: int, step: int, taken: tuple[str, ...]
) -> dict[str, torch.Tensor | None]:
    """One process: the mean over the ranks' losses; None where no rank has a gradient."""
    model.zero_grad()
    for rank, name in enumerate(taken):
        (loss_of(model, seed, rank, step, name) / len(taken)).backward()
    return gradients(model)


def compare(got: dict, want: dict, rank: int, what: str, parts: tuple = ()) -> None:
    """Gradients or weights by name, the largest first; None must be None.

    ``parts``: what each rank has put in, for the diagnosis.
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
                "give: whether it stays None is not for one rank, or one micro-batch, to decide",
                cause="none-alone",
                rank=rank,
            )
        expect_close(
            got[name],
            value,
            what=f"{what}: {name}",
            rank=rank,
            contributions=[part[name] for part in parts],
            rtol=1e-9,
            atol=1e-11,
        )


# the branches that three ranks take in each step
TAKEN = [("a", "b", "a"), ("a", "a", "a"), ("ab", "b", ""), ("b", "b", "b"), ("a", "ab", "b")]


# -- gradients that don't come --------------------------------------------------------------------
@exercise("3.11", "virtual gloo cuda")
def test_what_no_rank_uses_stays_none(impl, run, seed, cases):
    """Branches by rank and step: the mean where any rank has a gradient, None where none has."""
    for limit in cases(60, 1, 10_000):

        def body(ctx):
            model = switch(seed + ctx.rank).to(ctx.device)
            wrapped = impl.DDP(model, bucket_bytes=limit, first_bucket_bytes=limit, agree=True)
            got = []
            for step, taken in enumerate(TAKEN):
                wrapped.zero_grad()
                loss_of(wrapped, seed, ctx.rank, step, taken[ctx.rank]).backward()
                got.append(gradients(model))
            return got

        alone = switch(seed)
        want = [mean_gradients(alone, seed, step, taken) for step, taken in enumerate(TAKEN)]
        for rank, got in enumerate(run(body, 3)):
            for step, taken in enumerate(TAKEN):
                compare(got[step], want[step], rank, f"ranks take {taken}, gradient")


@exercise("3.11", "virtual")
def test_training_equals_one_process(impl, run, seed):
    """Momentum and weight decay over steps with unused branches: the weights of one process."""

    def body(ctx):
        model = switch(seed + ctx.rank)
        wrapped = impl.DDP(model, bucket_bytes=100, first_bucket_bytes=50, agree=True)
        optimizer = optimizer_of(model)
        for step, taken in enumerate(TAKEN):
            optimizer.zero_grad()
            loss_of(wrapped, seed, ctx.rank, step, taken[ctx.rank]).backward()
            optimizer.step()
        return weights(model)

    alone = switch(seed)
    optimizer = optimizer_of(alone)
    for step, taken in enumerate(TAKEN):
        mean_gradients(alone, seed, step, taken)
        optimizer.step()
    results = run(body, 3)
    for rank, got in enumerate(results):
        compare(got, weights(alone), rank, f"after {len(TAKEN)} steps")
        for name, value in results[0].items():
            if not torch.equal(got[name], value):
                fail(f"{name} differs between ranks 0 and {rank}", cause="ranks-differ", rank=rank)


@exercise("3.11", "gloo")
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
        compare(results[rank], torchs, rank, "beside torch's DDP")


@exercise("3.11", "virtual")
def test_without_agreement_nothing_more_is_sent(impl, run, seed):
    """With agree=False an unused parameter gets zeros, and the buckets are all that travels."""

    def body(ctx):
        model = switch(seed)
        wrapped = impl.DDP(model, bucket_bytes=10_000, first_bucket_bytes=10_000)
        for step in range(3):
            wrapped.zero_grad()
            loss = loss_of(wrapped, seed, ctx.rank, step, TAKEN[step][ctx.rank])
            with ctx.region(f"step {step}"):
                loss.backward()
        return gradients(model)

    results = run(body, 3)
    want = mean_gradients(switch(seed), seed, 2, TAKEN[2])
    want = {n: torch.zeros(2, dtype=torch.float64) if g is None else g for n, g in want.items()}
    for rank, got in enumerate(results):
        if got["nobodys"] is None:
            fail(
                "without agreement no rank can know that nobody uses a parameter: expected zeros, "
                "the gradient is None",
                cause="zeros-expected",
                rank=rank,
            )
        compare(got, want, rank, "without agreement")
        sent = results.logs[rank].select(region="step 2").messages
        expect_equal(sent, 1, what="messages for one bucket", rank=rank, cause="too-many-messages")


# -- windows of micro-batches ---------------------------------------------------------------------
def window_sum(seed: int, rank: int, first: int, agree: bool) -> dict[str, torch.Tensor | None]:
    """A rank's own gradient of three micro-batches, of which the last takes another branch."""
    alone = switch(seed)
    for step, name in enumerate("aab"):
        loss_of(alone, seed, rank, first + step, name).backward()
    if not agree:
        alone.nobodys.grad = torch.zeros_like(alone.nobodys)
    return gradients(alone)


@exercise("3.11", "virtual gloo")
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
                        raise KeyError
                except KeyError:
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


@exercise("3.11", "gloo")
def test_no_sync_needs_no_second_copy(impl, run):
    """Local gradients of a window lie in their buckets: N bytes, not 2N."""
    need = 6 * 256 * 256 * 4

    def body(ctx):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        with PeakMemory() as memory:
            wrapped = impl.DDP(model, bucket_bytes=600_000, first_bucket_bytes=300_000)
            with wrapped.no_sync():
                wrapped(torch.ones(2, 256)).sum().backward()
                until(lambda: memory.current <= need, 0.5)  # a thread of gloo is a little later
                return memory.current

    for rank, alive in enumerate(run(body, 2, ledger=False)):
        if alive > 1.05 * need:
            fail(
                f"inside no_sync {alive / 1e6:.2f} MB are alive on rank {rank} for "
                f"{need / 1e6:.2f} MB of gradients",
                cause="copies",
                rank=rank,
            )


@exercise("3.11", "virtual")
def test_backward_where_the_user_wants_it(impl, run, seed):
    """Two forwards and one backward, two backwards through one graph, no_sync round backward."""

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
            ),
            got,
            ((0, 1), (0, 0), (0, 1)),
            strict=True,
        ):
            alone = switch(seed)
            for step in steps:
                for other in range(3):
                    (loss_of(alone, seed, other, step, "ab") / 3).backward()
            want = gradients(alone) | {"nobodys": torch.zeros(2, dtype=torch.float64)}
            compare(each, want, rank, name)
