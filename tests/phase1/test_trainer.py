"""Checks of exercises 1.3 and 1.4: broadcast of the state and averaging of gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import exercise, expect_close, expect_equal, expect_same_sequence, fail, trace
from distlab.reference.workloads import build_model, digits


class Zoo(nn.Module):
    """Every kind of state: tied, frozen, strided, empty, integer and non-persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.strided = nn.Parameter(torch.rand(4, 6).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("steps", torch.randint(0, 1000, (3,)))
        self.register_buffer("scratch", torch.rand(2, 3), persistent=False)
        with torch.no_grad():
            self.norm.running_mean.uniform_()
            self.norm.num_batches_tracked.random_(1, 100)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().cpu().clone() for name, t in named}


def state_bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


@exercise("1.3", "virtual gloo cuda")
def test_state_equals_the_source(impl, run, seed, cases):
    """Parameters and buffers of every kind equal those of the source rank."""

    def body(ctx):
        src = ctx.world_size // 2
        model = Zoo().to(ctx.device)  # ranks start from different random states
        before = state_of(model)
        holders = [id(t) for t in (*model.parameters(), *model.buffers())]
        impl.broadcast_model_state(model, src)
        same_objects = holders == [id(t) for t in (*model.parameters(), *model.buffers())]
        grads = any(p.grad is not None or p.grad_fn is not None for p in model.parameters())
        tied = model.tied.weight is model.first.weight
        flags = [p.requires_grad for p in model.parameters()]
        return before, state_of(model), [same_objects, tied], grads, flags

    worlds = cases(3, 1, 2, 4, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        src = w // 2
        want = results[src][0]
        for rank, (before, after, same, grads, flags) in enumerate(results):
            if not all(same):
                fail(
                    "a parameter or buffer was replaced by a new tensor: the optimizer would go on "
                    "with the old one; write into it in place",
                    cause="new-tensors",
                    rank=rank,
                )
            expect_equal(grads, False, what="gradients recorded", rank=rank, cause="grad-recorded")
            expect_equal(flags, results[src][4], what="requires_grad flags", rank=rank)
            for name, value in want.items():
                expect_close(
                    after[name],
                    value,
                    what=f"{name} (from rank {src} of {w})",
                    rank=rank,
                    before=before[name] if rank != src else None,
                    rtol=0.0,
                    atol=0.0,
                )


@exercise("1.3", "virtual gloo")
def test_state_is_sent_once(impl, run, seed):
    """Only the state's own bytes are sent: tied tensors once, and not from every rank."""

    def body(ctx):
        model = Zoo()
        with ctx.region("broadcast"):
            impl.broadcast_model_state(model)

    results = run(body, 3, delays=True)
    nbytes = state_bytes(Zoo())
    for log in results.logs:
        log = log.select(region="broadcast")
        log.all_waited()
        # the source may send to each rank by itself
        log.sent_at_most(2 * nbytes if log.rank == 0 else nbytes * 2 / 3 + 64, "state once")
    received = [log.select(region="broadcast").received for log in results.logs[1:]]
    for rank, got in enumerate(received, 1):
        if got < nbytes:
            fail(
                f"rank {rank} received {got} bytes, the state has {nbytes}: something is missing",
                cause="too-few-bytes",
                rank=rank,
            )
        if got > nbytes + 64:
            fail(
                f"rank {rank} received {got} bytes, the state has {nbytes}: something is sent "
                "twice, tied parameters for example",
                cause="too-many-bytes",
                rank=rank,
            )
    expect_same_sequence(results.logs)


@exercise("1.3", "virtual")
def test_state_in_a_subgroup(impl, run, seed):
    """In a group, src is a global rank; the others are not disturbed."""

    def body(ctx):
        group = dist.new_group([1, 2])
        model = nn.Linear(3, 2)
        before = model.weight.detach().clone()
        if ctx.rank in (1, 2):
            impl.broadcast_model_state(model, 2, group)
        return before, model.weight.detach()

    results = run(body, 3)
    for rank in (1, 2):
        expect_close(results[rank][1], results[2][0], what="weight", rank=rank, rtol=0.0, atol=0.0)


class Branches(nn.Module):
    """Tied and frozen parameters, and one that only some ranks use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 6)
        self.decode = nn.Linear(6, 4, bias=False)
        self.tied = nn.Parameter(torch.empty(0))
        self.tied = self.encode.weight
        self.frozen = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 1)
        self.never = nn.Linear(3, 3)
        for p in self.frozen.parameters():
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        h = self.decode(torch.tanh(self.encode(self.frozen(x))))
        out = (h @ self.tied.t()).pow(2).sum(1)
        return out + self.sometimes(x).squeeze(1) if use else out


def make_branches(seed: int, device: torch.device | str = "cpu") -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Branches().double().to(device)


def own_data(seed: int, rank: int, n: int, device: torch.device | str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64).to(device)


def local_backward(model: Branches, x: torch.Tensor, rank: int) -> None:
    if len(x):
        model(x, use=rank == 1).mean().backward()


def grads_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in model.named_parameters()
    }


def global_gradients(seed: int, counts: list[int]) -> dict[str, torch.Tensor | None]:
    """The gradient of the mean over all ranks' samples, by one process."""
    model = make_branches(seed)
    losses = [
        model(own_data(seed, rank, n), use=rank == 1).sum() for rank, n in enumerate(counts) if n
    ]
    (sum(losses) / sum(counts)).backward()
    return grads_of(model)


def check_average(run, impl, seed, counts: list[int], what: str) -> None:
    def body(ctx):
        model = make_branches(seed, ctx.device)
        local_backward(model, own_data(seed, ctx.rank, counts[ctx.rank], ctx.device), ctx.rank)
        before = grads_of(model)
        with ctx.region("average"):
            impl.average_gradients(model.parameters(), counts[ctx.rank])
        return before, grads_of(model)

    results = run(body, len(counts))
    want = global_gradients(seed, counts)
    for rank in reversed(range(len(counts))):  # rank 0 is right by accident more often
        before, after = results[rank]
        for name, value in want.items():
            if value is None:
                if after[name] is not None:
                    fail(
                        f"{what}: {name} has no gradient on any rank, but got one",
                        cause="invented-gradient",
                        rank=rank,
                    )
                continue
            zero = torch.zeros_like(value)
            parts = [r[0][name] if r[0][name] is not None else zero for r in results]
            expect_close(
                after[name],
                value,
                what=f"{what}: gradient of {name}",
                rank=rank,
                contributions=parts,
                weights=counts,
                before=before[name] if len(counts) > 1 else None,
                rtol=1e-10,
                atol=1e-12,
            )
    expect_same_sequence([log.select(region="average") for log in results.logs])


@exercise("1.4", "virtual gloo cuda")
def test_mean_over_the_ranks(impl, run, seed):
    """With equally many samples everywhere, the plain mean over the ranks."""

    def body(ctx):
        params = [nn.Parameter(torch.zeros(n, device=ctx.device)) for n in (5, 7)]
        for p in params:
            p.grad = torch.randn(p.shape, generator=ctx.generator(p.numel())).to(ctx.device)
        own = [p.grad.cpu().clone() for p in params]
        impl.average_gradients(params, 4)
        return own, [p.grad.cpu() for p in params]

    results = run(body, 3)
    for rank in reversed(range(3)):
        for i, got in enumerate(results[rank][1]):
            parts = [own[i] for own, _ in results]
            mean = torch.stack(parts).mean(0)
            what = f"gradient of parameter {i}, 3 ranks, 4 samples each"
            expect_close(
                got, mean, what=what, rank=rank, contributions=parts, before=parts[rank]
            )


@exercise("1.4", "virtual gloo cuda")
def test_average_equals_global_batch(impl, run, seed, cases):
    """The average is the gradient of the global batch; all parameters, tied and partly unused."""
    for w in cases(3, 1, 2, 4, 5):
        check_average(run, impl, seed, [3] * w, f"{w} ranks, 3 samples each")


@exercise("1.4", "virtual gloo cuda")
def test_uneven_batches_are_weighted(impl, run, seed, cases):
    """Ranks with more samples weigh more; a rank without samples adds nothing."""
    for counts in cases([5, 1, 2], [4, 3, 0], [0, 2], [0, 0, 3, 1, 7]):
        check_average(run, impl, seed, counts, f"{counts} samples")


@exercise("1.4", "virtual gloo")
def test_gradients_under_delays(impl, run, seed):
    """Whatever the timing, the gradients are complete when the call returns."""

    def body(ctx):
        p = nn.Parameter(torch.zeros(200_000))
        p.grad = torch.full((200_000,), float(ctx.rank + 1))
        impl.average_gradients([p], 2)
        return p.grad.clone()

    results = run(body, 4, delays=True)
    parts = [torch.full((200_000,), float(r + 1)) for r in range(4)]
    for rank, (got, log) in enumerate(zip(results, results.logs, strict=True)):
        log.all_waited()
        expect_close(
            got, torch.full((200_000,), 2.5), what="gradient", rank=rank, contributions=parts
        )


@exercise("1.4", "virtual gloo")
def test_only_trainable_bytes_are_sent(impl, run, seed, cases):
    """Frozen parameters are sent nowhere, tied ones once; 2(W-1)/W of the bytes per rank."""

    def body(ctx):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = model[0].weight  # tied
        model[2].requires_grad_(False)
        frozen = [p.detach().clone() for p in model[2].parameters()]
        model(torch.ones(2, 64)).sum().backward()
        listed = [p for layer in model for p in layer.parameters()]  # names the tied one twice
        before = listed[0].grad.clone()
        impl.average_gradients(listed, 2)
        still = [p.detach().clone() for p in model[2].parameters()]
        ungraded = [p.grad is None for p in model[2].parameters()]
        return before, listed[0].grad, frozen, still, ungraded

    worlds = cases(4, 2, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        parts = [r[0] for r in results]
        trainable = (64 * 64 + 2 * 64) * 4
        budget = 2 * (w - 1) / w * (trainable + 8 * 8) + 64
        for rank, (log, result) in enumerate(zip(results.logs, results, strict=True)):
            _, got, frozen, still, ungraded = result
            kept = all(torch.equal(a, b) for a, b in zip(frozen, still, strict=True))
            expect_close(
                got,
                torch.stack(parts).mean(0),
                what="gradient of the tied weight",
                rank=rank,
                contributions=parts,
            )
            untouched = kept and all(ungraded)
            expect_equal(untouched, True, what="frozen parameters untouched", rank=rank)
            log.sent_at_most(budget, "2(W-1)/W of the trainable bytes and 8 bytes per parameter")
            log.sent_at_least(2 * (w - 1) / w * trainable - 64, "2(W-1)/W of the trainable bytes")


@exercise("1.4", "virtual")
def test_dtypes_and_groups(impl, run, seed):
    """Gradients keep the dtype of their parameter; sub-groups average among themselves."""

    def body(ctx):
        group = dist.new_group([0, 2])
        params = [nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float64, torch.float32)]
        params[1].requires_grad_(True)
        for p in params:
            p.grad = torch.full_like(p, float(ctx.rank))
        if ctx.rank != 1:
            impl.average_gradients(iter(params), 1, group)
        return [p.grad for p in params]

    for rank, grads in enumerate(run(body, 3)):
        for got, dtype in zip(grads, (torch.float64, torch.float32), strict=True):
            expect_close(
                got, torch.full((3,), 1.0, dtype=dtype), what=f"{dtype} gradient", rank=rank
            )


def traced_steps(impl, ctx) -> None:
    images, labels = digits()[ctx.rank :: ctx.world_size]
    model = build_model("mlp", ctx.rank)
    with ctx.region("1.3"):
        impl.broadcast_model_state(model)
    for step in range(3):
        model.zero_grad()
        chosen = slice(64 * step, 64 * step + 64)
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        impl.average_gradients(model.parameters(), 64)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad


@trace("1.3")
@trace("1.4")
def trace_averaging(impl):
    """Broadcast, then three steps on the digits: forward, backward, averaging."""
    digits()

    def body(ctx):
        traced_steps(impl, ctx)  # warms up
        dist.barrier()
        ctx.start_picture()
        traced_steps(impl, ctx)

    return body
