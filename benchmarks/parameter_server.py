"""Three kinds of parameter server with one slow worker, against DistributedDataParallel with the
same slow worker.

One server and three workers train the digits for a fixed time each way; one worker needs some
milliseconds more for every step. ``--plot FILE`` draws the workers' losses over time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import build_model, digits
from solutions.phase3_multi_node.parameter_client import Client
from solutions.phase3_multi_node.parameter_server import (
    Server,
    serve_asynchronous,
    serve_bounded,
    serve_synchronous,
)

from .common import Table, spread

WORKERS, BATCH, LR = 3, 32, 0.1
SLOW, BUDGET = 0.02, 1.5  # seconds: one worker's extra time per step; length of a run
WAYS = {
    "synchronous": serve_synchronous,
    "bounded, s=4": lambda server: serve_bounded(server, 4),
    "asynchronous": serve_asynchronous,
}
Curve = list[tuple[float, float]]  # (seconds, loss)


def data_of(worker: int) -> itertools.cycle[tuple[Tensor, Tensor]]:
    """The worker's batches, over and over."""
    images, labels = digits()[worker::WORKERS]
    return itertools.cycle(list(zip(images.split(BATCH), labels.split(BATCH), strict=True))[:-1])


def accuracy(values: dict[str, Tensor]) -> float:
    """Share of the test digits that a model with these parameters gets right."""
    model = build_model("mlp")
    model.load_state_dict(values)
    images, labels = digits(train=False)[:]
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def work(client: Client, worker: int) -> Curve:
    """Pull, compute and push until the time is over; the last worker is slow."""
    model, curve, begun = build_model("mlp"), Curve(), time.perf_counter()
    for inputs, targets in data_of(worker):
        if (now := time.perf_counter() - begun) > BUDGET:
            break
        model.load_state_dict(client.pull(client.parameters))
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        time.sleep(SLOW if worker == WORKERS - 1 else 0)
        client.push({name: p.grad for name, p in model.named_parameters()}, len(targets))
        curve.append((now, loss.item()))
    client.leave()
    return curve


def serve(way: str) -> tuple[list[Curve], float]:
    """The workers' curves, and the accuracy of the server's parameters at the end."""

    def body(ctx: RankContext) -> Curve | float:
        keys = dict(build_model("mlp").named_parameters())
        if ctx.rank:
            return work(Client(keys, servers=1), ctx.rank - 1)
        server = Server(keys, servers=1, lr=LR)
        WAYS[way](server)
        return accuracy(server.values)

    right, *curves = run_ranks(body, WORKERS + 1, ledger=False, timeout=60)
    return curves, right


def ddp() -> tuple[list[Curve], float]:
    """The same under DistributedDataParallel: the workers alone; rank 0's clock ends it."""

    def body(ctx: RankContext) -> tuple[Curve, float]:
        model = build_model("mlp")
        wrapped: nn.Module = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        curve, begun = Curve(), time.perf_counter()
        for inputs, targets in data_of(ctx.rank):
            over = torch.tensor([time.perf_counter() - begun])
            dist.broadcast(over, 0)
            if over > BUDGET:
                break
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(wrapped(inputs), targets)
            time.sleep(SLOW if ctx.rank == WORKERS - 1 else 0)
            loss.backward()
            optimizer.step()
            curve.append((float(over), loss.item()))
        return curve, accuracy(model.state_dict())

    results = run_ranks(body, WORKERS, ledger=False, timeout=60)
    return [curve for curve, _ in results], results[0][1]


def run(way: str) -> tuple[list[Curve], float]:
    """One run, by name."""
    return ddp() if way == "torch DDP" else serve(way)


def measure(repeats: int = 3) -> Table:
    """Gradients per second and accuracy side by side."""
    digits()
    digits(train=False)
    ways = ["torch DDP", *WAYS]
    rates: dict[str, list[float]] = {way: [] for way in ways}
    right: dict[str, list[float]] = {way: [] for way in ways}
    slow: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            curves, accurate = run(way)
            rates[way].append(sum(map(len, curves)) / BUDGET)
            slow[way].append(len(curves[-1]) / BUDGET)
            right[way].append(100 * accurate)
    rows = [
        [
            way,
            spread(rates[way], 0),
            spread(slow[way], 0),
            f"{statistics.median(rates[way]) / statistics.median(rates['torch DDP']):.2f}",
            spread(right[way], 1),
        ]
        for way in ways
    ]
    return Table(
        "Parameter servers with a slow worker, on the digits",
        ["", "gradients/s", "of the slow worker", "times DDP", "test accuracy, %"],
        rows,
        f"MLP with 17,226 parameters, 1 server and {WORKERS} workers (DDP: {WORKERS} ranks), "
        f"batches of {BATCH}, SGD with lr {LR}; one worker sleeps {1000 * SLOW:.0f} ms in every "
        f"step. Median (least … most) of {repeats} runs of {BUDGET} s, taken in turn. Synchronous "
        "rounds average three gradients into one step; the other servers take a step for each "
        "gradient.",
    )


def plot(path: Path) -> None:
    """Draw the losses of all workers over time, each way in its own colour."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, way in enumerate(["torch DDP", *WAYS]):
        points = sorted(point for curve in run(way)[0] for point in curve)
        near = [points[max(0, k - 15) : k + 16] for k in range(len(points))]
        smooth = [statistics.mean(loss for _, loss in part) for part in near]
        label = f"{way}: {len(points)} gradients"
        axes.plot([at for at, _ in points], smooth, color=f"C{number}", label=label)
    axes.set(xlabel="seconds", ylabel="training loss (mean of 31 gradients)", yscale="log")
    axes.legend()
    axes.set_title("Three workers, one of them slow")
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses over time")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
    else:
        print(measure().markdown())
