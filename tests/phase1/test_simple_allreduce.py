"""Checks of exercises 1.7 and 1.8: all-reduce from point-to-point messages."""

from __future__ import annotations

from itertools import pairwise, product

import torch
import torch.distributed as dist

from distlab.explain.diagnosis import tolerance
from distlab.grading import exercise, expect_close, expect_equal, fail, trace

OPS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.double().mean(0).to(x.dtype),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "product": lambda x: x.prod(0),
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
FORBIDDEN = (*COLLECTIVES, "gather", "scatter")
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


def uneven_rows(seed: int) -> torch.Tensor:
    """(4, 4001): one row per rank, each ten times larger than the one before."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4001, generator=generator) * 10.0 ** torch.arange(-2, 2).view(4, 1)


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


def check_strided(run, impl, seed: int, name: str) -> None:
    def body(ctx):
        base = values_of(seed, 3, 24, torch.float32)[ctx.rank].view(4, 6).to(ctx.device)
        getattr(impl, name)(base.t()[1:4])  # a view: columns 1 … 3 of base
        return base.cpu()

    rows = values_of(seed, 3, 24, torch.float32).view(3, 4, 6)
    for rank, got in enumerate(run(body, 3)):
        want = rows[rank].clone()
        want[:, 1:4] = rows.sum(0)[:, 1:4]
        expect_close(
            got,
            want,
            what="the tensor behind a transposed view, columns 1 … 3 to be reduced",
            rank=rank,
            before=rows[rank],
        )


def check_subgroup(run, impl, seed: int, name: str, **kwargs) -> None:
    members = [1, 3]

    def body(ctx):
        group = dist.new_group(members)
        if ctx.rank not in members:
            return torch.zeros(0)
        mine = values_of(seed, 4, 6, torch.float32)[ctx.rank].to(ctx.device)
        getattr(impl, name)(mine, "mean", group=group, **kwargs)
        return mine.cpu()

    results = run(body, 4)
    rows = values_of(seed, 4, 6, torch.float32)[members]
    for rank in members:
        expect_close(
            results[rank],
            rows.mean(0),
            what="mean over the group of global ranks 1 and 3",
            rank=rank,
            contributions=list(rows),
        )


def check_cost(
    run, impl, name: str, strategy: str, seed: int, worlds: tuple[int, ...]
) -> None:
    """Bytes and messages by the ledger against the module's table, values included."""
    n = 1000

    def body(ctx):
        mine = values_of(seed, ctx.world_size, n, torch.float32)[ctx.rank].to(ctx.device)
        getattr(impl, name)(mine, "sum")
        return mine.cpu()

    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        total = values_of(seed, w, n, torch.float32).sum(0)
        for rank, (log, got) in enumerate(zip(results.logs, results, strict=True)):
            log.forbid(*FORBIDDEN, why=WHY)
            expect_close(got, total, what=f"sum over {w} ranks, with delays", rank=rank)
            log.all_waited()
            ends = rank in (0, w - 1)
            most = {
                "root": (w - 1 if rank == 0 else 1, "(W-1) N for the root, N for the others"),
                "direct": (w - 1, "(W-1) N"),
                "chain": (1 if ends else 2, "2N, N at the ends"),
            }[strategy]
            log.sent_at_most(most[0] * n * 4, most[1])
            log.sent_at_least(most[0] * n * 4, most[1])
        messages = sum(log.select("send").messages for log in results.logs)
        want = w * (w - 1) if strategy == "direct" else 2 * (w - 1)
        if messages != want:
            fail(
                f"{w} ranks sent {messages} messages in all, expected {want}",
                cause="too-many-messages" if messages > want else "too-few-messages",
            )


def check_refusals(run, impl, name: str, **wrong_root) -> None:
    def body(ctx):
        reduce, out = getattr(impl, name), []
        wrong = [(torch.ones(3, dtype=torch.int64), "mean", {}), (torch.ones(3), "median", {})]
        wrong += [(torch.ones(3), "sum", wrong_root)] if wrong_root else []
        for tensor, op, kwargs in wrong:
            try:
                reduce(tensor.to(ctx.device), op, **kwargs)
                out.append(f"accepted {op} of {tensor.dtype} {kwargs or ''}")
            except ValueError:
                out.append("")
        return out

    for world_size in (1, 2):  # alone first: what is accepted can't also go wrong on the way
        results = run(body, world_size)
        for rank, said in enumerate(results):
            for text in filter(None, said):
                message = f"expected a ValueError on every rank, but it {text}"
                fail(message, cause="accepted", rank=rank)
            if results.logs[rank].events:
                fail("something was sent before the arguments were checked", cause="late-check")


