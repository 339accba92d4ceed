"""Checks of exercise 4.10: where the time of a step goes."""

from __future__ import annotations

import contextlib
import random
import time
import weakref

import torch
import torch._dynamo  # counting on the meta device imports it: once here, not per rank
import torch.distributed as dist

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from distlab.grading.checks import expect_refused, refusal
from tests.phase4.pretend_gpu import Gpu, Work

MS = 1e-3


def expect_seconds(got: float, want: float, what: str, cause: str, rank: int | None = None) -> None:
    """Fail unless the virtual seconds agree; reading a clock takes some of them."""
    if abs(got - want) > 1e-4:
        fail(f"{what}: expected {want:.4f} s, got {got:.4f} s", cause=cause, rank=rank)


class SlowLoss:
    """A loss that takes 7 ms to be read."""

    def __float__(self):
        time.sleep(7 * MS)
        return 0.5

    item = detach = cpu = __float__


# -- time ------------------------------------------------------------------------------------------
@exercise("4.10", "virtual", asserts="phase-time own-phase wall-clock steps-counted")
def test_phases_add_up(impl, run):
    """Two micro-batches: times of a phase add up; time in no phase is in the step."""

    def body(ctx):
        monitor = impl.StepMonitor()
        found, begun = [], time.perf_counter()
        for _ in range(3):
            for _ in monitor.batches(range(2)):
                with monitor.phase("forward"):
                    time.sleep(20 * MS)
                time.sleep(5 * MS)
                with monitor.phase("backward"):
                    time.sleep(40 * MS)
            with monitor.phase("optimizer"):
                time.sleep(3 * MS)
            with monitor.phase("logging"):
                pass
            found.append(monitor.step(samples=8, loss=SlowLoss()))
            time.sleep(10 * MS)  # the monitor's user writes a checkpoint, say
        whole = time.perf_counter() - begun - 10 * MS - 7 * MS
        return [(m.step, m.seconds, m.phases) for m in found], whole

    metrics, whole = run.simulate(body, 1)[0]
    expect_equal([m[0] for m in metrics], [0, 1, 2], what="numbers of the steps")
    for step, seconds, phases in metrics:
        names = {"data", "forward", "backward", "optimizer", "logging"}
        expect_equal({*phases}, names, what="names of the phases", cause="phase-missing")
        expect_seconds(phases["forward"], 40 * MS, "forward, two times 20 ms", "phase-time")
        expect_seconds(phases["backward"], 80 * MS, "backward, two times 40 ms", "phase-time")
        expect_seconds(phases["optimizer"], 3 * MS, "optimizer", "phase-time")
        expect_seconds(phases["data"], 0.0, "data that is there", "data-wait")
        want = (133 + (10 + 7) * (step > 0)) * MS
        what = f"step {step}, from the last one's call of step (which reads the loss for 7 ms)"
        expect_seconds(seconds, want, what, "step-time")
    expect_seconds(sum(m[1] for m in metrics), whole, "all steps together", "step-time")


@exercise("4.10", "virtual", asserts="nested after-exception life")
def test_phases_in_each_other_and_exceptions(impl, run):
    """Nested phases count for each of them. A phase that ends in an exception counts, also in one
    that is no Exception; so does communication. A phase inside of communication has no time left.
    Two monitors at once know nothing of each other."""

    def body(ctx):
        monitor, other = impl.StepMonitor(), impl.StepMonitor(first_step=5)
        with monitor.phase("forward"):
            time.sleep(10 * MS)
            with monitor.phase("attention"):
                time.sleep(20 * MS)
        raised = []
        for error in (KeyError, KeyboardInterrupt):
            for block in (monitor.phase("backward"), monitor.communication()):
                try:
                    with block:
                        time.sleep(15 * MS)
                        raise error("out of memory, say")
                except error:
                    raised.append(True)
        with monitor.communication(), monitor.phase("checkpoint"):
            time.sleep(5 * MS)
        with other.phase("forward"):
            time.sleep(40 * MS)
        a, b = (m.step(samples=1, loss=0.0) for m in (monitor, other))
        empty = monitor.step(samples=1, loss=0.0)
        return raised, (a.phases, a.exposed), (b.step, b.phases["forward"], b.exposed), empty.phases

    raised, (phases, exposed), (number, forward, waited), empty = run.simulate(body, 1)[0]
    expect_equal(raised, [True] * 4, what="the exceptions go on", cause="exception-swallowed")
    for name, want in {"forward": 30, "attention": 20, "backward": 30, "checkpoint": 0}.items():
        what = f"{name}, of phases in each other, with an exception or inside of communication"
        expect_seconds(phases.get(name, 0.0), want * MS, what, "phase-time")
    what = "communication, two times 15 ms to an exception and 5 ms with a phase inside"
    expect_seconds(exposed, 35 * MS, what, "exposed")
    expect_equal(number, 5, what="the second monitor's step", cause="shared-state")
    expect_seconds(forward, 40 * MS, "the second monitor's forward", "shared-state")
    expect_seconds(waited, 0.0, "the second monitor's exposed communication", "shared-state")
    expect_seconds(sum(empty.values()), 0.0, "phases of a step without any", "kept-from-before")


