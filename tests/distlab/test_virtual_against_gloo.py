"""The same random program on virtual ranks and on gloo: equal values, 200 seeds."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.virtual import run_virtual

WORLD = 3
PROGRAMS = 200
AT_ONCE = 25  # programs in one run of real ranks
REDUCTIONS = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
DTYPES = [torch.float32, torch.float64, torch.int64]
OPERATORS = [
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "messages",
    "batch", "objects", "barrier",
]  # fmt: skip


def gloo_lacks_alltoall() -> bool:
    """Old versions of torch: lists of tensors can't be exchanged over gloo."""

    def body(ctx: RankContext) -> None:
        dist.all_to_all([torch.empty(1)], [torch.ones(1)])

    try:
        run_ranks(body, 1)
    except RankFailure as failure:
        return "not support alltoall" in failure.message
    return False


def gloo_only_sums() -> bool:
    """Old versions of torch: reduce-scatter over gloo sums, whatever it is asked for."""

    def body(ctx: RankContext) -> float:
        out = torch.empty(1)
        dist.reduce_scatter_tensor(out, torch.ones(2), dist.ReduceOp.MAX)
        return out.item()

    return run_ranks(body, 2)[0] != 1.0


if gloo_lacks_alltoall():
    OPERATORS.remove("all_to_all")
SCATTERED = REDUCTIONS[:1] if gloo_only_sums() else REDUCTIONS


