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
from distlab.observe.memory import PeakMemory
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
OTHERS = [0, 2]  # another one, which does something else at the same time
N = 1001  # elements: no world size from 2 to 6 divides it
WIRE = {torch.float32: 4, torch.bfloat16: 2, torch.int64: 8}  # bytes per element
Input = tuple[str, int, torch.dtype]
Wanted = Callable[[Tensor, int, str], tuple[slice, Tensor]]
Call = Callable[[Tensor, str, Any], object]  # (tensor, op, group)
# (shape, strides, first element) of a tensor in a storage of 24 elements
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "columns 1 … 3 of a transposed view": ((3, 4), (1, 6), 1),
    "every third element of a row": ((7,), (3,), 2),
    "a channels-last tensor": ((1, 3, 2, 2), (12, 1, 6, 3), 5),
    "a tensor of 0 dimensions": ((), (), 7),
    "an empty transposed view": ((0, 3), (1, 6), 4),
    "the middle of a row": ((5,), (1,), 11),
}
ON_RANK_1 = {  # the same shape in another order of strides
    "columns 1 … 3 of a transposed view": ((3, 4), (5, 1), 2),
    "a channels-last tensor": ((1, 3, 2, 2), (12, 4, 2, 1), 4),
}


def layout_on(rank: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(shape, strides, offset) of the layout on that rank: ranks may have different strides."""
    return ON_RANK_1.get(name, LAYOUTS[name]) if rank == 1 else LAYOUTS[name]


def values_of(seed: int, world_size: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(world_size, n): one row per rank, all negative, so that a zero would win a maximum.

    Integers of 64 bits are too large for a float64.
    """
    generator = torch.Generator().manual_seed(seed * 31 + n)
    if dtype.is_floating_point:
        rows = -torch.rand(world_size, n, generator=generator, dtype=torch.float64) - 0.5
        return rows.to(dtype)
    rows = -torch.randint(1, 50, (world_size, n), generator=generator)
    return (rows - (2**58 if dtype == torch.int64 else 0)).to(dtype)


def inputs_of(world_size: int) -> list[Input]:
    """All operators on lengths 0, 1, W-1, W, W+1 and a prime; also other dtypes."""
    w = world_size
    lengths = sorted({0, 1, w - 1, w, w + 1, 23}, reverse=True)  # the telling ones first
    cases = [(op, n, torch.float32) for op in OPS for n in lengths]
    cases += [("sum", 7, torch.int64), ("max", 7, torch.int64), ("max", 11, torch.float16)]
    return [*cases, ("mean", 9, torch.float64), ("sum", 9, torch.bfloat16)]


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
    """For every world size, for every input: the ranks' tensors after ``call(tensor, op)``.

    They are in the storages that were there before. Those of float64 require gradients.
    """

    def body(ctx: RankContext) -> list[Tensor]:
        dist.barrier()  # NCCL without ``device_id``: all ranks join before some of them talk
        out = []
        for op, n, dtype in inputs_of(ctx.world_size):
            mine = values_of(seed, ctx.world_size, n, dtype)[ctx.rank].to(ctx.device)
            before = mine.detach()
            call(mine.requires_grad_(dtype == torch.float64), op)
            out.append(before.cpu())
        return out

    return [
        (w, list(zip(inputs_of(w), map(list, zip(*results, strict=True)), strict=True)))
        for w, results in zip(worlds, run.worlds(body, worlds), strict=True)
    ]


def distinct(ctx: RankContext, dtype: torch.dtype = torch.float32) -> Tensor:
    """N elements that differ from rank to rank."""
    return torch.arange(1, N + 1, dtype=dtype, device=ctx.device) * (ctx.rank + 2)


def on_the_wire(
    run: Any, worlds: Sequence[int], call: Callable[[RankContext, Tensor], object]
) -> list[tuple[int, int, Log]]:
    """(world size, bytes per element, log) of each rank, for each dtype of ``WIRE``.

    ``call(ctx, tensor)`` runs on N elements in eight orders of the ranks.
    """

    def body(ctx: RankContext) -> None:
        dist.barrier()  # as in ``reduced``
        for dtype in WIRE:
            with ctx.region(str(dtype)):
                call(ctx, distinct(ctx, dtype))

    return [
        (w, size, log.select(region=str(dtype)))
        for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True)
        for log in results.logs
        for dtype, size in WIRE.items()
    ]


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