@exercise("4.10", "virtual", asserts="union")
def test_covered_is_the_length_of_a_union(impl, run, seed):
    """Nested, touching, equal and separate intervals, in any order, also from a generator."""
    draw = random.Random(seed)
    cases = [[], [(3.0, 5.0), (-2.0, 1.0)], [(0.0, 9.0), (2.0, 3.0), (4.0, 9.0)], [(1.0, 1.0)]]
    for _ in range(40):
        begins = [draw.randrange(-20, 20) for _ in range(draw.randrange(1, 7))]
        cases.append([(float(b), float(b + draw.randrange(8))) for b in begins])

    def body(ctx):
        return [float(impl.covered(pair for pair in intervals)) for intervals in cases]

    for intervals, got in zip(cases, run(body, 1)[0], strict=True):
        want = len({tick for a, b in intervals for tick in range(int(a), int(b))})
        expect_equal(got, float(want), what=f"the length of {intervals} together", cause="union")


@exercise("4.10", "gloo", asserts="profile output")
def test_phases_show_in_a_profile(impl, run):
    """A profiler's trace says which operators belong to which phase, also to one of your own."""

    def body(ctx):
        monitor = impl.StepMonitor()
        with torch.profiler.profile() as profile:
            for name in ("forward", "evaluation"):
                with monitor.phase(name):
                    torch.ones(2).sum()
        return sorted(event.key for event in profile.key_averages())

    (keys,) = run(body, 1, process_group=False)
    for name in ("forward", "evaluation"):
        if name not in keys:
            fail(f"the profile has no {name!r}, only {', '.join(keys)}", cause="profile")


@exercise("4.10", "virtual", asserts="data any-batch lazy life")
def test_data_wait_is_what_the_loader_takes(impl, run):
    """Only the time in the loader counts, not the work on its batches. All batches arrive, also
    None, and none is asked for before its time."""
    batches = [0, None, (), 3]

    class Loader:
        def __init__(self) -> None:
            self.asked = 0

        def __iter__(self):
            for batch in batches:
                self.asked += 1
                time.sleep(30 * MS)
                yield batch

    def body(ctx):
        monitor, seen, waits, loader = impl.StepMonitor(), [], [], Loader()
        for batch in monitor.batches(loader):
            time.sleep(70 * MS)
            seen.append((batch, loader.asked))
            waits.append(monitor.step(samples=1, loss=0.0).phases["data"])
        for batch in monitor.batches(iter(loader)):  # another epoch, left early
            seen.append((batch, loader.asked))
            break
        waits.append(monitor.step(samples=1, loss=0.0).phases["data"])

        def breaks():
            time.sleep(30 * MS)
            raise OSError("a file is gone, say")
            yield

        with contextlib.suppress(OSError):
            next(monitor.batches(breaks()))
        return seen, waits, monitor.step(samples=1, loss=0.0).phases["data"]

    seen, waits, left = run.simulate(body, 1)[0]
    want = [(0, 1), (None, 2), ((), 3), (3, 4), (0, 5)]
    expect_equal(
        [batch for batch, _ in seen], [b for b, _ in want], what="the batches", cause="batches"
    )
    expect_equal(seen, want, what="batches, and how many were asked for", cause="asked-ahead")
    for wait in (*waits, left):
        expect_seconds(wait, 30 * MS, "waiting for a batch (or an error instead)", "data-wait")


