"""Checks of exercise 1.4: averaging of gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import exercise, expect_close, expect_equal, expect_same_sequence, fail
from tests.phase1.groups import group_of


def wrong_divisor(counts: Sequence[int]) -> tuple:
    """Rules for a weighted sum that is not divided by the number of all samples."""

    def rule(case: Case) -> Diagnosis | None:
        if case.combined != "weighted":
            return None
        total, w = sum(counts), len(counts)
        whole = case.want * total
        divisors = {"the world size": w}
        if len(set(counts)) > 1:
            divisors["the number of ranks with samples"] = sum(map(bool, counts))
            divisors["the samples of the largest part"] = max(counts)
        if len(set(counts)) > 1 and case.rank is not None:
            own = counts[case.rank]
            divisors |= {"this rank's samples": own, "the ranks times its samples": w * own}
        for name, divisor in divisors.items():
            if divisor and divisor != total and case.fits(whole / divisor):
                text = f"the weighted sum is divided by {divisor}, {name}, "
                text += f"and not by the {total} samples of all ranks"
                return Diagnosis("wrong-divisor", text)
        return None

    return (rule,)


class Branches(nn.Module):
    """Tied and frozen parameters, one that only some ranks use, and one that no rank uses."""

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

    def forward(self, x: Tensor, use: bool) -> Tensor:
        h = self.decode(torch.tanh(self.encode(self.frozen(x))))
        out = (h @ self.tied.t()).pow(2).sum(1)
        return out + self.sometimes(x).squeeze(1) if use else out


def make_branches(seed: int, device: torch.device | str = "cpu") -> Branches:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Branches().double().to(device)


def own_data(seed: int, rank: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64).to(device)


def local_backward(model: Branches, x: Tensor, rank: int) -> None:
    if len(x):
        model(x, use=rank == 1).mean().backward()


def overflow(case: Case) -> Diagnosis | None:
    """A rule: numbers of 16 bits that became infinite where the right mean is not."""
    if case.got.isfinite().all() or not case.want.isfinite().all():
        return None
    text = "numbers became infinite or nan: 16-bit gradients overflow if they are multiplied by "
    text += "samples or added up before they are divided; weight each by n_r / Σ n_r first"
    return Diagnosis("overflow", text)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().cpu().clone()
        for name, p in model.named_parameters()
    }


def own_gradients(seed: int, rank: int, n: int) -> dict[str, Tensor]:
    """One rank's gradients, computed by the grader; zero where there is none."""
    model = make_branches(seed)
    local_backward(model, own_data(seed, rank, n), rank)
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def global_gradients(seed: int, counts: list[int]) -> dict[str, Tensor | None]:
    """The gradient of the mean over all ranks' samples, by one process."""
    model = make_branches(seed)
    losses = [
        model(own_data(seed, rank, n), use=rank == 1).sum() for rank, n in enumerate(counts) if n
    ]
    (sum(losses) / sum(counts)).backward()
    return grads_of(model)


def expect_none(got: object, what: str, rank: int) -> None:
    if got is not None:
        text = f"{what} has no gradient on any rank, but got one on rank {rank}"
        fail(text, cause="invented-gradient", rank=rank)


def check_average(run, impl, seed, counts: list[int], what: str) -> None:
    def body(ctx):
        model = make_branches(seed, ctx.device)
        local_backward(model, own_data(seed, ctx.rank, counts[ctx.rank], ctx.device), ctx.rank)
        with ctx.region("average"):
            impl.average_gradients(model.parameters(), counts[ctx.rank])
        return grads_of(model)

    results = run(body, len(counts))
    want = global_gradients(seed, counts)
    own = [own_gradients(seed, rank, n) for rank, n in enumerate(counts)]
    for rank in reversed(range(len(counts))):  # rank 0 is right by accident more often
        for name, value in want.items():
            if value is None:
                expect_none(results[rank][name], f"{what}: {name}", rank)
                continue
            expect_close(
                results[rank][name],
                value,
                what=f"{what}: gradient of {name}",
                rank=rank,
                contributions=[gradients[name] for gradients in own],
                weights=counts,
                before=own[rank][name] if len(counts) > 1 and own[rank][name].any() else None,
                rtol=1e-10,
                atol=1e-12,
                rules=wrong_divisor(counts),
            )
    expect_same_sequence([log.select(region="average") for log in results.logs])