def check_bytes(log: Log, elements: int, messages: int, formula: str, size: int = 4) -> None:
    """Point-to-point only; exactly so many elements of ``size`` bytes, in so many messages."""
    log.forbid(*FORBIDDEN, why=WHY)
    log.all_waited()
    log.sent_at_most(size * elements, formula)
    log.sent_at_least(size * elements, formula)
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
            f"{seconds * 1e6:.2f} µs (α = {ALPHA * 1e6:g} µs per message): messages wait for each "
            "other, share a link with others, or are too many",
            cause="too-slow",
        )


def check_layouts(run: Any, seed: int, call: Call, wanted: Wanted) -> None:
    """Each of ``LAYOUTS`` is worked on in place, its surroundings stay, a leaf stays a leaf.

    ``wanted(rows, rank, op)``: which part of the flat tensor must hold what afterwards.
    """
    ops = [list(OPS)[k % len(OPS)] for k in range(len(LAYOUTS))]

    def body(ctx: RankContext) -> list[tuple[Tensor, bool]]:
        found = []
        for k, (name, op) in enumerate(zip(LAYOUTS, ops, strict=True)):
            base = values_of(seed + k, 3, 24)[ctx.rank].to(ctx.device, copy=True)
            tensor = base.as_strided(*layout_on(ctx.rank, name)).requires_grad_(k % 2 == 0)
            call(tensor, op, None)
            found.append((base.cpu(), tensor.is_leaf and tensor.requires_grad == (k % 2 == 0)))
        return found

    results = run(body, 3)
    for k, (name, op) in enumerate(zip(LAYOUTS, ops, strict=True)):
        rows = [row.clone() for row in values_of(seed + k, 3, 24)]  # offsets count from its start
        parts = [row.as_strided(*layout_on(r, name)).flatten() for r, row in enumerate(rows)]
        flat = torch.stack(parts)
        for rank, found in enumerate(results):
            layout = layout_on(rank, name)
            inside = torch.arange(24).as_strided(*layout).flatten()
            beside = sorted({*range(24)} - {*inside.tolist()})
            base, leaf = found[k]
            part, want = wanted(flat, rank, op)
            got = base.as_strided(*layout).flatten()[part]
            expect_close(got, want, what=f"{op} of {name}", rank=rank, before=flat[rank][part])
            same = torch.equal(base[beside], rows[rank][beside])
            what = f"{name}: the elements beside it kept"
            expect_equal(same, True, what=what, rank=rank, cause="surroundings")
            what = f"{name}: still a leaf, with the requires_grad that it had"
            expect_equal(leaf, True, what=what, rank=rank, cause="leaf")


