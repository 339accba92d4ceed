"""Checks of exercise 2.18: the block with its positions shared out."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.distributed as dist
from torch import nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, SavedActivations, storage_bytes
from distlab.reference.workloads import Block
from distlab.virtual import load_cluster
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
    """The part of a tensor of the whole block that ``rank`` has."""
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


@exercise("2.18", "virtual gloo cuda", nccl=True, asserts="gather scatter layout")
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


@exercise("2.18", "virtual gloo cuda", asserts="block replicated column row")
def test_sequence_block_equals_one_process(impl, run, seed, cases):
    """Output and all twelve gradients in both variants; replicated gradients
    after their reduction."""
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


DTYPES = {False: torch.float64, True: torch.bfloat16}  # with and without regather


@exercise("2.18", "virtual gloo", asserts="bytes cost")
def test_same_bytes_as_tensor_parallelism(impl, run, seed):
    """Two all-gathers and two reduce-scatters each way: the bytes of two all-reduces."""

    def body(ctx):
        part = values(seed, 1, BATCH, LENGTH, 24).chunk(ctx.world_size, 1)[ctx.rank]
        for regather, dtype in DTYPES.items():
            whole, x = whole_block(seed, 24, 12, dtype), part.to(dtype, copy=True)
            block = impl.SequenceParallelBlock(whole, regather=regather)
            with ctx.region(f"forward {regather}"):
                y = block(x.requires_grad_())
            with ctx.region(f"backward {regather}"):
                y.sum().backward()
            with ctx.region("replicated"):
                impl.sum_replicated_gradients(block.replicated())

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            for regather, dtype in DTYPES.items():
                unit = (w - 1) / w * BATCH * LENGTH * 24 * dtype.itemsize
                for phase in ("forward", "backward"):
                    times = 6 if regather and phase == "backward" else 4
                    part = log.select(region=f"{phase} {regather}")
                    formula = f"{times}·(W-1)/W·B·T·D of {dtype} in {phase}, regather={regather}"
                    part.sent_at_most(times * unit, formula)
                    part.sent_at_least(times * unit, formula)
                    part.forbid("all_reduce", why="gather and reduce-scatter take its place")
            part = log.select(region="replicated")
            nbytes = 2 * (w - 1) / w * 6 * 24 * sum(d.itemsize for d in DTYPES.values())
            part.sent_at_most(nbytes + 8, "two blocks' norms and biases, once")
            if part.messages > 2:
                fail(
                    f"{part.messages} messages for the replicated gradients of two blocks, not 2",
                    cause="too-many-messages",
                    rank=log.rank,
                )


@exercise("2.18", "virtual", asserts="kept resources")
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
            mine = x.clone().requires_grad_()
            with PeakMemory() as memory:
                y = block.qkv(mine)
                alive = memory.current - y.untyped_storage().nbytes()
                y = block(mine)
                whole = memory.current - y.untyped_storage().nbytes()
                y.sum().backward()
                del y
                grads = [mine.grad, *(p.grad for p in block.parameters())]
                after = memory.current - storage_bytes(grads)
            kept.append((saved.bytes, alive, whole, after))
        return kept

    unit = BATCH * LENGTH * width * 8
    statistics = (4 + heads) / width  # two per position and norm, one per position and head
    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        for rank, kept in enumerate(results):
            for (bytes_, alive, held, after), name, most, whole in zip(
                kept, ("regather=False", "regather=True"), (2 + 14 / w, 16 / w), (1, 0), strict=True
            ):
                if alive > (whole + 0.1) * unit:
                    text = f"{w} ranks, {name}: after forward of a column layer rank {rank} has "
                    text += f"{alive / unit:.2f} units of B·T·D numbers in memory beside input and "
                    text += f"output, {whole} are enough"
                    text += "" if whole else ": what backward gathers again need not stay"
                    fail(text, cause="too-much-memory", rank=rank)
                if after > 0.1 * unit:
                    text = f"{w} ranks, {name}: after backward rank {rank} has {after / unit:.2f} "
                    text += "units of B·T·D numbers in memory beside the gradients"
                    fail(text, cause="too-much-memory", rank=rank)
                bytes_ = max(bytes_, held)  # saved for backward, or held in another way
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


@exercise("2.18", "virtual", asserts="sum sum-bytes parameters alone layout")
def test_replicated_gradients_are_summed_once(impl, run, seed):
    """One message per dtype. Missing gradients count as zero, tied gradients
    once, frozen ones never."""

    def body(ctx):
        names = "own", "missing", "frozen", "stale"
        named = {name: nn.Parameter(torch.ones(2, 3)) for name in names}
        named["half"] = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        named["half"].grad = torch.full((4,), 1.0 + ctx.rank, dtype=torch.bfloat16)
        named["stale"].requires_grad_(False)
        named["stale"].grad = torch.full((2, 3), 1.0 + ctx.rank)
        named["wide"] = nn.Parameter(torch.ones(4, dtype=torch.float64))
        named["frozen"].requires_grad_(False)
        named["alone"] = nn.Parameter(torch.ones(4, dtype=torch.float16))
        named["own"].grad = values(seed, ctx.rank, 3, 2).float().t()
        named["wide"].grad = values(seed, 10 + ctx.rank, 4)
        if ctx.rank == 1:
            named["missing"].grad = torch.ones(2, 3)
            named["alone"].grad = torch.ones(4, dtype=torch.float16)
        held = {name: named[name].grad for name in ("own", "wide", "half")}
        with ctx.region("sum"):
            every = [named["half"], named["missing"], *named.values(), named["own"]]
            impl.sum_replicated_gradients(iter(every))
        with ctx.region("nothing"):
            impl.sum_replicated_gradients([])
            impl.sum_replicated_gradients([named["frozen"]])
        return {name: p.grad for name, p in named.items()}, held

    results = run(body, 3)
    own = [values(seed, rank, 3, 2).float().t() for rank in range(3)]
    wide = [values(seed, 10 + rank, 4) for rank in range(3)]
    for rank, (grads, held) in enumerate(results):
        expect_equal(grads.pop("frozen"), None, what="gradient of a frozen parameter", rank=rank)
        want = {"own": sum(own), "wide": sum(wide), "missing": torch.ones(2, 3)}
        want["half"] = torch.full((4,), 6.0, dtype=torch.bfloat16)
        want["alone"] = torch.ones(4, dtype=torch.float16)  # the dtype of one rank's gradient only
        want["stale"] = torch.full((2, 3), 1.0 + rank)
        for name, right in want.items():
            known = {"own": own, "wide": wide}.get(name)
            what = f"the sum over 3 ranks ({name})"
            expect_close(grads[name], right, what=what, rank=rank, contributions=known)
        in_place = [torch.equal(tensor, grads[name]) for name, tensor in held.items()]
        what = f"whether the sum is in the tensor that p.grad was before, for {[*held]}"
        expect_equal(in_place, [True] * 3, what=what, rank=rank, cause="not-in-place")
        log = results.logs[rank].select(region="sum")
        nothing = results.logs[rank].select(region="nothing")
        nothing.sent_at_most(0, "nothing without trainable parameters")
        formula = "2(W-1)/W of the gradients' bytes, once"
        log.sent_at_most(4 / 3 * (12 * 4 + 4 * 8 + 8 * 2) + 8, formula)
        if log.messages > 4:
            text = f"{log.messages} messages for gradients of four dtypes"
            fail(text, cause="too-many-messages", rank=rank)


def whole_numbers(seed: int, salt: int, *shape: int) -> torch.Tensor:
    """Small integers in bfloat16, whose sums are exact, behind strides of their own."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    drawn = torch.randint(-3, 4, shape, generator=generator).bfloat16()
    return drawn.transpose(0, 2).contiguous().transpose(0, 2)


