"""Calls that the dispatcher does not show: waits, closed groups, threads, phases, calls on a
backend.

The Python methods are wrapped while a recording runs, and are as before afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .lines import source_line
from .log import P2P, Event, waited_twice
from .operators import METHODS, canonical, group_of_backend, tensors_in
from .recording import Recording, this_thread

_BACKEND = torch._C._distributed_c10d.Backend
# the events of a handle, several for a batch; it stays alive, so its id stays its own
_EVENTS_OF: dict[int, tuple[list[Event], Any]] = {}
_AWAITED: weakref.WeakKeyDictionary[dist.Work, Event] = weakref.WeakKeyDictionary()
_OPTIMIZER_HOOKS = {
    "optimizer": register_optimizer_step_pre_hook,
    "": register_optimizer_step_post_hook,
}


class Wrapped:
    """Torch's methods tell ``recording`` of their calls until ``undo.close()``.

    ``view()``: a context in which another thread is recorded as well.
    """

    def __init__(
        self, recording: Recording, view: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> None:
        self.recording, self.view = recording, view
        self.local = recording.local
        self.threads = itertools.count()
        self.undo = contextlib.ExitStack()
        self._wrap_calls()
        self._follow_phases()

    def _wrap_calls(self) -> None:
        enter = self.undo.enter_context
        enter(_patched(dist.Work, "wait", self._wrap_wait))
        enter(_patched(dist.Work, "get_future", self._wrap_future))
        for method in METHODS:
            enter(_patched(dist.ProcessGroup, method, self._wrap_group))
            enter(_patched(_BACKEND, method, self._wrap_backend))
        for method in ("shutdown", "abort"):
            enter(_patched(dist.ProcessGroup, method, self._wrap_close))
        enter(_patched(dist.ProcessGroup, "_start_coalescing", self._wrap_batch_start))
        enter(_patched(dist.ProcessGroup, "_end_coalescing", self._wrap_batch_end))
        enter(_patched(threading.Thread, "start", self._wrap_start))

    def _follow_phases(self) -> None:
        self.undo.enter_context(_patched(_BaseDataLoaderIter, "__next__", self._wrap_phase("data")))
        for phase, register in _OPTIMIZER_HOOKS.items():
            handle = register(lambda *_, p=phase: setattr(self.local, "phase", p))
            self.undo.callback(handle.remove)
        follow = self.recording.enter_module
        enter = register_module_forward_pre_hook(lambda *_: follow(1))
        leave = register_module_forward_hook(lambda *_: follow(-1), always_call=True)
        self.undo.callback(enter.remove)
        self.undo.callback(leave.remove)

    def _wrap_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.local.last = None
            work = original(group, *args, **kwargs)
            if isinstance(work, dist.Work) and getattr(self.local, "last", None) is not None:
                self._remember(work, group)
            return work

        return call

    def _remember(self, work: dist.Work, group: dist.ProcessGroup) -> None:
        """The last event belongs to ``work``, unless the handle of a batch stands for it."""
        if not self.recording.batch_of(group):
            _EVENTS_OF[id(work)] = [self.local.last], work
            self.recording.follow(self.local.last, work)

    def _wrap_batch_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: Any, *args: Any) -> Any:
            vars(self.local).setdefault("batches", {})[group.group_name] = []
            return original(group, *args)

        return start

    def _wrap_batch_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """NCCL has one handle for a batch: the end of the batch gives it, and the handles of
        its parts are dropped."""

        def end(group: Any, *args: Any) -> Any:
            events = vars(self.local).get("batches", {}).pop(group.group_name, [])
            work = original(group, *args)
            if isinstance(work, dist.Work) and events:
                _EVENTS_OF[id(work)] = events, work
            return work

        return end

    def _wrap_backend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        op = canonical(original.__name__)

        def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in(args[:1]))
            root = args[1] if op in ("send", "recv") and len(args) > 1 else None
            group = group_of_backend(backend)
            if group is None:  # made without torch.distributed's functions: no rank is known
                return original(backend, *args, **kwargs)
            self.recording.begin(str(op), group, tensors, root, {})
            work = original(backend, *args, **kwargs)
            if isinstance(work, dist.Work):
                self._remember(work, group)
            return work

        return call

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            events, _ = _EVENTS_OF.pop(id(work), ([], None))
            if not events:
                if work in _AWAITED:
                    line = source_line(self.recording.line())
                    raise waited_twice(_AWAITED[work], dist.get_rank(), line)
                return original(work, *args, **kwargs)
            own = next((v for v in (*args, *kwargs.values()) if isinstance(v, timedelta)), None)
            # the first event of a batch speaks for all: if it can't end, the batch can't
            self.recording.wait(events[0], own.total_seconds() if own else None)
            try:
                out = original(work, *args, **kwargs)
            finally:  # also a wait that raises is over
                for event in events:
                    self.recording.end(event)
            if len(events) == 1 and events[0].op in P2P:
                _AWAITED[work] = events[0]
            return out

        return wait

    def _wrap_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            events, _ = _EVENTS_OF.pop(id(work), ([], None))
            future = original(work)
            for event in events:
                self.recording.futures[event.index] = future
                future.add_done_callback(lambda _, event=event: self.recording.end(event))
            return future

        return get_future

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(thread: threading.Thread) -> None:
            """The parent knows of the thread before it can do anything, and until it ends."""
            number, body = next(self.threads), thread.run

            def run() -> None:
                self.recording.emit("thread", {"number": number, "id": this_thread()})
                try:
                    with self.view():
                        body()
                finally:
                    del thread.run
                    self.recording.emit("thread end", {"number": number})

            thread.run = run  # type: ignore[method-assign]
            self.recording.emit("thread", {"number": number, "id": None})
            original(thread)

        return start

    def _wrap_close(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def close(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.recording.emit("close", {})
            return original(group, *args, **kwargs)

        return close

    def _wrap_phase(self, phase: str) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.local.phase = phase
                try:
                    return original(*args, **kwargs)
                finally:
                    self.local.phase = ""

            return call

        return wrap


@contextlib.contextmanager
def _patched(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name, None)
    if original is None:  # an operator that this version of torch does not have
        yield
        return
    own = vars(owner).get(name)  # as it is there: getattr would lose how it is bound
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if own is not None:
            setattr(owner, name, own)
        else:
            delattr(owner, name)
