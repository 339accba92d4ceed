"""A check with W ranks: the toolkit's forked ranks against ``torch.multiprocessing.spawn``.

Both start W processes, make a gloo process group, all-reduce one tensor and bring every rank's
result back. The toolkit forks from a process that has imported torch; spawn starts new Pythons,
each of which imports it.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from distlab.ranks import RankContext, run_ranks
from given.process_group import process_group

from .common import Table, in_turn, seconds, spread

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


def measure(repeats: int = 7) -> Table:
    """Seconds of a check, and spawn's time divided by the toolkit's."""
    rows = []
    for world_size in (2, 4, 8):
        forked(world_size)  # warm: modules that load on first use are there
        times = in_turn(
            {
                "forked": partial(seconds, partial(forked, world_size)),
                "spawned": partial(seconds, partial(spawned, world_size)),
            },
            repeats,
        )
        ratio = statistics.median(times["spawned"]) / statistics.median(times["forked"])
        rows.append(
            [str(world_size), spread(times["forked"], 3), spread(times["spawned"]), f"{ratio:.0f}×"]
        )
    return Table(
        "A check: start ranks, make a group, one all-reduce, collect results",
        ["ranks", "distlab, s", "torch.multiprocessing.spawn, s", "ratio of medians"],
        rows,
        f"Median (least … most) of {repeats} runs, taken in turn. The target is a ratio of 20 or "
        "more.",
    )


if __name__ == "__main__":
    print(measure().markdown())
