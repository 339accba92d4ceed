"""Step metrics: where the time of a step goes.

    seconds  =  data + forward + backward + optimizer + exposed + the rest
    exposed  =  |waited for|,          hidden = |in flight ∪ waited for| - exposed

|…| is the length of a union of intervals: two buckets on the wire at once don't count twice. More
overlap could still hide the exposed communication. Most of that waiting lies in backward, whose
time is without it. Hidden communication costs nothing.

A GPU runs behind the program: a clock read on the host tells when work was *launched*. So on CUDA a
moment is an event in the stream, and the host waits for the device once per step, at its end. Cost:
some µs per phase, no message. Invariant: the seconds of all steps add up to the wall clock. Source:
Li et al. 2020 (arXiv 2006.15704) for overlap.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from given.step_metrics import Gauges, StepMetrics

T = TypeVar("T")
Mark = Any  # a moment, as the clock of the device notes it
Interval = tuple[float, float]
PHASES = ("data", "forward", "backward", "optimizer")
NO_TRACE = contextlib.nullcontext()


# -- time ------------------------------------------------------------------------------------------
class Clock(Protocol):
    """Notes moments now, tells their distances later."""

    def mark(self) -> Mark:
        """This moment."""

    def settle(self) -> None:
        """Return when all moments noted so far have come."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one moment to the other; after ``settle``."""


class HostClock:
    """For a CPU: a call's work is done when it returns."""

    def mark(self) -> Mark:
        """This moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing runs behind the program."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one moment to the other."""
        return float(end - begin)


class StreamClock:
    """For a GPU: a moment is when the device gets to this point of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """An event in the current stream of ``device``; does not wait for it."""
        # --- exercise 4.10: start
        # Step 1: an event with timing, recorded in the device's current stream
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
        # --- exercise 4.10: end

    def settle(self) -> None:
        """Return when the device has done all launched work, in every stream."""
        # --- exercise 4.10: start
        # Step 2: the one synchronisation of the step
        torch.cuda.synchronize(self.device)
        # --- exercise 4.10: end

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one event to the other, by the device's own clock."""
        # --- exercise 4.10: start
        # Step 3: events count milliseconds
        return float(begin.elapsed_time(end)) / 1e3
        # --- exercise 4.10: end


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on ``device`` is done."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals (begin, end), in any order; 0 if there are none."""
    # --- exercise 4.10: start
    # Step 4: from left to right; of each the part beyond the end of all before it
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length
    # --- exercise 4.10: end


class Flight:
    """A handle of communication that notes when it was waited for, and when it had arrived."""

    def __init__(self, monitor: StepMonitor, handle: Any, began: Mark) -> None:
        self.monitor, self.handle = monitor, handle
        self.began: Mark = began
        self.arrived: Mark | None = None
        self.counted = False
        # --- exercise 4.10: start
        # Step 5: have the handle's future, if there is one, note the moment when it is complete. A
        #         GPU's future calls back in a stream of its own that is behind the communication
        with contextlib.suppress(AttributeError, RuntimeError):  # messages have no future
            handle.get_future().add_done_callback(self._note)
        # --- exercise 4.10: end

    def _note(self, _: object) -> None:
        self.arrived = self.monitor.clock.mark()

    def wait(self) -> object:
        """Wait for the handle, and return its result; this waiting is exposed.

        All of the flight counts once, for the step in which it is waited for first, whenever it
        began. A handle without a future has arrived when it was waited for the first time.
        """
        # --- exercise 4.10: start
        # Step 6: mark, wait, mark; without a future it has arrived by the second mark. A second
        #         wait is no second flight
        begin = self.monitor.clock.mark()
        result = self.handle.wait()
        end = self.monitor.clock.mark()
        self.monitor.waits.append((begin, end))
        if self.arrived is None:
            self.arrived = end
        if not self.counted:
            self.monitor.flights.append((self.began, self.arrived))
        self.counted = True
        return result
        # --- exercise 4.10: end


