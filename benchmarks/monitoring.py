"""What monitoring costs: a training step with it and without, in the same ranks, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.tensorboard  # takes a second: once here, not in the ranks
from torch import Tensor, nn

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import build_model
from given.sinks import Sinks
from solutions.phase3_multi_node.overlap import BucketedDDP
from solutions.phase4_production.flops import count_flops
from solutions.phase4_production.monitoring import StepMonitor
from solutions.phase4_production.sinks import open_sinks
from solutions.phase4_production.stragglers import ClusterMonitor

from .common import in_turn
from .ddp import batch, mlp
from .pairs import Case, Paired, Start

MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP, 8.5 M": mlp,
    "digits CNN": lambda: build_model("cnn"),
}
STEPS = {"MLP, 8.5 M": 10, "digits CNN": 20}  # in one timing: a report and its sinks at least once
EVERY = 10


def plain(net: nn.Module, steps: int, inputs: Tensor, targets: Tensor) -> Callable[[], float]:
    """Milliseconds of a training step; the loss is read in each, as for any log."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def measure() -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            loss.item()
        return (time.perf_counter() - begun) / steps * 1e3

    return measure


def monitored(
    net: BucketedDDP, steps: int, inputs: Tensor, targets: Tensor, sinks: Sinks
) -> Callable[[], float]:
    """The same with phases, watched buckets, a report of all ranks every 10 steps, and sinks."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = StepMonitor(flops_per_sample=1e6, peak_flops=1e11)
    cluster = ClusterMonitor(EVERY)
    net.register_comm_hook(monitor.watch(net.hook))

    def measure() -> float:
        dist.barrier()
        begun = time.perf_counter()
        for x, y in monitor.batches([(inputs, targets)] * steps):
            with monitor.phase("forward"):
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), y)
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                optimizer.step()
            report = cluster.add(monitor.step(samples=len(y), loss=loss.detach()))
            if report is not None:
                sinks.write(report.step, report.as_dict())
        return (time.perf_counter() - begun) / steps * 1e3

    return measure


def compare(
    model: str, world_size: int, repeats: int, number: int = 0
) -> tuple[dict[str, list[float]], float]:
    """Milliseconds of a step both ways; milliseconds per step of the monitoring by itself."""

    def body(ctx: RankContext) -> tuple[dict[str, list[float]], float]:
        data, steps = batch(model, ctx.rank), STEPS[model]
        nets = []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(BucketedDDP(MODELS[model]()))
        assert count_flops(nets[0].module, data[0]) > 0
        sinks = open_sinks(folder, total_steps=1_000_000)
        contestants = {
            "plain": plain(nets[0], steps, *data),
            "monitored": monitored(nets[1], steps, *data, sinks),
        }
        in_turn(contestants, 2)
        for one, other in zip(*(net.parameters() for net in nets), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # the same training
        taken = in_turn(contestants, repeats, number)
        alone = by_itself(sinks, len(nets[1].buckets), 20 * repeats)
        sinks.close()
        return taken, alone

    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(body, world_size, ledger=False, timeout=300)[0]


class Done:
    """A handle of nothing."""

    def wait(self) -> None:
        """It is complete."""


def by_itself(sinks: Sinks, buckets: int, steps: int) -> float:
    """Milliseconds per step of everything that monitoring adds, around no training at all."""
    monitor, cluster = StepMonitor(flops_per_sample=1e6, peak_flops=1e11), ClusterMonitor(EVERY)
    hook = monitor.watch(lambda _: Done())
    dist.barrier()
    begun = time.perf_counter()
    for _ in monitor.batches(range(steps)):
        for phase in ("forward", "backward", "optimizer"):
            with monitor.phase(phase):
                for _ in range(buckets if phase == "backward" else 0):
                    hook(None).wait()
        report = cluster.add(monitor.step(samples=1, loss=0.0))
        if report is not None:
            sinks.write(report.step, report.as_dict())
    return (time.perf_counter() - begun) / steps * 1e3


def start(model: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    taken, alone = compare(model, world_size, rounds, number)
    share = alone / statistics.median(taken["plain"])
    return Start(taken, {"monitoring by itself, ms": f"{alone:.3f}", "of a step": f"{share:.1%}"})


PAIRED = Paired(
    title="Monitoring: a training step",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("monitored", "plain")],
    facts=("monitoring by itself, ms", "of a step"),
    cases=lambda: [Case((model, "2"), partial(start, model, 2)) for model in MODELS],
    rounds=9,
    note=f"Monitored are phases, buckets and step metrics. Every {EVERY} steps a report of all "
    "ranks goes into JSON lines, TensorBoard and the terminal. The time of monitoring by itself, "
    "without training, hardly moves from run to run. The CNN is the worst case: its step on 32 "
    "images of 8×8 takes a few milliseconds.",
)
