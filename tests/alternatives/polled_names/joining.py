# for: 4.13
"""Written differently: rank 0 calls when names have changed, and everybody polls."""

from __future__ import annotations

import json
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from given.launched import Meeting


def fresh_store(
    store: dist.Store, rank: int, world_size: int, timeout: float = 300.0
) -> tuple[dist.Store, str]:
    start = time.monotonic()
    own = secrets.token_hex(16)
    store.set(f"hello/{rank}", own)
    said: list[str] = []
    answered = ""
    while True:
        name = ""
        if rank == 0:
            names = [own, *_written(store, "hello", world_size)[1:]]
            if names != said:
                store.set("call", json.dumps(names))
                said = names
            if all(names) and set(_written(store, "answer", world_size)[1:]) <= {own}:
                store.set(f"complete/{own}", own)
                name = own
        elif store.check(["call"]):
            names = json.loads(store.get("call").decode())
            if answered and store.check([f"complete/{answered}"]):
                name = answered
            elif len(names) == world_size and names[rank] == own and (answered != names[0]):
                answered = names[0]
                store.set(f"answer/{rank}", answered)
        if name:
            return (dist.PrefixStore(name, store), name)
        if time.monotonic() - start > timeout:
            raise TimeoutError(f"rank {rank} has waited {timeout} s for {world_size} ranks")
        time.sleep(0.01)


def _written(store: dist.Store, key: str, world_size: int) -> list[str]:
    keys = [f"{key}/{rank}" for rank in range(world_size)]
    return [store.get(k).decode() if store.check([k]) else "" for k in keys]


def join(timeout: timedelta = timedelta(minutes=10)) -> Meeting:
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    fresh, name = fresh_store(store, rank, world_size, timeout.total_seconds())
    return Meeting(fresh, rank, world_size, name)
