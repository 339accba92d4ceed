"""When a GPU reached each point of a rank's program, on the clock of the host.

A call that gives work to a GPU returns before the work is done, and a wait for NCCL makes a stream
wait, not the host. So the host's time of a call says when it was called, and nothing about the
device. An *event* in a stream gets its time when the device reaches it. Between two events there
are

    elapsed_time(first, second)   milliseconds of the device's clock, resolution 0.5 µs

One event at a moment without running work ties that clock to the host's. Events are read once, at
the end. NCCL's communication runs in a stream of its own. Its end is an event in a stream that
waits for it; the callback of the handle's future runs in such a stream. Messages, and handles
without a future, end where the program's stream has waited for them. That may be later: in a batch
NCCL begins when the batch is complete, and the futures of its parts do not know that.

Sources: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (``collective``: a handle's future is
complete at once, and its callbacks run in streams behind the communication. With
``coalescing_state_`` the end event comes only after the group's end); docs/source/notes/cuda.rst of
PyTorch.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
import torch.distributed as dist

GPU = "GPU"  # the clock of a time; else the host's
PATIENCE = 5.0  # seconds to wait for a communication that may never end
_future_of = dist.Work.get_future  # the function before a recording wraps it


class GpuClock:
    """Events in the streams of ``device``, and what they were recorded for.

    ``begun`` and ``done`` are by index of a communication, ``spans`` by index of a span.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begun: dict[int, Any] = {}
        self.done: dict[int, Any] = {}
        self.spans: dict[int, list[Any]] = {}
        self.settle()
        before = time.monotonic()
        self.zero = self.mark()
        self.settle()
        self.at = (before + time.monotonic()) / 2

    def mark(self) -> Any:
        """A mark at this point of the current stream; waits for nothing."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        """Return when the device has done everything so far."""
        torch.cuda.synchronize(self.device)

    def begins(self, index: int, group: dist.ProcessGroup) -> None:
        """A communication is called. With gloo the host itself waits for it, so
        the host's time is right."""
        if dist.get_backend(group) != "gloo":
            self.begun[index] = self.mark()

    def follow(self, index: int, work: dist.Work) -> None:
        """Note when the communication of this handle has ended, if it is one on the GPU."""
        if index not in self.begun:
            return
        with contextlib.suppress(RuntimeError):  # this handle has no future
            _future_of(work).add_done_callback(lambda _: self.done.setdefault(index, self.mark()))

    def waited(self, index: int) -> None:
        """The program's stream has waited for the communication."""
        if index in self.begun:
            self.done.setdefault(index, self.mark())

    def computed(self, index: int, first: Any, last: Any) -> None:
        """A span begins, or the one of this index goes on, and ends with ``last`` so far."""
        self.spans.setdefault(index, [first, last])[1] = last

    def moment(self, event: Any) -> float:
        """When the device reached the mark, in seconds of the host's clock."""
        return self.at + self.zero.elapsed_time(event) / 1e3

    def times(self) -> dict[str, dict[int, list[float]]]:
        """Begin and end of every communication and span that ends within some seconds."""
        last, until = self.mark(), time.monotonic() + PATIENCE
        while not last.query() and time.monotonic() < until:
            time.sleep(0.001)
        pairs = {index: [self.begun[index], end] for index, end in self.done.items()}
        return {"events": self._over(pairs), "spans": self._over(self.spans)}

    def _over(self, pairs: dict[int, list[Any]]) -> dict[int, list[float]]:
        over = {i: pair for i, pair in pairs.items() if all(event.query() for event in pair)}
        return {index: [*map(self.moment, pair)] for index, pair in over.items()}
