"""Checks of exercise 2.18: the block with its positions shared out."""

from __future__ import annotations

import torch
from torch import nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import SavedActivations
from distlab.reference.workloads import Block
from tests.phase2.parallel_values import values, whole_block

EXACT = {"rtol": 1e-9, "atol": 1e-10}
BATCH, LENGTH = 2, 12  # divides by 1, 2, 3 and 4 ranks
REPLICATED = ("norm_attention", "norm_mlp", "out.bias", "down.bias")


def results_of(block, x: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient of the block for ``x`` and a loss that weights each element."""
    x = x.clone().requires_grad_()
    y = block(x)
    (y * weight).sum().backward()
    named = {f"gradient of {name}": p.grad for name, p in block.named_parameters()}
    found = {"output": y, "gradient of x": x.grad, **named}
    return {n: None if t is None else t.detach() for n, t in found.items()}


def share_of(name: str, full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """What ``rank`` has of a tensor of the whole block."""
    name = name.removeprefix("gradient of ")
    if name in ("output", "x"):
        return full.chunk(world_size, 1)[rank]
    if name.startswith("qkv."):
        return torch.cat([part.chunk(world_size, 0)[rank] for part in full.chunk(3, 0)])
    if name.startswith("up."):
        return full.chunk(world_size, 0)[rank]
    if name in ("out.weight", "down.weight"):
        return full.chunk(world_size, 1)[rank]
    return full


@exercise("2.18", "virtual gloo cuda")
def test_gather_and_scatter_are_conjugate(impl, run, seed, cases):
    """All-gather forward is reduce-scatter backward and the other way round; for any strides."""
    worlds = cases(3, 1, 2, 4)
    shape = BATCH, LENGTH, 3

    def body(ctx):
        w, rank = ctx.world_size, ctx.rank
        part = values(seed, 1, *shape).chunk(w, 1)[rank].to(ctx.device).requires_grad_()
        whole = impl.gather_sequence(part)
        own = values(seed, 10 + rank, *shape).to(ctx.device)
        grad = torch.autograd.grad(whole, part, own)[0]
        term = values(seed, 20 + rank, 3, LENGTH, BATCH).to(ctx.device).transpose(0, 2)
        term.requires_grad_()
        mine = impl.scatter_sequence(term)
        shared = values(seed, 30, *shape).chunk(w, 1)[rank].to(ctx.device)
        back = torch.autograd.grad(mine, term, shared)[0]
        return [t.detach().cpu() for t in (whole, grad, mine, back)]

    names = ["gather_sequence", "gradient of gather_sequence"]
    names += ["scatter_sequence", "gradient of scatter_sequence"]
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, got in enumerate(results):
            own = [values(seed, 10 + r, *shape).chunk(w, 1)[rank] for r in range(w)]
            terms = [values(seed, 20 + r, 3, LENGTH, BATCH).transpose(0, 2) for r in range(w)]
            terms = [term.chunk(w, 1)[rank] for term in terms]
            want = [values(seed, 1, *shape), sum(own), sum(terms), values(seed, 30, *shape)]
            parts = [(), own, terms, ()]
            for name, a, b, known in zip(names, got, want, parts, strict=True):
                what = f"{name}, {w} ranks"
                expect_close(a, b, what=what, rank=rank, contributions=known, **EXACT)


@exercise("2.18", "virtual gloo cuda")
def test_sequence_block_equals_one_process(impl, run, seed, cases):
    """Output and all twelve gradients, replicated ones after their reduction, both ways."""
    sizes = cases((3, True), (2, False), (4, True), (3, False), (1, True))
    for w, regather in sizes:
        x, weight = values(seed, 1, BATCH, LENGTH, 24), values(seed, 2, BATCH, LENGTH, 24)

        def body(ctx, regather=regather, x=x, weight=weight):
            whole = whole_block(seed, 24, 12)
            block = impl.SequenceParallelBlock(whole, regather=regather).to(ctx.device)
            mine = [t.chunk(ctx.world_size, 1)[ctx.rank].to(ctx.device) for t in (x, weight)]
            found = results_of(block, *mine)
            found = {n: None if t is None else t.cpu().clone() for n, t in found.items()}
            names = {id(p): name for name, p in block.named_parameters()}
            listed = [names.get(id(p), "a tensor that is no parameter") for p in block.replicated()]
            impl.sum_replicated_gradients(block.replicated())
            after = {f"gradient of {n}": p.grad.cpu() for n, p in block.named_parameters()}
            return found, listed, after

        want = results_of(whole_block(seed, 24, 12), x, weight)
        results = run(body, w)
        own = [before for before, _, _ in results]
        for rank, (before, listed, after) in enumerate(results):
            names = sorted(
                n.removeprefix("gradient of ") for n in want if n.startswith(replicated_names())
            )
            what = "the parameters that replicated() gives"
            expect_equal(sorted(listed), names, what=what, rank=rank, cause="replicated-set")
            for name, full in want.items():
                right = share_of(name, full, rank, w)
                summed = name.startswith(replicated_names())
                expect_close(
                    (before | after).get(name),
                    right,
                    what=f"{w} ranks, regather={regather}: {name}",
                    rank=rank,
                    contributions=[each[name] for each in own] if summed else (),
                    rules=each_rank_its_own(before.get(name), w) if summed else (),
                    **EXACT,
                )


def replicated_names() -> tuple[str, ...]:
    return tuple(f"gradient of {name}" for name in REPLICATED)


def each_rank_its_own(own: torch.Tensor | None, world_size: int):
    """A rule: the replicated gradient was never summed."""

    def rule(case: Case) -> Diagnosis | None:
        if own is None or world_size == 1 or not case.fits(own):
            return None
        text = "it is the gradient of this rank's positions only: sum it over the ranks"
        return Diagnosis("only-own", text)

    return (rule,)


@exercise("2.18", "virtual gloo")
def test_same_bytes_as_tensor_parallelism(impl, run, seed):
    """Two all-gathers and two reduce-scatters each way: the bytes of two all-reduces."""

    def body(ctx):
        x = values(seed, 1, BATCH, LENGTH, 24).chunk(ctx.world_size, 1)[ctx.rank].clone()
        for regather in (False, True):
            block = impl.SequenceParallelBlock(whole_block(seed, 24, 12), regather=regather)
            with ctx.region(f"forward {regather}"):
                y = block(x.requires_grad_())
            with ctx.region(f"backward {regather}"):
                y.sum().backward()
            with ctx.region("replicated"):
                impl.sum_replicated_gradients(block.replicated())

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            unit = (w - 1) / w * BATCH * LENGTH * 24 * 8
            for regather in (False, True):
                for phase in ("forward", "backward"):
                    times = 6 if regather and phase == "backward" else 4
                    part = log.select(region=f"{phase} {regather}")
                    formula = f"{times}·(W-1)/W·B·T·D numbers in {phase}, regather={regather}"
                    part.sent_at_most(times * unit, formula)
                    part.sent_at_least(times * unit, formula)
                    part.forbid("all_reduce", why="gather and reduce-scatter take its place")
            part = log.select(region="replicated")
            nbytes = 2 * 2 * (w - 1) / w * 6 * 24 * 8
            part.sent_at_most(nbytes + 8, "two blocks' norms and biases, once")
            if part.messages > 2:
                fail(
                    f"{part.messages} messages for the replicated gradients of two blocks, not 2",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@exercise("2.18", "virtual")
def test_activations_follow_the_formula(impl, run, seed):
    """Kept for backward: 2 + 14/W units of B·T·D numbers, 16/W if gathered again."""
    width, heads, worlds = 96, 4, (1, 2, 4)

    def body(ctx):
        x = values(seed, 1, BATCH, LENGTH, width).chunk(ctx.world_size, 1)[ctx.rank].clone()
        kept = []
        for regather in (False, True):
            whole = whole_block(seed, width, heads)
            block = impl.SequenceParallelBlock(whole, regather=regather)
            with SavedActivations(block) as saved:
                block(x.clone().requires_grad_())
            kept.append(saved.bytes)
        return kept

    unit = BATCH * LENGTH * width * 8
    statistics = (4 + heads) / width  # two per position and norm, one per position and head
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, kept in enumerate(results):
            for bytes_, name, most in zip(
                kept, ("regather=False", "regather=True"), (2 + 14 / w, 16 / w), strict=True
            ):
                if bytes_ > (most + statistics / w + 0.1) * unit:
                    fail(
                        f"{w} ranks, {name}: rank {rank} keeps {bytes_ / unit:.2f} units of "
                        f"B·T·D numbers for backward, by the formula {most:.2f}",
                        cause="too-much-memory",
                        rank=rank,
                    )
                if bytes_ < 0.8 * most * unit:
                    fail(
                        f"{w} ranks, {name}: only {bytes_ / unit:.2f} units are kept",
                        cause="too-little-kept",
                        rank=rank,
                    )


@exercise("2.18", "virtual")
def test_replicated_gradients_are_summed_once(impl, run, seed):
    """One message per dtype; missing gradients count as zero, tied ones once, frozen ones never."""

    def body(ctx):
        named = {name: nn.Parameter(torch.ones(2, 3)) for name in ("own", "missing", "frozen")}
        named["wide"] = nn.Parameter(torch.ones(4, dtype=torch.float64))
        named["frozen"].requires_grad_(False)
        held = named["own"].grad = values(seed, ctx.rank, 3, 2).float().t()
        named["wide"].grad = values(seed, 10 + ctx.rank, 4)
        if ctx.rank == 1:
            named["missing"].grad = torch.ones(2, 3)
        with ctx.region("sum"):
            every = [*named.values(), named["own"]]
            impl.sum_replicated_gradients(iter(every))
        return {name: p.grad for name, p in named.items()}, held

    results = run(body, 3)
    own = [values(seed, rank, 3, 2).float().t() for rank in range(3)]
    wide = [values(seed, 10 + rank, 4) for rank in range(3)]
    for rank, (grads, held) in enumerate(results):
        expect_equal(grads.pop("frozen"), None, what="gradient of a frozen parameter", rank=rank)
        want = {"own": sum(own), "wide": sum(wide), "missing": torch.ones(2, 3)}
        for name, right in want.items():
            known = {"own": own, "wide": wide}.get(name)
            what = f"the sum over 3 ranks ({name})"
            expect_close(grads[name], right, what=what, rank=rank, contributions=known)
        in_place = torch.equal(held, grads["own"])
        expect_equal(in_place, True, what="p.grad is written in place", rank=rank)
        log = results.logs[rank].select(region="sum")
        log.sent_at_most(4 / 3 * (12 * 4 + 4 * 8) + 8, "2(W-1)/W of the gradients' bytes, once")
        if log.messages > 2:
            text = f"{log.messages} messages for gradients of two dtypes"
            fail(text, cause="too-many-messages", rank=rank)


@exercise("2.18", "virtual")
def test_sequence_under_autocast(impl, run, seed):
    """bfloat16 products under autocast: gradients arrive in the dtype of their tensors."""

    def results(block, mine):
        x = mine.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)
        y.float().sum().backward()
        return [y.detach().float(), x.grad]

    def body(ctx):
        whole = whole_block(seed, 24, 12).float()
        x = values(seed, 1, BATCH, LENGTH, 24).float().chunk(2, 1)[ctx.rank]
        return results(impl.SequenceParallelBlock(whole, regather=True), x)

    x = values(seed, 1, BATCH, LENGTH, 24).float()
    want = results(whole_block(seed, 24, 12).float(), x)
    for rank, got in enumerate(run(body, 2)):
        for name, a, b in zip(("output", "gradient of x"), got, want, strict=True):
            right = b.chunk(2, 1)[rank]
            near = 0.05 * float(b.abs().max())
            expect_close(a, right, what=f"{name} in bfloat16", rank=rank, rtol=0.05, atol=near)


@exercise("2.18", "virtual")
def test_sequence_refuses_what_does_not_divide(impl, run, seed):
    """7 positions over 3 ranks, and a wrong width: ValueError with the numbers, nothing sent."""

    def body(ctx):
        block = impl.SequenceParallelBlock(whole_block(seed, 24, 12))
        x = torch.ones(1, 7, 24, dtype=torch.float64)
        return [
            refusal(impl.scatter_sequence, x),
            refusal(block.qkv, x[..., 1:]),
            refusal(block.out, x[..., :8]),
        ]

    calls = [
        ("scattering 7 positions over 3 ranks", (7, 3)),
        ("23 features for 24", (23, 24)),
        ("7 positions in the row layer of 3 ranks", (7, 3)),
    ]
    expect_refused(run(body, 3), calls)


@trace("2.18")
def trace_sequence(impl):
    """Two steps of two blocks of width 128 with 8 heads, positions shared out."""

    def body(ctx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = [Block(128, 8) for _ in range(2)]
        blocks = nn.Sequential(*[impl.SequenceParallelBlock(b, regather=True) for b in whole])
        x = torch.ones(4, 128 // ctx.world_size, 128)
        for step in ctx.steps(3):
            with ctx.region(f"step {step}"):
                blocks(x).square().mean().backward()
                for block in blocks:
                    impl.sum_replicated_gradients(block.replicated())

    return body
