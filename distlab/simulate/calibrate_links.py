"""Messages and collectives between ranks of this machine, timed.

A row has the kind of operation, the number of ranks, its bytes and its seconds. All ranks start a
run together; a collective takes as long as on its slowest rank. A message is half of its way there
and back, and arrives in new memory, as programs receive it. Medians over rounds, then over fresh
starts of the ranks: placement and sockets stay the same for a whole start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks import RankContext, run_ranks

Row = dict[str, Any]
Run = Callable[[], object]

SIZES = tuple(4**power for power in range(2, 13))  # 16 B … 16 MiB
ROUNDS, STARTS, WARM_UP = 25, 3, 2
LARGE = 2**20  # bytes of a size that has a third of the rounds
OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
LIMIT = 300.0  # seconds of a start


def rows(ranks: int, device: str, quick: bool, sizes: Sequence[int]) -> Iterator[Row]:
    """Measure collectives of so many ranks, and messages if there are two."""
    rounds, starts = (5, 1) if quick else (ROUNDS, STARTS)
    options = {"device": device, "ledger": False, "timeout": LIMIT}
    found = [run_ranks(_body, ranks, sizes, rounds, **options)[0] for _ in range(starts)]
    for same in zip(*found, strict=True):
        yield same[0] | {"seconds": statistics.median(row["seconds"] for row in same)}


def _body(ctx: RankContext, sizes: Sequence[int], rounds: int) -> list[Row]:
    found = []
    for nbytes in sizes:
        repeats = rounds if nbytes < LARGE else max(3, rounds // 3)
        for op, run in _calls(ctx, nbytes).items():
            taken = _timed(ctx, run, repeats)
            found.append({"kind": op, "ranks": ctx.world_size, "bytes": nbytes, "seconds": taken})
    for name, start in _starts(ctx).items():
        row = {"kind": name, "ranks": ctx.world_size, "bytes": 4}
        found.append(row | {"seconds": _issued(start, rounds)})
    return found


def _calls(ctx: RankContext, nbytes: int) -> dict[str, Run]:
    """Operations whose larger side has ``nbytes``, by name."""
    count = max(ctx.world_size, nbytes // 4)
    whole = torch.ones(count - count % ctx.world_size, device=ctx.device)
    part = torch.ones(len(whole) // ctx.world_size, device=ctx.device)
    calls: dict[str, Run] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    if ctx.world_size == 2:
        calls |= {
            "send": lambda: _there_and_back(ctx.rank, whole),
            "exchange": lambda: _exchange(1 - ctx.rank, whole),
        }
    return calls


def _there_and_back(rank: int, tensor: Tensor) -> None:
    """Rank 0 sends, rank 1 answers; into new memory."""
    arrived = torch.empty_like(tensor)
    if rank == 0:
        dist.send(tensor, 1)
        dist.recv(arrived, 1)
    else:
        dist.recv(arrived, 0)
        dist.send(tensor, 0)


def _exchange(peer: int, tensor: Tensor) -> None:
    """Both ranks send and receive at once, in a batch."""
    arrived = torch.empty_like(tensor)
    batch = [dist.P2POp(dist.irecv, arrived, peer), dist.P2POp(dist.isend, tensor, peer)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def _timed(ctx: RankContext, run: Run, repeats: int) -> float:
    seconds = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        begun = _now(ctx.device)
        run()
        seconds.append(_now(ctx.device) - begun)
    slowest = torch.tensor(seconds[WARM_UP:], dtype=torch.float64, device=ctx.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    each: list[float] = slowest.tolist()
    return statistics.median(each)


def _starts(ctx: RankContext) -> dict[str, Callable[[], list[Any]]]:
    """Functions that start operations and return their handles: a collective, two messages."""
    tensor, arrived = torch.ones(1, device=ctx.device), torch.ones(1, device=ctx.device)
    peer = 1 - ctx.rank
    starts: dict[str, Callable[[], list[Any]]] = {
        "issue": lambda: [dist.all_reduce(tensor, async_op=True)]
    }
    if ctx.world_size == 2:
        starts["post"] = lambda: [dist.irecv(arrived, peer), dist.isend(tensor, peer)]
    return starts


def _issued(start: Callable[[], list[Any]], repeats: int) -> float:
    """Seconds of the program to start one operation, for which it does not wait yet."""
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
