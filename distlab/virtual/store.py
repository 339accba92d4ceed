"""The store of a run, shared by all virtual ranks."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .scheduler import Scheduler, VirtualRank


class VirtualStore(dist.Store):
    """The store of a run, shared by all ranks. A rank that waits for a key hands the baton on."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.data: dict[str, bytes] = {}
        self.waiting: list[tuple[list[str], VirtualRank]] = []
        self.limit = timedelta(minutes=5)
        self.counting = scheduler.runs[-1]  # for those that don't run as well

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key and wake the ranks that wait for it."""
        self.data[key] = value.encode() if isinstance(value, str) else bytes(value)
        woken = [rank for keys, rank in self.waiting if all(k in self.data for k in keys)]
        self.waiting = [(k, rank) for k, rank in self.waiting if rank not in woken]
        for rank in woken:
            self.scheduler.make_ready(rank)

    def get(self, key: str) -> bytes:
        """The value of a key, once there is one."""
        self.wait([key])
        return self.data[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set."""
        if not all(key in self.data for key in keys):
            rank = self.scheduler.me
            self.waiting.append((keys, rank))
            self.scheduler.sleep(rank, keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        if key.startswith(c10d.STORE_BASED_BARRIER_PREFIX) and self.scheduler.me is self.counting:
            amount *= 1 + len(self.scheduler.ranks) - len(self.scheduler.runs)
        value = int(self.data.get(key, b"0")) + amount
        self.set(key, str(value))
        return value

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self.data for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set ``desired`` if the value is ``expected`` (or there is none); returns the value."""
        now = self.data.get(key)
        if now == expected.encode() or (now is None and not expected):
            self.set(key, desired)
        return self.data.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self.data.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys are set."""
        return len(self.data)

    def set_timeout(self, timeout: timedelta) -> None:
        """Kept, not used: a wait that cannot end is reported at once."""
        self.limit = timeout

    @property
    def timeout(self) -> timedelta:
        """The value given to ``set_timeout``."""
        return self.limit
