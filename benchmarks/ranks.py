"""A check with W ranks: the toolkit's forked ranks against ``torch.multiprocessing.spawn``.

Both start W processes, make a gloo process group, all-reduce one tensor and bring every rank's
result back. The toolkit forks from a process that has imported torch; spawn starts new Pythons,
each of which imports it.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distlab.ranks import RankContext, run_ranks
from given.process_group import process_group

from .common import in_turn, milliseconds, seconds
from .pairs import Case, Paired, Start

NUMEL = 1000


def forked(world_size: int) -> None:
    """The toolkit's way."""

    def body(ctx: RankContext) -> torch.Tensor:
        tensor = torch.full((NUMEL,), float(ctx.rank))
        dist.all_reduce(tensor)
        return tensor

    _check(list(run_ranks(body, world_size)), world_size)


def _spawned_rank(rank: int, world_size: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    where = {"init_method": f"file://{store}", "rank": rank, "world_size": world_size}
    with process_group("gloo", **where):
        tensor = torch.full((NUMEL,), float(rank))
        dist.all_reduce(tensor)
        results.put((rank, tensor.tolist()))


def spawned(world_size: int) -> None:
    """PyTorch's way."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        store = str(Path(folder) / "store")
        ranks = mp.spawn(_spawned_rank, (world_size, store, results), world_size, join=False)
        found = dict(results.get() for _ in range(world_size))  # before joining: pipes fill up
        while not ranks.join():
            pass
    _check([torch.tensor(found[rank]) for rank in range(world_size)], world_size)


def _check(tensors: list[torch.Tensor], world_size: int) -> None:
    want = torch.full((NUMEL,), float(sum(range(world_size))))
    assert all(torch.equal(tensor, want) for tensor in tensors)


CONTESTANTS = {"distlab": forked, "torch.multiprocessing.spawn": spawned}


def start(world_size: int, rounds: int, number: int) -> Start:
    """Some checks, each of which starts its ranks anew."""
    forked(world_size)  # warm: modules that load on first use are there
    calls = {name: partial(seconds, partial(way, world_size)) for name, way in CONTESTANTS.items()}
    taken = in_turn(calls, rounds, number)
    return Start(milliseconds(taken))


PAIRED = Paired(
    title="A check: start ranks, make a group, one all-reduce, collect results",
    labels=("ranks",),
    unit="ms",
    pairs=[("distlab", "torch.multiprocessing.spawn")],
    cases=lambda: [Case((str(w),), partial(start, w)) for w in (2, 4, 8)],
    rounds=1,
    note="The toolkit forks ranks from a process that has imported torch. spawn starts new "
    "Pythons, each of which imports it.",
)
