"""A GPU that only keeps time: kernels and communication run behind the host, as on a real one.

``torch.cuda`` gets its events, streams and synchronisation from here, so that a program which
measures a GPU can be judged on a machine without one. The host's time is that of ``time``, which
virtual ranks have for themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Stream:
    """Work in order; ``done_at``: when the last of it ends."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.done_at = gpu, 0.0
        gpu.streams.append(self)

    def reaches(self) -> float:
        """When work that is launched now begins."""
        return max(time.perf_counter(), self.done_at)

    def synchronize(self) -> None:
        self.gpu.host_waits_until(self.done_at)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(enable_timing=True)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.done_at = max(self.done_at, other.done_at)

    def wait_event(self, event: Event) -> None:
        self.done_at = max(self.done_at, event.at)


class Event:
    """A point of a stream."""

    gpu: Gpu

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timing, self.at = enable_timing, float("nan")

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            self.gpu.asked(None)
        self.at = (stream or self.gpu.current).reaches()

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        self.gpu.host_waits_until(self.at)

    def elapsed_time(self, end: Event) -> float:
        if not (self.timing and end.timing):
            raise RuntimeError("both events must be made with enable_timing=True")
        if not (self.query() and end.query()):
            raise RuntimeError("the device has not come to this event yet: synchronise first")
        return (end.at - self.at) * 1e3


class Work:
    """Communication of ``seconds`` in a stream of its own: ``wait`` lets the current stream wait,
    not the host; callbacks of its future run at once, in a stream that is behind it."""

    def __init__(self, gpu: Gpu, seconds: float) -> None:
        self.gpu = gpu
        gpu.network.done_at = max(gpu.network.reaches(), gpu.current.done_at) + seconds
        self.finish = gpu.network.done_at

    def wait(self) -> bool:
        self.gpu.current.done_at = max(self.gpu.current.done_at, self.finish)
        return True

    def get_future(self) -> SimpleNamespace:
        def add_done_callback(call: Callable[[Any], Any]) -> None:
            behind = Stream(self.gpu)
            behind.done_at = self.finish
            with self.gpu.stream(behind):
                call(None)

        return SimpleNamespace(add_done_callback=add_done_callback, then=add_done_callback)


class Gpu:
    """The device; ``synchronisations``: how often the host has waited for it."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current, self.network = Stream(self), Stream(self)
        self.synchronisations = 0
        self.devices: set[str] = set()  # whose stream was asked for, or who was waited for

    def asked(self, device: Any) -> None:
        """Note which device is meant; None: whichever is the program's current one."""
        self.devices.add(str(device))

    def stream_of(self, device: Any = None) -> Stream:
        self.asked(device)
        return self.current

    def launch(self, seconds: float) -> None:
        """A kernel: the host goes on at once."""
        self.current.done_at = self.current.reaches() + seconds

    def host_waits_until(self, moment: float) -> None:
        """The host waits for the device."""
        self.synchronisations += 1
        time.sleep(max(0.0, moment - time.perf_counter()))

    def synchronize(self, device: Any = None) -> None:
        self.asked(device)
        self.host_waits_until(max(s.done_at for s in self.streams))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def no_driver(self, *_: Any) -> float:
        raise RuntimeError("no NVML")

    @contextlib.contextmanager
    def installed(self) -> Iterator[Gpu]:
        """``torch.cuda`` is this device inside."""
        event = type("Event", (Event,), {"gpu": self})
        functions = {
            "Event": event,
            "Stream": lambda *_, **__: Stream(self),
            "stream": self.stream,
            "current_stream": self.stream_of,
            "synchronize": self.synchronize,
            "is_available": lambda: True,
            "max_memory_allocated": lambda *_: 3 * 2**30,
            "memory_allocated": lambda *_: 2**30,
            "reset_peak_memory_stats": lambda *_: None,
            "get_device_properties": lambda *_: SimpleNamespace(total_memory=4 * 2**30),
            "utilization": self.no_driver,
        }
        with mock.patch.multiple("torch.cuda", **functions):
            yield self
