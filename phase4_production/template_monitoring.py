# Exercises 4.10: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.10
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
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
        # Step 1: an event with timing, recorded in the device's current stream
        raise NotImplementedError("exercise 4.10")

    def settle(self) -> None:
        """Return when the device has done all launched work, in every stream."""
        # Step 2: the one synchronisation of the step
        raise NotImplementedError("exercise 4.10")

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one event to the other, by the device's own clock."""
        # Step 3: events count milliseconds
        raise NotImplementedError("exercise 4.10")


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on ``device`` is done."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals (begin, end), in any order; 0 if there are none."""
    # Step 4: from left to right; of each the part beyond the end of all before it
    raise NotImplementedError("exercise 4.10")


class Flight:
    """A handle of communication that notes when it was waited for, and when it had arrived."""

    def __init__(self, monitor: StepMonitor, handle: Any, began: Mark) -> None:
        self.monitor, self.handle = monitor, handle
        self.began: Mark = began
        self.arrived: Mark | None = None
        self.counted = False
        # Step 5: have the handle's future, if there is one, note the moment when it is complete. A
        #         GPU's future calls back in a stream of its own that is behind the communication
        raise NotImplementedError("exercise 4.10")

    def _note(self, _: object) -> None:
        self.arrived = self.monitor.clock.mark()

    def wait(self) -> object:
        """Wait for the handle, and return its result; this waiting is exposed.

        All of the flight counts once, for the step in which it is waited for first, whenever it
        began. A handle without a future has arrived when it was waited for the first time.
        """
        # Step 6: mark, wait, mark; without a future it has arrived by the second mark. A second
        #         wait is no second flight
        raise NotImplementedError("exercise 4.10")


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
        # Step 7: a mark at each end; inside a `record_function(name)` if a profiler runs (if none
        #          does, it would take longer than everything else here)
        raise NotImplementedError("exercise 4.10")

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, of any kind; waiting for them is the phase "data".

        It asks the loader for a batch only when the caller asks for one.
        """
        # Step 8: only `next` lies inside the phase, not what the caller does with the batch
        raise NotImplementedError("exercise 4.10")

    @contextlib.contextmanager
    def communication(self) -> Iterator[None]:
        """Blocking communication runs inside: all of it is exposed, also if it ends in an error."""
        # Step 9: as if it had been waited for from its beginning
        raise NotImplementedError("exercise 4.10")

    def track(self, handle: Any) -> Flight:
        """To wait for in place of ``handle``, whose communication has begun just now."""
        return Flight(self, handle, self.clock.mark())

    def watch(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A communication hook (exercise 3.12) that does the same as ``hook``, and is measured.

        Its handles are in flight since it was called, and return the results of the hook's. A hook
        that has reduced the bucket already returns None: its time is exposed.
        """

        # Step 10: a handle becomes a Flight that began when the hook was called
        raise NotImplementedError("exercise 4.10")

    def step(self, *, samples: int, loss: Tensor | float, tokens: int = 0) -> StepMetrics:
        """End the step: its metrics, for this rank's ``samples``, ``tokens`` and mean loss.

        ``phases`` has all PHASES, and your own. A loss on a GPU may be passed as it is: it is read
        after the device has finished. Nothing of the step is kept.
        """
        # Step 11: mark the end, settle; only then ask for seconds
        # Step 12: lengths of unions: waiting; a phase without waiting; flights without waiting
        # Step 13: the next step begins where this one ends
        raise NotImplementedError("exercise 4.10")