def wire_seconds(run, numel: int) -> float:
    """The virtual time of an all-reduce of two ranks beside no other work."""

    def reference(ctx):
        begun = time.perf_counter()
        dist.all_reduce(torch.zeros(numel))
        return time.perf_counter() - begun

    return max(run.simulate(reference, 2))


@exercise("4.10", "virtual", asserts="exposed hidden phase-time never-communicates cost")
def test_exposed_and_hidden_communication(impl, run):
    """A wire slower than compute, a faster one, and none at all, by real all-reduces."""
    wire, shares = wire_seconds(run, 1_000_000), (0.25, 3.0, 0.0)

    def body(ctx):
        monitor, found = impl.StepMonitor(), []
        monitor.step(samples=1, loss=0.0)
        for share in shares:
            with monitor.phase("backward"):
                handle = monitor.track(dist.all_reduce(torch.zeros(1_000_000), async_op=True))
                time.sleep(share * wire)
                handle.wait()
            m = monitor.step(samples=1, loss=0.0)
            found.append((m.exposed, m.hidden, m.phases["backward"]))
        return found

    results = run.simulate(body, 2)
    for rank, found in enumerate(results):
        operators = [event.op for event in results.logs[rank].events]
        expect_equal(
            operators,
            ["all_reduce"] * len(shares),
            what="communication of a measured program",
            rank=rank,
            cause="communicates",
        )
        for share, (exposed, hidden, backward) in zip(shares, found, strict=True):
            what = f"compute of {share:g} times the wire's {wire * 1e3:.1f} ms beside it"
            visible = max(0.0, 1 - share) * wire
            expect_seconds(exposed, visible, f"exposed, {what}", "exposed", rank)
            expect_seconds(hidden, wire - visible, f"hidden, {what}", "hidden", rank)
            expect_seconds(backward, share * wire, f"backward, {what}", "phase-time", rank)


@exercise("4.10", "virtual", asserts="union hidden")
def test_communication_at_once_counts_once(impl, run):
    """Two buckets on the wire: seconds in which any of them is, not the sum of their times."""
    wire = wire_seconds(run, 1_000_000)

    def body(ctx):
        monitor = impl.StepMonitor()
        begun = time.perf_counter()
        buffers = [torch.zeros(1_000_000) for _ in range(2)]
        handles = [monitor.track(dist.all_reduce(b, async_op=True)) for b in buffers]
        time.sleep(wire / 2)
        for handle in handles:
            handle.wait()
        both = time.perf_counter() - begun
        time.sleep(wire)  # compute that follows hides nothing
        metrics = monitor.step(samples=1, loss=0.0)
        return both, metrics.exposed, metrics.hidden

    for rank, (both, exposed, hidden) in enumerate(run.simulate(body, 2)):
        expect_seconds(exposed, both - wire / 2, "exposed, two buckets", "exposed", rank)
        expect_seconds(hidden, wire / 2, "hidden, two buckets", "hidden", rank)


