"""How fast one GPU runs the kernels of training: the basis of a simulator's efficiency tables.

    python -m benchmarks.kernels --out references/cuda/kernels.json

Each row names a kernel, its sizes, its dtype and its seconds. These are the median over groups of
launches after a warm-up, timed by CUDA events. ``host_seconds`` is the time that the CPU needs to
launch it once, with no wait for the GPU. Work and bytes follow from the sizes, so the file holds no
rates. Besides kernels there are whole steps of training, with the memory that was allocated and
reserved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from distlab.reference import sealed

from .kernel_steps import steps

GROUPS = 7  # timed groups of launches; their median counts
GROUP_SECONDS = 0.01  # launches of a group take about this long
HOST_LAUNCHES = 200
HALF = (torch.bfloat16, torch.float16)
PRECISIONS = (
    *((dtype, False) for dtype in HALF),
    (torch.float32, True),
    (torch.float32, False),
)  # and tf32
HIDDEN = (768, 1024, 1600, 2048, 4096, 5120, 8192, 12288)
TOKENS = (1024, 4096, 16384)
SQUARES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
UNEVEN = ((2049, 4096, 4096), (4096, 4097, 4096), (4096, 4096, 4100), (8320, 8192, 8192))
ELEMENTS = tuple(4**power for power in range(5, 15))  # 1,024 … 268 million
CONVOLUTION_SIZES = ("batch", "into", "out", "side", "kernel", "stride", "groups")
# of ResNet, ResNeXt and VGG
CONVOLUTIONS = (
    (64, 3, 64, 224, 7, 2, 1), (64, 64, 64, 56, 1, 1, 1), (64, 64, 64, 56, 3, 1, 1),
    (64, 64, 256, 56, 1, 1, 1), (64, 256, 128, 56, 1, 1, 1), (64, 128, 128, 56, 3, 2, 1),
    (64, 128, 128, 28, 3, 1, 1), (64, 256, 256, 14, 3, 1, 1), (64, 512, 512, 7, 3, 1, 1),
    (64, 1024, 256, 14, 1, 1, 1), (64, 512, 2048, 7, 1, 1, 1), (64, 256, 256, 56, 3, 1, 32),
    (64, 512, 512, 28, 3, 1, 32), (64, 1024, 1024, 14, 3, 1, 32), (64, 64, 64, 224, 3, 1, 1),
    (64, 128, 128, 112, 3, 1, 1), (64, 512, 512, 28, 3, 1, 1), (64, 96, 96, 56, 3, 1, 96),
)  # fmt: skip
ATTENTIONS = ((8, 16, 64), (4, 32, 128))  # batch, heads, elements per head


class Case(NamedTuple):
    """One kernel to time; ``sizes`` and ``dtype`` describe its data."""

    kind: str
    name: str
    sizes: dict[str, int]
    dtype: str
    run: Callable[[], object]


def seconds(run: Callable[[], object], groups: int = GROUPS) -> float:
    """Seconds of the GPU for one call of ``run``: the median of ``groups`` groups."""
    once = max(_group(run, 3), 1e-7)
    launches = max(1, min(1000, round(GROUP_SECONDS / once)))
    return statistics.median(_group(run, launches) for _ in range(groups))


def _group(run: Callable[[], object], launches: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(launches):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / launches


def host_seconds(run: Callable[[], object]) -> float:
    """Seconds of the CPU for one launch of ``run``, which must be short for the GPU."""
    run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(HOST_LAUNCHES):
        run()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / HOST_LAUNCHES


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def products() -> Iterator[Case]:
    """Matrix products M×K by K×N: squares, layers of transformers, and sizes off the tiles."""
    shapes = [(n, n, n) for n in SQUARES]
    shapes += [
        (t, n, k) for t in TOKENS for h in HIDDEN for n, k in ((3 * h, h), (4 * h, h), (h, 4 * h))
    ]
    shapes += [(4096, 50304, h) for h in HIDDEN[:5]] + list(UNEVEN)
    for dtype, tf32 in PRECISIONS:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for m, n, k in shapes:
            if dtype == torch.float32 and m * n * k > 4096 * 4096 * 16384:
                continue
            a, b = (
                torch.randn(m, k, device="cuda", dtype=dtype),
                torch.randn(n, k, device="cuda", dtype=dtype),
            )
            label = "tfloat32" if tf32 else _name(dtype)
            yield Case("matmul", "linear", {"m": m, "n": n, "k": k}, label, partial(F.linear, a, b))


def products_fp8() -> Iterator[Case]:
    """Squares in float8, with one scale per tensor."""
    one = torch.ones((), device="cuda")
    for n in SQUARES[2:]:
        a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        run = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
        yield Case("matmul", "scaled_mm", {"m": n, "n": n, "k": n}, "float8_e4m3fn", run)


def convolutions() -> Iterator[Case]:
    """Forward and backward, in both memory layouts."""
    torch.backends.cudnn.benchmark = True
    for dtype, tf32 in PRECISIONS:
        torch.backends.cudnn.allow_tf32 = tf32
        for layout in (torch.contiguous_format, torch.channels_last):
            for shape in CONVOLUTIONS:
                batch, c, out, side, kernel, stride, groups = shape
                x, w = (
                    torch.randn(*size, device="cuda", dtype=dtype)
                    .to(memory_format=layout)
                    .requires_grad_()
                    for size in ((batch, c, side, side), (out, c // groups, kernel, kernel))
                )
                forward = partial(F.conv2d, x, w, None, stride, kernel // 2, 1, groups)
                y = forward()
                grad = torch.randn_like(y)
                sizes = dict(zip(CONVOLUTION_SIZES, shape, strict=True))
                sizes["channels_last"] = int(layout == torch.channels_last)
                label = "tfloat32" if tf32 else _name(dtype)
                yield Case("convolution", "forward", sizes, label, forward)
                backward = partial(torch.autograd.grad, y, (x, w), grad, retain_graph=True)
                yield Case("convolution", "backward", sizes, label, backward)


def attentions() -> Iterator[Case]:
    """``scaled_dot_product_attention``, forward and backward."""
    for dtype in HALF:
        for batch, heads, width in ATTENTIONS:
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                rows = max(1, batch * 2048 // length)
                q, k, v = (
                    torch.randn(
                        rows, heads, length, width, device="cuda", dtype=dtype, requires_grad=True
                    )
                    for _ in range(3)
                )
                for causal in (True, False):
                    forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
                    y = forward()
                    grad = torch.randn_like(y)
                    shape = {"batch": rows, "heads": heads, "length": length, "width": width}
                    sizes = shape | {"causal": int(causal)}
                    yield Case("attention", "forward", sizes, _name(dtype), forward)
                    backward = partial(torch.autograd.grad, y, (q, k, v), grad, retain_graph=True)
                    yield Case("attention", "backward", sizes, _name(dtype), backward)


def pointwise() -> Iterator[Case]:
    """Kernels that wait for memory: operations by element, by row, casts and copies."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in ELEMENTS:
            x = torch.randn(count, device="cuda", dtype=dtype)
            y = torch.randn_like(x)
            rows, bias = x.view(-1, 1024), torch.randn(1024, device="cuda", dtype=dtype)
            other = torch.bfloat16 if dtype == torch.float32 else torch.float32
            runs: dict[str, Callable[[], object]] = {
                "add": partial(torch.add, x, y),
                "add_": partial(x.add_, y, alpha=1e-9),
                "copy_": partial(y.copy_, x),
                "cast": partial(x.to, other),
                "gelu": partial(F.gelu, x),
                "relu": partial(F.relu, x),
                "dropout": partial(F.dropout, x, 0.1),
                "sum": x.sum,
                "zero_": y.zero_,
                "layer_norm": partial(F.layer_norm, rows, (1024,), bias, bias),
                "softmax": partial(F.softmax, rows, -1),
            }
            for name, run in runs.items():
                yield Case("memory", name, {"elements": count}, _name(dtype), run)