def drawn(seed: int, rank: int, shape: Sequence[int], salt: int = 0) -> Tensor:
    """A float64 gradient of a rank, the same for the rank and for the grader."""
    generator = torch.Generator().manual_seed((seed * 1009 + rank) * 1009 + salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@exercise("1.4", "virtual gloo cuda", asserts="mean")
def test_mean_over_the_ranks(impl, run, seed):
    """With equally many samples everywhere, the plain mean over the ranks."""

    def body(ctx):
        params = [nn.Parameter(torch.zeros(n, device=ctx.device)) for n in (5, 7)]
        for p in params:
            p.grad = drawn(seed, ctx.rank, p.shape).float().to(ctx.device)
        impl.average_gradients(params, 4)
        return [None if p.grad is None else p.grad.cpu() for p in params]

    results = run(body, 3)
    for rank in reversed(range(3)):
        for i, (got, n) in enumerate(zip(results[rank], (5, 7), strict=True)):
            parts = [drawn(seed, r, (n,)).float() for r in range(3)]
            mean = torch.stack(parts).mean(0)
            what = f"gradient of parameter {i}, 3 ranks, 4 samples each"
            expect_close(
                got,
                mean,
                what=what,
                rank=rank,
                contributions=parts,
                weights=[4, 4, 4],
                before=parts[rank],
                rules=wrong_divisor([4, 4, 4]),
            )


@exercise("1.4", "virtual gloo cuda", asserts="mean missing same-communication parameters")
def test_average_equals_global_batch(impl, run, seed, cases):
    """The average is the gradient of the global batch; all parameters, tied and partly unused."""
    for w in cases(3, 1, 2, 4, 5):
        check_average(run, impl, seed, [7] * w, f"{w} ranks, 7 samples each")


@exercise("1.4", "virtual gloo cuda", asserts="mean samples same-communication alone")
def test_uneven_batches_are_weighted(impl, run, seed, cases):
    """Ranks with more samples weigh more; a rank without samples adds nothing."""
    for counts in cases([5, 1, 2], [4, 3, 0], [0, 1], [0, 0, 3, 1, 7]):
        check_average(run, impl, seed, counts, f"{counts} samples")


@exercise("1.4", "virtual gloo", asserts="mean")
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


@exercise("1.4", "virtual gloo", asserts="frozen tied cost missing parameters")
def test_only_trainable_bytes_are_sent(impl, run, seed, cases):
    """Frozen parameters are sent nowhere, tied ones once; 2(W-1)/W of the bytes per rank."""

    def body(ctx):
        layers = [nn.Linear(64, 64) for _ in range(3)] + [nn.Linear(64, 64).bfloat16()]
        layers[1].weight = layers[0].weight  # tied
        listed = [p for layer in layers for p in layer.parameters()]  # names the tied one twice
        for salt, p in enumerate(listed):
            p.grad = drawn(seed, ctx.rank, p.shape, salt).to(p.dtype)
        layers[2].requires_grad_(False)  # its gradients are of another time
        layers.append(nn.Linear(64, 64))  # that no rank uses
        still = [p.detach().clone() for p in listed]
        impl.average_gradients([*listed, *layers[-1].parameters()], 2)
        same = all(torch.equal(p, q) for p, q in zip(listed, still, strict=True))
        return listed[0].grad, [p.grad for p in layers[2].parameters()], same

    worlds = cases(4, 2, 5)
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        parts = [drawn(seed, rank, (64, 64), 2).float() for rank in range(w)]
        trainable = (64 * 64 + 2 * 64) * 4 + (64 * 64 + 64) * 2
        budget = 2 * (w - 1) / w * (trainable + 9 * 8 + 8) + 16
        for rank, (log, result) in enumerate(zip(results.logs, results, strict=True)):
            got, frozen, same = result
            expect_close(
                got,
                torch.stack(parts).mean(0),
                what="gradient of the tied weight",
                rank=rank,
                contributions=parts,
            )
            for salt, (gradient, shape) in enumerate(
                zip(frozen, ((64, 64), (64,)), strict=True), 4
            ):
                expect_close(
                    gradient,
                    drawn(seed, rank, shape, salt).float(),
                    what="the gradient of another time of a frozen parameter",
                    rank=rank,
                    rtol=0.0,
                    atol=0.0,
                )
            expect_equal(same, True, what="the parameters themselves are unchanged", rank=rank)
            log.sent_at_most(budget, "2(W-1)/W of the trainable bytes and 8 bytes per parameter")
            log.sent_at_least(2 * (w - 1) / w * trainable - 64, "2(W-1)/W of the trainable bytes")


@dataclass(frozen=True)
class Kind:
    """A parameter and the kind of its gradients; ``gone``: ranks of the
    group without a gradient."""

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    size: float = 1.0
    gone: tuple[int, ...] = ()


KINDS = (
    Kind("a float64 parameter", (3, 5)),
    Kind("a large float16 parameter", (7,), torch.float16, 9000.0),
    Kind("a bfloat16 parameter", (7,), torch.bfloat16),
    Kind("a float32 parameter", (4,), torch.float32),
    Kind("a single number", ()),
    Kind("an empty parameter", (0, 3)),
    Kind("images, channels last on one rank", (2, 3, 4, 5)),
    Kind("a matrix, transposed on one rank", (4, 4)),
    Kind("a float32 parameter with every second element of a vector", (6,), torch.float32),
    Kind("a parameter that only the first rank uses", (3,), torch.float32, 1.0, (1,)),
    Kind("a parameter that only the second rank uses", (3,), torch.float64, 1.0, (0,)),
    Kind("a parameter that no rank uses", (3,), torch.float64, 1.0, (0, 1)),
    Kind("zeros on the first rank, none on the second", (3,), torch.float64, 0.0, (1,)),
    Kind("zeros on the second rank, none on the first", (2,), torch.float32, 0.0, (0,)),
)


def overflow_of(kind: Kind) -> tuple:
    return (overflow,) if kind.dtype == torch.float16 else ()


def gradient_of(kind: Kind, seed: int, rank: int) -> Tensor:
    salt = KINDS.index(kind) + 1
    value = drawn(seed, rank, kind.shape, salt) * kind.size
    return value.clamp(-6 * kind.size, 6 * kind.size).to(kind.dtype)


def laid_out(value: Tensor, rank: int) -> Tensor:
    """The same numbers with another layout in memory, different on odd and even ranks."""
    if value.ndim == 4 and rank % 2:
        return value.contiguous(memory_format=torch.channels_last)
    if value.ndim == 2 and rank % 2:
        return value.t().contiguous().t()
    if value.ndim == 1:
        return torch.stack([value, value], dim=1)[:, rank % 2]
    return value


@exercise(
    "1.4", "virtual gloo", asserts="mean samples dtypes strides missing group dtype layout alone"
)
def test_every_kind_of_gradient(impl, run, seed):
    """Any dtype and any strides, in two groups at once, with other parameters in each."""
    groups, kinds = ([3, 1], [2, 0]), {1: KINDS, 0: KINDS[::-2]}
    samples = {3: 3_000_000_001, 1: 2_000_000_000, 2: 5, 0: 0}

    def body(ctx):
        mine = [group_of(ranks) for ranks in groups][1 - ctx.rank % 2]
        place = groups[1 - ctx.rank % 2].index(ctx.rank)
        chosen = kinds[ctx.rank % 2]
        params = [nn.Parameter(torch.ones(kind.shape, dtype=kind.dtype)) for kind in chosen]
        for p, kind in zip(params, chosen, strict=True):
            if place not in kind.gone:
                p.grad = laid_out(gradient_of(kind, seed, ctx.rank), place)
                if not samples[ctx.rank]:
                    p.grad.fill_(math.nan)
        impl.average_gradients(iter(params), samples[ctx.rank], mine)
        return [p.grad for p in params]

    results = run(body, 4)
    for ranks in groups:
        weights = [samples[rank] for rank in ranks]
        for rank in ranks:
            for kind, got in zip(kinds[rank % 2], results[rank], strict=True):
                what = f"{kind.what}, group {ranks}, {weights} samples, on global rank {rank}"
                if len(kind.gone) == 2:
                    expect_none(got, what, rank)
                    continue
                parts = [
                    torch.zeros(kind.shape, dtype=kind.dtype)
                    if place in kind.gone or not samples[other]
                    else gradient_of(kind, seed, other)
                    for place, other in enumerate(ranks)
                ]
                want = sum(
                    p.double() * (n / sum(weights)) for p, n in zip(parts, weights, strict=True)
                )
                expect_close(
                    got,
                    want.to(kind.dtype),
                    what=what,
                    contributions=parts,
                    weights=weights,
                    rules=(*overflow_of(kind), *wrong_divisor(weights)),
                )


@exercise("1.4", "virtual", asserts="no-samples samples alone")
def test_nan_and_no_samples(impl, run):
    """Without samples gradients become zero; infinity from a rank with samples stays."""

    def body(ctx):
        answers = []
        for samples in (0, ctx.rank):
            p, q, r = (nn.Parameter(torch.zeros(3)) for _ in range(3))
            (p if ctx.rank else r).grad = torch.tensor([1.0, math.inf, math.nan])
            impl.average_gradients([p, q, r], samples)
            answers += [None if t.grad is None else t.grad.clone() for t in (p, q, r)]
        return answers

    for rank, (nothing, never, _, some, again, idle) in enumerate(run(body, 2)):
        zero = torch.zeros(3)
        expect_close(nothing, zero, what="no rank has a sample: the gradient", rank=rank)
        expect_none(never, "a parameter, and no rank has a sample: it", rank)
        expect_none(again, "a parameter", rank)
        want = torch.tensor([1.0, math.inf, math.nan])
        expect_close(some, want, what="rank 1 has infinity, nan and the only sample", rank=rank)
        what = "only rank 0 has the gradient, and no samples: the gradient"
        expect_close(idle, zero, what=what, rank=rank)


@exercise("1.4", "virtual", asserts="mean history no-parameters next-call life resources")
def test_called_again(impl, run, seed):
    """Two models in turn, twice: earlier gradients stay, later gradients are
    added, nothing is kept."""
    sizes = ((3, 4), (7,))

    def body(ctx):
        models = [[nn.Parameter(torch.zeros(n)) for n in each] for each in sizes]
        history, overwritten, before = [], [], None
        for turn in range(2):
            for number, params in enumerate(models):
                for p in params:
                    value = drawn(seed, ctx.rank, p.shape, 10 * turn + number).float()
                    graph = (value.requires_grad_() * 1.0) if turn else value
                    p.grad = graph if p.grad is None else p.grad + graph
                others = [p.grad for p in models[1 - number]]
                before = [None if g is None else g.detach().clone() for g in others]
                impl.average_gradients(params, 1 + ctx.rank * turn)
                overwritten.append(str(others) != str(before))
                history += [p.grad.requires_grad for p in params if p.grad is not None]
        with ctx.region("nothing"):
            impl.average_gradients([], 1)
            impl.average_gradients([late := nn.Parameter(torch.zeros(2), requires_grad=False)], 1)
            impl.average_gradients([p.requires_grad_(False) for p in models[0]], 1)
        late.requires_grad_(True).grad = torch.full((2,), float(ctx.rank))
        impl.average_gradients([late], 1)
        gradients = [[p.grad.detach().clone() for p in params] for params in models]
        watched = [weakref.ref(p) for params in models for p in params]
        del models, params, p, value, graph, others
        alive = sum(ref() is not None for ref in watched)
        return gradients, any(history), any(overwritten), alive, late.grad

    results = run(body, 2)
    for rank, (gradients, history, overwritten, alive, late) in enumerate(results):
        half = torch.full((2,), 0.5)
        what = "the gradient of a parameter that was frozen in the call before"
        expect_close(late, half, what=what, rank=rank, before=torch.full((2,), float(rank)))
        if overwritten:
            text = "a call for one model changed the gradients of another one of the same size: "
            text += "their memory is used again"
            fail(text, cause="kept-buffer", rank=rank)
        for number, (each, got) in enumerate(zip(sizes, gradients, strict=True)):
            for n, gradient in zip(each, got, strict=True):
                first, second = (
                    [drawn(seed, r, (n,), 10 * turn + number) for r in range(2)] for turn in (0, 1)
                )
                want = (first[0] + first[1]) / 2 + second[0] / 3 + second[1] * 2 / 3
                what = f"model {number}: two turns of gradients added up"
                expect_close(gradient, want.float(), what=what, rank=rank, rtol=1e-5, atol=1e-5)
        if history:
            fail("a new gradient requires grad itself", cause="grad-recorded", rank=rank)
        if alive:
            text = f"{alive} parameters are still alive after their models are gone"
            fail(text, cause="kept-alive", rank=rank)
        sent = results.logs[rank].select(region="nothing").events
        if sent:
            text = f"without trainable parameters rank {rank} issued {sent[0]}"
            fail(text, cause="needless-communication", rank=rank, line=sent[0].line)
