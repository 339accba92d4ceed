"""Everything private that the virtual cluster needs from torch, in one place.

Tested on the oldest and the newest version of torch that the course supports. What is used:

- ``torch._C._distributed_c10d._set_thread_isolation_mode``: groups are looked up per thread;
- ``distributed_c10d._world``: the module's table of groups, exchanged when the baton changes hands;
- ``torch._C._DisableTorchDispatch``: the transport's own copies are no work of the rank;
- the prefix of the keys by which ``new_group`` counts the ranks that have come.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from .scheduler import Scheduler, VirtualRank

NAME = "virtual"


def register(create: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Make ``init_process_group("virtual")`` call ``create(options, _)`` in this process."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "meta"])


class GroupTable:
    """A rank's own ``distributed_c10d._world``: the same names, each with a fresh value."""

    def __init__(self) -> None:
        for name, value in vars(c10d._World).items():
            if isinstance(value, property) and name != "pg_config_info":
                now = getattr(_original, name)
                fresh = type(now)() if isinstance(now, (dict, list, int)) else None
                setattr(self, name, fresh)

    pg_config_info = c10d._World.pg_config_info


_original = c10d._world


def use_groups(table: GroupTable) -> None:
    """Let ``torch.distributed`` in this process see the groups of ``table``."""
    c10d._world = table  # type: ignore[assignment]


def join_world(rank: int, world_size: int, store: dist.Store) -> None:
    """Make this thread's default group."""
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world_size)


def in_backward() -> bool:
    """Whether autograd is running backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(call: Callable[[], object]) -> None:
    """Let autograd call this when the running backward is done, before what is queued later."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Unseen:
    """A context without dispatch modes: the transport moves data, the rank does not compute."""

    def __enter__(self) -> None:
        self.guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self.guard


class VirtualStore(dist.Store):
    """The store of a run, shared by all ranks; who waits for a key hands the baton on."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.data: dict[str, bytes] = {}
        self.waiting: list[tuple[list[str], VirtualRank]] = []
        self.limit = timedelta(minutes=5)
        self.counting = scheduler.runs[-1]  # for those that don't run as well

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key and wake who waits for it."""
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
        """What ``set_timeout`` was given."""
        return self.limit
