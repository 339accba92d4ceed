"""Checks of exercise 3.10: order, bytes, time and memory of the buckets."""

from __future__ import annotations

import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.hardware.clusters import load_cluster
from distlab.hardware.collectives import collective_time
from distlab.host.program_clock import until
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import digits


@exercise("3.10", "virtual gloo", asserts="bytes limits order-once arrived tied frozen cost")
def test_every_byte_once_in_few_messages(impl, run):
    """2(W-1)/W of the trainable bytes per step, a message per bucket, all waited for."""

    def body(ctx):
        layers = [nn.Linear(32, 32, bias=False) for _ in range(8)]  # 4,096 bytes each
        layers[0].requires_grad_(False)
        layers[3].weight = layers[5].weight
        model = nn.Sequential(*layers)
        wrapped = impl.BucketedDDP(model, bucket_bytes=8_192, first_bucket_bytes=4_096)
        for step in range(3):
            wrapped.zero_grad()
            loss = wrapped(torch.ones(2, 32)).sum()
            with ctx.region(f"step {step}"):
                loss.backward()
        flying = sum(e.end is None for e in ctx.ledger.events)
        homes = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
        return flying, len(homes)

    results = run(body, 3)
    for log, (flying, homes) in zip(results.logs, results, strict=True):
        log.all_waited()
        if flying:
            fail(
                f"{flying} operations are in flight on rank {log.rank} when backward returns",
                cause="in-flight",
                rank=log.rank,
            )
        for step, extra in ((2, 0), (1, 1), (0, 1)):  # the order travels soon, and once
            part = log.select(region=f"step {step}")
            share = 2 * 2 / 3 * 6 * 4_096
            part.sent_at_most(share + 100 * extra + 16, "2(W-1)/W of the trainable bytes")
            part.sent_at_least(share - 16, "2(W-1)/W of the trainable bytes")
            if part.messages > 4 + extra:
                fail(
                    f"rank {log.rank} issued {part.messages} messages in step {step} for 4 buckets",
                    cause="too-many-messages",
                    rank=log.rank,
                )
        spare = sum(log.select(region=f"step {step}").messages for step in range(3)) - 12
        if spare > 1:
            fail(
                f"rank {log.rank} sent {spare} messages beside the 12 buckets of three steps: the "
                "order is learned once",
                cause="too-many-messages",
                rank=log.rank,
            )
        expect_equal(
            homes,
            4,
            what="buckets of one, two, two and one of six gradients",
            rank=log.rank,
            cause="wrong-buckets",
        )


LAYERS, WIDTH = 6, 128


