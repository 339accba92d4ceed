"""One part of ``distlab doctor --cuda``: solutions against NCCL and against torch's own, on GPUs.

    python -m benchmarks.cuda ddp --ranks 8

The comparisons are those of the other benchmarks, with a GPU per rank. Bus bandwidth is the bytes
that a rank must send and receive, divided by the time. For an all-reduce of n bytes these are
2(W-1)/W·n, so it is comparable with the speed of the links (nccl-tests, doc/PERFORMANCE.md). It
prints one line of JSON: a status, a message, and a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import allreduce, ddp, fsdp, pipeline, tensor_parallel
from .common import failed, spread

SIZES = {4_000: 20, 400_000: 20, 4_000_000: 10, 40_000_000: 5, 400_000_000: 1}  # bytes: weights
QUICK = {4_000: 1, 400_000: 1}
ALONE = ("ddp", "fsdp")  # with one rank they still show the cost of wrapping
# ranks over which eight layers (two stages per rank, interleaved) and eight heads can be divided
DIVIDED = {"pipeline": (4, 2), "tensor-parallel": (8, 4, 2)}
Result = dict[str, Any]


def bandwidth(ranks: int, device: str, repeats: int) -> Result:
    """GB/s of every all-reduce, by size."""
    sizes = SIZES if repeats > 1 else QUICK
    rows, best, header = [], 0.0, ["bytes"]
    for nbytes, taken, chosen in allreduce.compare(ranks, sizes, repeats, device):
        seconds = {name: statistics.median(values) for name, values in taken.items()}
        header = ["bytes", *seconds, "auto chose"]
        speeds = [2 * (ranks - 1) / ranks * nbytes / s / 1e9 for s in seconds.values()]
        best = max(best, max(speeds[1:]) / speeds[0])
        rows.append([f"{nbytes:,}", *(f"{speed:.3g}" for speed in speeds), chosen])
    note = "Bus bandwidth in GB/s; medians of runs in the same ranks, the slowest rank's time."
    return _passed(f"at best {best:.2f} times the bandwidth of {header[1]}", header, rows, note)


def compare_ddp(ranks: int, device: str, repeats: int) -> Result:
    """Time and memory of DDP beside torch's."""
    rows, ratios = [], []
    for model in ddp.MODELS:
        pair = ddp.PAIRS["every parameter used"]
        (mine, held), (torchs, theirs) = ddp.compare(model, pair, ranks, repeats, device)
        ratios.append(_ratio(mine, torchs))
        rows.append([model, *_times(mine, torchs), f"{held / 1e6:.1f} / {theirs / 1e6:.1f}"])
    return _compared(rows, ratios, "MB of gradients and buckets")


def compare_fsdp(ranks: int, device: str, repeats: int) -> Result:
    """Time and memory of FSDP beside torch's."""
    rows, ratios = [], []
    for model in fsdp.MODELS:
        seconds, peaks = fsdp.compare(model, ranks, repeats, device)
        mine, torchs = ([1e3 * s for s in values] for values in seconds.values())
        ratios.append(_ratio(mine, torchs))
        told = " / ".join(f"{peak / 1e6:.1f}" for peak in peaks)
        rows.append([model, *_times(mine, torchs), told])
    return _compared(rows, ratios, "MB at the peak of a step")


def compare_pipeline(ranks: int, device: str, repeats: int) -> Result:
    """Time and memory of the pipeline schedules beside torch's."""
    rows, ratios = [], []
    for name in pipeline.THEIRS:
        found = pipeline.compare(name, ranks, repeats, device)
        mine, torchs = (
            [1e3 * max(turn) for turn in zip(*(rank[who] for rank in found), strict=True)]
            for who in ("ours", "torch")
        )
        ratios.append(_ratio(mine, torchs))
        peaks = (max(rank[f"{who} facts"][1] for rank in found) for who in ("ours", "torch"))
        told = " / ".join(f"{peak / 1e6:.1f}" for peak in peaks)
        rows.append([name, *_times(mine, torchs), told])
    return _compared(rows, ratios, "MB of activations and messages at the peak")


def compare_tensor(ranks: int, device: str, repeats: int) -> Result:
    """Time of tensor parallel layers beside torch's, and the bytes that each keeps for backward."""
    rows, ratios = [], []
    kept = tensor_parallel.costs(ranks, device)
    for kind, seconds in tensor_parallel.compare(ranks, repeats, device).items():
        mine, torchs = ([1e3 * s for s in values] for values in seconds.values())
        ratios.append(_ratio(mine, torchs))
        told = " / ".join(f"{nbytes / 1e6:.2f}" for nbytes in kept[kind][1])
        rows.append([kind, *_times(mine, torchs), told])
    return _compared(rows, ratios, "MB kept for backward")


PARTS: dict[str, Callable[[int, str, int], Result]] = {
    "bandwidth": bandwidth,
    "ddp": compare_ddp,
    "fsdp": compare_fsdp,
    "pipeline": compare_pipeline,
    "tensor-parallel": compare_tensor,
}


def _ratio(mine: Sequence[float], torchs: Sequence[float]) -> float:
    return statistics.median(mine) / statistics.median(torchs)


def _times(mine: Sequence[float], torchs: Sequence[float]) -> list[str]:
    return [spread(mine), spread(torchs), f"{_ratio(mine, torchs):.2f}"]


def _compared(rows: list[list[str]], ratios: list[float], memory: str) -> Result:
    header = ["", "solution, ms", "torch, ms", "ratio of medians", f"{memory}, solution / torch"]
    told = " to ".join(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return _passed(f"{told} times torch's time of a step", header, rows)


def _passed(message: str, header: list[str], rows: list[list[str]], note: str = "") -> Result:
    result = {"header": header, "table": rows, "note": note}
    return {"status": "passed", "message": message, "result": result}


def main() -> int:
    """Measure one part; the exit status is 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    try:
        found = measured(options.part, options.ranks, options.device, options.repeats)
    except Exception as error:
        found = failed(error)
    print(json.dumps(found))
    return int(found["status"] == "failed")


def measured(part: str, most: int, device: str, repeats: int) -> Result:
    """The part on as many ranks as can divide it, but no more than ``most``."""
    if most < 2 and part not in ALONE:
        return {"status": "needs", "message": "needs two GPUs", "result": {}}
    ranks = next(count for count in DIVIDED.get(part, (most,)) if count <= most)
    found = PARTS[part](ranks, device, repeats)
    found["message"] += f", on {ranks} rank{'s' * (ranks > 1)}"
    return found


if __name__ == "__main__":
    sys.exit(main())
