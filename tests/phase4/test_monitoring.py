"""Checks of exercise 4.10: where the time of a step goes."""

from __future__ import annotations

import time

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


# -- time ------------------------------------------------------------------------------------------
@exercise("4.10", "virtual")
def test_phases_add_up(impl, run):
    """Two micro-batches: times of a phase add up; what lies in none of them is in the step."""

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
            found.append(monitor.step(samples=8, loss=0.5))
            time.sleep(10 * MS)  # the monitor's user writes a checkpoint, say
        whole = time.perf_counter() - begun - 10 * MS
        return [(m.step, m.seconds, m.phases) for m in found], whole

    metrics, whole = run.simulate(body, 1)[0]
    expect_equal([m[0] for m in metrics], [0, 1, 2], what="numbers of the steps")
    for step, seconds, phases in metrics:
        expect_seconds(phases["forward"], 40 * MS, "forward, two times 20 ms", "phase-time")
        expect_seconds(phases["backward"], 80 * MS, "backward, two times 40 ms", "phase-time")
        expect_seconds(phases["optimizer"], 3 * MS, "optimizer", "phase-time")
        expect_seconds(phases["data"], 0.0, "data that is there", "data-wait")
        want = (133 + 10 * (step > 0)) * MS
        expect_seconds(seconds, want, f"step {step}, from the end of the last", "step-time")
    expect_seconds(sum(m[1] for m in metrics), whole, "all steps together", "step-time")


@exercise("4.10", "gloo")
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


@exercise("4.10", "virtual")
def test_data_wait_is_what_the_loader_takes(impl, run):
    """Only the time in the loader counts, not what is done with its batches; they all arrive."""

    def loader():
        for batch in range(3):
            time.sleep(30 * MS)
            yield batch

    def body(ctx):
        monitor, seen, waits = impl.StepMonitor(), [], []
        for batch in monitor.batches(loader()):
            time.sleep(70 * MS)
            seen.append(batch)
            waits.append(monitor.step(samples=1, loss=0.0).phases["data"])
        return seen, waits

    seen, waits = run.simulate(body, 1)[0]
    expect_equal(seen, [0, 1, 2], what="the loader's batches")
    for wait in waits:
        expect_seconds(wait, 30 * MS, "waiting for a batch", "data-wait")


def wire_seconds(run, numel: int) -> float:
    """What an all-reduce of two ranks takes when nothing else goes on, in virtual time."""

    def reference(ctx):
        begun = time.perf_counter()
        dist.all_reduce(torch.zeros(numel))
        return time.perf_counter() - begun

    return max(run.simulate(reference, 2))


@exercise("4.10", "virtual")
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

    for rank, found in enumerate(run.simulate(body, 2)):
        for share, (exposed, hidden, backward) in zip(shares, found, strict=True):
            what = f"compute of {share:g} times the wire's {wire * 1e3:.1f} ms beside it"
            visible = max(0.0, 1 - share) * wire
            expect_seconds(exposed, visible, f"exposed, {what}", "exposed", rank)
            expect_seconds(hidden, wire - visible, f"hidden, {what}", "hidden", rank)
            expect_seconds(backward, share * wire, f"backward, {what}", "phase-time", rank)


@exercise("4.10", "virtual")
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


@exercise("4.10", "virtual")
def test_hooks_and_blocking_communication(impl, run):
    """A watched hook does its work; one that blocks is exposed, like what runs in a block."""
    wire = wire_seconds(run, 500_000)

    def body(ctx):
        def quick(bucket):
            return dist.all_reduce(bucket, async_op=True)

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
        with monitor.communication():
            dist.all_reduce(torch.zeros(500_000))
        m = monitor.step(samples=1, loss=0.0)
        return found, m.exposed, m.hidden

    for rank, ((quick, blocks), *block) in enumerate(run.simulate(body, 2)):
        for sums, *_ in (quick, blocks):
            expect_close(sums, torch.full((3,), 3.0), what="the bucket", rank=rank)
        expect_equal((quick[1], blocks[1]), (False, True), what="None for done", rank=rank)
        expect_seconds(quick[2], 0.75 * wire, "a hook that begins: exposed", "exposed", rank)
        expect_seconds(quick[3], 0.25 * wire, "a hook that begins: hidden", "hidden", rank)
        for exposed, hidden in (blocks[2:], block):
            expect_seconds(exposed, wire, "blocking communication: exposed", "exposed", rank)
            expect_seconds(hidden, 0.0, "blocking communication: hidden", "hidden", rank)


