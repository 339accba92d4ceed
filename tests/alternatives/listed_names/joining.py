# for: 4.13
"""Written differently: rank 0 calls again and again until all have answered to one name."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from given.launched import Meeting


def fresh_store(
    store: dist.Store, rank: int, world_size: int, timeout: float = 300.0
) -> tuple[dist.Store, str]:
    end = time.monotonic() + timeout
    me = uuid.uuid4().hex
    name = ""
    store.set(f"hello/{rank}", me)
    while time.monotonic() < end:
        if rank == 0:
            hellos = _written(store, "hello", world_size)
            if all(hellos):
                store.set("call", json.dumps(hellos))
                store.set("answer/0", me)
                if all(answer == me for answer in _written(store, "answer", world_size)):
                    store.set(f"complete/{me}", "yes")
                    return (dist.PrefixStore(me, store), me)
        elif store.check(["call"]):
            hellos = json.loads(store.get("call"))
            if name and store.check([f"complete/{name}"]):
                return (dist.PrefixStore(name, store), name)
            if len(hellos) == world_size and hellos[rank] == me:
                name = hellos[0]
                store.set(f"answer/{rank}", name)
        time.sleep(0.02)
    raise TimeoutError(f"not all of {world_size} ranks have come within {timeout} s")


def _written(store: dist.Store, key: str, world_size: int) -> list[str]:
    keys = [f"{key}/{rank}" for rank in range(world_size)]
    return [store.get(k).decode() if store.check([k]) else "" for k in keys]


def join(timeout: timedelta = timedelta(minutes=10)) -> Meeting:
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    fresh, name = fresh_store(store, rank, world_size, timeout.total_seconds())
    return Meeting(fresh, rank, world_size, name)
