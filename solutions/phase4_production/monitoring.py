"""Step metrics: where the time of a step goes, and what the hardware makes of it.

    seconds  =  data + forward + backward + optimizer + exposed + the rest
    exposed  =  |waited for|,          hidden = |in flight ∪ waited for| - exposed
    MFU      =  FLOPs of the model per sample · samples / seconds / peak FLOP/s

|…| is the length of a union of intervals: two buckets on the wire at once don't count twice.
Exposed communication is what overlap can still gain; most of it is waited for in backward, whose
time is without it. Hidden communication costs nothing.

A GPU runs behind the program: a clock read on the host tells when work was *launched*. So on CUDA a
moment is an event in the stream, and the device is waited for once per step, at its end.
Cost: some µs per phase, no message. Invariant: the seconds of all steps add up to the wall clock.
Sources: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B for MFU; Narayanan et al. 2021 (arXiv
2104.04473), appendix, for counted FLOPs; Li et al. 2020 (arXiv 2006.15704) for overlap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
T = TypeVar("T")
Mark = Any  # a moment, as the clock of the device notes it
Interval = tuple[float, float]
PHASES = ("data", "forward", "backward", "optimizer")
NO_TRACE = contextlib.nullcontext()


# -- FLOPs -----------------------------------------------------------------------------------------
class FlopCounter(TorchDispatchMode):
    """Adds up in ``flops`` what matrix products and convolutions cost that run inside.

    A multiplication and an addition are two. Everything else counts as nothing: it is bound by
    memory, and the peak that MFU divides by is that of matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func.overloadpacket, args, out)
        return out


def operator_flops(operator: Any, args: Sequence[Any], out: Any) -> int:
    """FLOPs of one call of an ATen operator; 0 if it is no product and no convolution.

    ``aten.mm(a, b)``, ``aten.addmm(c, a, b)``, ``aten.bmm(a, b)``, ``aten.baddbmm(c, a, b)``: 2·n·k
    for n elements of the result, sums of k terms. ``aten.convolution(x, w, bias, stride, padding,
    dilation, transposed, …)``: every element of the result (transposed: of x) meets one filter,
    ``w[0]``. ``aten.convolution_backward(grad_out, x, w, …, transposed, …, mask)``: as much for
    each gradient of x and of w that ``mask`` asks for.
    """
    # --- exercise 4.10: start
    # Step 1: products: 2 · elements of `out` · last dimension of `a`
    # Step 2: convolution: 2 · elements of `out` (transposed: of `x`) · elements of `w[0]`
    # Step 3: its backward: the same with `grad_out` for `out`, times the gradients asked for
    if operator in (aten.mm, aten.bmm):
        return 2 * out.numel() * args[0].shape[-1]
    if operator in (aten.addmm, aten.baddbmm):
        return 2 * out.numel() * args[1].shape[-1]
    if operator is aten.convolution:
        x, w, transposed = args[0], args[1], args[6]
        return 2 * (x if transposed else out).numel() * w[0].numel()
    if operator is aten.convolution_backward:
        grad_out, x, w, transposed, mask = args[0], args[1], args[2], args[7], args[10]
        return 2 * (x if transposed else grad_out).numel() * w[0].numel() * sum(mask[:2])
    return 0
    # --- exercise 4.10: end


