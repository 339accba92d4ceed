"""Checks of exercise 4.13: joining again, through a store that is full of old keys."""

from __future__ import annotations

import time

import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase4.job_runs import folder_of


@exercise("4.13", "gloo")
def test_a_store_full_of_old_keys(impl, run, seed):
    """After attempts of 4, 2 and 3 ranks that ended anyhow: one empty store, the same for all."""
    joined = joins(impl, run, patience=5.0)
    if any("gave up" in attempt for attempt in zip(*(found[1:] for found in joined), strict=True)):
        joined = joins(impl, run, patience=12.0)  # a busy machine may be slow once
    expect_joined(joined)


def joins(impl, run, patience: float) -> list:
    """For each rank what it found in each of four attempts to join."""

    def body(ctx, folder):
        store = dist.FileStore(str(folder / "store"), 3)
        found = []
        for attempt, world_size in enumerate((4, 2, 3, 3)):
            if attempt == 0:  # rank 3 never came: the others have given up
                try:
                    impl.fresh_store(store, ctx.rank, 4, 0.3)
                    found.append("!a store without rank 3")
                except TimeoutError:
                    found.append("gave up")
            elif ctx.rank < world_size:
                rank_0_is_late = attempt == 3
                time.sleep(0.2 if (ctx.rank == 0) == rank_0_is_late else 0.0)
                try:
                    fresh, name = impl.fresh_store(store, ctx.rank, world_size, patience)
                    empty = not fresh.check(["address"])
                    if ctx.rank == 0:
                        fresh.set("address", name)
                    found.append((name, fresh.get("address").decode(), empty))
                except TimeoutError:
                    found.append("gave up")
            else:
                found.append(None)
            (folder / f"{attempt} {ctx.rank}").touch()
            while len(list(folder.glob(f"{attempt} *"))) < 3:
                time.sleep(0.01)
        return found

    return folder_of(run, body, 3, timeout=10 + 4 * patience)


def expect_joined(results: list) -> None:
    names = set()
    for attempt, world_size in enumerate((4, 2, 3, 3)):
        ranks = [found[attempt] for found in results][:world_size]
        if attempt == 0:
            expect_equal(
                ranks, ["gave up"] * 3, what="without rank 3, a TimeoutError", cause="no-timeout"
            )
            continue
        what = f"attempt {attempt} of {world_size} ranks"
        if "gave up" in ranks:
            rank = ranks.index("gave up")
            fail(f"{what}: rank {rank} waits in vain for the others", cause="old-keys", rank=rank)
        for rank, (name, address, empty) in enumerate(ranks):
            expect_equal(name, ranks[0][0], what=f"{what}: its name", rank=rank, cause="old-keys")
            expect_equal(
                address, ranks[0][0], what=f"{what}: rank 0's key", rank=rank, cause="old-keys"
            )
            if rank == 0:  # the others may find its key
                expect_equal(empty, True, what=f"{what}: the store is empty", cause="old-keys")
        names.add(ranks[0][0])
    expect_equal(len(names), 3, what="names of three attempts", cause="old-keys")


@trace("4.13")
def trace_joining(impl):
    """Three attempts to join through one store; in each another rank is late."""

    def body(ctx):
        store = dist.PrefixStore("agent", dist.distributed_c10d._get_default_store())
        dist.barrier()
        ctx.start_picture()
        for attempt in range(3):
            time.sleep(0.05 if ctx.rank == attempt else 0.0)
            with ctx.span("join", str(attempt)):
                impl.fresh_store(store, ctx.rank, ctx.world_size, 60.0)
            dist.barrier()  # as making the group does: nobody begins the next attempt alone

    return body