def optimizers() -> Iterator[Case]:
    """A step of AdamW over tensors of 4 million elements, in its three implementations."""
    for name in ("fused", "foreach", "for"):
        for tensors in (4, 64):
            held = [
                torch.zeros(4_194_304, device="cuda", requires_grad=True) for _ in range(tensors)
            ]
            for each in held:
                each.grad = torch.zeros_like(each)
            how = {
                "fused": {"fused": True},
                "foreach": {"foreach": True},
                "for": {"foreach": False},
            }[name]
            step = torch.optim.AdamW(held, **how).step
            yield Case(
                "optimizer",
                f"adamw {name}",
                {"tensors": tensors, "elements": 4_194_304},
                "float32",
                step,
            )


def launches() -> Iterator[Case]:
    """Small operations, whose cost is the host's."""
    x = torch.randn(64, 64, device="cuda")
    grown = torch.randn(64, 64, device="cuda", requires_grad=True)
    image = torch.randn(1, 16, 8, 8, device="cuda")
    kernel = torch.randn(16, 16, 3, 3, device="cuda")
    linear, norm = torch.nn.Linear(64, 64).cuda(), torch.nn.LayerNorm(64).cuda()
    runs: dict[str, Callable[[], object]] = {
        "add": lambda: x + x,
        "add with autograd": lambda: grown + grown,
        "linear": lambda: linear(x),
        "layer_norm": lambda: norm(x),
        "convolution": lambda: F.conv2d(image, kernel, padding=1),
        "linear, forward and backward": lambda: linear(x).sum().backward(),
        "view": lambda: x.view(-1),
        "empty_like": lambda: torch.empty_like(x),
    }
    for name, run in runs.items():
        yield Case("launch", name, {}, "float32", run)


def measure() -> Iterator[dict[str, Any]]:
    """A row per kernel; the cases of a kind are made one after another, so memory stays small."""
    for kind in (launches, products, products_fp8, attentions, pointwise, optimizers, convolutions):
        for case in kind():
            row = {"kind": case.kind, "name": case.name, **case.sizes, "dtype": case.dtype}
            if case.kind == "launch":
                row["host_seconds"] = host_seconds(case.run)
            row["seconds"] = seconds(case.run)
            yield row
        torch.cuda.empty_cache()


def main() -> None:
    """Measure everything, and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--no-steps", action="store_true", help="kernels only")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels needs a GPU")
    properties = torch.cuda.get_device_properties(0)
    data: dict[str, Any] = {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernels": [],
        "steps": [],
    }
    for row in measure():
        data["kernels"].append(row)
    sealed.write(options.out, data)
    for row in () if options.no_steps else steps():
        data["steps"].append(row)
        sealed.write(options.out, data)
    print(f"{options.out}: {len(data['kernels'])} kernels, {len(data['steps'])} steps")


if __name__ == "__main__":
    main()
