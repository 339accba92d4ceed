"""From measured kernels to the constants of a kernel file (``hardware/kernels.py``).

Rows are those of ``benchmarks/kernels.py`` or of ``calibrate_kernels.py``. R is the rate of the
fastest product of a dtype, B the bandwidth of the longest sum in place. A product takes F / (share
· R) + traffic · n / B, attention F / (share · R) · (1 + half / L); both are fitted to relative
errors by least squares without negative terms. Shares of other kernels are read off. On a CPU the
time of a small operator, which is the host's, is taken off first.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from ..hardware.curves import interpolated
from .calibrate_kernels import CONVOLUTION_SIZES, Row

Constants = dict[str, Any]

LONG = "add_"  # the kernel that B is read from
# bytes read and written, in those of the first tensor; and torch's operator
MOVED = {
    "add": 3, "add_": 3, "copy_": 3, "gelu": 2, "relu": 2, "dropout": 2, "sum": 1, "zero_": 2,
    "layer_norm": 2, "softmax": 2, "tanh": 2, "gelu_backward": 3, "tanh_backward": 3,
    "threshold_backward": 3, "max_pool2d": 1.75, "max_pool2d_backward": 2.75,
}  # fmt: skip
OPERATORS = {
    "layer_norm": "native_layer_norm", "softmax": "_softmax", "cast": "_to_copy",
    "dropout": "native_dropout", "max_pool2d": "max_pool2d_with_indices",
    "max_pool2d_backward": "max_pool2d_with_indices_backward",
}  # fmt: skip
OPTIMIZER_BYTES = 28  # of AdamW for an element: weight, gradient and two states read, three written
LEAST = 1e-9  # seconds: a kernel is never faster than nothing
SMALL = 2**16  # bytes, below which the host's part of a kernel's time is most of it
TILE = 128


def constants(rows: Sequence[Row], multiprocessors: int = 0) -> tuple[Constants, Constants]:
    """(numbers of the cluster's ``gpu``, constants of its kernels); both without sources.

    ``multiprocessors``: of a GPU. Products of fewer tiles leave some of them idle, and count
    neither for R nor for its share. 0 is for a CPU.
    """
    on_cpu = not multiprocessors
    key = "seconds" if on_cpu else "host_seconds"
    host = statistics.median(float(row[key]) for row in _of(rows, "launch"))
    alone = host if on_cpu else 0.0
    memory = _memory(rows, alone)
    products = [_product(r, alone) for r in _of(rows, "matmul") if _fills(r, multiprocessors)]
    long = max((r for r in memory if r["name"] == LONG), key=lambda r: float(r["bytes"]))
    bandwidth = long["bytes"] / long["seconds"]
    cached = _cached(memory) if on_cpu else {}
    dtypes = dict.fromkeys(r["dtype"] for r in products)
    rates = {d: max(r["flops"] / r["seconds"] for r in products if r["dtype"] == d) for d in dtypes}
    kernels: Constants = {
        "product": {d: _two_terms(products, d, rates[d], bandwidth) for d in dtypes},
        "attention": _attention(_of(rows, "attention"), alone, rates),
        "convolution": _convolution(_of(rows, "convolution"), alone, rates),
        "memory": _shares(memory, bandwidth, cached),
        "optimizer": _optimizer(_of(rows, "optimizer"), bandwidth),
        "kernel": LEAST if on_cpu else min(r["seconds"] for r in memory),
        "host": host,
        "load": {"product": 1.0, "attention": 1.0, "memory": 1.0},
        "growth": 0.0,
    }
    if cached:
        kernels["cached"] = cached
    return {"flops": rates, "peak_flops": rates, "bandwidth": bandwidth}, kernels


def _of(rows: Iterable[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _size(dtype: str) -> int:
    return int(getattr(torch, "float32" if dtype == "tfloat32" else dtype).itemsize)


def _fills(row: Row, multiprocessors: int) -> bool:
    """Whether the product has a tile for each of a GPU's multiprocessors, none of them cut."""
    even = not any(row[side] % 8 for side in "mnk")
    return not multiprocessors or (even and row["m"] * row["n"] >= multiprocessors * TILE**2)


def _product(row: Row, alone: float) -> Row:
    m, n, k, size = row["m"], row["n"], row["k"], _size(row["dtype"])
    moved = (m * k + n * k + m * n) * size
    taken = max(row["seconds"] - alone, LEAST)
    return row | {"flops": 2 * m * n * k, "bytes": moved, "seconds": taken}


def _two_terms(products: Sequence[Row], dtype: str, rate: float, bandwidth: float) -> Constants:
    chosen = [r for r in products if r["dtype"] == dtype]
    columns = [[r["flops"] / rate, r["bytes"] / bandwidth] for r in chosen]
    inverse, traffic = _fitted(columns, [r["seconds"] for r in chosen])
    return {"share": 1 / inverse, "traffic": traffic}


def _fitted(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Factors of the columns, not negative, with the least squares of relative errors."""
    matrix = np.asarray(columns) / np.asarray(seconds)[:, None]
    found, _ = nnls(matrix, np.ones(len(seconds)))
    return [max(float(x), 1e-6) for x in found]


def _attention(rows: Sequence[Row], alone: float, rates: dict[str, float]) -> Constants:
    found: Constants = {}
    for way in ("forward", "backward"):
        for width in dict.fromkeys(r["width"] for r in rows):
            chosen = [r for r in rows if (r["name"], r["width"]) == (way, width)]
            full = [_pair(r, way, alone, rates) for r in chosen if not r["causal"]]
            masked = [_pair(r, way, alone, rates) for r in chosen if r["causal"]]
            inverse, bend = _fitted([c for c, _ in full], [s for _, s in full])
            rest = [s / c[0] - inverse for c, s in masked]
            bends = [
                max(more * c[0] / c[1], 0.0) for more, (c, _) in zip(rest, masked, strict=True)
            ]
            found.setdefault(way, {})[width] = {
                "share": 1 / inverse,
                "half": bend / inverse,
                "half_causal": statistics.median(bends) / inverse,
            }
    return found


def _pair(row: Row, way: str, alone: float, rates: dict[str, float]) -> tuple[list[float], float]:
    """(seconds at R, the same over the length), and the measured seconds."""
    pairs = row["batch"] * row["heads"] * row["length"] ** 2 / (2 if row["causal"] else 1)
    flops = (4 if way == "forward" else 10) * pairs * row["width"]
    least = flops / rates.get(row["dtype"], rates["float32"])
    return [least, least / row["length"]], max(row["seconds"] - alone, LEAST)


def _convolution(rows: Sequence[Row], alone: float, rates: dict[str, float]) -> list[list[Any]]:
    found = []
    for row in rows:
        batch, into, out, side, kernel, stride, groups = (row[s] for s in CONVOLUTION_SIZES)
        outputs = ((side + 2 * (kernel // 2) - kernel) // stride + 1) ** 2
        flops = 2 * batch * out * outputs * (into // groups) * kernel**2
        flops *= 2 if row["name"] == "backward" else 1
        rate = flops / max(row["seconds"] - alone, LEAST)
        known = row["name"], row["dtype"], bool(row["channels_last"])
        share = rate / rates.get(row["dtype"], rates["float32"])
        found.append([*known, into, out, side, kernel, stride, groups, share])
    return found


def _memory(rows: Sequence[Row], alone: float) -> list[Row]:
    found = []
    for row in _of(rows, "memory"):
        size = _size(row["dtype"])
        cast = 1.5 if size == 4 else 3  # to 16 bits, or from 16 to 32
        moved = MOVED.get(row["name"], cast) * row["elements"] * size
        taken = max(row["seconds"] - alone, row["seconds"] / 5, LEAST)
        found.append(row | {"bytes": moved, "one": row["elements"] * size, "seconds": taken})
    return found


def _shares(
    memory: Sequence[Row], bandwidth: float, cached: dict[int, float]
) -> dict[str, float]:
    """By operator, of the longest kernel. Where caches count, the median over sizes: an operator
    that is bound by arithmetic gains less by them than one that is bound by memory."""
    points = [(math.log2(size), faster) for size, faster in sorted(cached.items())]
    found = {}
    for name in dict.fromkeys(r["name"] for r in memory):
        rows = [r for r in memory if r["name"] == name]
        longest = max(rows, key=lambda r: float(r["bytes"]))
        rows = [r for r in rows if r["bytes"] >= SMALL] if points else [longest]
        shares = [
            r["bytes"] / r["seconds"] / bandwidth
            / (interpolated(points, math.log2(r["bytes"])) if points else 1.0)
            for r in rows or [longest]
        ]  # fmt: skip
        found[OPERATORS.get(name, name)] = statistics.median(shares)
    return {"other": found.pop("add"), **{k: v for k, v in found.items() if k != LONG}}


def _cached(memory: Sequence[Row]) -> dict[int, float]:
    """How much faster than the longest kernel one over so few bytes is: caches hold them."""
    chosen = sorted((r for r in memory if r["name"] == LONG), key=lambda r: float(r["bytes"]))
    least = chosen[-1]["bytes"] / chosen[-1]["seconds"]
    return {int(r["bytes"]): r["bytes"] / r["seconds"] / least for r in chosen}


def _optimizer(rows: Sequence[Row], bandwidth: float) -> dict[str, float]:
    found = {}
    for row in rows:  # the last one of a name has the most tensors
        moved = row["tensors"] * row["elements"] * OPTIMIZER_BYTES
        found[row["name"].removeprefix("adamw ")] = moved / row["seconds"] / bandwidth
    return found
