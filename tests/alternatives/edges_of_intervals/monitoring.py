# for: 4.10
"""Written differently: a union by the number of open intervals, phases end in an exit stack."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from given.step_metrics import Gauges, StepMetrics

T = TypeVar("T")
Mark = Any  # a moment, as the clock of the device notes it
Interval = tuple[float, float]
PHASES = ("data", "forward", "backward", "optimizer")


class HostClock:
    def mark(self) -> Mark:
        return time.perf_counter()

    def settle(self) -> None: ...

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(end - begin)


class StreamClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, begin: Mark, end: Mark) -> float:
        milliseconds = begin.elapsed_time(end)
        return float(milliseconds * 0.001)


def clock_of(device: torch.device) -> Any:
    return StreamClock(device) if device.type == "cuda" else HostClock()


def covered(intervals: Iterable[Interval]) -> float:
    edges = []
    for begin, end in intervals:
        if end > begin:
            edges += [(begin, 1), (end, -1)]
    depth, since, total = 0, 0.0, 0.0
    for moment, change in sorted(edges, key=lambda edge: (edge[0], -edge[1])):
        if depth == 0:
            since = moment
        depth += change
        if depth == 0:
            total += moment - since
    return total


class Flight:
    def __init__(self, monitor: StepMonitor, handle: Any, began: Mark) -> None:
        self.monitor, self.handle = monitor, handle
        self.began: Mark = began
        self.arrived: Mark | None = None
        self.seen = False
        if hasattr(handle, "get_future"):
            handle.get_future().add_done_callback(self._note)

    def _note(self, _: object) -> None:
        self.arrived = self.monitor.clock.mark()

    def wait(self) -> object:
        monitor = self.monitor
        began = monitor.clock.mark()
        try:
            result = self.handle.wait()
        finally:
            ended = monitor.clock.mark()
            if self.arrived is None:
                self.arrived = ended
            monitor.waits.append((began, ended))
            if not self.seen:
                monitor.flights.append((self.began, self.arrived))
            self.seen = True
        return result


class StepMonitor:
    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        flops_per_sample: float = 0.0,
        peak_flops: float | None = None,
        first_step: int = 0,
    ) -> None:
        if flops_per_sample < 0 or (peak_flops is not None and peak_flops <= 0):
            raise ValueError(
                f"FLOPs can't be negative and a peak is positive: got {flops_per_sample} per "
                f"sample and a peak of {peak_flops}"
            )
        self.device = torch.device(device)
        self.clock = clock_of(self.device)
        self.flops_per_sample, self.peak_flops = flops_per_sample, peak_flops
        self.gauges = Gauges(self.device)
        self.steps = first_step
        self._begin(self.clock.mark())

    def _begin(self, now: Mark) -> None:
        self.began = now
        self.spans: dict[str, list[tuple[Mark, Mark]]] = {n: [] for n in PHASES}
        self.flights: list[tuple[Mark, Mark]] = []  # communication: issued, arrived
        self.waits: list[tuple[Mark, Mark]] = []  # of it, what was waited for

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            begin = self.clock.mark()

            def ended() -> None:
                if name not in self.spans:
                    self.spans[name] = []
                self.spans[name].append((begin, self.clock.mark()))

            stack.callback(ended)
            if torch.autograd._profiler_enabled():
                stack.enter_context(record_function(name))
            yield

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        end = object()
        source = None
        while True:
            with self.phase("data"):
                if source is None:
                    source = iter(loader)
                batch = next(source, end)
            if batch is end:
                break
            yield batch

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        class Exposed:
            def wait(_) -> None:
                self.waits.append((begin, self.clock.mark()))

        begin = self.clock.mark()
        try:
            yield
        finally:
            Exposed().wait()

    def track(self, handle: Any) -> Flight:
        return Flight(self, handle, self.clock.mark())

    def watch(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:

        def measured(bucket: Any) -> Any:
            begin = self.clock.mark()
            try:
                handle = hook(bucket)
            except BaseException:
                self.waits.append((begin, self.clock.mark()))
                raise
            if handle is not None:
                return Flight(self, handle, begin)
            self.waits.append((begin, self.clock.mark()))
            return None

        return measured

    def step(self, *, samples: int, loss: Tensor | float, tokens: int = 0) -> StepMetrics:
        end, begin = self.clock.mark(), self.began
        self.clock.settle()
        value = loss.item() if isinstance(loss, Tensor) else float(loss)

        def seconds(marks: list[tuple[Mark, Mark]]) -> list[Interval]:
            return [tuple(self.clock.seconds(begin, m) for m in pair) for pair in marks]

        spans, flights, waits = self.spans, seconds(self.flights), seconds(self.waits)
        number, self.steps = self.steps, self.steps + 1
        self._begin(end)
        exposed = covered(waits)
        phases = {}
        for name, marks in spans.items():
            phases[name] = max(0.0, covered([*seconds(marks), *waits]) - exposed)
        most, capacity = self.gauges.memory()
        return StepMetrics(
            step=number,
            loss=value,
            samples=samples,
            tokens=tokens,
            seconds=self.clock.seconds(begin, end),
            phases=phases,
            exposed=exposed,
            hidden=max(0.0, covered([*flights, *waits]) - exposed),
            flops=samples * self.flops_per_sample,
            peak_flops=self.peak_flops,
            memory=most,
            memory_capacity=capacity,
            gpu_utilisation=self.gauges.utilisation(),
        )