@exercise("1.7", "virtual gloo cuda")
def test_root_combines_all_operators(impl, run, seed, cases):
    """Sum, mean, max, min and product, for any length and world size."""
    check_values(run, impl, seed, ("all_reduce_root",), cases(3, 1, 2, 4, 5))


@exercise("1.7", "virtual gloo cuda")
def test_root_uses_point_to_point_only(impl, run, seed, cases):
    """2(W-1) messages, point-to-point only, every handle waited for."""
    check_cost(run, impl, "all_reduce_root", "root", seed, cases(4, 2, 3, 5))


@exercise("1.7", "virtual")
def test_root_writes_into_the_callers_view(impl, run, seed):
    """A strided view is reduced in place, its surroundings stay."""
    check_strided(run, impl, seed, "all_reduce_root")


@exercise("1.7", "virtual")
def test_root_in_a_subgroup(impl, run, seed):
    """Ranks are those of the group, not global ones; any root works."""
    check_subgroup(run, impl, seed, "all_reduce_root", root=1)


@exercise("1.7", "virtual")
def test_root_refuses_bad_arguments(impl, run):
    """Unknown operators, integer means and foreign roots raise before anything is sent."""
    check_refusals(run, impl, "all_reduce_root", root=2)


@exercise("1.8", "virtual gloo cuda")
def test_direct_and_chain_combine(impl, run, seed, cases):
    """Both strategies: all operators, any length and world size."""
    names = "all_reduce_direct", "all_reduce_chain"
    check_values(run, impl, seed, names, cases(3, 1, 2, 4, 5))


@exercise("1.8", "virtual gloo cuda")
def test_direct_costs_what_the_formula_says(impl, run, seed, cases):
    """W(W-1) messages, (W-1)N bytes sent by each rank."""
    check_cost(run, impl, "all_reduce_direct", "direct", seed, cases(4, 2, 3, 5))


@exercise("1.8", "virtual gloo cuda")
def test_chain_costs_what_the_formula_says(impl, run, seed, cases):
    """2(W-1) messages, neighbours only, at most 2N bytes sent by each rank."""
    check_cost(run, impl, "all_reduce_chain", "chain", seed, cases(4, 2, 3, 5))

    def body(ctx):
        impl.all_reduce_chain(torch.ones(5, device=ctx.device))

    for log in run(body, 4).logs:
        for event in log.events:
            if event.peer is None or abs(event.peer - log.rank) != 1:
                fail(
                    f"rank {log.rank}: {event}, but a chain links neighbours only",
                    cause="not-a-chain",
                    rank=log.rank,
                    line=event.line,
                )


@exercise("1.8", "virtual")
def test_direct_is_equal_to_the_last_bit(impl, run, seed):
    """Sums in rank order on every rank: the same bits everywhere, and those of a plain loop."""

    def body(ctx):
        mine = uneven_rows(seed)[ctx.rank].clone()
        impl.all_reduce_direct(mine)
        return mine

    results = run(body, 4, delays=True)
    rows = uneven_rows(seed)
    want = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    for rank, got in enumerate(results):
        results.logs[rank].all_waited()
        expect_close(got, want, what="sum of values of very different size", rank=rank)
        if not torch.equal(got, results[0]) or not torch.equal(got, want):
            differing = int((got != want).sum())
            fail(
                f"{differing} of {len(got)} elements differ in the last bits from the sum in rank "
                f"order on rank {rank}: replicas would drift apart",
                cause="order-of-summation",
                rank=rank,
            )


@exercise("1.8", "virtual")
def test_direct_and_chain_on_views_and_groups(impl, run, seed):
    """Strided views and sub-groups, for both strategies."""
    for name in ("all_reduce_direct", "all_reduce_chain"):
        check_strided(run, impl, seed, name)
        check_subgroup(run, impl, seed, name)
        check_refusals(run, impl, name)


@exercise("1.8")
def test_cost_table(impl, run):
    """communication_cost gives messages, bytes and steps of every strategy."""
    sizes = (1, 2, 3, 4, 8, 256)

    def body(ctx):
        out = {}
        for strategy in ("root", "direct", "chain", "ring"):
            for w in sizes:
                c = impl.communication_cost(strategy, w, 12_000)
                out[f"{strategy} {w}"] = [c.messages, c.total_bytes, c.max_bytes_per_rank, c.steps]
        try:
            impl.communication_cost("star", 4, 8)
            out["unknown"] = "accepted"
        except ValueError:
            out["unknown"] = ""
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
    expect_equal(got["unknown"], "", what="an unknown strategy", cause="not-refused")
    expect_equal(got["strategies"], sorted(STRATEGY), what="the names in STRATEGIES")


@trace("1.7")
@trace("1.8")
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
