"""What the checks of all-reduces share: inputs, and expectations of values, messages and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
)
from distlab.hardware.clusters import Link
from distlab.observe.log import Log
from distlab.ranks import RankContext
from distlab.virtual import load_cluster

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.double().mean(0).to(x.dtype),
    "max": lambda x: x.amax(0),
}
COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all")
FORBIDDEN = (*COLLECTIVES, "gather", "scatter")
WHY = "build it from point-to-point messages"
ALPHA, BETA = 10e-6, 1e-9
NODE = dataclasses.replace(  # equal links everywhere
    load_cluster("dgx-h100"),
    gpus_per_node=64,
    nics_per_node=64,
    inside=Link(alpha=ALPHA, bandwidth=1 / BETA),
)
MEMBERS = [1, 3, 4]  # a sub-group: global ranks
N = 1001  # elements: no world size from 2 to 6 divides it
Input = tuple[str, int, torch.dtype]
Wanted = Callable[[Tensor, int], tuple[slice, Tensor]]


def values_of(
    seed: int, world_size: int, n: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(world_size, n): one row per rank, all negative, so that a zero would win a maximum."""
    generator = torch.Generator().manual_seed(seed * 31 + n)
    if dtype.is_floating_point:
        return -torch.rand(world_size, n, generator=generator, dtype=dtype) - 0.5
    return -torch.randint(1, 50, (world_size, n), generator=generator, dtype=dtype)


def inputs_of(world_size: int) -> list[Input]:
    """All operators on lengths 0, 1, W-1, W, W+1 and a prime; also integers and float64."""
    w = world_size
    lengths = sorted({0, 1, w - 1, w, w + 1, 23}, reverse=True)  # the telling ones first
    cases = [(op, n, torch.float32) for op in OPS for n in lengths]
    return [*cases, ("sum", 7, torch.int64), ("max", 7, torch.int64), ("mean", 9, torch.float64)]


def cut(tensor: Tensor, world_size: int) -> tuple[Tensor, ...]:
    """The chunks of a flat tensor."""
    return tensor.tensor_split(world_size)


def chunk_sizes(n: int, world_size: int) -> list[int]:
    """The lengths of its chunks."""
    return [chunk.numel() for chunk in cut(torch.empty(n), world_size)]


def named(case: Input, world_size: int) -> str:
    """The case in words."""
    op, n, dtype = case
    return f"{op} of {n} {str(dtype)[6:]} elements over {world_size} ranks"


def reduced(
    run: Any, seed: int, worlds: Sequence[int], call: Callable[[Tensor, str], None]
) -> list[tuple[int, list[tuple[Input, list[Tensor]]]]]:
    """For every world size, for every input: the ranks' tensors after ``call(tensor, op)``."""

    def body(ctx: RankContext) -> list[Tensor]:
        out = []
        for op, n, dtype in inputs_of(ctx.world_size):
            mine = values_of(seed, ctx.world_size, n, dtype)[ctx.rank].to(ctx.device)
            call(mine, op)
            out.append(mine.cpu())
        return out

    return [
        (w, list(zip(inputs_of(w), map(list, zip(*results, strict=True)), strict=True)))
        for w, results in zip(worlds, run.worlds(body, worlds), strict=True)
    ]


def distinct(ctx: RankContext) -> Tensor:
    """N elements that differ from rank to rank."""
    return torch.arange(1, N + 1, dtype=torch.float32, device=ctx.device) * (ctx.rank + 2)


def warm_and_drawn(ctx: RankContext) -> Iterator[None]:
    """Twice round: once to warm up, once for the picture; the ranks begin together."""
    for warm in (True, False):
        dist.barrier()
        if not warm:
            ctx.start_picture()
        yield


def rest_kept(case: Case) -> Diagnosis | None:
    """The last elements were left out: the length does not divide by the number of chunks."""
    got, before = case.got, case.before
    wrong = [k for k, pair in enumerate(zip(got, case.want, strict=True)) if not case.near(*pair)]
    if before is None or not wrong or not wrong[0] or torch.equal(got, before):
        return None
    if not torch.equal(got[wrong[0] :], before[wrong[0] :]):
        return None
    text = f"from element {wrong[0]} on it still holds the input: N need not divide by W"
    return Diagnosis("rest-kept", text)


def check_all_reduce(
    run: Any, seed: int, worlds: Sequence[int], call: Callable[[Tensor, str], None]
) -> None:
    """``call(tensor, op)`` leaves the reduction on every rank, with the same bits."""
    for w, cases in reduced(run, seed, worlds, call):
        for case, tensors in cases:
            rows, text = values_of(seed, w, *case[1:]), named(case, w)
            for rank, got in enumerate(tensors):
                expect_close(
                    got,
                    OPS[case[0]](rows),
                    what=text,
                    rank=rank,
                    before=rows[rank] if w > 1 else None,
                    contributions=list(rows) if case[0] != "max" else [],
                    chunks=w,
                    rules=[rest_kept],
                )
                if not torch.equal(got, tensors[0]):
                    fail(
                        f"{text}: ranks 0 and {rank} differ in the last bits, replicas would drift "
                        "apart: every element must be combined on one rank only",
                        cause="order-of-summation",
                        rank=rank,
                    )


