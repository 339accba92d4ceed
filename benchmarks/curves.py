"""How time and bytes grow, beside the formulas: ``python -m benchmarks.curves``, 15 minutes, alone.

A curve is one program over one variable: ranks, bytes, numbers in the model, or tensors that hold
them. Each point is run in several fresh starts of the ranks. Its bytes are those that the ranks'
events tell, of the rank that sent most. The same programs run on virtual ranks, up to 1,024 of
them, where the time is that of the links alone. ``--virtual`` runs these only.

The numbers go to ``benchmarks/curves.json``, from which table and picture are made.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distlab.course import progress
from distlab.ranks import RankContext, run_ranks
from distlab.virtual import run_virtual

from .common import Table, now
from .curve_programs import Curve, Setting, curves, flat
from .curves_fit import Measured
from .curves_picture import UNITS, draw
from .machine import Load, fingerprint

FILE = Path(__file__).with_name("curves.json")
PICTURE = FILE.with_suffix(".png")
STARTS, ROUNDS = 7, 5


def seconds(curve: Curve, setting: Setting) -> float:
    """The median of some rounds in one start of the ranks; of each round the slowest rank."""

    def body(ctx: RankContext) -> list[float]:
        once, taken = curve.make(setting), []
        once()
        for _ in range(ROUNDS):
            dist.barrier()
            begun = now(ctx.device)
            once()
            taken.append(now(ctx.device) - begun)
        return taken

    results = run_ranks(body, setting.ranks, ledger=False, timeout=300)
    return statistics.median(map(max, zip(*results, strict=True)))


def counted(curve: Curve, setting: Setting) -> tuple[int, float]:
    """The bytes of the rank that sends most, as events tell, and the time of the slowest rank."""

    def body(ctx: RankContext) -> float:
        once = curve.make(setting)
        if curve.warm:
            once()
        begun = now(ctx.device)
        with ctx.region("counted"):
            once()
        return now(ctx.device) - begun

    run = partial(run_virtual, cluster=flat(curve.cluster)) if curve.cluster else run_ranks
    results = run(body, setting.ranks, timeout=3000)
    return max(log.select(region="counted").sent for log in results.logs), max(results)


def measure_points(wanted: Sequence[Curve], say: Callable[[str], None]) -> None:
    """Add to the file what it lacks; what is there is kept. A start that other programs disturbed
    is made again, at most as often as there are starts."""
    kept = read() or {"machine": fingerprint(), "curves": {}}
    for curve, setting in ((c, s) for c in wanted for s in c.points):
        points = kept["curves"].setdefault(curve.name, {})
        point = points.setdefault(str(getattr(setting, curve.over)), {"seconds": []})
        if "sent" not in point:
            point["sent"], virtual = counted(curve, setting)
            point["seconds"] = [virtual] if curve.cluster else []
        tries = 0 if curve.cluster else 2 * STARTS
        while len(point["seconds"]) < STARTS and tries:
            with Load() as load:
                took = seconds(curve, setting)
            tries -= 1
            if load.alone:
                point["seconds"].append(float(f"{took:.4g}"))
        progress.write(FILE, kept)
        say(f"{curve.name}: {getattr(setting, curve.over):,}: {point}")


def read() -> dict[str, Any]:
    """The file; empty if there is none."""
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


def measured() -> list[Measured]:
    """All curves whose points the file has."""
    found, kept = [], read().get("curves", {})
    for curve in curves():
        points = kept.get(curve.name, {})
        x = tuple(getattr(setting, curve.over) for setting in curve.points)
        if not all(points.get(str(each), {}).get("seconds") for each in x):
            continue
        fewest = min(len(points[str(each)]["seconds"]) for each in x)
        starts = tuple(tuple(points[str(each)]["seconds"][:fewest]) for each in x)
        found.append(Measured(curve, x, starts, tuple(points[str(e)]["sent"] for e in x)))
    return found


def row(each: Measured, cores: int) -> list[str]:
    """A curve's line in the table."""
    growth = each.growth
    crowded = each.curve.over == "ranks" and not each.curve.cluster and each.x[-1] > cores
    reach = f"{each.x[0]:,} … {each.x[-1]:,} {UNITS[each.curve.over]}"
    spread = "" if each.curve.cluster else f" ({growth.low:.2f} … {growth.high:.2f})"
    return [
        each.curve.what + (", virtual" if each.curve.cluster else ""),
        reach + (f" (more than {cores} cores)" if crowded else ""),
        f"{growth.measured:.2f}{spread}",
        f"{growth.formula:.2f}",
        f"{growth.error:.0%}",
        f"{each.off:.1%}",
    ]


def table() -> Table:
    """All curves that are measured."""
    found, kept = measured(), read()
    cores = int(kept["machine"]["cores"])
    return Table(
        "Scale curves",
        ["what", "over", "exponent of time", "by the formula", "formula's error", "bytes off by"],
        [row(each, cores) for each in found],
        "The exponent is the slope of time on logarithmic axes: 1 means that twice as much takes "
        "twice as long. Brackets have the least and the most of single starts. The formula of an "
        "all-reduce is messages times α plus bytes times β of its critical path. That of a step "
        "adds times per tensor, per number, per rank of a ring, per round of a tree, and per "
        'number sent. Their constants are fitted to the curve. "Formula\'s error" is the median '
        "of its errors. Bytes are those of the rank that sends most, and the last column is their "
        "largest deviation from the formula. With more ranks than cores, ranks wait for "
        "processors, which no formula here has. Virtual ranks have one GPU and one card per node, "
        "and their time is that of the links alone.\n\n"
        f"![time and bytes over ranks, bytes and models]({PICTURE.name})",
    )


def measure() -> Table:
    """Measure what the file lacks, and draw."""
    measure_points(curves(), lambda line: print(line, flush=True))
    draw(measured(), int(read()["machine"]["cores"]), PICTURE)
    return table()


if __name__ == "__main__":
    virtual_ones = [each for each in curves() if each.cluster]
    chosen = virtual_ones if "--virtual" in sys.argv else curves()
    measure_points(chosen, lambda line: print(line, flush=True))