@exercise("4.10", "virtual", asserts="hook exposed hidden")
def test_hooks_and_blocking_communication(impl, run):
    """A watched hook does its work; a blocking hook is exposed, like communication in a block."""
    wire = wire_seconds(run, 500_000)

    def body(ctx):
        def quick(bucket):  # computes before it sends, and after
            time.sleep(wire / 8)
            handle = dist.all_reduce(bucket, async_op=True)
            time.sleep(wire / 8)
            return handle

        def blocks(bucket):
            dist.all_reduce(bucket)

        monitor, found = impl.StepMonitor(), []
        for hook in (quick, blocks):
            monitor.step(samples=1, loss=0.0)
            bucket = torch.full((500_000,), ctx.rank + 1.0)
            handle = monitor.watch(hook)(bucket)
            time.sleep(wire / 4)
            if handle is not None:
                handle.wait()
            m = monitor.step(samples=1, loss=0.0)
            found.append((bucket[:3].clone(), handle is None, m.exposed, m.hidden))
        with monitor.phase("optimizer"):
            time.sleep(wire / 4)
            with monitor.communication():
                dist.all_reduce(torch.zeros(500_000))
        m = monitor.step(samples=1, loss=0.0)
        return found, m.phases["optimizer"], m.exposed, m.hidden

    for rank, ((quick, blocks), phase, *block) in enumerate(run.simulate(body, 2)):
        what = "a phase in which blocking communication runs: the time that is left of it"
        expect_seconds(phase, 0.25 * wire, what, "phase-time", rank)
        for sums, *_ in (quick, blocks):
            expect_close(sums, torch.full((3,), 3.0), what="the bucket", rank=rank)
        expect_equal((quick[1], blocks[1]), (False, True), what="None for done", rank=rank)
        what = "a hook that computes, begins, and computes, each for an eighth of the wire's time"
        expect_seconds(quick[2], 0.625 * wire, f"{what}: exposed", "exposed", rank)
        said = f"{what}: hidden (in flight since it was called)"
        expect_seconds(quick[3], 0.5 * wire, said, "hidden", rank)
        for exposed, hidden in (blocks[2:], block):
            expect_seconds(exposed, wire, "blocking communication: exposed", "exposed", rank)
            expect_seconds(hidden, 0.0, "blocking communication: hidden", "hidden", rank)


@exercise("4.10", "virtual", asserts="no-future wait-result running-step not-kept life resources")
def test_messages_can_be_tracked(impl, run):
    """A handle of a message, which may have no future on this backend."""

    def body(ctx):
        class Plain:
            def wait(self):
                time.sleep(10 * MS)
                return "arrived"

        def times():
            metrics = monitor.step(samples=1, loss=0.0)
            return metrics.exposed, metrics.hidden

        monitor = impl.StepMonitor()
        results, found = [monitor.track(Plain()).wait()], [times()]
        handle = monitor.watch(lambda _: Plain())(None)  # begun in one step …
        time.sleep(5 * MS)
        found.append(times())
        time.sleep(20 * MS)
        results.append(handle.wait())  # … and waited for in the next
        time.sleep(40 * MS)
        handle.wait()
        found.append(times())
        handle.wait()
        found.append(times())
        kept = {"handles": weakref.ref(handle.handle)}
        del handle
        loss = torch.ones(1, requires_grad=True) * 2
        loss.grad_fn.metadata["alive"] = graph = Plain()
        kept |= {"the loss": weakref.ref(loss), "the loss's graph": weakref.ref(graph)}
        kept["its metrics"] = weakref.ref(monitor.step(samples=1, loss=loss))
        del loss, graph
        return results, found, [name for name, ref in kept.items() if ref() is not None]

    results, found, alive = run.simulate(body, 1)[0]
    expect_equal(
        results, ["arrived"] * 2, what="what wait() returns, that of the handle", cause="no-result"
    )
    cases = {
        "a handle with wait() only": (10, 0),
        "a step that begins communication, and does not wait": (0, 0),
        "a step that waits, twice, for what was begun 5 ms before it": (20, 25),
        "a step that waits again for what a step before has waited for": (10, 0),
    }
    for (what, (waited, behind)), (exposed, hidden) in zip(cases.items(), found, strict=True):
        expect_seconds(exposed, waited * MS, f"exposed, {what}", "exposed")
        expect_seconds(hidden, behind * MS, f"hidden, {what}", "hidden")
    if alive:
        fail(f"of steps that are over the monitor keeps {' and '.join(alive)}", cause="kept")