def check_bytes(log: Log, elements: int, messages: int, formula: str) -> None:
    """Point-to-point only; exactly so many float32 elements, in at most so many messages."""
    log.forbid(*FORBIDDEN, why=WHY)
    log.all_waited()
    log.sent_at_most(4 * elements, formula)
    log.sent_at_least(4 * elements, formula)
    if log.messages > messages:
        fail(
            f"rank {log.rank} sent {log.messages} messages, expected {messages}",
            cause="too-many-messages",
            rank=log.rank,
        )


def check_neighbours(log: Log) -> None:
    """In a ring a rank sends to its right and receives from its left neighbour."""
    log.forbid(*FORBIDDEN, why=WHY)
    for event in log.events:
        step = 1 if event.op == "send" else -1
        place = event.group.index(log.rank) + step
        if event.peer != event.group[place % len(event.group)]:
            fail(
                f"rank {log.rank}: {event}, but in a ring a rank sends to its right neighbour and "
                "receives from its left one only",
                cause="not-a-ring",
                rank=log.rank,
                line=event.line,
            )


def check_time(
    run: Any, body: Callable[..., Any], world_size: int, seconds: float, formula: str
) -> None:
    """``body`` takes so much virtual time at most on ranks with equal links of ALPHA and BETA."""
    took = run.simulate(body, world_size, cluster=NODE).clock
    if took > seconds * (1 + 1e-9):
        fail(
            f"{world_size} ranks need {took * 1e6:.2f} µs, expected {formula} = "
            f"{seconds * 1e6:.2f} µs (α = {ALPHA * 1e6:g} µs per message): messages that could "
            "travel at the same time wait for each other, or there are too many",
            cause="too-slow",
        )


def check_strided(run: Any, seed: int, call: Callable[[Tensor], None], wanted: Wanted) -> None:
    """Three columns of a transposed view are worked on in place, their surroundings stay.

    ``wanted(rows, rank)``: which part of the flat view must hold what afterwards.
    """

    def body(ctx: RankContext) -> Tensor:
        base = values_of(seed, 3, 24)[ctx.rank].view(4, 6).to(ctx.device)
        call(base.t()[1:4])
        return base.cpu()

    rows = values_of(seed, 3, 24).view(3, 4, 6)
    flat = torch.stack([row.t()[1:4].flatten() for row in rows])
    for rank, got in enumerate(run(body, 3)):
        part, want = wanted(flat, rank)
        text = "columns 1 … 3 of a transposed view"
        result = got.t()[1:4].flatten()[part]
        expect_close(result, want, what=text, rank=rank, before=flat[rank][part])
        same = torch.equal(got[:, [0, 4, 5]], rows[rank][:, [0, 4, 5]])
        expect_equal(same, True, what="the elements beside the view kept", rank=rank)


def check_subgroup(
    run: Any, seed: int, call: Callable[[Tensor, Any], None], wanted: Wanted
) -> None:
    """Works with the group's ranks; who is no member is refused and sends nothing."""

    def body(ctx: RankContext) -> Tensor | str:
        group = dist.new_group(MEMBERS)
        mine = values_of(seed, 5, 7)[ctx.rank].to(ctx.device)
        if ctx.rank in MEMBERS:
            call(mine, group)
            return mine.cpu()
        return refusal(call, mine, group)

    rows = values_of(seed, 5, 7)[MEMBERS]
    for rank, got in enumerate(run(body, 5)):
        if rank not in MEMBERS:
            expect_refusals([got], [("a call by a rank that is not in the group", ())], rank=rank)
            continue
        part, want = wanted(rows, MEMBERS.index(rank))
        expect_close(got[part], want, what=f"in the group of global ranks {MEMBERS}", rank=rank)


def check_refusals(run: Any, wrong: dict[str, Callable[[], object]]) -> None:
    """Every one of these calls raises ValueError on every rank before anything is sent."""

    def body(ctx: RankContext) -> list[str]:
        return [refusal(call) for call in wrong.values()]

    for world_size in (1, 2):  # alone first: what is accepted can't also go wrong on the way
        expect_refused(run(body, world_size), [(text, ()) for text in wrong])


def bad_arguments(call: Callable[[Tensor, str], None]) -> dict[str, Callable[[], object]]:
    """What every reduction refuses."""
    return {
        "the mean of integers": lambda: call(torch.ones(3, dtype=torch.int64), "mean"),
        "an unknown operator": lambda: call(torch.ones(3), "median"),
    }


def whole(rows: Tensor, rank: int) -> tuple[slice, Tensor]:
    """The sum, in the whole tensor."""
    return slice(None), rows.sum(0)
