# Names agreed on by gossip; for: 4.13

from __future__ import annotations

import hashlib
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from given.process_group import join_group


def fresh_store(store, rank, world_size, timeout=300.0):
    """Everybody tells whom it has seen; done when all have seen the same."""
    store.set(f"i/{rank}", uuid.uuid4().hex)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        keys = [f"i/{r}" for r in range(world_size)]
        if all(store.check([key]) for key in keys):
            names = b"".join(store.get(key) for key in keys)
            mine = hashlib.sha256(names).hexdigest().encode()
            store.set(f"saw/{rank}", mine)
            told = [f"saw/{r}" for r in range(world_size)]
            if all(store.check([key]) and store.get(key) == mine for key in told):
                return dist.PrefixStore(mine.decode(), store), mine.decode()
        time.sleep(0.01)
    raise TimeoutError(f"{world_size} ranks are not complete after {timeout} s")


def join(backend="gloo", timeout=timedelta(minutes=10)):
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store, name = fresh_store(store, rank, world_size, timeout.total_seconds())
    join_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return name