@exercise("2.18", "virtual", asserts="start-gather start-scatter group dtype layout cost life")
def test_gathers_and_scatters_overlap(impl, run, seed):
    """Both start at once and travel while the rank does other things, in a group, in bfloat16."""
    laptop = load_cluster("laptop")
    link = dataclasses.replace(laptop.inside, alpha=0.1, bandwidth=1e15)

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        length = 4 + 2 * even
        x = whole_numbers(seed, ctx.rank, 2, length, 3)
        part = x.chunk(2, 1)[ctx.rank > 1]
        begin = time.perf_counter()
        finish = [impl.start_gather(part, mine), impl.start_scatter(x, mine)]
        time.sleep(1.0)
        whole, share = (wait() for wait in finish)
        took = time.perf_counter() - begin
        kept = torch.equal(x, whole_numbers(seed, ctx.rank, 2, length, 3))
        part, x = part.clone().requires_grad_(), x.requires_grad_()
        of_part = torch.autograd.grad(impl.gather_sequence(part, mine), part, x.detach())[0]
        of_x = torch.autograd.grad(impl.scatter_sequence(x, mine), x, part.detach())[0]
        return took, whole, share, kept, of_part, of_x

    results = run.simulate(body, 4, cluster=dataclasses.replace(laptop, inside=link))
    for rank, (took, whole, share, kept, of_part, of_x) in enumerate(results):
        mine, length = ((0, 2), 6) if rank in (0, 2) else ((1, 3), 4)
        every = [whole_numbers(seed, r, 2, length, 3) for r in mine]
        place, what = int(rank > 1), f"in the group of ranks {mine}"
        want = torch.cat([x.chunk(2, 1)[r] for r, x in enumerate(every)], 1)
        expect_close(whole, want, what=f"start_gather {what}", rank=rank)
        right = sum(every).chunk(2, 1)[place]
        expect_close(share, right, what=f"start_scatter {what}", rank=rank)
        expect_close(of_part, right, what=f"gradient of gather_sequence {what}", rank=rank)
        expect_close(of_x, want, what=f"gradient of scatter_sequence {what}", rank=rank)
        expect_equal(kept, True, what="x kept its values", rank=rank, cause="input-changed")
        if took > 1.02:
            text = f"after one second of other work the messages took {took - 1:.2f} s more: "
            text += "they did not travel meanwhile"
            fail(text, cause="no-overlap", rank=rank)


