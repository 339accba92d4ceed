"""How fast one core of this machine runs the kernels of training.

A row has the kind of kernel, its sizes, its dtype and its seconds, as ``benchmarks/kernels.py``
writes them for a GPU. The seconds are CPU time of the thread that computes: a core that other
programs take away for a while does not count. The median over groups of calls is kept, and then
over passes: others who use the core as well make it slower for seconds.

The calls of a kernel take several sets of tensors in turn. With one set a kernel would find all its
data in caches, but in a program other kernels have used them in between. Results are written into
memory that was used before (``starts.py``).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

Row = dict[str, Any]
Run = Callable[[], object]
Clock = Callable[[], float]

SETS = 4  # of tensors
PASSES, GROUPS, GROUP_SECONDS, MOST_CALLS = 3, 7, 3e-3, 1000
SQUARES = (32, 64, 128, 256, 512, 1024)
# rows of a batch, outputs, inputs: layers, and the gradients of their weights
LAYERS = (
    (16, 96, 96), (32, 256, 64), (128, 64, 256), (64, 768, 768), (256, 384, 1536), (768, 768, 24),
    (300, 80, 40), (1536, 384, 64), (40, 20, 400),
)  # fmt: skip
ELEMENTS = tuple(4**power for power in range(4, 12))  # 256 … 4 million
CONVOLUTION_SIZES = ("batch", "into", "out", "side", "kernel", "stride", "groups")
CONVOLUTIONS = (
    (32, 3, 16, 32, 3, 1, 1), (32, 1, 8, 12, 3, 1, 1), (64, 8, 24, 12, 3, 1, 1),
    (32, 24, 48, 6, 3, 1, 1), (8, 3, 64, 56, 7, 2, 1), (8, 64, 64, 28, 3, 1, 1),
    (8, 64, 128, 28, 1, 1, 1), (8, 128, 128, 14, 3, 2, 1), (16, 96, 96, 14, 3, 1, 96),
)  # fmt: skip
LENGTHS, HEADS, WIDTH = (64, 256, 1024), 4, 64


def seconds(run: Run, clock: Clock = time.thread_time) -> float:
    """Seconds of ``clock`` for one call of ``run``: the median over groups of calls."""
    run()
    once = max(_group(run, 1, clock), 1e-7)
    calls = max(1, min(MOST_CALLS, round(GROUP_SECONDS / once)))
    return statistics.median(_group(run, calls, clock) for _ in range(GROUPS))


def _group(run: Run, calls: int, clock: Clock) -> float:
    begun = clock()
    for _ in range(calls):
        run()
    return (clock() - begun) / calls


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure every kernel; ``quick``: few sizes of each kind. One intra-op thread."""
    passes = [list(_once(quick)) for _ in range(1 if quick else PASSES)]
    for same in zip(*passes, strict=True):
        yield same[0] | {"seconds": statistics.median(row["seconds"] for row in same)}


def _once(quick: bool) -> Iterator[Row]:
    for cases in (products, attentions, pointwise, optimizers, convolutions, launches):
        for alike in zip(*(cases(quick) for _ in range(SETS)), strict=True):
            runs = [run for _, run in alike]
            for run in runs:
                run()
            yield alike[0][0] | {"seconds": seconds(_in_turn(runs))}


def _in_turn(runs: Sequence[Run]) -> Run:
    turns = itertools.cycle(runs)
    return lambda: next(turns)()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def products(quick: bool) -> Iterator[tuple[Row, Run]]:
    """Matrix products M×K by K×N: squares, layers, and the gradients of their weights."""
    squares = SQUARES[1:4] if quick else SQUARES
    shapes = [(n, n, n) for n in squares] + list(LAYERS[:3] if quick else LAYERS)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for m, n, k in shapes if dtype == torch.float32 else shapes[: len(squares) - 1]:
            a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
            row = {"kind": "matmul", "name": "linear", "m": m, "n": n, "k": k}
            yield row | {"dtype": _name(dtype)}, partial(F.linear, a, b)


