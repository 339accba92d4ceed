"""How well virtual time predicts real time on this machine, as ``distlab calibrate`` measured it.

Calibration times kernels, a small program of its own, messages and collectives of other sizes; none
of the programs below. Then the same code runs on virtual ranks, as ``distlab simulate`` runs it,
and on real ranks: the all-reduce strategies of exercise 1.8 over sizes, the backend's all-reduce,
and training steps. More ranks than cores are refused, and so not measured. ``python -m
benchmarks.run validation`` writes the pages; this module alone prints every point. ``published.py``
compares with measurements of others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by torch.optim: once here
import torch.distributed as dist
from torch import Tensor

from distlab.hardware.clusters import Cluster
from distlab.ranks import RankContext
from distlab.reference.workloads import digits
from distlab.simulate.calibrate import calibrate, counts
from distlab.simulate.starts import starts
from distlab.virtual import run_virtual
from solutions.phase1_data_parallel import collectives

from . import predictions_page, this_machine
from .common import Table
from .machine import Load, described, fingerprint
from .this_machine import Point, Record, middle
from .trainer import MODELS, solution_step

SIZES = (4_000, 40_000, 400_000, 4_000_000)
BATCH = 96  # global; divides by 1, 2, 3 and 4
STEPS, REPEATS = 60, 15
ROUNDS, STARTS = 5, 9  # of the ranks in each round
VIRTUAL = 4  # steps and repeats of a virtual run, where all are equal

BUSY = "validation: other programs use the processors"
Times = dict[str, float]


def _strategies(ctx: RankContext, device: str, repeats: int) -> Times:
    """Median seconds of each strategy of exercise 1.8 and each size."""
    rows = collectives.compare_strategies(SIZES, warmup=2, repeats=repeats, device=device)
    return {
        f"all-reduce {row.strategy}, {row.nbytes:,} B": row.seconds
        for row in rows
        if row.strategy != "backend"
    }


def _backend(ctx: RankContext, device: str, repeats: int) -> Times:
    """Mean seconds of the backend's all-reduce for each size; all ranks start together."""
    import time  # on a virtual rank this is virtual time

    found = {}
    for nbytes in SIZES:
        tensor, taken = torch.ones(nbytes // 4, device=device), []
        for _ in range(repeats):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - begun)
        found[f"all-reduce backend, {nbytes:,} B"] = statistics.fmean(taken[repeats // 4 :])
    return found


def _training(ctx: RankContext, device: str, steps: int) -> Times:
    """Mean seconds of a step of each model, after some that warm up."""
    import time

    inputs, targets = _batch(ctx, device)
    found = {}
    for name, make in MODELS.items():
        with torch.device(device):
            step = solution_step(make())
        for at in range(steps):
            if at == steps // 4:
                begun = time.perf_counter()
            step(inputs, targets)
        found[f"training step, {name}"] = (time.perf_counter() - begun) / (steps - steps // 4)
    return found


def _batch(ctx: RankContext, device: str) -> tuple[Tensor, Tensor]:
    """This rank's part of the first batch of the digits."""
    share = BATCH // ctx.world_size
    data = [digits()[ctx.rank * share + at] for at in range(share)]
    images = torch.stack([torch.as_tensor(image) for image, _ in data])
    return images.to(device), torch.tensor([int(target) for _, target in data]).to(device)


# how often, fewest ranks, and what counts of fresh starts
PROGRAMS: tuple[tuple[Callable[..., Times], int, int, Callable[..., float]], ...] = (
    (_strategies, REPEATS, 2, statistics.median),
    (_backend, STEPS, 2, statistics.fmean),
    (_training, STEPS, 1, statistics.fmean),
)


def quiet(run: Callable[[], Any], anyway: bool, tries: int = 3) -> Any:
    """The result of a run that other programs left alone; None if none of the tries was."""
    for _ in range(tries):
        with Load() as load:
            found = run()
        if load.alone or anyway:
            return found
    return None


def on_this_machine(anyway: bool = False, say: Callable[[str], None] = print) -> Record:
    """Calibrate, predict and measure, several times: the pace of a machine that others share
    changes from minute to minute. Ends the program where others are too busy; ``anyway`` counts
    their starts, too."""
    torch.set_num_threads(1)
    digits()
    rounds = [_round(anyway, say) for _ in range(ROUNDS)]
    points = tuple(middle(same) for same in zip(*(found for _, found in rounds), strict=True))
    cluster = sorted((cluster for cluster, _ in rounds), key=lambda c: c.inside.alpha)[ROUNDS // 2]
    return Record(described(fingerprint()), _today(), in_words(cluster), points)


def _round(anyway: bool, say: Callable[[str], None]) -> tuple[Cluster, list[Point]]:
    """What a user does: calibrate, predict, run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "this-machine.yaml"
        made = quiet(lambda: calibrate(path, False, say), anyway)
        if made is None:
            raise SystemExit(f"{BUSY}: no calibration was left alone")
        cluster, points = made[0], []
        for program, often, least, counted in PROGRAMS:
            for ranks in [r for r in (1, *counts(cluster.gpus_per_node)) if r >= least]:
                say(f"programs on {this_machine.ranks(ranks)}")
                for what, (predicted, real) in _run(program, often, ranks, cluster, anyway).items():
                    point = what, ranks, counted(real), predicted, len(real), ()
                    points.append(Point(*point))
    return cluster, points


def _today() -> str:
    import datetime

    return datetime.date.today().isoformat()


def _run(
    program: Callable[..., Times], often: int, ranks: int, cluster: Cluster, anyway: bool
) -> dict[str, tuple[float, list[float]]]:
    """The predicted seconds, and those of fresh starts."""
    virtual = run_virtual(
        program, ranks, "meta", VIRTUAL, cluster=cluster, compute="kernels", timeout=300
    )[0]
    tried = [
        quiet(lambda: starts(program, ranks, "cpu", often, count=1, timeout=300)[0], anyway)
        for _ in range(STARTS)
    ]
    real = [start for start in tried if start is not None]
    if not real:
        raise SystemExit(f"{BUSY}: no start of the ranks was left alone")
    return {what: (predicted, [each[what] for each in real]) for what, predicted in virtual.items()}


def in_words(cluster: Cluster) -> str:
    """The numbers that calibration found for links."""
    link = cluster.inside
    return (
        f"A message between two ranks takes {link.alpha * 1e6:.0f} µs beside its bytes, and "
        f"{cluster.overhead * 1e6:.0f} µs to issue. A collective takes "
        f"{cluster.collective_overhead * 1e6:.0f} µs to issue. With {cluster.gpus_per_node} ranks "
        f"at once a rank computes {cluster.company:.2f} times as long."
    )


def table(record: Record) -> Table:
    """The distribution of errors, by program, and the worst."""
    return Table(
        "Virtual time against this machine",
        this_machine.HEADER,
        this_machine.by_program(record.points),
        f"`distlab calibrate` measured this machine, and the same programs ran on virtual and on "
        f"real ranks. {record.calibrated} A positive error means: predicted slower than measured. "
        f"{this_machine.verdict(record.points)} More ranks than cores are refused: they wait for "
        "time slices. [docs/validation.md](../docs/validation.md) has every prediction.",
    )


def measure() -> Table:
    """What ``make bench`` prints; the page of all predictions is written, too."""
    record = on_this_machine()
    this_machine.write(record)
    predictions_page.write()
    return table(record)


def points_of(points: Sequence[Point]) -> str:
    """All points, one per line."""
    return "\n".join(
        f"{p.what:40} {p.ranks} {p.measured * 1e3:10.3f} ms {p.predicted * 1e3:10.3f} ms "
        f"{p.error:+7.0%}  {p.starts} starts"
        for p in points
    )


def main() -> None:
    """Print every point; writes nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--anyway", action="store_true", help="count starts that were disturbed")
    found = on_this_machine(parser.parse_args().anyway)
    print(found.calibrated, points_of(found.points), table(found).markdown(), sep="\n\n")


if __name__ == "__main__":
    main()