# -- the monitor -----------------------------------------------------------------------------------
class StepMonitor:
    """Measures the steps of one rank, computed on ``device``, and counts them from ``first_step``.

    ``flops_per_sample``: see ``count_flops``. ``peak_flops``: FLOP/s of the device at best, for the
    dtype in use; without it there is no MFU. A step lasts from the end of the last one (the first:
    from here) to its ``step`` call. It never communicates, and waits for the device in ``step``
    only.

    Raises ValueError for negative FLOPs, or a peak that is not positive.
    """

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
        """A new step begins."""
        self.began = now
        self.spans: dict[str, list[tuple[Mark, Mark]]] = {n: [] for n in PHASES}
        self.flights: list[tuple[Mark, Mark]] = []  # communication: issued, arrived
        self.waits: list[tuple[Mark, Mark]] = []  # its part that was waited for

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time inside belongs to ``name``: one of PHASES, or a further one.

        Times of one name add up in a step, without communication that is waited for inside. Phases
        may lie in each other: time counts for each. Time until an exception counts, and the
        exception goes on. It shows in a profiler's trace as well.
        """
        # --- exercise 4.10: start
        # Step 7: a mark at each end; inside a `record_function(name)` if a profiler runs (if none
        #          does, it would take longer than everything else here)
        with record_function(name) if torch.autograd._profiler_enabled() else NO_TRACE:
            begin = self.clock.mark()
            try:
                yield
            finally:
                self.spans.setdefault(name, []).append((begin, self.clock.mark()))
        # --- exercise 4.10: end

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, of any kind; waiting for them is the phase "data".

        It asks the loader for a batch only when the caller asks for one.
        """
        # --- exercise 4.10: start
        # Step 8: only `next` lies inside the phase, not what the caller does with the batch
        iterator, nothing = iter(loader), object()
        while True:
            with self.phase("data"):
                batch = next(iterator, nothing)
            if batch is nothing:
                return
            yield batch  # type: ignore[misc]
        # --- exercise 4.10: end

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        """Blocking communication runs inside: all of it is exposed, also if it ends in an error."""
        # --- exercise 4.10: start
        # Step 9: as if it had been waited for from its beginning
        begin = self.clock.mark()
        try:
            yield
        finally:
            self.waits.append((begin, self.clock.mark()))
        # --- exercise 4.10: end

    def track(self, handle: Any) -> Flight:
        """To wait for in place of ``handle``, whose communication has begun just now."""
        return Flight(self, handle, self.clock.mark())

    def watch(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A communication hook (exercise 3.12) that does the same as ``hook``, and is measured.

        Its handles are in flight since it was called, and return the results of the hook's. A hook
        that has reduced the bucket already returns None: its time is exposed.
        """

        # --- exercise 4.10: start
        # Step 10: a handle becomes a Flight that began when the hook was called
        def watched(bucket: Any) -> Flight | None:
            began = self.clock.mark()
            handle = hook(bucket)
            if handle is not None:
                return Flight(self, handle, began)
            self.waits.append((began, self.clock.mark()))
            return None

        return watched
        # --- exercise 4.10: end

    def step(self, *, samples: int, loss: Tensor | float, tokens: int = 0) -> StepMetrics:
        """End the step: its metrics, for this rank's ``samples``, ``tokens`` and mean loss.

        ``phases`` has all PHASES, and your own. A loss on a GPU may be passed as it is: it is read
        after the device has finished. Nothing of the step is kept.
        """
        # --- exercise 4.10: start
        # Step 11: mark the end, settle; only then ask for seconds
        # Step 12: lengths of unions: waiting; a phase without waiting; flights without waiting
        # Step 13: the next step begins where this one ends
        now, seconds = self.clock.mark(), self.clock.seconds
        self.clock.settle()

        def since_begin(marks: Iterable[tuple[Mark, Mark]]) -> list[Interval]:
            return [(seconds(self.began, a), seconds(self.began, b)) for a, b in marks]

        waits = since_begin(self.waits)
        exposed = covered(waits)
        phases = {n: covered(since_begin(m) + waits) - exposed for n, m in self.spans.items()}
        memory, capacity = self.gauges.memory()
        metrics = StepMetrics(
            step=self.steps,
            loss=float(loss),
            samples=samples,
            tokens=tokens,
            seconds=seconds(self.began, now),
            phases=phases,
            exposed=exposed,
            hidden=covered(since_begin(self.flights) + waits) - exposed,
            flops=self.flops_per_sample * samples,
            peak_flops=self.peak_flops,
            memory=memory,
            memory_capacity=capacity,
            gpu_utilisation=self.gauges.utilisation(),
        )
        self.steps += 1
        self._begin(now)
        return metrics
        # --- exercise 4.10: end
