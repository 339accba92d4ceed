"""Everything private that the virtual cluster needs from torch, in one place.

Tested on the oldest and the newest version of torch that the course supports. What is used:

- ``torch._C._distributed_c10d._set_thread_isolation_mode``: groups are looked up per thread;
- ``distributed_c10d._world``: the module's table of groups, swapped when the baton changes hands;
- ``torch._C._DisableTorchDispatch``: the transport's own copies are no work of the rank;
- the prefix of the keys by which ``new_group`` counts the ranks that have come;
- ``distributed_c10d._new_process_group_helper``: called on every rank that makes a group or is told
  that it is not in it, but not on a rank outside with ``use_local_synchronization``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

NAME = "virtual"


def register(create: Callable[[Any, Any], dist.ProcessGroup]) -> None:
    """Make ``init_process_group("virtual")`` call ``create(options, _)`` in this process."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    devices = ["cpu", "meta", "cuda"]  # groups are split for a device that the backend knows
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=devices)


def stand_in(making: Callable[[str, bool, Any], str], name: Callable[[Any], str | None]) -> None:
    """Stand in for other backends.

    ``making(backend, is_part, device)`` is called wherever torch would split the world's
    communicator for a new group, and returns the backend to use; ``name(group)`` is what a group's
    backend is called.
    """
    helper, named = c10d._new_process_group_helper, c10d.get_backend
    of_objects = c10d._get_object_coll_device

    @functools.wraps(helper)
    def create(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **more: Any) -> Any:
        chosen = making(str(backend), bool(ranks), more.get("device_id"))
        return helper(size, rank, ranks, dist.Backend(chosen), *args, **more)

    @functools.wraps(named)
    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        known = named(group)
        return name(group or dist.group.WORLD) or known

    def device_of_objects(group: dist.ProcessGroup | None = None) -> str:
        return "cuda" if get_backend(group) == "nccl" else of_objects(group)

    c10d._get_object_coll_device = device_of_objects
    c10d._new_process_group_helper = create
    c10d.get_backend = dist.get_backend = get_backend


class GroupTable:
    """A rank's own ``distributed_c10d._world``: the same names, each with a fresh value."""

    pg_map: dict[Any, Any]
    default_pg: dist.ProcessGroup | None

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
    c10d._world = table


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


cpu_time = time.thread_time  # the real one