class Slowly(torch.autograd.Function):
    """Does nothing, and takes ``seconds`` for it in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Layers(nn.Module):
    """Equal layers, used in another order than registered.

    The k-th gradient comes ``seconds[k]`` after the one before.
    """

    def __init__(self, seconds: list[float], registered: list[int]) -> None:
        super().__init__()
        layers = {k: nn.Linear(WIDTH, WIDTH, bias=False) for k in registered}
        self.layers = nn.ModuleDict({f"layer{k}": layer for k, layer in layers.items()})
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in range(LAYERS):
            x = Slowly.apply(self.layers[f"layer{k}"](x), self.seconds[LAYERS - 1 - k])
        return x


LAYER_BYTES = WIDTH * WIDTH * 4


@exercise("3.10", "virtual gloo", asserts="leaves-early first-guess first-ranks-order cost")
def test_buckets_leave_before_the_last_gradient_exists(impl, run, cases):
    """With a bucket per layer, all but one are on their way when the first layer is reached."""
    for registered in cases([0, 1, 2, 3, 4, 5], [3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0]):

        def body(ctx):
            moments, early = [], []
            model = Layers([0.0] * LAYERS, registered)
            first = model.layers["layer0"].weight
            first.register_post_accumulate_grad_hook(lambda _: moments.append(time.monotonic()))
            wrapped = impl.BucketedDDP(
                model, bucket_bytes=LAYER_BYTES, first_bucket_bytes=LAYER_BYTES
            )
            for _ in range(2):
                wrapped.zero_grad()
                begun = len(ctx.ledger.events)
                wrapped(torch.ones(2, WIDTH)).sum().backward()
                events = ctx.ledger.events[begun:]
                early.append(sum(e.start < moments[-1] for e in events))
            return early

        guessed = registered == sorted(registered)  # right from the first step on
        for rank, (first_step, second_step) in enumerate(run(body, 2)):
            early = min(first_step, second_step) if guessed else second_step
            if early < LAYERS - 1:
                cause = "late-buckets" if early else "no-overlap"
                fail(
                    f"layers registered as {registered}: {early} of {LAYERS} buckets left before "
                    f"the last gradient existed, {LAYERS - 1} were complete. Let each leave when "
                    "its last gradient comes, in the order that was observed",
                    cause=cause,
                    rank=rank,
                )


@exercise("3.10", "virtual", asserts="beside leaves-early cost")
def test_step_takes_what_the_overlap_leaves(impl, run):
    """Virtual time of backward: f_k = max(t_k, f_{k-1}) + c_k, not T + Σ c_k."""
    world = tuple(range(4))
    wire = collective_time("all_reduce", LAYER_BYTES, world, load_cluster("laptop"))
    last = [0.0] * (LAYERS - 1) + [4 * wire]  # nothing is to be waited for before it
    for registered, seconds in (
        ([3, 0, 5, 1, 4, 2], [wire] * LAYERS),
        ([0, 1, 2, 3, 4, 5], [wire / 3] * LAYERS),
        ([0, 1, 2, 3, 4, 5], last),
    ):

        def body(ctx):
            model = Layers(seconds, registered)
            wrapped = impl.BucketedDDP(
                model, bucket_bytes=LAYER_BYTES, first_bucket_bytes=LAYER_BYTES
            )
            for _ in range(3):
                wrapped.zero_grad()
                loss = wrapped(torch.ones(2, WIDTH)).sum()
                dist.barrier()
                begun = time.perf_counter()
                loss.backward()
            return time.perf_counter() - begun

        arrived = 0.0
        for k in range(1, LAYERS + 1):
            arrived = max(sum(seconds[:k]), arrived) + wire
        apart = sum(seconds) + LAYERS * wire
        for rank, took in enumerate(run(body, 4)):
            if took > 1.02 * arrived + 1e-5:
                fail(
                    f"backward takes {sum(seconds) * 1e3:.2f} ms and {LAYERS} buckets "
                    f"{wire * 1e3:.2f} ms each. Overlapped that is {arrived * 1e3:.2f} ms, one "
                    f"after the other {apart * 1e3:.2f} ms; the step took {took * 1e3:.2f} ms",
                    cause="no-overlap" if took > 0.98 * apart else "late-buckets",
                    rank=rank,
                )


class Recorded:
    """A handle that notes when it is waited for."""

    def __init__(self, work, note) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        self.note()
        self.work.wait()


@exercise("3.10", "virtual", asserts="order-of-buckets hook")
def test_hook_reduces_every_bucket_in_order(impl, run):
    """The registered hook gets each bucket once, in order; its handles are waited for in order."""

    def body(ctx):
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(5)])
        wrapped = impl.BucketedDDP(model, bucket_bytes=512, first_bucket_bytes=256)
        wrapped(torch.ones(2, 8)).sum().backward()
        begun, waited, marks = [], [], []

        def hook(bucket):
            begun.append(int(bucket.index))
            work = dist.all_reduce(bucket.buffer, async_op=True)
            return Recorded(work, lambda: waited.append(int(bucket.index)))

        def silent(bucket):  # complete when it returns; marks what p.grad should hold
            bucket.buffer.fill_(bucket.index + 1.0)

        wrapped.register_comm_hook(hook)
        wrapped(torch.ones(2, 8)).sum().backward()
        in_time = len(waited)
        wrapped.register_comm_hook(silent)
        wrapped(torch.ones(2, 8)).sum().backward()
        marks = [float(p.grad.min()) for p in model.parameters()]
        events = len(ctx.ledger.events)
        try:
            wrapped.register_comm_hook("ring")
            refused = False
        except TypeError:
            refused = True
        return begun, waited, in_time, marks, refused, events

    for rank, (begun, waited, in_time, marks, refused, _) in enumerate(run(body, 2)):
        expect_equal(
            begun, [0, 1, 2], what="buckets given to the hook", rank=rank, cause="hook-order"
        )
        expect_equal(
            (waited, in_time),
            ([0, 1, 2], 3),
            what="handles waited for",
            rank=rank,
            cause="never-waited",
        )
        expect_equal(
            marks,
            [3.0, 3.0, 2.0, 2.0, 1.0],
            what="what the hook left in each gradient",
            rank=rank,
            cause="hook-ignored",
        )
        expect_equal(
            refused,
            True,
            what="TypeError for a hook that can't be called",
            rank=rank,
            cause="accepted",
        )


@exercise("3.10", "gloo", asserts="one-copy resources")
def test_gradients_and_buckets_are_one_copy(impl, run):
    """After a step N bytes are alive for N bytes of gradients, buckets and all."""
    need = 6 * 256 * 256 * 4

    def body(ctx):
        model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
        alive = []
        with PeakMemory() as memory:
            wrapped = impl.BucketedDDP(model, bucket_bytes=600_000, first_bucket_bytes=300_000)
            for _ in range(3):
                wrapped.zero_grad()
                wrapped(torch.ones(2, 256)).sum().backward()
                until(lambda: memory.current <= need, 0.5)  # a thread of gloo is a little later
                alive.append(memory.current)
        return alive

    for rank, alive in enumerate(run(body, 2, ledger=False)):
        if max(alive) > 1.05 * need:
            fail(
                f"after each step {[round(n / 1e6, 2) for n in alive]} MB are alive on rank "
                f"{rank}, the gradients have {need / 1e6:.2f}. Buckets and gradients are two "
                "copies, or old buckets are kept",
                cause="copies",
                rank=rank,
            )


@trace("3.10", measures="hidden")
def trace_overlap(impl):
    """Three steps of a model of five wide layers: buckets leave while backward runs."""
    digits()

    def body(ctx):
        images, labels = digits()[64 * ctx.rank : 64 * ctx.rank + 64]
        wide = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 768), nn.ReLU(), *wide, nn.Linear(768, 10)
        )
        wrapped = impl.BucketedDDP(model, bucket_bytes=2_500_000, first_bucket_bytes=1_000_000)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
        for step in range(5):
            if step == 3:
                dist.barrier()
                ctx.start_picture()
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()

    return body
