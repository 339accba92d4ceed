"""Join a process group, and leave it so that nothing of it is left: for every program with ranks.

    with process_group("gloo"):
        train()

A gloo group has threads. ``gloo_tcp_loop`` moves bytes. Two ``pt_gloo_runloop`` run the collectives
and then release the tensors, for which they need the interpreter's lock. They end when the group is
*destructed*, that is when nothing refers to it any more. ``dist.destroy_process_group()`` only
drops torch's own references. If another reference is left, the threads live on. A thread that still
needs the lock when the interpreter shuts down ends the process with
``terminate called without an active exception`` and SIGABRT, after all work was done
(pytorch/pytorch, issue 190489 and pull request 179291). So:

- *Before joining*, while ``WORLD`` is still None, the module that stores ``group.WORLD`` in default
  arguments is imported: ``torch.distributed.nn.functional`` (torch 2.8 to 2.15). Building the first
  optimizer imports it, too, but that is after joining.
- *At the end of the block* torch's references are dropped, then cycles and default arguments of
  functions that were defined later. If a variable still holds a group, one line names it.
- *After an exception* leaving neither blocks nor says anything: the exception is the message.

Invariant: after the block no gloo thread is left, as long as no variable holds a group. See it with
``cat /proc/self/task/*/comm`` (Linux; torch 2.8 does not name its threads).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = 2.0  # seconds for the threads of a group whose rank has failed: they may wait for ever


@contextlib.contextmanager
def process_group(backend: str, **settings: Any) -> Iterator[None]:
    """Be a member of the default group inside the block; ``settings`` as in ``join_group``."""
    join_group(backend, **settings)
    with leaving_group():
        yield


def join_group(backend: str, **settings: Any) -> None:
    """``dist.init_process_group``, in the right order; enter ``leaving_group`` after it.

    ``settings``: ``store``, ``rank``, ``world_size``, ``timeout``, ``device_id`` and so on, as
    there; without them torchrun's environment counts.
    """
    importlib.import_module("torch.distributed.nn.functional")  # while group.WORLD is None
    dist.init_process_group(backend, **settings)


@contextlib.contextmanager
def leaving_group() -> Iterator[None]:
    """Leave all groups at the block's end, also if its body left them itself.

    Make groups, models and handles in a function that returns before the block ends: a variable
    that still refers to a group keeps its threads, and one line on standard error says so.
    """
    try:
        yield
    except BaseException:
        _give_up()
        raise
    _leave()


def _groups() -> list[dist.ProcessGroup]:
    """The default group and all others, as far as this rank is a member."""
    return list(distributed_c10d._world.pg_map)


def _leave() -> None:
    """Destroy all groups, drop their unseen references, and name the others."""
    if not dist.is_initialized():
        return
    groups = [weakref.ref(group) for group in _groups()]
    dist.destroy_process_group()
    gc.collect()  # wrapped models, handles and their hooks refer to each other
    if any(group() is not None for group in groups):
        _forget_defaults([group() for group in groups])
    for held in filter(None, (group() for group in groups)):
        print(
            f"process_group: {_holder(held)} still refers to a group after leaving it, so its "
            "threads live on and may abort the process at its end; make groups in a function that "
            "returns before the block ends",
            file=sys.stderr,
            flush=True,
        )


def _give_up() -> None:
    """Leave after an exception, whatever the other ranks do.

    An operation may be under way in which the others will never take part. To destruct a group is
    to wait for it, so a thread does that, and the rank does not wait long for the thread. Groups
    that the exception's frames hold are never destructed: the end of the process would wait there.
    """
    if not dist.is_initialized():
        return
    groups = _groups()
    with contextlib.suppress(Exception):
        distributed_c10d._abort_process_group()
    for index in range(len(groups)):
        if sys.getrefcount(groups[index]) > 2:  # the list's, and the argument's
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups[index]))
    last = threading.Thread(target=groups.clear, name="leave group", daemon=True)
    last.start()
    last.join(PATIENCE)


def _forget_defaults(groups: list[dist.ProcessGroup | None]) -> None:
    """Functions that were defined after joining may have a group as a default argument. It becomes
    None, which means the default group, as everywhere in torch."""
    held = {id(group) for group in groups if group is not None}
    for function in gc.get_objects():
        if type(function) is not FunctionType:
            continue
        defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
        if any(id(value) in held for value in defaults):
            function.__defaults__ = tuple(None if id(v) in held else v for v in defaults)
        for name, value in by_name.items():
            if id(value) in held:
                by_name[name] = None


def _holder(group: dist.ProcessGroup) -> str:
    """The variable (by its name) or the object (by its type) that refers to ``group``."""
    frame = sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name != "<module>" and frame.f_globals is not globals():
            for name, value in frame.f_locals.items():
                if _refers(value, group):
                    return f"`{name}` in {frame.f_code.co_name}()"
    for module in list(sys.modules.values()):
        for name, value in list(_attributes(module).items()):
            if not name.startswith("__") and _refers(value, group):
                return f"`{name}` in {module.__name__}"
    for owner in gc.get_objects():
        if type(owner).__module__ != "builtins" and _refers(owner, group):
            return f"an object of type {type(owner).__name__}"
    return "something"


def _refers(value: object, group: dist.ProcessGroup) -> bool:
    """Whether ``value`` is the group, or has it as an item or attribute."""
    parts: Iterable[object] = (value, *_attributes(value).values())
    if type(value) in (list, tuple, set):
        parts = value  # type: ignore[assignment]
    elif type(value) is dict:
        parts = value.values()
    return any(part is group for part in parts)


def _attributes(value: object) -> dict[str, Any]:
    """The attributes in its ``__dict__``, whatever it does when it is asked for one."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
