"""The record of a process so far: its communication as events, its compute as spans."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from .gpu_clock import GpuClock
from .lines import learner_line
from .log import P2P, Event, sent_from_shared_gpu, traffic
from .operators import Sending, patience_of
from .values import passes_in, value_of


def this_thread() -> int:
    """This thread as the system knows it; 0 is the main one."""
    main = threading.get_ident() == threading.main_thread().ident
    return 0 if main else threading.get_native_id()


class Recording:
    """Events and spans of this process, written by the code that sees the calls (``recorder``,
    ``wrapped``).

    The parameters are those of ``recorder.Ledger``.
    """

    def __init__(
        self,
        learner_files: tuple[str, ...] = (),
        emit: Callable[[str, dict[str, Any]], None] | None = None,
        delays: float = 0.0,
        seed: int = 0,
    ) -> None:
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
        self.in_flight: dict[int, Sending] = {}  # by index of the event
        self.futures: dict[int, torch.futures.Future[Any]] = {}  # the same, until they are done
        self.gpu: GpuClock | None = None  # of a rank that computes on a GPU
        self.values = False  # whether events keep what was passed in

    def begin(
        self,
        op: str,
        process_group: dist.ProcessGroup,
        tensors: list[torch.Tensor],
        root: int | None,
        named: dict[str, Any],
    ) -> Event:
        """A communication begins; ``named``: the arguments of its operator."""
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
            line=self.line(),
            region=self.region,
            phase=self.phase(),
            index=len(self.events),
            tag=named.get("tag", 0) if op in ("send", "recv") else 0,
            group_name=process_group.group_name,
            patience=patience_of(process_group, named),
            value=value_of(tensors) if self.values and passes_in(op, peer, me) else None,
        )
        self.events.append(event)
        self.local.last = event
        self.batch_of(process_group).append(event)
        if op == "send":
            self.in_flight[event.index] = Sending(tensors[0])
        if self.gpu is not None and any(t.is_cuda for t in tensors):
            self.gpu.begins(event.index, process_group)
        self.emit("begin", vars(event))
        return event

    def batch_of(self, group: dist.ProcessGroup) -> list[Event]:
        """The communications that this thread has begun in the open batch of
        ``group``; a new list if none."""
        return getattr(self.local, "batches", {}).get(group.group_name, [])

    def follow(self, event: Event, work: dist.Work) -> None:
        """``work`` is the handle of the communication."""
        if self.gpu is not None and event.op not in P2P:
            self.gpu.follow(event.index, work)

    def emit(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell the other process; a process that was forked from this one has nothing to tell."""
        if os.getpid() == self.pid:
            self.tell(kind, fields)

    def wait(self, event: Event, patience: float | None = None) -> None:
        """This thread waits for the communication from now on."""
        fields = {"index": event.index, "line": self.line(), "thread": this_thread()}
        self.emit("wait", fields | {"patience": patience or event.patience})

    def end(self, event: Event) -> None:
        """The communication is over, or its wait has raised; told once."""
        self.futures.pop(event.index, None)
        if self.gpu is not None:
            self.gpu.waited(event.index)
        if event.end is None:
            event.end = time.monotonic()
            sending = self.in_flight.pop(event.index, None)
            event.overwritten = sending is not None and sending.overwritten()
            done = {"end": event.end, "overwritten": event.overwritten}
            self.emit("end", {"index": event.index, **done})

    def computed(self, start: float, end: float, marks: tuple[Any, Any] | None = None) -> None:
        """A tensor operator ran. Operators that follow closely in the same phase form one span.

        ``marks``: those of the GPU that it ran on, before and after.
        """
        if getattr(self.local, "named", False):
            return
        name = self.phase() or "other"
        spans, last = self.raw_spans, len(self.raw_spans) - 1
        alike = self.gpu is None or (last in self.gpu.spans) == (marks is not None)
        if spans and alike and spans[-1][0] == name and start - spans[-1][2] < 3e-5:
            spans[-1] = (name, spans[-1][1], end)
        else:
            spans.append((name, start, end))
        if self.gpu is not None and marks is not None:
            self.gpu.computed(len(spans) - 1, *marks)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record what is computed inside as one span."""
        start, self.local.named = time.monotonic(), True
        first = self.gpu.mark() if self.gpu is not None else None
        try:
            yield
        finally:
            self.local.named = False
            self.raw_spans.append((name, start, time.monotonic()))
            if self.gpu is not None:
                self.gpu.computed(len(self.raw_spans) - 1, first, self.gpu.mark())

    def phase(self) -> str:
        """The phase of this thread: forward, backward, optimizer, data, or none with a name."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return getattr(self.local, "phase", "")

    def enter_module(self, step: int) -> None:
        """Follow calls of modules: everything inside the outermost call is forward."""
        self.local.depth = getattr(self.local, "depth", 0) + step
        self.local.phase = "forward" if self.local.depth > 0 else ""

    def line(self) -> str:
        """The learner's line that runs."""
        return learner_line(sys._getframe(1), self.learner_files)