# -- a GPU runs behind -----------------------------------------------------------------------------
@exercise("4.10", "virtual", asserts="gpu-time one-synchronisation loss-read-late cost")
def test_slow_kernels_show_where_they_run(impl, run):
    """On a GPU that runs behind the host: seconds of kernels, not of their launches."""

    def body(ctx):
        found, read = [], []

        class Loss:
            def __float__(self):
                read.append(gpu.current.done_at - time.perf_counter())
                return 0.5

            item = detach = cpu = __float__

        with Gpu().installed() as gpu:
            monitor = impl.StepMonitor("cuda:1")
            for _ in range(3):
                with monitor.phase("forward"):
                    gpu.launch(50 * MS)
                with monitor.phase("backward"):
                    gpu.launch(100 * MS)
                    handle = monitor.track(Work(gpu, 40 * MS))
                    gpu.launch(30 * MS)
                    handle.wait()
                with monitor.phase("optimizer"):
                    gpu.launch(5 * MS)
                before = gpu.synchronisations
                m = monitor.step(samples=2, loss=Loss())
                times = (m.seconds, m.exposed, m.hidden, m.phases)
                found.append((*times, before, gpu.synchronisations))
        return found, max(read, default=None), gpu.devices

    found, early, devices = run.simulate(body, 1)[0]
    if early is None or early > 0:
        fail(
            f"the loss was read {early or 0:.3f} s before the device had finished: reading it "
            "waits for the device, a second time",
            cause="loss-read-early",
        )
    expect_equal(
        devices,
        {"cuda:1"},
        what="devices whose stream was asked for or that were waited for (None: the current one)",
        cause="other-device",
    )
    last = 0
    for seconds, exposed, hidden, phases, before, after in found:
        if before > last or after > last + 1:
            fail(
                f"the host waited for the GPU {after - last} times in one step, {before - last} of "
                "them before its end. Once is enough, and more makes training slower",
                cause="synchronises-too-often",
            )
        last = after
        expect_seconds(phases["forward"], 50 * MS, "forward's kernel", "not-synchronised")
        expect_seconds(phases["backward"], 130 * MS, "backward's kernels", "not-synchronised")
        expect_seconds(phases["optimizer"], 5 * MS, "the optimizer's kernel", "not-synchronised")
        expect_seconds(exposed, 10 * MS, "exposed on the stream", "exposed")
        expect_seconds(hidden, 30 * MS, "hidden behind kernels", "hidden")
        expect_seconds(seconds, 195 * MS, "the step on the GPU", "not-synchronised")


@exercise("4.10", "virtual", asserts="stream-clock gpu-time")
def test_stream_clock_waits_for_every_stream(impl, run):
    """A mark does not wait; settle waits for all streams; distances are the device's seconds."""

    def body(ctx):
        with Gpu().installed() as gpu:
            clock = impl.StreamClock(torch.device("cuda:1"))
            begun = time.perf_counter()
            marks = [clock.mark()]
            gpu.launch(20 * MS)
            marks.append(clock.mark())
            Work(gpu, 50 * MS)
            marked = time.perf_counter() - begun
            clock.settle()
            settled = time.perf_counter() - begun
            return marked, settled, clock.seconds(*marks)

    marked, settled, seconds = run.simulate(body, 1)[0]
    expect_seconds(marked, 0.0, "the host's time for two marks", "synchronises-too-often")
    expect_seconds(settled, 70 * MS, "settle: kernels and communication", "not-synchronised")
    expect_seconds(seconds, 20 * MS, "from mark to mark on the device", "milliseconds")


# -- the rest of the metrics -----------------------------------------------------------------------
@exercise("4.10", "virtual", asserts="metrics first-step dtype")
def test_rates_and_utilisation(impl, run):
    """Samples and tokens per second, MFU from the FLOPs of a sample; None if not known."""

    def body(ctx):
        found = []
        for options in ({"flops_per_sample": 2e9, "peak_flops": 1e12}, {"flops_per_sample": 2e9}):
            monitor = impl.StepMonitor(first_step=7, **options)
            time.sleep(0.5)
            m = monitor.step(samples=50, tokens=400, loss=torch.tensor(1.25, requires_grad=True))
            found.append((m.step, m.as_dict()))
        return found

    def losses(ctx):
        monitor = impl.StepMonitor()
        kinds = [torch.tensor(1.5, dtype=dtype) for dtype in (torch.float16, torch.bfloat16)]
        kinds += [torch.tensor(1 + 2**-40, dtype=torch.float64), torch.tensor(3), 2.5]
        return [monitor.step(samples=1, loss=loss).loss for loss in kinds]

    (step, known), (_, unknown) = run.simulate(body, 1)[0]
    expect_equal(step, 7, what="the number of the first step")
    want = {"loss": 1.25, "samples_per_second": 100, "tokens_per_second": 800, "mfu": 0.2}
    for name, value in want.items():
        if abs(known[name] - value) > 1e-3 * value:
            fail(f"{name}: expected {value}, got {known[name]}", cause="rate")
    dtypes = run(losses, 1)[0]
    expect_equal(dtypes, [1.5, 1.5, 1 + 2**-40, 3.0, 2.5], what="losses of five dtypes")
    expect_equal(unknown["mfu"], None, what="MFU without a peak", cause="rate")
    expect_equal(known["gpu_utilisation"], None, what="GPU utilisation of a CPU")
    expect_equal(0 < known["memory_share"] < 1, True, what="a share of the memory")


