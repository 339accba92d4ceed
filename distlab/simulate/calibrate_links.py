"""Messages and collectives between ranks of this machine, timed.

A row has the kind of operation, the number of ranks, its bytes and its seconds. All ranks start a
run together; a collective takes as long as on its slowest rank. Messages are timed inside a small
program, which computes what it sends and uses what arrives: after a wait its operators find caches
cold, and take longer than one after another. The program's operators alone are taken off. A message
is half of the way there and back.

A message has the median over rounds and over fresh starts of the ranks, a collective the mean. Some
of gloo's collectives wait for a time slice of a few ms, the others do not. A program's time is a
sum of both, and so the mean predicts it. Messages have ranks of their own: fewer collectives wait
where messages come between them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import RankContext
from .starts import STARTS, starts

Row = dict[str, Any]
Run = Callable[[], object]

SIZES = tuple(4**power for power in range(2, 13))  # 16 B … 16 MiB
ROUNDS, WARM_UP = 25, 2
LARGE = 2**20  # bytes of a size that has a third of the rounds
OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
LIMIT = 300.0  # seconds of a start


def rows(ranks: int, device: str, quick: bool, sizes: Sequence[int]) -> Iterator[Row]:
    """Measure collectives of so many ranks, and messages if there are two."""
    rounds, count = (5, 1) if quick else (ROUNDS, STARTS)
    for body in [_collectives, *[_messages] * (ranks == 2)]:
        found = starts(body, ranks, sizes, rounds, count=count, device=device, timeout=LIMIT)
        for same in zip(*found, strict=True):
            seconds = [row["seconds"] for row in same]
            yield same[0] | {"seconds": _average(same[0]["kind"])(seconds)}


def alone(count: int) -> float:
    """Seconds of a collective of one rank: no byte moves, but threads wake each other."""
    return statistics.fmean(starts(_alone, 1, count=count, timeout=LIMIT))


def _alone(ctx: RankContext) -> float:
    tensor = torch.ones(4)
    return _timed(ctx, "all_reduce", lambda: dist.all_reduce(tensor), ROUNDS)


def _average(kind: str) -> Callable[[Sequence[float]], float]:
    return statistics.fmean if kind in OPERATORS else statistics.median


def _collectives(ctx: RankContext, sizes: Sequence[int], rounds: int) -> list[Row]:
    found = []
    for nbytes in sizes:
        whole = _tensor(ctx, nbytes)
        part = torch.ones(len(whole) // ctx.world_size, device=ctx.device)
        calls: dict[str, Run] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "broadcast": partial(dist.broadcast, whole, 0),
        }
        for op, run in calls.items():
            found.append(_row(ctx, op, nbytes, _timed(ctx, op, run, _repeats(nbytes, rounds))))
    one = torch.ones(1, device=ctx.device)
    taken = _issued(lambda: [dist.all_reduce(one, async_op=True)], rounds)
    return [*found, _row(ctx, "issue", 4, taken)]


def _messages(ctx: RankContext, sizes: Sequence[int], rounds: int) -> list[Row]:
    found, peer = [], 1 - ctx.rank
    for nbytes in sizes:
        whole, repeats = _tensor(ctx, nbytes), _repeats(nbytes, rounds)
        calls: dict[str, Callable[..., None]] = {
            "send": partial(_there_and_back, ctx.rank, whole),
            "exchange": partial(_exchange, peer, whole),
        }
        for op, run in calls.items():
            without = _timed(ctx, op, partial(run, False), repeats)
            found.append(_row(ctx, op, nbytes, _timed(ctx, op, run, repeats) - without))
    one, arrived = torch.ones(1, device=ctx.device), torch.ones(1, device=ctx.device)
    taken = _issued(lambda: [dist.irecv(arrived, peer), dist.isend(one, peer)], rounds)
    return [*found, _row(ctx, "post", 4, taken)]


def _row(ctx: RankContext, kind: str, nbytes: int, seconds: float) -> Row:
    return {"kind": kind, "ranks": ctx.world_size, "bytes": nbytes, "seconds": seconds}


def _tensor(ctx: RankContext, nbytes: int) -> Tensor:
    """About ``nbytes``, in equal parts for all ranks."""
    count = max(ctx.world_size, nbytes // 4)
    return torch.ones(count - count % ctx.world_size, device=ctx.device)


def _repeats(nbytes: int, rounds: int) -> int:
    return rounds if nbytes < LARGE else max(3, rounds // 3)


def _there_and_back(rank: int, tensor: Tensor, sends: bool = True) -> None:
    """Rank 0 sends, and rank 1 answers."""
    scaled, arrived = tensor * 2, torch.empty_like(tensor)
    if rank == 0:
        if sends:
            dist.send(scaled, 1)
            dist.recv(arrived, 1)
        arrived.neg_()
    else:
        if sends:
            dist.recv(arrived, 0)
        answer = arrived.neg()
        if sends:
            dist.send(answer, 0)


def _exchange(peer: int, tensor: Tensor, sends: bool = True) -> None:
    """Both ranks send and receive at once, in a batch."""
    scaled, arrived = tensor * 2, torch.empty_like(tensor)
    if sends:
        batch = [dist.P2POp(dist.irecv, arrived, peer), dist.P2POp(dist.isend, scaled, peer)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    arrived.neg_()


def _timed(ctx: RankContext, op: str, run: Run, repeats: int) -> float:
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        begun = _now(ctx.device)
        run()
        seconds.append(_now(ctx.device) - begun)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64, device=ctx.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return _average(op)(slowest.tolist())


def _issued(start: Callable[[], list[Any]], repeats: int) -> float:
    """Seconds of the program to start one operation, for which it does not wait yet; ``start``
    returns the handles of those that it started."""
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        begun = time.perf_counter()
        works = start()
        seconds.append((time.perf_counter() - begun) / len(works))
        for work in works:
            work.wait()
    return statistics.median(seconds[WARM_UP:])


def _now(device: torch.device) -> float:
    """The clock, read when the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
