"""How long each rank of ring attention multiplies: ``python -m benchmarks.context_balance``.

Each rank's products of one forward and backward run alone, one rank after another and without
messages, in a row and zig-zag. What counts is the least processor time, which hardly depends on
what else the machine does. The numbers go to ``benchmarks/context_balance.json``, from which
the guidelines' picture is drawn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from given.attention_parts import Part, tiles
from solutions.phase2_advanced.context_parallel import attend, gradients, visible

from .common import in_turn

FILE = Path(__file__).with_name("context_balance.json")
RANKS, CHUNK, HEADS, WIDTH = 8, 128, 4, 64
Way = Callable[[int, int], list[Part]]


def zigzag(rank: int, source: int) -> list[Part]:
    """The parts of the solution."""
    return visible(rank, source, [CHUNK])


def in_a_row(rank: int, source: int) -> list[Part]:
    """The parts if a rank has two neighbouring chunks."""
    if source == rank:
        return zigzag(rank, source)
    whole = slice(0, 2 * CHUNK)
    return [(whole, whole, False)] if source < rank else []


WAYS: dict[str, Way] = {"row": in_a_row, "zigzag": zigzag}


def multiply(way: Way, rank: int) -> float:
    """Seconds of processor time for all products of one rank."""
    begun = time.thread_time()
    q, grad = (torch.ones(1, HEADS, 1, 2 * CHUNK, WIDTH) for _ in range(2))
    lse, rest = (torch.ones(1, HEADS, 1, 2 * CHUNK, 1) for _ in range(2))
    for source in range(RANKS):
        for ours, theirs, masked in tiles(way(rank, source)):
            k = v = q[..., theirs, :]
            attend(q[..., ours, :], k, v, masked, 1.0)
            queries, of_out, weights, sums = (t[..., ours, :] for t in (q, grad, lse, rest))
            gradients(queries, of_out, weights, sums, k, v, masked, 1.0)
    return time.thread_time() - begun


def measure(repeats: int = 15) -> dict[str, Any]:
    """Milliseconds of each rank, the least of all repeats, by way."""
    torch.set_num_threads(1)
    work = {
        f"{name} {rank}": partial(multiply, way, rank)
        for name, way in WAYS.items()
        for rank in range(RANKS)
    }
    took = in_turn(work, repeats)
    settings = {"ranks": RANKS, "chunk": CHUNK, "heads": HEADS, "width": WIDTH}
    of_ways = {
        name: [round(1e3 * min(took[f"{name} {rank}"]), 2) for rank in range(RANKS)]
        for name in WAYS
    }
    return {"torch": torch.__version__, **settings, "milliseconds": of_ways}


if __name__ == "__main__":
    FILE.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
