"""Checks of exercise 2.17: a transformer block shared by the ranks."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from distlab.observe.memory import PeakMemory, storage_bytes
from distlab.reference.workloads import Block
from tests.phase2.parallel_values import values, whole_block

EXACT = {"rtol": 1e-9, "atol": 1e-10}
BATCH, LENGTH = 2, 5


def results_of(block, x: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Output and every gradient of the block for ``x`` and a loss that weights each element."""
    x = x.requires_grad_()
    y = block(x)
    (y * values(seed, 2, *y.shape).to(y)).sum().backward()
    named = {f"gradient of {name}": p.grad for name, p in block.named_parameters()}
    found = {"output": y, "gradient of x": x.grad, **named}
    return {n: None if t is None else t.detach().cpu() for n, t in found.items()}


def share_of(name: str, full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The part of a tensor of the whole block that ``rank`` has."""
    name = name.removeprefix("gradient of ")
    if name.startswith("qkv."):  # this rank's heads of q, of k and of v
        parts = full.chunk(3, 0)
        return torch.cat([part.chunk(world_size, 0)[rank] for part in parts])
    if name.startswith("up."):
        return full.chunk(world_size, 0)[rank]
    if name in ("out.weight", "down.weight"):
        return full.chunk(world_size, 1)[rank]
    return full


def rows_in_one_piece(fused: torch.Tensor, rank: int, world_size: int):
    """A rule: the fused rows were cut without regard to q, k and v."""

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(fused.detach().chunk(world_size)[rank]):
            return None
        text = f"it is block {rank} of the fused rows, so q, k and v are mixed up: cut each of them"
        return Diagnosis("qkv-mixed", text)

    return (rule,)


@exercise("2.17", "virtual", asserts="same-names rows copied silent heads")
def test_block_takes_over_the_weights(impl, run, seed):
    """This rank's heads and features under the same names; the whole block is left alone."""

    def body(ctx):
        whole = whole_block(seed, 24, 6)
        whole.norm_mlp.requires_grad_(False)
        block = impl.ParallelBlock(whole)
        given = {name: p.detach() for name, p in whole.named_parameters()}
        shared = {p.untyped_storage().data_ptr() for p in whole.parameters()}
        apart = all(p.untyped_storage().data_ptr() not in shared for p in block.parameters())
        frozen = [name for name, p in block.named_parameters() if not p.requires_grad]
        weights = {name: p.detach() for name, p in block.named_parameters()}
        return weights, storage_bytes(block.parameters()), block.heads, given, apart, frozen

    results = run(body, 3)
    whole = dict(whole_block(seed, 24, 6).named_parameters())
    for rank, (weights, held, heads, given, apart, frozen) in enumerate(results):
        right = {name: share_of(name, p, rank, 3) for name, p in whole.items()}
        names = sorted(weights), sorted(right)
        expect_equal(*names, what="the parameters", rank=rank, cause="other-parameters")
        for name, want in right.items():
            rules = rows_in_one_piece(whole[name], rank, 3) if name.startswith("qkv") else ()
            what = f"6 heads, 3 ranks: {name}"
            expect_close(weights[name], want, what=what, rank=rank, rules=rules, **EXACT)
        expect_equal(heads, 2, what="heads of a rank, of 6 over 3 ranks", rank=rank)
        most = sum(p.numel() * 8 for p in right.values())
        if held > most:
            text = f"{held} bytes of parameters, this rank's share are {most}"
            fail(text, cause="too-much-memory", rank=rank)
        text = "the whole block was changed, or shares memory with this rank's"
        kept = given.keys() == whole.keys()
        kept = kept and all(torch.equal(given[name], p) for name, p in whole.items())
        if not kept or not apart:
            fail(text, cause="whole-changed", rank=rank)
        names = ["norm_mlp.bias", "norm_mlp.weight"]
        expect_equal(sorted(frozen), names, what="frozen as in the whole", rank=rank)
        if results.logs[rank].events:
            fail("sharding a block needs no communication", cause="too-many-messages")


def projection(seed: int, bias: bool, frozen: str) -> nn.Linear:
    """6 to 3·12 features in float32; ``frozen`` is one of the parameters' names."""
    qkv = nn.Linear(6, 36, bias)
    for salt, (name, p) in enumerate(qkv.named_parameters()):
        p.data = values(seed, 70 + salt, *p.shape).float()
        p.requires_grad_(name != frozen)
    return qkv


@exercise("2.17", "gloo", asserts="rows copied parameters dtype resources")
def test_rows_are_put_in_the_order_of_the_ranks(impl, run, seed):
    """For any number of ranks, also one: a new layer, whose parameters are its own."""
    kinds = [(w, bias, frozen) for w in (1, 2, 3) for bias, frozen in KINDS]

    def body(ctx):
        out = []
        for w, bias, frozen in kinds:
            qkv = projection(seed, bias, frozen)
            made = impl.rows_by_rank(qkv, w)
            facts = {n: (p.dtype, p.requires_grad) for n, p in made.named_parameters()}
            got = {n: p.detach().clone() for n, p in made.named_parameters()}
            for p in made.parameters():
                p.data.zero_()
            kept = {n: p.detach() for n, p in qkv.named_parameters()}
            out.append((made is qkv, facts, got, kept))
        return out

    (results,) = run(body, 1, process_group=False, ledger=False)
    for (w, bias, frozen), (same, facts, got, kept) in zip(kinds, results, strict=True):
        what = f"rows_by_rank for {w} ranks, {frozen or 'nothing'} frozen, bias={bias}"
        qkv = dict(projection(seed, bias, frozen).named_parameters())
        expect_equal(sorted(got), sorted(qkv), what=f"{what}: parameters", cause="copied")
        for name, p in qkv.items():
            seen = torch.float32, name != frozen
            text = f"{what}: dtype and requires_grad of the {name}"
            expect_equal(facts[name], seen, what=text, cause="copied")
            parts = [part.chunk(w) for part in p.detach().chunk(3)]
            want = torch.cat([part[r] for r in range(w) for part in parts])
            expect_close(got[name], want, what=f"{what}: {name}", rtol=0.0, atol=0.0)
            if same or not torch.equal(kept[name], p):
                text = f"{what}: writing into the new layer changes qkv's {name}: copy the rows"
                fail(text, cause="whole-changed")


KINDS = ((True, ""), (True, "weight"), (True, "bias"), (False, ""))


def of_partial_sums(block: Block, x: torch.Tensor, rank: int, world_size: int):
    """A rule: the terms of attention went into the next norm without being summed."""
    q, k, v = block.qkv(block.norm_attention(x)).chunk(3, dim=-1)
    q, k, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    heads = zip(mixed.chunk(world_size, -1), block.out.weight.chunk(world_size, 1), strict=True)
    alone = [x + part @ weight.T + block.out.bias for part, weight in heads]
    inner = [F.gelu(block.up(block.norm_mlp(each))).chunk(world_size, -1) for each in alone]
    mine = torch.cat([features[r] for r, features in enumerate(inner)], -1)
    formula = (alone[rank] + block.down(mine)).detach()

    def rule(case: Case) -> Diagnosis | None:
        if not case.fits(formula):
            return None
        text = (
            "the terms of attention are not summed before the next layers: norms need the whole sum"
        )
        return Diagnosis("partial-sums", text)

    return (rule,)


def inner_of(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The inputs of the block's GELU."""
    given: list[torch.Tensor] = []
    handle = block.up.register_forward_hook(lambda *call: given.append(call[2].detach()))
    block(x.detach())
    handle.remove()
    return given[0]


def of_tanh(tanh: torch.Tensor, name: str):
    """A rule: GELU by its approximation."""

    def rule(case: Case) -> Diagnosis | None:
        if name != "output" or not case.fits(tanh.detach()):
            return None
        text = 'it is the output with approximate="tanh": the block has the exact GELU'
        return Diagnosis("approximate-gelu", text)

    return (rule,)


@exercise("2.17", "virtual gloo cuda", asserts="block gradients")
def test_block_equals_one_process(impl, run, seed, cases):
    """Output and all twelve gradients of the block, for several heads per rank."""
    sizes = cases((2, 24, 4), (3, 24, 6), (4, 24, 4), (1, 24, 2))
    for w, width, heads in sizes:

        def body(ctx, width=width, heads=heads):
            block = impl.ParallelBlock(whole_block(seed, width, heads)).to(ctx.device)
            return results_of(block, values(seed, 1, BATCH, LENGTH, width).to(ctx.device), seed)

        x = values(seed, 1, BATCH, LENGTH, width)
        want = results_of(whole_block(seed, width, heads), x, seed)
        whole = whole_block(seed, width, heads)
        tanh = whole(x.detach()).detach() - whole.down(F.gelu(inner_of(whole, x)))
        tanh += whole.down(F.gelu(inner_of(whole, x), approximate="tanh"))
        for rank, got in enumerate(run(body, w)):
            for name, full in want.items():
                output = name == "output" and w > 1
                rules = of_partial_sums(whole, x.detach(), rank, w) if output else ()
                rules += of_tanh(tanh, name)
                expect_close(
                    got.get(name),
                    share_of(name, full, rank, w),
                    what=f"{heads} heads over {w} ranks: {name}",
                    rank=rank,
                    bias=whole.down.bias.detach().expand_as(full) if output else None,
                    rules=rules,
                    **EXACT,
                )


@exercise("2.17", "virtual gloo", asserts="bytes cost")
def test_block_needs_two_all_reduces_each_way(impl, run, seed):
    """Two messages forward, two backward, of batch·time·width numbers each."""

    def body(ctx):
        block = impl.ParallelBlock(whole_block(seed, 24, 6))
        x = values(seed, 1, BATCH, LENGTH, 24).requires_grad_()
        with ctx.region("forward"):
            y = block(x)
        with ctx.region("backward"):
            y.sum().backward()

    for w in (3, 2):
        for log in run(body, w).logs:
            log.all_waited()
            for region in ("forward", "backward"):
                part = log.select(region=region)
                nbytes = 2 * 2 * (w - 1) / w * BATCH * LENGTH * 24 * 8
                part.sent_at_most(nbytes, f"two all-reduces of B·T·D numbers in {region}")
                part.sent_at_least(nbytes, f"two all-reduces of B·T·D numbers in {region}")
                if part.messages != 2:
                    fail(
                        f"rank {log.rank} issued {part.messages} collectives in {region}, not 2",
                        cause="too-many-messages",
                        rank=log.rank,
                    )


@exercise("2.17", "virtual", asserts="block gradients life")
def test_training_equals_one_process(impl, run, seed):
    """Three steps of SGD through two blocks: the same losses, replicated weights stay equal."""

    def train(blocks: nn.Module):
        losses = []
        for step in range(3):
            x = values(seed, 5 + step, BATCH, LENGTH, 12)
            loss = (blocks(x) - x.roll(1, -1)).square().mean()
            losses.append(loss.item())
            with torch.no_grad():
                grads = torch.autograd.grad(loss, [*blocks.parameters()])
                for p, grad in zip(blocks.parameters(), grads, strict=True):
                    p -= 0.05 * grad
        return losses

    def body(ctx):
        whole = [whole_block(seed + k, 12, 2) for k in range(2)]
        blocks = nn.Sequential(*[impl.ParallelBlock(block) for block in whole])
        losses = train(blocks)
        return losses, [p.detach() for p in blocks[0].norm_attention.parameters()]

    want = train(nn.Sequential(*[whole_block(seed + k, 12, 2) for k in range(2)]))
    results = run(body, 2)
    for rank, (losses, norm) in enumerate(results):
        right, got = torch.tensor(want), torch.tensor(losses)
        expect_close(got, right, what="losses of three steps", rank=rank, rtol=1e-6)
        for a, b in zip(norm, results[0][1], strict=True):
            if not torch.equal(a, b):
                text = "the replicated norm differs from rank 0's after three steps"
                fail(text, cause="replicas-differ", rank=rank)


NO_GRADIENT = ("norm_attention.weight", "qkv.weight", "up.bias", "out.bias")
OTHERS = {"qkv": (12, 36, False), "up": (12, 20, True), "down": (20, 12, False)}  # bias?


def odd_block(seed: int, dtype: torch.dtype) -> Block:
    """Frozen in part, with stale gradients, few biases, an inner width of 20, and odd norms."""
    block = whole_block(seed, 12, 4)
    for salt, (name, (width, features, bias)) in enumerate(OTHERS.items()):
        layer = nn.Linear(width, features, bias)
        for p in layer.parameters():
            p.data = values(seed, 60 + salt, *p.shape) * 0.2
        setattr(block, name, layer)
    block.norm_attention.eps, block.norm_mlp.eps = 0.3, 0.7
    for name, p in block.to(dtype).named_parameters():
        p.grad = torch.ones_like(p)
        p.requires_grad_(name not in NO_GRADIENT)
    return block


@exercise(
    "2.17",
    "virtual",
    asserts="block gradients rows copied same-names group dtype layout parameters alone life "
    "resources",
)
def test_odd_blocks_in_groups(impl, run, seed):
    """Half frozen, few biases, float32, one position, used twice: in two groups at once."""
    shapes = ((2, 3, 12), (3, 1, 12), (0, 4, 12))

    def twice(block, x, weight):
        x = x.requires_grad_()
        y = block(x) + block(2 * x)
        for _ in range(2):
            (y * weight).sum().backward(retain_graph=True)
        named = {f"gradient of {n}": p.grad for n, p in block.named_parameters()}
        return {"output": y.detach(), "gradient of x": x.grad, **named}

    def drawn(salt: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Strides of its own."""
        return values(seed, salt, *shape).float().transpose(0, 2).contiguous().transpose(0, 2)

    def body(ctx):
        even = ctx.rank in (0, 2)
        mine = [dist.new_group(ranks) for ranks in ([3, 1], [0, 2])][even]
        out = []
        for shape in shapes[::-1] if even else shapes:
            with PeakMemory() as memory:
                whole = odd_block(seed + even, torch.float32)
                alive, block = weakref.ref(whole), impl.ParallelBlock(whole, mine)
                stale = [p.grad is not None for p in block.parameters()]
                kept = all(p.grad is not None for p in whole.parameters())
                del whole
            freed = alive() is None and memory.current <= storage_bytes(block.parameters())
            facts = [any(stale), kept, freed, block.heads]
            block.train(even)
            out.append((twice(block, drawn(1, shape), drawn(2, shape)), facts))
        return out[::-1] if even else out

    for rank, results in enumerate(run(body, 4)):
        even, place = rank in (0, 2), int(rank > 1)
        for shape, (got, facts) in zip(shapes, results, strict=True):
            whole = odd_block(seed + even, torch.float32)
            for p in whole.parameters():
                p.grad = None
            want = twice(whole, drawn(1, shape), drawn(2, shape))
            heads = facts.pop()
            what = "heads of a rank, of 4 in a group of 2 ranks"
            expect_equal(heads, 2, what=what, rank=rank, cause="heads")
            text = f"x {shape}: stale gradients copied, the whole's kept, the whole freed"
            expect_equal(facts, [False, True, True], what=text, rank=rank, cause="copied")
            expect_equal(sorted(got), sorted(want), what="parameters", rank=rank)
            for name, full in want.items():
                what = f"x {shape}, half frozen: {name}"
                if full is None:
                    expect_equal(got[name], None, what=what, rank=rank, cause="frozen")
                    continue
                near = 1e-4 * float(full.abs().max()) if full.numel() else 0.0
                right = share_of(name, full, place, 2)
                expect_close(got[name], right, what=what, rank=rank, rtol=1e-4, atol=near)


@exercise("2.17", "virtual", asserts="divides refusals")
def test_block_refuses_what_does_not_divide(impl, run, seed):
    """Heads or an inner width that can't be shared, a foreign process: ValueError everywhere."""

    def body(ctx):
        odd = Block(12, 3)
        odd.up, odd.down = nn.Linear(12, 50), nn.Linear(50, 12)
        ragged = Block(12, 3)
        ragged.heads = 9
        group = dist.new_group([0, 1])
        refused = [refusal(impl.ParallelBlock, each) for each in (Block(12, 4), odd, ragged)]
        if ctx.rank == 2:
            refused.append(refusal(impl.ParallelBlock, Block(12, 4), group))
        return refused

    calls = ["4 heads over 3 ranks", "an inner width of 50 over 3 ranks", "a width of 12, 9 heads"]
    results = run(body, 3)
    expect_refusals(results[2][3:], ["a block outside of the group"], rank=2)
    results[2] = results[2][:3]
    expect_refused(results, calls)


@trace("2.17")
def trace_block(impl):
    """Two steps of two blocks of width 128 with 8 heads, forward and backward."""

    def body(ctx):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            whole = [Block(128, 8) for _ in range(2)]
        blocks = nn.Sequential(*[impl.ParallelBlock(block) for block in whole])
        x = torch.ones(4, 128, 128)
        for step in ctx.steps(3):
            with ctx.region(f"step {step}"):
                blocks(x).square().mean().backward()

    return body