NO_GRADIENT = (  # of the odd ranks; of the even ones, whose x needs none either
    ("norm_attention.weight", "qkv.weight", "up.bias", "down.bias"),
    ("norm_attention.weight", "norm_attention.bias", "qkv.bias", "up.bias", "down.bias"),
)


def half_frozen(seed: int, even: bool) -> Block:
    """float32, without a bias of ``out``, or of ``qkv`` and ``down``, partly frozen."""
    block = whole_block(seed, 12, 4)
    for name in ("out",) if even else ("qkv", "down"):
        whole = getattr(block, name)
        bare = nn.Linear(whole.in_features, whole.out_features, bias=False)
        bare.weight = whole.weight
        setattr(block, name, bare)
    for name, p in block.float().named_parameters():
        p.requires_grad_(name not in NO_GRADIENT[even])
    return block


@exercise(
    "2.18",
    "virtual",
    asserts="block column row replicated sum group dtype parameters life",
)
def test_half_frozen_blocks_in_groups(impl, run, seed):
    """Frozen weights, no bias, float32, used twice, two backwards: in two groups at once."""

    def twice(block):
        return lambda x: block(x) + block(2 * x)

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        length, out = 4 + 2 * even, []
        for regather in (False, True):
            whole = half_frozen(seed + even, even)
            block = impl.SequenceParallelBlock(whole, mine, regather=regather)
            x, weight = (values(seed, salt, 1, length, 12).float() for salt in (1, 2))
            x, weight = (t.chunk(2, 1)[ctx.rank > 1] for t in (x, weight))
            x = x.clone().requires_grad_(not even)
            y = twice(block)(x)
            for _ in range(2):
                (y * weight).sum().backward(retain_graph=True)
            impl.sum_replicated_gradients(block.replicated(), mine)
            named = {f"gradient of {n}": p.grad for n, p in block.named_parameters()}
            out.append({"output": y.detach(), "gradient of x": x.grad, **named})
        return out

    for rank, results in enumerate(run(body, 4)):
        even, place = rank in (0, 2), int(rank > 1)
        whole = half_frozen(seed + even, even)
        x, weight = (values(seed, salt, 1, 4 + 2 * even, 12).float() for salt in (1, 2))
        x = x.requires_grad_(not even)
        y = twice(whole)(x)
        (2 * y * weight).sum().backward()
        named = {f"gradient of {n}": p.grad for n, p in whole.named_parameters()}
        want = {"output": y.detach(), "gradient of x": x.grad, **named}
        for regather, got in zip((False, True), results, strict=True):
            expect_equal(sorted(got), sorted(want), what="parameters", rank=rank)
            for name, full in want.items():
                what = f"half frozen, regather={regather}: {name}"
                if full is None:
                    expect_equal(got[name], None, what=what, rank=rank, cause="frozen")
                    continue
                near = 1e-4 * float(full.abs().max())
                right = share_of(name, full, place, 2)
                expect_close(got[name], right, what=what, rank=rank, rtol=1e-4, atol=near)


@exercise("2.18", "virtual", asserts="divides width outsider refusals")
def test_sequence_refuses_what_does_not_divide(impl, run, seed):
    """7 positions over 3 ranks, a wrong width, a foreign process: ValueError, nothing sent."""

    def body(ctx):
        block = impl.SequenceParallelBlock(whole_block(seed, 24, 12))
        x = torch.ones(1, 7, 24, dtype=torch.float64)
        group = dist.new_group([0, 1])
        even, calls = torch.ones(1, 2, 24), (impl.gather_sequence, impl.scatter_sequence)
        return [
            refusal(impl.scatter_sequence, x),
            refusal(block.qkv, x[..., 1:]),
            refusal(block.out, x[..., :8]),
            refusal(block.out, x[:, :6, :7]),
            refusal(block.up, x[:, :, :8]),
            *([refusal(call, even, group) for call in calls] if ctx.rank == 2 else []),
        ]

    calls = [
        "scattering 7 positions over 3 ranks",
        "23 features for 24",
        "7 positions in the row layer of 3 ranks",
        "7 features for the 8 of a row layer",
        "8 features for 24",
    ]
    results = run(body, 3)
    names = ["gather_sequence outside of the group", "scatter_sequence outside of the group"]
    expect_refusals(results[2][len(calls) :], names, rank=2)
    results[2] = results[2][: len(calls)]
    expect_refused(results, calls)


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
