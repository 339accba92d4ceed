"""Checks of exercises 1.7 and 1.8: all-reduce from point-to-point messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product

import torch
import torch.distributed as dist

from distlab.explain.diagnosis import tolerance
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
from tests.phase1.groups import group_of, order_in

OPS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.double().mean(0).to(x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}
COMBINE = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
FORBIDDEN = (*COLLECTIVES, "gather", "scatter")
DIVIDED = ", divided by the number of ranks at the end,"
WHY = "build it from send and receive"
STRATEGY = {"direct": "all_reduce_direct", "chain": "all_reduce_chain", "root": "all_reduce_root"}


def values_of(seed: int, world_size: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """(world_size, n): one row per rank; small integers for integer dtypes."""
    generator = torch.Generator().manual_seed(seed * 31 + n)
    if dtype.is_floating_point:
        return torch.rand(world_size, n, generator=generator, dtype=dtype) + 0.5
    return torch.randint(1, 5, (world_size, n), generator=generator, dtype=dtype)


def inputs_of(world_size: int) -> list[tuple[str, int, torch.dtype]]:
    """All operators on lengths 0, 1, W-1, W, W+1 and a prime; also integers."""
    w = world_size
    lengths = sorted({0, 1, w - 1, w, w + 1, 23}, reverse=True)  # the telling ones first
    cases = [(op, n, torch.float32) for op in OPS for n in lengths]
    cases += [(op, 5, torch.int64) for op in OPS if op != "mean"]
    return [*cases, ("sum", 7, torch.float64)]


ORDER = [2, 0, 4, 3, 1]  # five ranks: a division by five rounds
BITS = (
    ("sum", torch.float32),
    ("mean", torch.float32),
    ("product", torch.float32),
    ("sum", torch.bfloat16),
    ("mean", torch.float16),
    ("product", torch.bfloat16),
)


def uneven_rows(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """(5, 1501): one row per rank, each three times larger than the one before."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, 1501, generator=generator) * 3.0 ** torch.arange(-2, 3).view(5, 1)
    rows[:, ::50] *= 1e-39  # too small for all digits
    return rows.to(dtype)


def rounded_once(seed: int, op: str, dtype: torch.dtype) -> torch.Tensor:
    """The result if the whole is computed in float32 and rounded at the end."""
    total = uneven_rows(seed, dtype).float()[order_in(ORDER)].sum(0)
    return (total / 5 if op == "mean" else total).to(dtype)


def check_values(run, impl, seed: int, names: tuple[str, ...], worlds: tuple[int, ...]) -> None:
    def body(ctx):
        out = []
        for name, (op, n, dtype) in product(names, inputs_of(ctx.world_size)):
            mine = values_of(seed, ctx.world_size, n, dtype)[ctx.rank].to(ctx.device)
            getattr(impl, name)(mine, op)
            out.append(mine.cpu())
        return out

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        compare_values(results, names, w, seed)


def compare_values(results, names: tuple[str, ...], w: int, seed: int) -> None:
    for rank, outs in enumerate(results):
        for (name, (op, n, dtype)), got in zip(product(names, inputs_of(w)), outs, strict=True):
            rows = values_of(seed, w, n, dtype)
            expect_close(
                got,
                OPS[op](rows),
                what=f"{name}, {op} of {n} {str(dtype)[6:]} elements over {w} ranks",
                rank=rank,
                before=rows[rank] if w > 1 else None,
                contributions=list(rows) if op in ("sum", "mean") else [],
            )


MEMBERS = [3, 0, 2]  # neither sorted nor a prefix; rank 1 is alone in a group of its own


@dataclass(frozen=True)
class Kind:
    """A tensor to reduce: where its numbers lie, and how large they are."""

    what: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    offset: int = 0  # so much larger are integers
    dense: bool = False  # in another order of memory on every second rank; else amid other numbers
    leaf: bool = False