def check_subgroup(run: Any, seed: int, call: Call, wanted: Wanted) -> Any:
    """Two groups work at the same time, each on its own; who is no member of one is refused.

    A refused rank sends nothing, its tensor stays, and its next call works.
    """
    lengths = {tuple(MEMBERS): 7, tuple(OTHERS): 5}

    def body(ctx: RankContext) -> list[Any]:
        groups = [dist.new_group(MEMBERS[::-1]), dist.new_group(OTHERS)]
        own, other = groups if ctx.rank in MEMBERS else groups[::-1]
        n = lengths[tuple(MEMBERS if ctx.rank in MEMBERS else OTHERS)]
        mine = values_of(seed, 5, n)[ctx.rank].to(ctx.device)
        found: list[Any] = []
        with ctx.region("refused"):
            found.append(refusal(call, mine, "sum", other))
        for op in OPS:
            tensor = mine.clone()
            with ctx.region("group"):
                call(tensor, op, own)
            found.append(tensor.cpu())
        return found

    results = run(body, 5)
    for rank, (refused, *tensors) in enumerate(results):
        members = MEMBERS if rank in MEMBERS else OTHERS
        expect_refusals([refused], ["a call by a rank that is not in the group"], rank=rank)
        sent = results.logs[rank].select(region="refused").events
        if sent:
            text = f"rank {rank} is not in the group and issued {sent[0]}"
            fail(text, cause="late-check", rank=rank, line=sent[0].line)
        rows = values_of(seed, 5, lengths[tuple(members)])[members]
        for op, got in zip(OPS, tensors, strict=True):
            part, want = wanted(rows, members.index(rank), op)
            text = f"{op} in the group of global ranks {members}"
            sums = [row[part] for row in rows] if op != "max" else []
            expect_close(got[part], want, what=text, rank=rank, contributions=sums)
    return results


def check_refusals(run: Any, wrong: dict[str, Callable[[], object]]) -> None:
    """Every one of these calls raises ValueError on every rank before anything is sent."""

    def body(ctx: RankContext) -> list[str]:
        return [refusal(call) for call in wrong.values()]

    for world_size in (1, 2):  # alone first: what is accepted can't also go wrong on the way
        expect_refused(run(body, world_size), [*wrong])


def bad_arguments(call: Callable[[Tensor, str], None]) -> dict[str, Callable[[], object]]:
    """What every reduction refuses."""
    return {
        "the mean of 64-bit integers": lambda: call(torch.ones(3, dtype=torch.int64), "mean"),
        "the mean of bytes": lambda: call(torch.ones(3, dtype=torch.uint8), "mean"),
        "the mean of an empty list of integers": lambda: call(
            torch.ones(0, dtype=torch.int32), "mean"
        ),
        "an unknown operator": lambda: call(torch.ones(3), "median"),
        "an unknown operator on an empty tensor": lambda: call(torch.ones(0), "Sum"),
    }


def check_memory(
    run: Any, world_size: int, n: int, call: Callable[[Tensor], object], most: int, what: str
) -> None:
    """``call`` on n float32 elements allocates ``most`` bytes at one time; nothing stays alive."""

    def body(ctx: RankContext) -> tuple[int, int]:
        tensor = torch.ones(n)
        with PeakMemory() as memory:
            call(tensor)
        return memory.peak, memory.current

    for rank, (peak, left) in enumerate(run(body, world_size)):
        if peak > most + 1000:
            fail(
                f"rank {rank} allocated {peak:,} bytes beside the tensor of {4 * n:,}: {what}, "
                f"{most:,} bytes, is enough",
                cause="too-much-memory",
                rank=rank,
            )
        if left:
            text = f"{left:,} bytes are still alive on rank {rank} after the call"
            fail(text, cause="memory-kept", rank=rank)


def check_not_finite(run: Any, call: Callable[[Tensor, str], object], wanted: Wanted) -> None:
    """What is nan or infinite on one rank alone is so in the result of every operator."""
    rows = torch.zeros(3, 6)
    rows[1, 0::2], rows[2, 1::2] = float("nan"), float("inf")

    def body(ctx: RankContext) -> list[Tensor]:
        tensors = [rows[ctx.rank].clone() for _ in OPS]
        for op, tensor in zip(OPS, tensors, strict=True):
            call(tensor, op)
        return tensors

    for rank, found in enumerate(run(body, 3)):
        for op, got in zip(OPS, found, strict=True):
            part, want = wanted(rows, rank, op)
            expect_close(got[part], want, what=f"{op} of nan and infinity", rank=rank)


def whole(rows: Tensor, rank: int, op: str) -> tuple[slice, Tensor]:
    """The reduction, in the whole tensor."""
    return slice(None), OPS[op](rows)