def convolutions(quick: bool) -> Iterator[tuple[Row, Run]]:
    """Forward and backward; small images, as a CPU trains on them."""
    for shape in CONVOLUTIONS[:2] if quick else CONVOLUTIONS:
        batch, into, out, side, kernel, stride, groups = shape
        x = torch.randn(batch, into, side, side, requires_grad=True)
        w = torch.randn(out, into // groups, kernel, kernel, requires_grad=True)
        forward = partial(F.conv2d, x, w, None, stride, kernel // 2, 1, groups)
        y = forward()
        sizes = dict(zip(CONVOLUTION_SIZES, shape, strict=True)) | {"channels_last": 0}
        row = {"kind": "convolution", "dtype": "float32", **sizes}
        yield row | {"name": "forward"}, forward
        backward = partial(torch.autograd.grad, y, (x, w), torch.randn_like(y), retain_graph=True)
        yield row | {"name": "backward"}, backward


def attentions(quick: bool) -> Iterator[tuple[Row, Run]]:
    """``scaled_dot_product_attention``, forward and backward."""
    for length in LENGTHS[:2] if quick else LENGTHS:
        batch = max(1, 256 // length)
        q, k, v = (torch.randn(batch, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
        for causal in (True, False):
            forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
            y = forward()
            shape = {"batch": batch, "heads": HEADS, "length": length, "width": WIDTH}
            row = {"kind": "attention", "dtype": "float32", **shape, "causal": int(causal)}
            yield row | {"name": "forward"}, forward
            grad = torch.randn_like(y)
            backward = partial(torch.autograd.grad, y, (q, k, v), grad, retain_graph=True)
            yield row | {"name": "backward"}, backward


def pointwise(quick: bool) -> Iterator[tuple[Row, Run]]:
    """Kernels that wait for memory: operations by element, by row, casts and copies."""
    for count in ELEMENTS[1::3] if quick else ELEMENTS:
        x, y = torch.randn(count), torch.randn(count)
        by_row, bias = x.view(-1, 256), torch.randn(256)
        image = x.view(-1, 1, 16, 16)
        _, largest = torch.ops.aten.max_pool2d_with_indices(image, 2)
        pooled = image[..., :8, :8].contiguous()
        runs: dict[str, Run] = {
            "add": partial(torch.add, x, y),
            "add_": partial(x.add_, y, alpha=1e-9),
            "copy_": partial(y.copy_, x),
            "cast": partial(x.to, torch.bfloat16),
            "gelu": partial(F.gelu, x),
            "relu": partial(F.relu, x),
            "dropout": partial(F.dropout, x, 0.1),
            "sum": x.sum,
            "zero_": torch.empty_like(y).zero_,
            "layer_norm": partial(F.layer_norm, by_row, (256,), bias, bias),
            "softmax": partial(F.softmax, by_row, -1),
            "tanh": x.tanh,
            "gelu_backward": partial(torch.ops.aten.gelu_backward, x, y),
            "tanh_backward": partial(torch.ops.aten.tanh_backward, x, y),
            "threshold_backward": partial(torch.ops.aten.threshold_backward, x, y, 0),
            "max_pool2d": partial(torch.ops.aten.max_pool2d_with_indices, image, 2),
            "max_pool2d_backward": partial(
                torch.ops.aten.max_pool2d_with_indices_backward,
                *(pooled, image, (2, 2), (2, 2), (0, 0), (1, 1), False, largest),
            ),
        }
        for name, run in runs.items():
            row = {"kind": "memory", "name": name, "elements": count, "dtype": "float32"}
            yield row, run


def optimizers(quick: bool) -> Iterator[tuple[Row, Run]]:
    """A step of AdamW over tensors of 262,144 elements, in its three implementations."""
    tensors, elements = (2 if quick else 8), 262_144
    for name, how in (
        ("fused", {"fused": True}),
        ("foreach", {"foreach": True}),
        ("for", {"foreach": False}),
    ):
        held = [torch.zeros(elements, requires_grad=True) for _ in range(tensors)]
        for each in held:
            each.grad = torch.zeros_like(each)
        row = {"kind": "optimizer", "name": f"adamw {name}", "tensors": tensors}
        yield row | {"elements": elements, "dtype": "float32"}, torch.optim.AdamW(held, **how).step


def launches(quick: bool) -> Iterator[tuple[Row, Run]]:
    """A small operator, which is the host's time alone."""
    x = torch.randn(8, 8)
    yield {"kind": "launch", "name": "add", "dtype": "float32"}, partial(torch.add, x, x)
