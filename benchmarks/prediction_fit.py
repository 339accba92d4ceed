"""The four constants per GPU that published runs give: loads of three kinds of kernels, growth.

A recorded row has the seconds of its kernels by kind, and the time in which its GPU waits. Other
constants change the kernels' seconds, so a row's rate with them follows without a simulation:

    step = waits + optimizer + (1 + growth·log₂ nodes) · Σ load · seconds alone

The fit minimises Σ (log of predicted over published)², rounded off for outliers (soft L1). A weak
pull of memory's load to 1 keeps it where few rows tell it. ``held_out``: each row predicted with
the constants that come out without all rows of its model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from distlab.hardware.clusters import load_cluster
from distlab.hardware.kernels import Kernels, load_kernels
from distlab.simulate.published import Row, rows

FITTED = ("h100", "a100")
PARTS = {"product": "product", "convolution": "product", "attention": "attention"}
START = (1.3, 1.6, 1.3, 0.0)  # loads of products, attention and memory; growth
SOFT, PULL = 0.05, 0.05  # error that counts in full; weight of the pull
Entries = dict[str, dict[str, Any]]


def rows_of(name: str, known: Entries) -> list[Row]:
    """The recorded rows that the constants of a GPU rest on."""
    return [
        row
        for row in rows()
        if row.rests_on.startswith("loads")
        and row.id in known
        and load_cluster(row.run["cluster"]).gpu.kernels == name
    ]


@functools.cache  # a fit asks thousands of times
def _machine(cluster: str) -> tuple[Kernels, int]:
    described = load_cluster(cluster)
    return load_kernels(described.gpu.kernels), described.gpus_per_node


def with_constants(row: Row, entry: dict[str, Any], constants: Sequence[float]) -> float:
    """The recorded prediction, had the kernels' file these constants."""
    kernels, gpus_per_node = _machine(row.run["cluster"])
    nodes = math.ceil(row.run["gpus"] / gpus_per_node)
    loads = dict(zip(("product", "attention", "memory"), constants[:3], strict=True))
    before = after = entry["waits"] + entry["parts"].get("optimizer", 0.0)
    growing = (1 + constants[3] * math.log2(nodes)) / kernels.growing(nodes)
    for part, seconds in entry["parts"].items():
        if part != "optimizer":
            load = PARTS.get(part, "memory")
            before += seconds
            after += seconds * growing * loads[load] / kernels.load[load]
    return float(entry["predicted"] * before / after)


def fit(name: str, known: Entries, without: str = "") -> list[float]:
    """The constants of a GPU, from all its rows but those of one model or of one table."""
    used = [row for row in rows_of(name, known) if without not in (model_of(row), table_of(row))]

    def residuals(constants: Any) -> list[float]:
        errors = [
            math.log(max(with_constants(row, known[row.id], constants) / row.value, 1e-3))
            for row in used
        ]
        return [*errors, PULL * (constants[2] - 1)]

    found = least_squares(residuals, START, loss="soft_l1", f_scale=SOFT)
    return [float(value) for value in np.asarray(found.x)]


def model_of(row: Row) -> str:
    """The model of a run."""
    return str(row.run["model"])


def table_of(row: Row) -> str:
    """The table of the fitted source that has a row."""
    return row.source


def held_out(known: Entries, group: Callable[[Row], str] = model_of) -> dict[str, float]:
    """The rows of the fits, each predicted without the rows of its ``group``."""
    found = {}
    for name in FITTED:
        used = rows_of(name, known)
        for left_out in dict.fromkeys(map(group, used)):
            constants = fit(name, known, without=left_out)
            for row in used:
                if group(row) == left_out:
                    found[row.id] = with_constants(row, known[row.id], constants)
    return found