LATE = 0.3  # seconds


class Heard:
    """A handle; the store has, under ``key``, the time at which it is waited for."""

    def __init__(self, handle, key: str) -> None:
        self.handle, self.key = handle, key

    def wait(self):
        dist.distributed_c10d._get_default_store().set(self.key, "")
        return self.handle.wait()

    def __getattr__(self, name):
        return getattr(self.handle, name)


@exercise("4.10", "gloo cuda", asserts="exposed alone")
def test_a_late_rank_is_exposed_on_the_others(impl, run):
    """Real ranks: rank 1 computes 0.3 s longer; rank 0 waits for it, in its communication.

    It begins to compute when rank 0 waits, so on a busy machine that wait is longer, never shorter.
    Rank 1's wait is the least of three steps: a disturbed step says nothing.
    """

    def body(ctx):
        monitor = impl.StepMonitor(ctx.device)
        monitor.step(samples=1, loss=0.0)
        found = []
        for step in range(3):
            buffer = torch.ones(10, device=ctx.device)
            with monitor.phase("backward"):
                if ctx.rank == 1:
                    dist.distributed_c10d._get_default_store().wait([f"heard{step}"])
                    time.sleep(LATE)
                handle = dist.all_reduce(buffer, async_op=True)
                monitor.track(handle if ctx.rank else Heard(handle, f"heard{step}")).wait()
            metrics = monitor.step(samples=1, loss=buffer.sum())
            found.append((metrics.exposed, metrics.seconds, metrics.own_seconds, metrics.loss))
        return found

    results = run(body, 2)
    for rank, found in enumerate(results):
        for exposed, seconds, own, loss in found:
            expect_equal(loss, 20.0, what="the buffer's sum", rank=rank)
            expect_equal(abs(seconds - own - exposed) < 1e-6, True, what="own = step - exposed")
            if seconds < LATE:
                text = f"rank {rank}'s step took {seconds:.3f} s, at least {LATE} passed in it"
                fail(text, cause="step-time", rank=rank)
    first, second = (min(exposed for exposed, *_ in found) for found in results)
    if first < LATE or second > 0.7 * LATE:
        fail(
            f"rank 0 waits {LATE} s for rank 1 and not the other way round: exposed are "
            f"{first:.3f} and {second:.3f} s",
            cause="exposed",
        )


@exercise("4.10", "virtual", asserts="refused refusals")
def test_bad_settings_are_refused(impl, run):
    """Negative FLOPs and a peak of zero, before anything is measured."""
    calls = {
        "negative FLOPs": {"flops_per_sample": -5.0},
        "a peak of zero": {"flops_per_sample": 1.0, "peak_flops": 0.0},
        "a negative peak": {"peak_flops": -1e12},
    }
    settings = [*calls.values()]

    def body(ctx):
        return [refusal(impl.StepMonitor, **options) for options in settings]

    expect_refused(run(body, 2), [*calls])


@trace("4.10")
def scenario(impl):
    """Three steps: the last bucket's all-reduce is exposed, the first one's hidden."""

    def body(ctx):
        monitor = impl.StepMonitor(ctx.device)
        ctx.start_picture()
        for _ in range(3):
            with monitor.phase("forward"), ctx.span("forward"):
                time.sleep(10 * MS)
            with monitor.phase("backward"):
                handles = []
                for _ in range(2):
                    with ctx.span("backward"):
                        time.sleep(10 * MS)
                    gradient = torch.zeros(1_000_000, device=ctx.device)
                    handles.append(monitor.track(dist.all_reduce(gradient, async_op=True)))
                for handle in handles:
                    handle.wait()
            monitor.step(samples=1, loss=0.0)

    return body