@exercise("4.10", "virtual")
def test_messages_can_be_tracked(impl, run):
    """A handle of a message, which may have no future on this backend."""

    def body(ctx):
        class Plain:
            def wait(self):
                time.sleep(10 * MS)

        monitor = impl.StepMonitor()
        monitor.track(Plain()).wait()
        metrics = monitor.step(samples=1, loss=0.0)
        return metrics.exposed, metrics.hidden

    exposed, hidden = run.simulate(body, 1)[0]
    expect_seconds(exposed, 10 * MS, "exposed, a handle with wait() only", "exposed")
    expect_seconds(hidden, 0.0, "hidden, a handle with wait() only", "hidden")


# -- a GPU runs behind -----------------------------------------------------------------------------
@exercise("4.10", "virtual")
def test_slow_kernels_show_where_they_run(impl, run):
    """On a GPU that runs behind the host: seconds of kernels, not of their launches."""

    def body(ctx):
        found = []
        with Gpu().installed() as gpu:
            monitor = impl.StepMonitor("cuda")
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
                m = monitor.step(samples=2, loss=torch.tensor(0.5))
                times = (m.seconds, m.exposed, m.hidden, m.phases)
                found.append((*times, before, gpu.synchronisations))
        return found

    last = 0
    for seconds, exposed, hidden, phases, before, after in run.simulate(body, 1)[0]:
        if before > last or after > last + 1:
            fail(
                f"the host waited for the GPU {after - last} times in one step, {before - last} of "
                "them before its end: once is enough, and more makes training slower",
                cause="synchronises-too-often",
            )
        last = after
        expect_seconds(phases["forward"], 50 * MS, "forward's kernel", "not-synchronised")
        expect_seconds(phases["backward"], 130 * MS, "backward's kernels", "not-synchronised")
        expect_seconds(phases["optimizer"], 5 * MS, "the optimizer's kernel", "not-synchronised")
        expect_seconds(exposed, 10 * MS, "exposed on the stream", "exposed")
        expect_seconds(hidden, 30 * MS, "hidden behind kernels", "hidden")
        expect_seconds(seconds, 195 * MS, "the step on the GPU", "not-synchronised")


# -- the rest of the metrics -----------------------------------------------------------------------
@exercise("4.10", "virtual")
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

    (step, known), (_, unknown) = run.simulate(body, 1)[0]
    expect_equal(step, 7, what="the number of the first step")
    want = {"loss": 1.25, "samples_per_second": 100, "tokens_per_second": 800, "mfu": 0.2}
    for name, value in want.items():
        if abs(known[name] - value) > 1e-3 * value:
            fail(f"{name}: expected {value}, got {known[name]}", cause="rate")
    expect_equal(unknown["mfu"], None, what="MFU without a peak", cause="rate")
    expect_equal(known["gpu_utilisation"], None, what="GPU utilisation of a CPU")
    expect_equal(0 < known["memory_share"] < 1, True, what="a share of the memory")


LATE = 0.3  # seconds


class Heard:
    """A handle; the store tells, under ``key``, when it is waited for."""

    def __init__(self, handle, key: str) -> None:
        self.handle, self.key = handle, key

    def wait(self):
        dist.distributed_c10d._get_default_store().set(self.key, "")
        return self.handle.wait()

    def __getattr__(self, name):
        return getattr(self.handle, name)


@exercise("4.10", "gloo cuda")
def test_a_late_rank_is_exposed_on_the_others(impl, run):
    """Real ranks: rank 1 computes 0.3 s longer; rank 0 waits for it, in its communication.

    It begins to compute when rank 0 waits, so on a busy machine that wait is longer, never shorter.
    What rank 1 waits is the least of three steps: one that was disturbed says nothing.
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


@exercise("4.10", "virtual")
def test_bad_settings_are_refused(impl, run):
    """Negative FLOPs and a peak of zero, before anything is measured."""
    calls = [
        ("negative FLOPs", {"flops_per_sample": -5.0}, [-5]),
        ("a peak of zero", {"flops_per_sample": 1.0, "peak_flops": 0.0}, [0.0]),
    ]
    settings = [options for _, options, _ in calls]

    def body(ctx):
        return [refusal(impl.StepMonitor, **options) for options in settings]

    expect_refused(run(body, 2), [(what, numbers) for what, _, numbers in calls])


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