LARGE = 2**60  # beyond what float64 holds exactly
KINDS = (
    Kind("a strided matrix", "sum", (4, 3)),
    Kind("a strided vector of float64", "mean", (5,), torch.float64),
    Kind("images, channels last on one rank", "max", (2, 3, 4, 2), dense=True),
    Kind("a matrix, transposed on one rank", "sum", (3, 3), dense=True),
    Kind("a single number", "product", ()),
    Kind("an empty matrix", "sum", (0, 3)),
    Kind("large int64", "sum", (5,), torch.int64, LARGE),
    Kind("large int64", "max", (5,), torch.int64, LARGE),
    Kind("uint8", "max", (3,), torch.uint8),
    Kind("uint8 beyond 255", "sum", (3,), torch.uint8, 200),
    Kind("float16", "sum", (7,), torch.float16),
    Kind("bfloat16", "mean", (7,), torch.bfloat16),
    Kind("a parameter that requires grad", "mean", (6,), leaf=True),
    Kind("with nan on one rank", "max", (4,)),
    Kind("with nan on one rank", "min", (4,)),
    Kind("with nan on the last rank", "max", (4,)),
    Kind("with nan on the last rank", "min", (4,)),
    Kind("with nan on one rank", "product", (4,)),
)


def number_of(kind: Kind, seed: int, rank: int) -> torch.Tensor:
    """The tensor of a rank."""
    count = max(1, math.prod(kind.shape))
    row = values_of(seed + KINDS.index(kind), 4, count, kind.dtype)[rank] + kind.offset
    if "nan" in kind.what and rank == (2 if "last" in kind.what else 0):
        row[1] = math.nan
    return row[: math.prod(kind.shape)].view(kind.shape)


