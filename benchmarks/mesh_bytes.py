"""Bytes of a step on five axes, by axis, beside the formulas: ``python -m benchmarks.mesh_bytes``.

A GPT with experts takes one step on 32 virtual GPUs, in four nodes of a DGX H100 cluster: data,
expert, context, pipeline and tensor axis, with two ranks each. It does so twice: with the axes in
the order for which the fewest bytes leave a node, and in the reverse order. The bytes are those of
the ranks' events, by the axes of their groups. The virtual time is that of the messages alone. The
numbers go to ``benchmarks/mesh_bytes.json``, from which the guidelines' picture is drawn.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank

from distlab.hardware.clusters import load_cluster
from distlab.ranks import RankContext
from distlab.reference.workloads import CONTEXT
from distlab.virtual import VirtualResults, run_virtual
from solutions.phase2_advanced.train_gpt import batch_of
from solutions.phase3_multi_node.mesh import Grid
from solutions.phase3_multi_node.mesh_gpt import MeshGPT, train_step
from solutions.phase3_multi_node.mesh_specs import BATCH as BATCH_AXES
from solutions.phase3_multi_node.mesh_specs import MeshLayout
from solutions.phase3_multi_node.mesh_traffic import Traffic, axes_of, best_grid, expected
from solutions.phase3_multi_node.mixture_gpt import build_gpt

assert torch._dynamo
FILE = Path(__file__).with_name("mesh_bytes.json")
CLUSTER, MODEL, BATCH = "dgx-h100", "tiny_moe", 16
LAYOUT = MeshLayout(data=2, tensor=2, pipeline=2, context=2, experts=2, micro_batches=2)


def step(grid: Grid) -> VirtualResults:
    """One step on virtual GPUs, with the ranks in ``grid``."""

    def body(ctx: RankContext) -> None:
        model = MeshGPT(build_gpt(MODEL), LAYOUT, grid)
        pipeline = model.pipeline(BATCH, CONTEXT)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens, targets = map(model.own, batch_of(0, BATCH))
        with ctx.region("step"):
            train_step(model, pipeline, optimizer, tokens, targets)

    return run_virtual(body, LAYOUT.ranks, cluster=CLUSTER, timeout=600)


def counted(results: VirtualResults, grid: Grid) -> Traffic:
    """The bytes that the ranks sent in the step, by the axes of their groups."""
    found = Traffic()
    for log in results.logs:
        for event in log.select(region="step").events:
            found[axes_of(grid, event.group)] += event.sent
    return +found


def measure() -> dict[str, Any]:
    """Both runs, and the formulas."""
    gpt = build_gpt(MODEL)
    best = best_grid(gpt, LAYOUT, BATCH, CONTEXT, load_cluster(CLUSTER).gpus_per_node)
    grids = best, Grid(dict(reversed(list(best.sizes.items()))), BATCH_AXES)
    runs = [step(grid) for grid in grids]
    orders = [
        {"order": axes_of(grid, range(LAYOUT.ranks)), "milliseconds": round(1e3 * run.clock, 3)}
        for grid, run in zip(grids, runs, strict=True)
    ]
    formulas = Counter({frozenset(a): n for a, n in expected(gpt, LAYOUT, BATCH, CONTEXT).items()})
    table = [
        {"axes": axes, "counted": nbytes, "formula": formulas[frozenset(axes)]}
        for axes, nbytes in counted(runs[0], best).most_common()
    ]
    return {"torch": torch.__version__, "cluster": CLUSTER, "rows": table, "orders": orders}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
