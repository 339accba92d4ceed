"""Record every communication of this process, whichever Python name it was called by.

A ``TorchDispatchMode`` sees each ``c10d`` operator below all Python aliases: calls through
``torch.distributed``, on the process group itself, from autograd hooks and from threads. Calls on
the backend object bypass the dispatcher, so the Python methods of ``Backend`` are wrapped as well.
``Work.wait`` is wrapped, too, to know when an operation was waited for (``wrapped``). The cost is
about 5 µs per tensor operator, so timings are taken without a recorder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .log import Event
from .operators import canonical, group_of, payload_of, root_of, tensors_in
from .recording import Recording
from .wrapped import Wrapped


class Ledger(Recording, TorchDispatchMode):
    """Record this process's communication and compute until the context ends.

    ``learner_files``: source files whose frames are named as the learner's line. ``emit(kind,
    fields)`` is called at once for every begin ("begin"), wait ("wait") and end ("end"). It is also
    called for threads ("thread", "thread end") and closed groups ("close"), because they decide
    whether this process can go on. So another process knows where this one is. ``delays``: largest
    random pause in seconds before a communication, drawn from ``seed``.
    """

    def __init__(
        self,
        learner_files: tuple[str, ...] = (),
        emit: Callable[[str, dict[str, Any]], None] | None = None,
        delays: float = 0.0,
        seed: int = 0,
    ) -> None:
        TorchDispatchMode.__init__(self)
        Recording.__init__(self, learner_files, emit, delays, seed)
        self.by_tensor: dict[int, Event] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler (1.4 s) at the first call to wrap the method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if os.getpid() != self.pid:  # a forked worker of the learner has no ledger
            return func(*args, **kwargs)
        if any(t.__name__ == "AsyncCollectiveTensor" for t in types):
            return NotImplemented  # it waits for its collective first, which comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        start = time.monotonic()
        first = self.gpu.mark() if self.gpu is not None else None
        out = func(*args, **kwargs)
        marks = None
        if self.gpu is not None and any(t.is_cuda for t in tensors_in((out, args))):
            marks = first, self.gpu.mark()
        self.computed(start, time.monotonic(), marks)
        return out

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.split("::")[1]
        if name.startswith("wait_tensor"):
            found = [self.by_tensor.pop(t.data_ptr(), None) for t in tensors_in(args)]
            waited = [event for event in found if event is not None]
            for event in waited:
                self.wait(event)
            try:
                return func(*args, **kwargs)
            finally:
                for event in waited:
                    self.end(event)
        op = canonical(name)
        if op is None:
            return func(*args, **kwargs)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = group_of(named)
        event = self.begin(op, group, payload_of(op, named), root_of(named), named)
        if name.startswith("monitored_barrier"):  # only a barrier blocks in the call itself
            self.wait(event)
        try:
            out = func(*args, **kwargs)
        finally:
            if name.startswith("monitored_barrier"):
                self.end(event)
        if func.namespace == "_c10d_functional":
            for tensor in tensors_in(out):
                self.by_tensor[tensor.data_ptr()] = event
        return out

    def __enter__(self) -> Ledger:
        self._wrapped = Wrapped(self, lambda: _ThreadView(self))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._wrapped.undo.close()
        for index, future in [*self.futures.items()]:
            if future.done():  # a thread that waits for it goes on before its callbacks are called
                self.end(self.events[index])


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