def values(r: random.Random, rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: sums and products of them are exact in any order."""
    generator = torch.Generator().manual_seed(r.randrange(2**30) * 10 + rank)
    return torch.randint(-3, 4, (n,), generator=generator).to(dtype)


def step(r: random.Random, name: str, rank: int, ranks: list[int], group) -> list[torch.Tensor]:
    """One operator with random arguments; returns what this rank has afterwards."""
    w, n = len(ranks), r.choice([1, 2, 5, 16])
    dtype, op, root = r.choice(DTYPES), r.choice(REDUCTIONS), r.choice(ranks)
    if name.startswith("reduce_scatter"):
        op = r.choice(SCATTERED)
    place, later = ranks.index(rank), r.random() < 0.5
    mine = values(r, rank, n * w, dtype)
    chunks = list(mine.clone().chunk(w))
    options = {"group": group, "async_op": later}
    out = [mine]
    work = None
    if name == "all_reduce":
        work = dist.all_reduce(mine, op, **options)
    elif name == "broadcast":
        work = dist.broadcast(mine, root, **options)
    elif name == "reduce":
        work = dist.reduce(mine, root, op, **options)
        out = [mine] if rank == root else []
    elif name == "all_gather":
        out = [torch.empty_like(mine) for _ in range(w)]
        work = dist.all_gather(out, mine, **options)
    elif name == "all_gather_into_tensor":
        out = [torch.empty(n * w * w, dtype=dtype)]
        work = dist.all_gather_into_tensor(out[0], mine, **options)
    elif name == "reduce_scatter":
        out = [torch.empty_like(chunks[0])]
        work = dist.reduce_scatter(out[0], chunks, op, **options)
    elif name == "reduce_scatter_tensor":
        out = [torch.empty_like(chunks[0])]
        work = dist.reduce_scatter_tensor(out[0], mine, op, **options)
    elif name == "all_to_all":
        out = [torch.empty_like(c) for c in chunks]
        work = dist.all_to_all(out, chunks, **options)
    elif name == "all_to_all_single":
        table = [[r.randrange(4) for _ in ranks] for _ in ranks]
        out = [torch.empty(sum(row[place] for row in table), dtype=dtype)]
        given = values(r, rank, sum(table[place]), dtype)
        received = [row[place] for row in table]
        work = dist.all_to_all_single(out[0], given, received, table[place], **options)
    elif name == "gather":
        out = [torch.empty_like(mine) for _ in range(w)] if rank == root else []
        work = dist.gather(mine, out if rank == root else None, root, **options)
    elif name == "scatter":
        given = [values(r, rank, n, dtype) for _ in range(w)]
        out = [torch.empty(n, dtype=dtype)]
        work = dist.scatter(out[0], given if rank == root else None, root, **options)
    elif name in ("messages", "batch"):
        right, left = ranks[(place + 1) % w], ranks[(place - 1) % w]
        out = [torch.empty_like(mine)]
        if w == 1:
            return []
        if name == "messages":
            handle = dist.isend(mine, right, group=group, tag=n)
            dist.recv(out[0], left, group=group, tag=n)
            handle.wait()
        else:
            ops = [(dist.isend, mine, right), (dist.irecv, out[0], left)]
            batch = [dist.P2POp(f, t, peer, group) for f, t, peer in ops]
            for handle in dist.batch_isend_irecv(batch):
                handle.wait()
    elif name == "objects":
        got: list = [None] * w
        dist.all_gather_object(got, {"rank": rank, "text": "x" * n}, group=group)
        root_said = [got if rank == root else None]
        dist.broadcast_object_list(root_said, root, group=group)
        assert root_said[0] == got == [{"rank": k, "text": "x" * n} for k in ranks]
        out = []
    else:
        work = dist.barrier(**options)
        out = []
    if work is not None:
        work.wait()
    return out


def program(seed: int, rank: int, groups: list) -> list[torch.Tensor]:
    """Six random operators, each on a random group that this rank may be in."""
    shared, out = random.Random(seed), []
    for _ in range(6):
        ranks, group = shared.choice(groups)
        name, inner = shared.choice(OPERATORS), shared.randrange(2**30)
        if rank in ranks:
            out += step(random.Random(inner), name, rank, ranks, group)
    return [t.clone() for t in out]


def make_groups() -> list:
    every = [list(range(WORLD)), [0, 2], [1, 2]]
    return [(ranks, dist.new_group(ranks)) for ranks in every]


def body(ctx: RankContext, seeds: list[int]) -> list[list[torch.Tensor]]:
    groups = make_groups()
    return [program(seed, ctx.rank, groups) for seed in seeds]


@pytest.mark.parametrize("begin", range(0, PROGRAMS, AT_ONCE))
def test_values_equal_gloos(begin: int) -> None:
    seeds = list(range(begin, begin + AT_ONCE))
    real = run_ranks(body, WORLD, seeds, timeout=60)
    for order in (None, begin):
        virtual = run_virtual(body, WORLD, seeds, seed=order, timeout=60)
        for rank in range(WORLD):
            for seed, mine, theirs in zip(seeds, virtual[rank], real[rank], strict=True):
                assert len(mine) == len(theirs)
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.equal(a, b), f"program {seed}, rank {rank}: {a} and {b}"


def test_the_ledgers_agree() -> None:
    """Both tiers record the same operators with the same bytes."""
    seeds = list(range(12))
    real = run_ranks(body, WORLD, seeds, timeout=60)
    virtual = run_virtual(body, WORLD, seeds, timeout=60)
    for a, b in zip(virtual.logs, real.logs, strict=True):
        told = [[(e.op, e.peer, e.numel, e.sent, e.received) for e in log.events] for log in (a, b)]
        assert told[0] == told[1]


def test_the_programs_use_every_operator() -> None:
    used = set()
    for seed in range(PROGRAMS):
        shared = random.Random(seed)
        for _ in range(6):
            shared.choice(range(3))
            used.add(shared.choice(OPERATORS))
            shared.randrange(2**30)
    assert used == set(OPERATORS)


def test_a_message_from_anybody_names_its_sender() -> None:
    """In a group whose ranks are not numbered as the world's: recv returns the global rank."""

    def body(ctx: RankContext) -> int | None:
        group = dist.new_group([1, 2])
        if ctx.rank == 2:
            dist.send(torch.ones(2), group=group, group_dst=0)
        return dist.recv(torch.zeros(2), group=group) if ctx.rank == 1 else None

    assert list(run_virtual(body, WORLD)) == list(run_ranks(body, WORLD)) == [None, 2, None]
