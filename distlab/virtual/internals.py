"""All private parts of torch that the virtual cluster needs, in one place.

Tested on the oldest and the newest version of torch that the course supports. What is used:

- ``torch._C._distributed_c10d._set_thread_isolation_mode``: groups are looked up per thread;
- ``distributed_c10d._world``: the module's table of groups, swapped when the baton changes hands;
- ``torch._C._DisableTorchDispatch``: the transport's own copies are no work of the rank;
- the prefix of the keys by which ``new_group`` counts the ranks that have come;
- ``distributed_c10d._new_process_group_helper``: called on every rank that makes a group or learns
  that it is not in it, but not on a rank outside with ``use_local_synchronization``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
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


def stand_in(
    making: Callable[[str, Any, Any], str],
    name: Callable[[Any], str | None],
    environment: Callable[[], dict[str, Any]],
) -> None:
    """Stand in for other backends.

    ``making(backend, ranks, device)`` is called wherever torch would split the world's communicator
    for a new group, and returns the backend to use. ``name(group)`` is the name of a group's
    backend. ``environment()`` gives store, rank and world size as a launcher's environment would.
    """
    helper, named = c10d._new_process_group_helper, c10d.get_backend
    configured = c10d.get_backend_config
    of_objects, join = c10d._get_object_coll_device, c10d.init_process_group

    @functools.wraps(helper)
    def create(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **more: Any) -> Any:
        chosen = making(str(backend), ranks, more.get("device_id"))
        return helper(size, rank, ranks, dist.Backend(chosen), *args, **more)

    @functools.wraps(named)
    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        known = named(group)
        return name(group or dist.group.WORLD) or known

    @functools.wraps(configured)
    def get_backend_config(group: dist.ProcessGroup | None = None) -> str:
        known = name(group or dist.group.WORLD)
        return str(c10d.BackendConfig(dist.Backend(known))) if known else configured(group)

    def device_of_objects(group: dist.ProcessGroup | None = None) -> str:
        return "cuda" if get_backend(group) == "nccl" else of_objects(group)

    @functools.wraps(join)
    def init_process_group(*args: Any, **more: Any) -> None:
        join(*args, **more if "store" in more else more | environment() | {"init_method": None})

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[Any, ...]]:
        yield tuple(environment()[key] for key in ("store", "rank", "world_size"))

    c10d.rendezvous = dist.rendezvous = rendezvous
    c10d.init_process_group = dist.init_process_group = init_process_group
    c10d._get_object_coll_device = device_of_objects
    c10d._new_process_group_helper = create
    c10d.get_backend = dist.get_backend = get_backend
    c10d.get_backend_config = dist.get_backend_config = get_backend_config


def make_groups_without(absent: Callable[[Any], bool]) -> None:
    """Let nobody make a group of ranks of which none runs (``absent``): thousands take minutes."""
    group_of, groups_of = c10d.new_group, c10d.new_subgroups_by_enumeration

    @functools.wraps(group_of)
    def new_group(ranks: Any = None, *args: Any, **more: Any) -> Any:
        if ranks is not None and absent(ranks):
            return dist.GroupMember.NON_GROUP_MEMBER
        return group_of(ranks, *args, **more)

    @functools.wraps(groups_of)
    def new_subgroups_by_enumeration(lists: Any, *args: Any, **more: Any) -> Any:
        present = [ranks for ranks in lists if not absent(ranks)]
        if len(present) in (0, len(lists)):
            return groups_of(lists, *args, **more)
        mine, made = groups_of(present, *args, **more)
        outside = dist.GroupMember.NON_GROUP_MEMBER
        rest = iter(made)
        return mine, [outside if absent(ranks) else next(rest) for ranks in lists]

    c10d.new_group = dist.new_group = new_group
    c10d.new_subgroups_by_enumeration = new_subgroups_by_enumeration
    dist.new_subgroups_by_enumeration = new_subgroups_by_enumeration


def batch_at_once() -> None:
    """Let groups that support it issue batches of messages at once, also where torch (2.8) asks for
    the class ``ProcessGroup`` itself."""
    one_by_one = c10d.batch_isend_irecv

    @functools.wraps(one_by_one)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group if p2p_op_list else None
        group = group or dist.group.WORLD
        device = p2p_op_list[0].tensor.device if p2p_op_list else None
        if device is None or not group._get_backend(device).supports_coalescing:
            return one_by_one(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as batch:
            for each in p2p_op_list:
                end = "group_dst" if each.op is dist.isend else "group_src"
                peer = {end: each.group_peer}
                each.op(each.tensor, group=each.group, tag=each.tag, **peer)
        return batch.works

    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


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
    """Let autograd call this when the running backward is done, before callbacks
    that are queued later."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Unseen:
    """A context without dispatch modes: the transport moves data, and this is
    no compute of the rank."""

    def __enter__(self) -> None:
        self.guard = torch._C._DisableTorchDispatch()

    def __exit__(self, *_: object) -> None:
        del self.guard


cpu_time = time.thread_time  # the real one