def count_flops(model: nn.Module, *inputs: Any) -> int:
    """FLOPs of one forward and backward of ``model(*inputs)``.

    Computes shapes only, no values: parameters, gradients, buffers and random state stay as they
    are, and it takes milliseconds for a model of any size. Gradients are counted for parameters
    that have ``requires_grad``, not for the inputs; none at all if no parameter has. Attention
    counts as its two products, what activation checkpointing computes again counts again. Give it
    the plain model: no wrapper that communicates.
    """

    # --- exercise 4.10: start
    # Step 4: the same shapes without storage, on the meta device; `torch.func.functional_call` runs
    #         the model on them in place of its own parameters and buffers
    # Step 5: run forward, and backward from a sum of the outputs, inside `FlopCounter`
    def meta(t: Tensor) -> Tensor:
        return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)

    state = {n: meta(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    shapes = tree_map_only(Tensor, lambda t: meta(t.detach()), inputs)
    with FlopCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        outputs = tree_leaves(torch.func.functional_call(model, state, shapes))
        learned = [o.sum() for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        if learned:
            torch.autograd.backward(learned)
    return counter.flops
    # --- exercise 4.10: end


def matmul_peak(device: torch.device | str, dtype: torch.dtype, n: int = 1024) -> float:
    """FLOP/s of the best of ten n×n matrix products: a stand-in where no data sheet is at hand."""
    clock = clock_of(torch.device(device))
    a = torch.ones(n, n, device=device, dtype=dtype)
    marks = [clock.mark()]
    for _ in range(10):
        a @ a
        marks.append(clock.mark())
    clock.settle()
    return 2 * n**3 / min(clock.seconds(a, b) for a, b in itertools.pairwise(marks))


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
    """For a CPU: what was called is done when it returns."""

    def mark(self) -> Mark:
        """This moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing runs behind the program."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one moment to the other."""
        return float(end - begin)


class StreamClock:
    """For a GPU: a moment is when the device gets to this place in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """An event in the current stream; does not wait for it."""
        # --- exercise 4.10: start
        # Step 6: an event with timing, recorded in the device's current stream
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
        # --- exercise 4.10: end

    def settle(self) -> None:
        """Return when the device has done all that was launched, in every stream."""
        # --- exercise 4.10: start
        # Step 7: the one synchronisation of the step
        torch.cuda.synchronize(self.device)
        # --- exercise 4.10: end

    def seconds(self, begin: Mark, end: Mark) -> float:
        """From one event to the other, by the device's own clock."""
        # --- exercise 4.10: start
        # Step 8: events count milliseconds
        return float(begin.elapsed_time(end)) / 1e3
        # --- exercise 4.10: end


def clock_of(device: torch.device) -> Clock:
    """The clock that tells when work on ``device`` is done."""
    return StreamClock(device) if device.type == "cuda" else HostClock()


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals (begin, end), in any order."""
    # --- exercise 4.10: start
    # Step 9: from left to right; of each what lies beyond the end of all before it
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
        # --- exercise 4.10: start
        # Step 10: have the handle's future, if it has one, note the moment when it is complete. A
        #          GPU's future calls back in a stream of its own that is behind the communication
        with contextlib.suppress(AttributeError, RuntimeError):  # messages have no future
            handle.get_future().add_done_callback(self._note)
        # --- exercise 4.10: end

    def _note(self, _: object) -> None:
        self.arrived = self.monitor.clock.mark()

    def wait(self) -> object:
        """Wait for the handle; what that takes is exposed. Counts for the step that is running."""
        # --- exercise 4.10: start
        # Step 11: mark, wait, mark; without a future it has arrived by the second mark
        begin = self.monitor.clock.mark()
        result = self.handle.wait()
        end = self.monitor.clock.mark()
        self.monitor.waits.append((begin, end))
        self.monitor.flights.append((self.began, end if self.arrived is None else self.arrived))
        return result
        # --- exercise 4.10: end


# -- the monitor -----------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of one rank. Times in seconds, memory in bytes; None where nothing is known."""

    step: int
    loss: float
    samples: int
    tokens: int
    seconds: float
    phases: dict[str, float]  # without what is exposed inside
    exposed: float
    hidden: float
    flops: float
    peak_flops: float | None
    memory: int  # at most allocated in the step (CPU: resident since the process began)
    memory_capacity: int
    gpu_utilisation: float | None  # share of time in which the GPU ran anything: 0 … 1

    @property
    def own_seconds(self) -> float:
        """What the rank spent on its own account, not waiting for others."""
        return self.seconds - self.exposed

    def as_dict(self) -> dict[str, float | None]:
        """Flat, for sinks: rates instead of counts, a ``…_seconds`` for each phase."""
        mfu = self.flops / self.seconds / self.peak_flops if self.peak_flops else None
        return {
            "loss": self.loss,
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "mfu": mfu,
            "step_seconds": self.seconds,
            **{f"{name}_seconds": taken for name, taken in self.phases.items()},
            "exposed_communication_seconds": self.exposed,
            "hidden_communication_seconds": self.hidden,
            "memory_bytes": self.memory,
            "memory_share": self.memory / self.memory_capacity,
            "gpu_utilisation": self.gpu_utilisation,
        }


class StepMonitor:
    """Measures the steps of one rank, computed on ``device``, and counts them from ``first_step``.

    ``flops_per_sample``: see ``count_flops``; ``peak_flops``: FLOP/s of the device at best, for the
    dtype that is used; without it there is no MFU. A step lasts from the end of the last one (the
    first: from here) to its ``step`` call. Never communicates, and waits for the device in ``step``
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
        self.waits: list[tuple[Mark, Mark]] = []  # of it, what was waited for

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs inside belongs to ``name``: one of PHASES, or a further one.

        Times of one name add up in a step; communication that is waited for inside is not part of
        them. Shows in a profiler's trace as well.
        """
        # --- exercise 4.10: start
        # Step 12: a mark at each end; inside a `record_function(name)` if a profiler runs (if none
        #          does, it would take longer than everything else here)
        with record_function(name) if torch.autograd._profiler_enabled() else NO_TRACE:
            begin = self.clock.mark()
            yield
            self.spans.setdefault(name, []).append((begin, self.clock.mark()))
        # --- exercise 4.10: end

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches; waiting for them is the phase "data"."""
        # --- exercise 4.10: start
        # Step 13: only `next` lies inside the phase, not what the caller does with the batch
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
        """Blocking communication runs inside: all of it is exposed."""
        # --- exercise 4.10: start
        # Step 14: as if it had been waited for from its beginning
        begin = self.clock.mark()
        yield
        self.waits.append((begin, self.clock.mark()))
        # --- exercise 4.10: end

    def track(self, handle: Any) -> Flight:
        """To be waited for in place of ``handle``, whose communication was begun just now."""
        return Flight(self, handle, self.clock.mark())

    def watch(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A communication hook (exercise 3.12) that does what ``hook`` does, and is measured.

        Time in a hook that returns None, because it has reduced the bucket already, is exposed.
        """

        # --- exercise 4.10: start
        # Step 15: a handle becomes a Flight that began when the hook was called
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

        A loss on a GPU may be given as it is: it is read after the device has finished.
        """
        # --- exercise 4.10: start
        # Step 16: mark the end, settle; only then ask for seconds
        # Step 17: lengths of unions: what is waited for; a phase without that; flights without that
        # Step 18: the next step begins where this one ends
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


class Gauges:
    """What the device says about itself."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.next_reading, self.reading = 0.0, None
        self.capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type == "cuda":
            self.capacity = torch.cuda.get_device_properties(device).total_memory

    def memory(self) -> tuple[int, int]:
        """Bytes: the most since the last call (CPU: since the process began), and what there is."""
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return most, self.capacity
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, self.capacity

    def utilisation(self) -> float | None:
        """The GPU's by NVML, read once a second at most; None without a GPU or its NVML."""
        if self.device.type == "cuda" and time.monotonic() >= self.next_reading:
            self.next_reading = time.monotonic() + 1.0
            try:
                self.reading = torch.cuda.utilization(self.device) / 100
            except Exception:  # NVML missing or forbidden, in the words of three libraries
                self.reading = None
        return self.reading
