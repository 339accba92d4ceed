"""Checks of exercise 4.13: joining again, through a store that is full of old keys."""

from __future__ import annotations

import threading
import time
from itertools import chain

import torch
import torch.distributed as dist

from distlab.grading import exercise, expect_equal, fail, trace
from tests.phase4.job_runs import folder_of
from tests.phase4.small_training import first_draws, next_draws, seed_streams

ATTEMPTS = (  # ranks, and which one of them does not come
    (4, 3),
    (2, None),
    (3, None),
    (3, 2),
    (3, 0),
    (3, None),
)
CALLS = 3  # in a row, of ranks that call again at once


@exercise(
    "4.13",
    "gloo",
    asserts="fresh name old-keys again-at-once times-out unique alone life refusals resources "
    "randomness",
)
def test_a_store_full_of_old_keys(impl, run, seed):
    """After attempts that ended anyhow, or called again at once: one empty store, for all ranks."""
    joined = joins(impl, run, patience=5.0)
    if any("gave up" in [*found, *chain(*at_once)] for found, at_once, _ in joined):
        joined = joins(impl, run, patience=12.0)  # a busy machine may be slow once
    expect_joined([found for found, *_ in joined])
    for slow, (_, at_once, _) in enumerate(joined):
        expect_joined_at_once(at_once, slow)
    for rank, (*_, (alone, streams, threads)) in enumerate(joined):
        [[old, first], [again, second]] = alone
        found = [old, again, first == second]
        what = "one rank joins twice: keys there before, each time, and whether the names are equal"
        expect_equal(found, [False] * 3, what=what, rank=rank, cause="old-keys")
        expect_equal(streams, [], what="random streams that it moved", rank=rank, cause="streams")
        expect_equal(threads, 0, what="threads that are left", rank=rank, cause="left-over")


def joins(impl, run, patience: float) -> list:
    """For each rank the findings of four attempts to join, and of calls at once."""

    def body(ctx, folder):
        store = dist.FileStore(str(folder / "store"), 3)
        found, draws, threads = [], [], threading.active_count()
        for attempt, (world_size, absent) in enumerate(ATTEMPTS):
            if (folder / "gave up").exists():
                found.append("gave up")  # nothing new to learn
            elif absent is not None:
                try:
                    seed_streams(0)  # as a program does that wants equal weights on all ranks
                    if ctx.rank != absent:
                        impl.fresh_store(store, ctx.rank, world_size, 0.3)
                    found.append("a store")
                except TimeoutError:
                    found.append("TimeoutError")
            elif ctx.rank < world_size:
                rank_0_is_late = world_size == 3
                time.sleep(0.2 if (ctx.rank == 0) == rank_0_is_late else 0.0)
                seed_streams(0)
                try:
                    fresh, name = impl.fresh_store(store, ctx.rank, world_size, patience)
                    empty = not fresh.check(["address"])
                    draws.append(next_draws(torch.device("cpu")))
                    if ctx.rank == 0:
                        fresh.set("address", name)
                    found.append((name, fresh.get("address").decode(), empty))
                except TimeoutError:
                    found.append("gave up")
                    (folder / "gave up").touch()
            else:
                found.append(None)
            (folder / f"{attempt} {ctx.rank}").touch()
            while len(list(folder.glob(f"{attempt} *"))) < 3:
                time.sleep(0.01)
        at_once = [] if "gave up" in found else joins_at_once(impl, patience, slow=ctx.rank)
        alone = dist.FileStore(str(folder / f"store of {ctx.rank}"), 1)
        mine = []
        for _ in range(2):
            fresh, name = impl.fresh_store(alone, 0, 1, patience)
            mine.append([fresh.check(["address"]), name])
            fresh.set("address", name)
        streams = [stream for d in draws for stream in d if d[stream] != untouched[stream]]
        return found, at_once, [mine, streams, threading.active_count() - threads]

    untouched = first_draws(0)
    return folder_of(run, body, 3, timeout=10 + 4 * patience)


class SlowStore(dist.HashStore):
    """A store to which one thread, of the name "slow", has a slow line."""

    def wait_for_line(self) -> None:
        if threading.current_thread().name == "slow":
            time.sleep(0.01)

    def check(self, keys):
        self.wait_for_line()
        return super().check(keys)

    def get(self, key):
        self.wait_for_line()
        return super().get(key)

    def set(self, key, value):
        self.wait_for_line()
        return super().set(key, value)


def joins_at_once(impl, patience: float, slow: int) -> list[list[str]]:
    """The names that three threads get, as ranks, which call again as soon as they have joined."""
    store, names = SlowStore(), [[], [], []]

    def calls(rank: int) -> None:
        for _ in range(CALLS):
            if any("gave up" in found for found in names):
                return
            try:
                names[rank].append(impl.fresh_store(store, rank, 3, patience)[1])
            except TimeoutError:
                names[rank].append("gave up")

    called = ["slow" if rank == slow else None for rank in range(3)]
    ranks = [threading.Thread(target=calls, args=[r], name=n) for r, n in enumerate(called)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return names


def expect_joined_at_once(names: list[list[str]], slow: int) -> None:
    what = f"three ranks call {CALLS} times, again at once, while rank {slow} is slower"
    for rank, found in enumerate(names):
        if "gave up" in found:
            message = f"{what}: rank {rank} waits in vain in call {len(found)}; is a key of one"
            message += " call taken for one of another?"
            fail(message, cause="next-call", rank=rank)
        expect_equal(found, names[0], what=f"{what}: names", rank=rank, cause="next-call")
    expect_equal(len({*names[0]}), CALLS, what=f"{what}: different names", cause="next-call")


def expect_joined(results: list) -> None:
    names = set()
    for attempt, (world_size, absent) in enumerate(ATTEMPTS):
        ranks = [found[attempt] for found in results][:world_size]
        what = f"attempt {attempt} of {world_size} ranks"
        if absent is not None and "gave up" not in ranks:
            for rank in {0, 1, 2} - {absent}:
                said = f"{what}, rank {absent} does not come: the outcome on the other ranks"
                expect_equal(ranks[rank], "TimeoutError", what=said, rank=rank, cause="no-timeout")
            continue
        if "gave up" in ranks:
            rank = ranks.index("gave up")
            fail(f"{what}: rank {rank} waits in vain for the others", cause="old-keys", rank=rank)
        for rank, (name, address, empty) in enumerate(ranks):
            expect_equal(name, ranks[0][0], what=f"{what}: its name", rank=rank, cause="old-keys")
            expect_equal(
                address, ranks[0][0], what=f"{what}: rank 0's key", rank=rank, cause="old-keys"
            )
            if not isinstance(name, str) or not name:
                fail(f"{what}: the name is {name!r}, no text", cause="type", rank=rank)
            if rank == 0:  # the others may find its key
                expect_equal(empty, True, what=f"{what}: the store is empty", cause="old-keys")
        names.add(ranks[0][0])
    expect_equal(len(names), 3, what="names of three attempts", cause="old-keys")


@trace("4.13")
def trace_joining(impl):
    """Three attempts to join through one store; in each of them another rank is late."""

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
