"""Record every communication of this process, whichever Python name it was called by.

A ``TorchDispatchMode`` sees each ``c10d`` operator below all Python aliases: calls through
``torch.distributed``, on the process group itself, from autograd hooks and from threads. Calls on
the backend object bypass the dispatcher, so the Python methods of ``Backend`` are wrapped as well;
and ``Work.wait`` is, to know when an operation was waited for. The cost is about 5 µs per tensor
operator, so timings are taken without it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .ledger import P2P, Event, sent_from_shared_gpu, traffic, waited_twice
from .lines import learner_line
from .operators import (
    METHODS,
    Sending,
    canonical,
    group_of,
    group_of_backend,
    patience_of,
    payload_of,
    root_of,
    tensors_in,
)
from .rank_report import source_line


class Ledger(TorchDispatchMode):
    """Record this process's communication and compute until the context ends.

    ``learner_files``: source files whose frames are named as the learner's line.
    ``emit(kind, fields)`` is told of every begin ("begin"), wait ("wait") and end ("end") at once,
    and of what else decides whether this process can go on: threads ("thread", "thread end"),
    groups that are closed ("close"). So another process knows where this one is. ``delays``:
    largest random pause in seconds before a communication, drawn from ``seed``.
    """

    def __init__(
        self,
        learner_files: tuple[str, ...] = (),
        emit: Callable[[str, dict[str, Any]], None] | None = None,
        delays: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.raw_spans: list[tuple[str, float, float]] = []
        self.picture_from = 0.0
        self.region = ""
        self.learner_files = frozenset(learner_files)
        self.tell = emit or (lambda kind, fields: None)
        self.delays = delays
        self.random = random.Random(seed)
        self.pid = os.getpid()
        self.local = threading.local()
        self.threads = itertools.count()
        self.by_tensor: dict[int, Event] = {}
        self.in_flight: dict[int, Sending] = {}  # by index of the event
        self.futures: dict[int, torch.futures.Future[Any]] = {}  # the same, until they are done

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler (1.4 s) at the first call to wrap the method

    # -- recording ---------------------------------------------------------------------------
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self.pid:  # a forked worker of the learner has no ledger
            return func(*args, **kwargs)
        if any(t.__name__ == "AsyncCollectiveTensor" for t in types):
            return NotImplemented  # it waits for its collective first, which comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        start = time.monotonic()
        out = func(*args, **kwargs)
        self._compute(start, time.monotonic())
        return out

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.split("::")[1]
        if name.startswith("wait_tensor"):
            found = [self.by_tensor.pop(t.data_ptr(), None) for t in tensors_in(args)]
            waited = [event for event in found if event is not None]
            for event in waited:
                self._wait(event)
            try:
                return func(*args, **kwargs)
            finally:
                for event in waited:
                    self._end(event)
        op = canonical(name)
        if op is None:
            return func(*args, **kwargs)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = group_of(named)
        event = self._begin(op, group, payload_of(op, named), root_of(named), named)
        if name.startswith("monitored_barrier"):  # the only one that blocks in the call itself
            self._wait(event)
        try:
            out = func(*args, **kwargs)
        finally:
            if name.startswith("monitored_barrier"):
                self._end(event)
        if func.namespace == "_c10d_functional":
            for tensor in tensors_in(out):
                self.by_tensor[tensor.data_ptr()] = event
        return out

    def _begin(
        self,
        op: str,
        process_group: dist.ProcessGroup,
        tensors: list[torch.Tensor],
        root: int | None,
        named: dict[str, Any],
    ) -> Event:
        on_gpu = op in P2P and any(t.is_cuda for t in tensors)
        if on_gpu and dist.get_backend(process_group) == "gloo":  # it would abort the process
            raise sent_from_shared_gpu(op)
        if self.delays:
            time.sleep(self.random.random() * self.delays)
        group = tuple(dist.get_process_group_ranks(process_group))
        payload = sum(t.numel() * t.element_size() for t in tensors)
        me = dist.get_rank() if dist.is_initialized() else 0
        peer = group[root] if root is not None and 0 <= root < len(group) else None
        sent, received = traffic(op, len(group), payload, is_root=peer == me)
        event = Event(
            op=op,
            group=group,
            peer=peer,
            numel=sum(t.numel() for t in tensors) if op != "barrier" else 0,
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            payload=payload if op != "barrier" else 0,
            sent=sent,
            received=received,
            start=time.monotonic(),
            line=self._line(),
            region=self.region,
            phase=self._phase(),
            index=len(self.events),
            tag=named.get("tag", 0) if op in ("send", "recv") else 0,
            group_name=process_group.group_name,
            patience=patience_of(process_group, named),
        )
        self.events.append(event)
        self.local.last = event
        if op == "send":
            self.in_flight[event.index] = Sending(tensors[0])
        self.emit("begin", vars(event))
        return event

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell the other process; a process that was forked from this one has nothing to tell."""
        if os.getpid() == self.pid:
            self.tell(kind, fields)

    def _wait(self, event: Event, patience: float | None = None) -> None:
        fields = {"index": event.index, "line": self._line(), "thread": _thread()}
        self.emit("wait", fields | {"patience": patience or event.patience})

    def _end(self, event: Event) -> None:
        self.futures.pop(event.index, None)
        if event.end is None:
            event.end = time.monotonic()
            sending = self.in_flight.pop(event.index, None)
            event.overwritten = sending is not None and sending.overwritten()
            done = {"end": event.end, "overwritten": event.overwritten}
            self.emit("end", {"index": event.index, **done})

    def _compute(self, start: float, end: float) -> None:
        if getattr(self.local, "named", False):
            return
        name = self._phase() or "other"
        spans = self.raw_spans
        if spans and spans[-1][0] == name and start - spans[-1][2] < 3e-5:
            spans[-1] = (name, spans[-1][1], end)
        else:
            spans.append((name, start, end))

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what is computed inside as one span."""
        start, self.local.named = time.monotonic(), True
        try:
            yield
        finally:
            self.local.named = False
            self.raw_spans.append((name, start, time.monotonic()))

    def _phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return getattr(self.local, "phase", "")

    def _enter_module(self, step: int) -> None:
        """Follow calls of modules: what runs inside the outermost one is forward."""
        self.local.depth = getattr(self.local, "depth", 0) + step
        self.local.phase = "forward" if self.local.depth > 0 else ""

    def _line(self) -> str:
        return learner_line(sys._getframe(1), self.learner_files)

    # -- what the dispatcher does not show -----------------------------------------------------
    def __enter__(self) -> Ledger:
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(_patched(dist.Work, "wait", self._wrap_wait))
        self._undo.enter_context(_patched(dist.Work, "get_future", self._wrap_future))
        for method in METHODS:
            self._undo.enter_context(_patched(dist.ProcessGroup, method, self._wrap_group))
            self._undo.enter_context(_patched(_BACKEND, method, self._wrap_backend))
        for method in ("shutdown", "abort"):
            self._undo.enter_context(_patched(dist.ProcessGroup, method, self._wrap_close))
        self._undo.enter_context(_patched(threading.Thread, "start", self._wrap_start))
        data = _patched(_BaseDataLoaderIter, "__next__", self._wrap_phase("data"))
        self._undo.enter_context(data)
        for phase, register in _OPTIMIZER_HOOKS.items():
            handle = register(lambda *_, p=phase: setattr(self.local, "phase", p))
            self._undo.callback(handle.remove)
        enter = register_module_forward_pre_hook(lambda *_: self._enter_module(1))
        leave = register_module_forward_hook(
            lambda *_: self._enter_module(-1), always_call=True
        )
        self._undo.callback(enter.remove)
        self._undo.callback(leave.remove)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._undo.close()
        for index, future in [*self.futures.items()]:
            if future.done():  # who waits for it goes on before its callbacks are called
                self._end(self.events[index])

    def _wrap_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.local.last = None
            work = original(group, *args, **kwargs)
            if isinstance(work, dist.Work) and getattr(self.local, "last", None) is not None:
                _EVENT_OF[id(work)] = (self.local.last, work)
            return work

        return call

    def _wrap_backend(self, original: Callable[..., Any]) -> Callable[..., Any]:
        op = canonical(original.__name__)

        def call(backend: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = list(tensors_in(args[:1]))
            root = args[1] if op in ("send", "recv") and len(args) > 1 else None
            group = group_of_backend(backend)
            if group is None:  # made without torch.distributed's functions: no rank is known
                return original(backend, *args, **kwargs)
            event = self._begin(str(op), group, tensors, root, {})
            work = original(backend, *args, **kwargs)
            if isinstance(work, dist.Work):
                _EVENT_OF[id(work)] = (event, work)
            return work

        return call

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            event, _ = _EVENT_OF.pop(id(work), (None, None))
            if event is None:
                if work in _AWAITED:
                    raise waited_twice(_AWAITED[work], dist.get_rank(), source_line(self._line()))
                return original(work, *args, **kwargs)
            own = next((v for v in (*args, *kwargs.values()) if isinstance(v, timedelta)), None)
            self._wait(event, own.total_seconds() if own else None)
            try:
                out = original(work, *args, **kwargs)
            finally:  # also a wait that raises is over
                self._end(event)
            if event.op in P2P:
                _AWAITED[work] = event
            return out

        return wait

    def _wrap_future(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_future(work: Any) -> Any:
            event, _ = _EVENT_OF.pop(id(work), (None, None))
            future = original(work)
            if event is not None:
                self.futures[event.index] = future
                future.add_done_callback(lambda _: self._end(event))
            return future

        return get_future

    def _wrap_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(thread: threading.Thread) -> None:
            """The parent knows of the thread before it can do anything, and until it ends."""
            number, body = next(self.threads), thread.run

            def run() -> None:
                self.emit("thread", {"number": number, "id": _thread()})
                try:
                    with _ThreadView(self):
                        body()
                finally:
                    del thread.run
                    self.emit("thread end", {"number": number})

            thread.run = run  # type: ignore[method-assign]
            self.emit("thread", {"number": number, "id": None})
            original(thread)

        return start

    def _wrap_close(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def close(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.emit("close", {})
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


class _ThreadView(TorchDispatchMode):
    """The same ledger in another thread: a dispatch mode belongs to one thread only."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.ledger.__torch_dispatch__(func, types, args, kwargs)


_BACKEND = torch._C._distributed_c10d.Backend
_EVENT_OF: dict[int, tuple[Event, Any]] = {}  # keeps the handle alive, so that its id is its own
_AWAITED: weakref.WeakKeyDictionary[dist.Work, Event] = weakref.WeakKeyDictionary()
_OPTIMIZER_HOOKS = {
    "optimizer": register_optimizer_step_pre_hook,
    "": register_optimizer_step_post_hook,
}


def _thread() -> int:
    """This thread as the system knows it; 0 is the main one."""
    main = threading.get_ident() == threading.main_thread().ident
    return 0 if main else threading.get_native_id()


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
