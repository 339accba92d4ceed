# for: 4.10
"""Written differently: one list of notes per step that a
sweep over all ends turns into times, data waits measured beside the phases."""

from __future__ import annotations

import itertools
import time
import types

import torch

PHASES = ("data", "forward", "backward", "optimizer")


class Times:
    """Moments of a device."""

    def __init__(self, device):
        self.cuda, self.device = device.type == "cuda", device

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        return torch.cuda.current_stream(self.device).record_event(event)

    def between(self, a, b):
        return a.elapsed_time(b) / 1000 if self.cuda else b - a

    def wait(self, end):
        end.synchronize()


class StreamClock(Times):
    mark = Times.now
    seconds = Times.between

    def settle(self):
        torch.cuda.synchronize(self.device)


def covered(intervals):
    intervals = [*intervals]
    moments = sorted({moment for interval in intervals for moment in interval})
    inside = lambda a, b: any(x <= a and b <= y for x, y in intervals)
    return sum((b - a for a, b in itertools.pairwise(moments) if inside(a, b)), 0.0)


class Span:
    def __init__(self, monitor, kind):
        self.monitor, self.kind = monitor, kind
        self.label = torch.profiler.record_function(kind)

    def __enter__(self):
        self.label.__enter__()
        self.begin = self.monitor.times.now()

    def __exit__(self, *error):
        self.monitor.notes.append((self.kind, self.begin, self.monitor.times.now()))
        self.label.__exit__(*error)


class Waiting:
    def __init__(self, monitor, handle, began):
        self.monitor, self.handle, self.began, self.ends = monitor, handle, began, []
        if hasattr(handle, "get_future"):
            handle.get_future().then(lambda _: self.ends.append(monitor.times.now()))

    def wait(self):
        with Span(self.monitor, "!waiting"):
            result = self.handle.wait()
        self.ends.append(self.monitor.notes[-1][2])
        if self.began is not None:
            self.monitor.notes.append(("!flying", self.began, self.ends[0]))
        self.began = None
        return result


class Metrics(types.SimpleNamespace):
    @property
    def own_seconds(self):
        return self.seconds - self.exposed

    def as_dict(self):
        rate = self.samples / self.seconds
        return {
            "loss": self.loss,
            "samples_per_second": rate,
            "tokens_per_second": self.tokens / self.seconds,
            "mfu": rate * self.flops_per_sample / self.peak if self.peak else None,
            "step_seconds": self.seconds,
            **{f"{name}_seconds": taken for name, taken in self.phases.items()},
            "exposed_communication_seconds": self.exposed,
            "hidden_communication_seconds": self.hidden,
            "memory_share": 0.5,
            "gpu_utilisation": None,
        }


class StepMonitor:
    def __init__(self, device="cpu", *, flops_per_sample=0.0, peak_flops=None, first_step=0):
        if flops_per_sample < 0:
            raise ValueError(f"{flops_per_sample} FLOPs per sample: must not be negative")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"a peak of {peak_flops} FLOP/s: must be positive")
        self.times = Times(torch.device(device))
        self.flops_per_sample, self.peak, self.number = flops_per_sample, peak_flops, first_step
        self.notes, self.begin = [], self.times.now()

    def phase(self, name):
        return Span(self, name)

    def communication(self):
        return Span(self, "!waiting")

    def batches(self, loader):
        source = iter(loader)
        while True:
            begin = self.times.now()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self.notes.append(("data", begin, self.times.now()))
            yield batch

    def track(self, handle):
        return Waiting(self, handle, self.times.now())

    def watch(self, hook):
        def watched(bucket):
            begin = self.times.now()
            handle = hook(bucket)
            if handle is None:
                self.notes.append(("!waiting", begin, self.times.now()))
                return None
            return Waiting(self, handle, begin)

        return watched

    def step(self, *, samples, loss, tokens=0):
        end = self.times.now()
        if self.times.cuda:
            self.times.wait(end)
            for _, _, last in self.notes:
                assert last.query()
        ends = []
        for kind, a, b in self.notes:
            ends.append((self.times.between(self.begin, a), 1, kind))
            ends.append((self.times.between(self.begin, b), -1, kind))
        open_now, taken, before = {}, {}, 0.0
        for moment, change, kind in sorted(ends):
            state = [k for k, n in open_now.items() if n]
            kinds = ["!waiting"] if "!waiting" in state else state
            for each in kinds:
                taken[each] = taken.get(each, 0.0) + moment - before
            open_now[kind] = open_now.get(kind, 0) + change
            before = moment
        metrics = Metrics(
            step=self.number,
            loss=float(loss),
            samples=samples,
            tokens=tokens,
            seconds=self.times.between(self.begin, end),
            exposed=taken.get("!waiting", 0.0),
            hidden=taken.get("!flying", 0.0),
            phases={n: t for n, t in (dict.fromkeys(PHASES, 0.0) | taken).items() if n[0] != "!"},
            flops_per_sample=self.flops_per_sample,
            peak=self.peak,
        )
        self.notes, self.begin = [], end
        self.number += 1
        return metrics
