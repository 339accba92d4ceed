"""Clocks, output and randomness for the ranks of one process: each rank gets its own.

The functions of ``time`` and ``random`` and the standard streams are replaced once in the child
process, and look up which rank's thread calls them. A thread of no rank gets the real ones.
"""

from __future__ import annotations

import io
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import torch

from ..observe.defaults import notice_changes
from ..observe.notices import Notice, listen, note
from . import internals, pretend_cuda
from .group import VirtualGroup
from .nccl_group import NcclGroup
from .pretend import Pretended
from .state import RankState
from .world import BOTH, World

KEPT_OUTPUT = 64 * 1024
READ_CLOCK = 5e-8  # virtual seconds for a look at the clock, so that a loop until some time ends

_world: World | None = None


def enter(world: World) -> None:
    """Make ``world`` the process's: clocks, output and the rest look up its ranks."""
    global _world
    if _world is None:
        internals.register(lambda options, _: entered().create_group(options))
        internals.stand_in(lambda *new: entered().making(*new), _backend_name, _environment)
        _own_clock()
        _own_random()
        _no_cuda()
        if world.rules.nccl:
            internals.batch_at_once()
            _pretend_cuda()
        listen(_noticed)
        notice_changes(lambda: entered().learner_files)
        os.register_at_fork(after_in_child=_leave_world)  # a worker of the learner's
        for name in ("stdout", "__stdout__", "stderr", "__stderr__"):
            setattr(sys, name, Output())
    if not world.fold.all_run:
        internals.make_groups_without(world.fold.without)
    _world = world


def _noticed(what: str, notice: Notice) -> None:
    """The state of the running rank, also in a thread that the rank has started:
    one rank runs at a time."""
    state = current()
    if state is None and _world is not None and _world.scheduler.running is not None:
        state = _world.states[_world.scheduler.running.index]
    if state is not None:
        note(state.notices, what, notice)


def _leave_world() -> None:
    global _world
    _world = None


def entered() -> World:
    """The world whose ranks run in this process."""
    assert _world is not None
    return _world


def current() -> RankState | None:
    """The state of the rank whose thread this is; None on a thread or process that is no rank."""
    world = _world
    if world is None:
        return None
    rank = getattr(world.scheduler.local, "rank", None)
    return None if rank is None else world.states[rank.index]


class Output(io.TextIOBase):
    """Standard output: each rank's goes to its own buffer."""

    def write(self, text: str) -> int:
        """Keep what the current rank prints, up to a limit."""
        state = current()
        if state is not None and state.printed < KEPT_OUTPUT:
            state.output.append(text[:KEPT_OUTPUT])
            state.printed += len(text)
        return len(text)

    def isatty(self) -> bool:
        """A rank has no terminal."""
        return False

    def fileno(self) -> int:
        """There is no file behind it."""
        raise io.UnsupportedOperation("a virtual rank's output has no file")


def _own_clock() -> None:
    """``time`` tells a rank its virtual time; ``sleep`` takes no real time."""
    real_sleep = time.sleep

    def reader(real: Callable[[], Any], scale: float, offset: float = 0.0) -> Callable[[], Any]:
        def now() -> Any:
            state = current()
            if state is None:
                return real()
            entered().charge(state)
            state.rank.clock += READ_CLOCK
            return type(real())((state.rank.clock + offset) * scale)

        return now

    def sleep(seconds: float) -> None:
        state = current()
        if state is None:
            real_sleep(seconds)
            return
        if seconds < 0:
            raise ValueError("sleep length must be non-negative")
        world = entered()
        world.charge(state)
        world.compute(state, seconds, "sleep")
        if state.rank.clock > world.patience / 2:
            state.looks.take(sys._getframe(1))
        if state.rank.clock > world.patience:
            world.scheduler.abort()
        world.scheduler.pause(state.rank, always=True)

    today = time.time()
    for name in ("perf_counter", "monotonic", "process_time", "thread_time", "time"):
        offset = today if name == "time" else 0.0
        setattr(time, name, reader(getattr(time, name), 1.0, offset))
        setattr(time, name + "_ns", reader(getattr(time, name + "_ns"), 1e9, offset))
    time.sleep = cast(Any, sleep)  # the real one takes what has __index__ as well


def _own_random() -> None:
    """The functions of ``random`` use the current rank's generator."""

    def of_rank(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            state = current()
            method = original if state is None else getattr(state.random, name)
            return method(*args, **kwargs)

        return call

    for name in random.__all__:
        original = getattr(random, name)
        if getattr(original, "__self__", None) is random._inst:
            setattr(random, name, of_rank(name, original))


def _no_cuda() -> None:
    """A virtual rank has no GPU of this machine; its own 'current device' is kept per thread."""
    device = threading.local()

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "a virtual rank can't use this machine's GPU: put tensors on the device that the "
            "function was given"
        )

    torch.cuda.is_available = lambda: False
    torch.cuda.device_count = lambda: 0
    torch.cuda._lazy_init = refuse
    torch.cuda.current_device = lambda: getattr(device, "index", 0)
    torch.cuda.set_device = lambda index: setattr(
        device,
        "index",
        torch.device("cuda", index).index if isinstance(index, int) else index.index,
    )


def _backend_name(group: Any) -> str | None:
    if type(group) is NcclGroup and group.host is not None:
        return BOTH
    return {NcclGroup: "nccl", VirtualGroup: "gloo"}.get(type(group))


def _environment() -> dict[str, Any]:
    world = entered()
    rank, size = world.scheduler.me.index, world.size
    return {"store": world.store, "rank": rank, "world_size": size}


def _pretend_cuda() -> None:
    """Each rank has a GPU of its own: tensors report it, and stay in this memory."""

    def finish() -> None:
        state = current()
        for work in [] if state is None else [*state.works.values()]:
            work.complete()
        read("synchronize")

    def read(what: str) -> None:
        state = current()
        if state is not None:  # a thread beside the rank: it holds up no rank
            entered().read(state, what)

    def resize(storage: Any) -> None:
        state = current()
        if state is not None:
            entered().flight(state).resize(storage)

    def now() -> float:
        state = current()
        return 0.0 if state is None else state.rank.clock

    def count() -> int:
        return int(os.environ["LOCAL_WORLD_SIZE"])

    Pretended(read, resize)
    pretend_cuda.install(count, finish, now)