def laid_out(kind: Kind, value: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(all the memory, the part of it that is to be reduced)."""
    if kind.leaf:
        parameter = torch.nn.Parameter(value)
        parameter.grad = torch.ones_like(value)
        return parameter, parameter
    if kind.dense and place % 2:
        value = value.transpose(0, -1).contiguous().transpose(0, -1)
    if kind.dense:
        return value, value
    memory = torch.stack([value] * 3, dim=-1 if place % 2 else 0)
    return memory, memory[..., 1] if place % 2 else memory[1]


def check_any_tensor(run, impl, seed: int, name: str, **kwargs) -> None:
    def body(ctx):
        mine, other = group_of(MEMBERS), group_of([1])
        group = other if ctx.rank == 1 else mine
        place = MEMBERS.index(ctx.rank) if ctx.rank in MEMBERS else 0
        reduce, out = getattr(impl, name), []
        refusal(reduce, torch.ones(2), "median", group=group)  # leaves nothing behind
        own = kwargs if ctx.rank in MEMBERS else {}
        for kind in KINDS:
            memory, part = laid_out(kind, number_of(kind, seed, ctx.rank), place)
            lies = part.data_ptr(), part.stride()
            reduce(part, kind.op, group=group, **own)
            leaf = part.is_leaf, part.requires_grad == kind.leaf, part.grad_fn is None
            if kind.leaf:
                leaf += (part.grad is not None and bool((part.grad == 1).all()),)
            out.append([memory.detach(), all(leaf), lies == (part.data_ptr(), part.stride())])
        return out

    results = run(body, 4)
    order = order_in(MEMBERS)
    for rank, outs in enumerate(results):
        members = order if rank in order else [rank]
        place = MEMBERS.index(rank) if rank in MEMBERS else 0
        for kind, (memory, leaf, stays) in zip(KINDS, outs, strict=True):
            if not stays:
                text = f"{name}: {kind.what} lies elsewhere in memory after the call; what shares "
                fail(f"{text}its memory keeps the old numbers", cause="new-memory", rank=rank)
            rows = [number_of(kind, seed, member) for member in members]
            total = rows[0]
            for row in rows[1:]:
                total = COMBINE[kind.op](total, row)
            want, part = laid_out(kind, number_of(kind, seed, rank), place)
            before = want.detach().clone()
            part.detach().copy_(total / len(rows) if kind.op == "mean" else total)
            exact = {} if kind.dtype.is_floating_point else {"rtol": 0.0, "atol": 0.0}
            expect_close(
                memory,
                want,
                what=f"{name}, {kind.op} over ranks {members}: {kind.what}, and what is beside it "
                f"in memory, on global rank {rank}",
                before=before if len(rows) > 1 else None,
                **exact,
            )
            if not leaf:
                text = f"{name}: {kind.what} is no leaf any more, a gradient is recorded, or the "
                text += "gradient that it had has changed"
                fail(text, cause="grad-recorded", rank=rank)


def check_bits(run, impl, seed: int, name: str, **kwargs) -> None:
    """Sums in rank order on every rank: the same bits everywhere, and those of a plain loop."""

    def body(ctx):
        group = group_of(ORDER)
        out = []
        for op, dtype in BITS:
            mine = uneven_rows(seed, dtype)[ctx.rank].clone()
            with ctx.region(f"{op} {dtype}"):
                getattr(impl, name)(mine, op, group=group, **kwargs)
            out.append(mine)
        return out

    results = run(body, 5, delays=True)
    for rank, answers in enumerate(results):
        results.logs[rank].all_waited()
        expect_own_bytes(results.logs[rank], name)
        for (op, dtype), got in zip(BITS, answers, strict=True):
            total, *rows = uneven_rows(seed, dtype)[order_in(ORDER)]
            for row in rows:
                total = COMBINE[op](total, row)
            want = total / 5 if op == "mean" else total
            what = f"{name}, {op} of {str(dtype)[6:]} values of very different size"
            expect_close(got, want, what=what, rank=rank)
            if not torch.equal(got, want):
                differing = int((got != want).sum())
                if dtype.itemsize == 2 and torch.equal(got, rounded_once(seed, op, dtype)):
                    text = f"{what}: combined in float32 and rounded once; a loop in the dtype of "
                    fail(f"{text}the tensor gives other bits", cause="other-dtype", rank=rank)
                text = f"{what}: {differing} of {len(got)} elements differ in the last bits from "
                text += f"the {op} in rank order{DIVIDED if op == 'mean' else ''} on rank {rank}: "
                text += "replicas would drift apart"
                fail(text, cause="order-of-summation", rank=rank)


def expect_own_bytes(log, name: str) -> None:
    """Messages have the tensor's own bytes, also for 16 bits."""
    for op, dtype in BITS:
        for event in log.select("send", region=f"{op} {dtype}").events:
            what = f"{name}, {op} of {str(dtype)[6:]}: bytes of a message"
            nbytes = 1501 * dtype.itemsize
            expect_equal(event.payload, nbytes, what=what, rank=log.rank, cause="message-size")


def check_cost(run, impl, name: str, strategy: str, seed: int, worlds: tuple[int, ...]) -> None:
    """Bytes, messages and partners by the ledger against the module's table, values included."""
    n = 1000

    def body(ctx):
        mine = values_of(seed, ctx.world_size, n, torch.float32)[ctx.rank].to(ctx.device)
        last = {"root": ctx.world_size - 1} if strategy == "root" else {}
        getattr(impl, name)(mine, "sum", **last)
        return mine.cpu()

    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        total = values_of(seed, w, n, torch.float32).sum(0)
        for rank, (log, got) in enumerate(zip(results.logs, results, strict=True)):
            log.forbid(*FORBIDDEN, why=WHY)
            expect_close(got, total, what=f"sum over {w} ranks, with delays", rank=rank)
            log.all_waited()
            ends = rank in (0, w - 1)
            most = {
                "root": (w - 1 if rank == w - 1 else 1, "(W-1) N for the root, N for the others"),
                "direct": (w - 1, "(W-1) N"),
                "chain": (1 if ends else 2, "2N, N at the ends"),
            }[strategy]
            log.sent_at_most(most[0] * n * 4, most[1])
            log.sent_at_least(most[0] * n * 4, most[1])
            expect_partners(log, strategy, w)
        messages = sum(log.select("send").messages for log in results.logs)
        want = w * (w - 1) if strategy == "direct" else 2 * (w - 1)
        if messages != want:
            fail(
                f"{w} ranks sent {messages} messages in all, expected {want}",
                cause="too-many-messages" if messages > want else "too-few-messages",
            )


def expect_partners(log, strategy: str, w: int) -> None:
    """Every message is between the two ranks that the strategy links."""
    partners = {
        "root": [w - 1] if log.rank < w - 1 else [r for r in range(w) if r != w - 1],
        "direct": [r for r in range(w) if r != log.rank],
        "chain": [r for r in (log.rank - 1, log.rank + 1) if 0 <= r < w],
    }[strategy]
    for op in ("send", "recv"):
        events = log.select(op).events
        for event in events:
            if event.peer not in partners:
                cause = "not-a-chain" if strategy == "chain" else "wrong-partner"
                text = f"rank {log.rank}: {event}, but its partners are the ranks {partners}"
                fail(text, cause=cause, rank=log.rank, line=event.line)
        expect_equal(
            sorted(event.peer for event in events),
            partners,
            what=f"partners of its messages ({op}), {strategy} over {w} ranks",
            rank=log.rank,
            cause="wrong-partner",
        )


def check_refusals(run, impl, name: str, *, with_root: bool = False) -> None:
    calls = [("mean", torch.int64), ("mean", torch.bool), ("mean", torch.complex64)]
    calls += [("mean", torch.uint8), ("mean", torch.int8), ("median", torch.float32)]

    def body(ctx):
        reduce = getattr(impl, name)
        alone = group_of([ctx.world_size - 1])
        last = ctx.rank == ctx.world_size - 1
        out = [refusal(reduce, torch.ones(3, dtype=dtype), op) for op, dtype in calls]
        if with_root:
            roots = (ctx.world_size, -1)
            out += [refusal(reduce, torch.ones(3), "sum", root) for root in roots]
            out.append(refusal(reduce, torch.ones(3), "sum", 1, alone) if last else "")
        return out

    what = [f"the {op} of {dtype}" for op, dtype in calls]
    what += ["root = W", "root = -1", "root 1 in a group of one rank"] if with_root else []
    for world_size in (1, 2):  # alone first: what is accepted can't also go wrong on the way
        expect_refused(run(body, world_size), [f"{name}: {each}" for each in what])


@exercise("1.7", "virtual gloo cuda", asserts="combines in-place")
def test_root_combines_all_operators(impl, run, seed, cases):
    """Sum, mean, max, min and product, for any length and world size."""
    check_values(run, impl, seed, ("all_reduce_root",), cases(3, 1, 2, 4, 5))


@exercise(
    "1.7",
    "virtual gloo cuda",
    nccl=True,
    asserts="through-the-root point-to-point cost resources nccl-order",
)
def test_root_uses_point_to_point_only(impl, run, seed, cases):
    """2(W-1) messages, point-to-point only, to and from the root, every handle waited for."""
    check_cost(run, impl, "all_reduce_root", "root", seed, cases(4, 2, 3, 5))


@exercise(
    "1.7",
    "virtual",
    asserts="combines through-the-root own-dtype any-tensor nothing-else in-place "
    "group dtype layout parameters life alone",
)
def test_root_on_any_tensor_and_group(impl, run, seed):
    """Any dtype and strides, in place, in a group out of order; memory beside the tensor stays."""
    check_any_tensor(run, impl, seed, "all_reduce_root", root=1)


@exercise("1.7", "virtual", asserts="rank-order")
def test_root_combines_in_rank_order(impl, run, seed):
    """All ranks get the same bits: those of a loop in the order of the group's ranks."""
    check_bits(run, impl, seed, "all_reduce_root", root=2)


@exercise("1.7", "virtual", asserts="bad-arguments refusals")
def test_root_refuses_bad_arguments(impl, run):
    """Unknown operators, integer means and foreign roots raise before anything is sent."""
    check_refusals(run, impl, "all_reduce_root", with_root=True)


@exercise("1.8", "virtual gloo cuda", asserts="combines")
def test_direct_and_chain_combine(impl, run, seed, cases):
    """Both strategies: all operators, any length and world size."""
    names = "all_reduce_direct", "all_reduce_chain"
    check_values(run, impl, seed, names, cases(3, 1, 2, 4, 5))


@exercise("1.8", "virtual gloo cuda", nccl=True, asserts="direct-cost cost resources nccl-order")
def test_direct_costs_what_the_formula_says(impl, run, seed, cases):
    """W(W-1) messages, (W-1)N bytes sent by each rank."""
    check_cost(run, impl, "all_reduce_direct", "direct", seed, cases(4, 2, 3, 5))


@exercise("1.8", "virtual gloo cuda", nccl=True, asserts="chain-cost cost resources nccl-order")
def test_chain_costs_what_the_formula_says(impl, run, seed, cases):
    """2(W-1) messages, neighbours only, at most 2N bytes sent by each rank."""
    check_cost(run, impl, "all_reduce_chain", "chain", seed, cases(4, 2, 3, 5))


@exercise("1.8", "virtual", asserts="rank-order")
def test_direct_is_equal_to_the_last_bit(impl, run, seed):
    """Sums in rank order on every rank: the same bits everywhere, and those of a plain loop."""
    check_bits(run, impl, seed, "all_reduce_direct")


@exercise("1.8", "virtual", asserts="rank-order")
def test_chain_is_equal_to_the_last_bit(impl, run, seed):
    """Rank r combines the result of ranks 0 … r-1 with its own value: the bits of a plain loop."""
    check_bits(run, impl, seed, "all_reduce_chain")


@exercise(
    "1.8", "virtual", asserts="same-contract group dtype layout parameters life alone refusals"
)
def test_direct_and_chain_on_views_and_groups(impl, run, seed):
    """Any dtype, strides and sub-groups, and bad arguments, for both strategies."""
    for name in ("all_reduce_direct", "all_reduce_chain"):
        check_refusals(run, impl, name)
        check_any_tensor(run, impl, seed, name)


@exercise("1.8", asserts="table one-rank unknown-strategy refusals")
def test_cost_table(impl, run):
    """communication_cost gives messages, bytes and steps of every strategy."""
    sizes = (1, 2, 3, 4, 8, 256)

    def body(ctx):
        out = {}
        for strategy in ("root", "direct", "chain", "ring"):
            for w in sizes:
                c = impl.communication_cost(strategy, w, 12_000)
                out[f"{strategy} {w}"] = [c.messages, c.total_bytes, c.max_bytes_per_rank, c.steps]
        out["unknown"] = [refusal(impl.communication_cost, "star", w, 8) for w in (1, 4)]
        out["strategies"] = sorted(impl.STRATEGIES)
        return out

    got = run(body, 1, process_group=False)[0]
    n = 12_000
    for w in sizes:
        k = w - 1
        table = {
            "root": [2 * k, 2 * k * n, k * n, 2 * k],
            "direct": [w * k, w * k * n, k * n, k],
            "chain": [2 * k, 2 * k * n, min(k, 2) * n, 2 * k],
            "ring": [2 * w * k, 2 * k * n, 2 * k / w * n, 2 * k],
        }
        for strategy, want in table.items():
            for name, a, b in zip(
                ("messages", "total_bytes", "max_bytes_per_rank", "steps"),
                got[f"{strategy} {w}"],
                want,
                strict=True,
            ):
                if abs(a - b) > 1e-6 * max(1, b):
                    fail(f"{strategy}, {w} ranks: {name} expected {b}, got {a}", cause="formula")
    expect_refusals(got["unknown"], ["an unknown strategy"] * 2, cause="not-refused")
    expect_equal(got["strategies"], sorted(STRATEGY), what="the names in STRATEGIES")


@trace("1.7")
@trace("1.8", measures="waiting")
def trace_strategies(impl):
    """Root, direct and chain one after the other on 4 MB."""

    def body(ctx):
        for name in ("all_reduce_root", "all_reduce_direct", "all_reduce_chain"):
            with ctx.region(name):
                getattr(impl, name)(torch.ones(1_000_000))
            dist.barrier()

    return body


def test_every_pair_of_operators_differs():
    """The inputs tell the operators apart: no operator's result equals another's."""
    rows = values_of(3, 3, 6, torch.float32)
    results = sorted((OPS[op](rows)[0].item(), op) for op in OPS)
    rtol, _ = tolerance(torch.float32, 3)
    assert all(b - a > 100 * rtol for (a, _), (b, _) in pairwise(results))
