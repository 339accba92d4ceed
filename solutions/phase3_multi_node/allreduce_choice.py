"""Ring, tree, or halving and doubling: measure, fit a line, use the pattern with the least time.

The critical path is what must happen one after another. With N bytes, W ranks, α seconds per
message and β per byte, the three patterns have these:

=================  ======================  =========================  =========================
pattern            messages                bytes                      messages of all ranks
=================  ======================  =========================  =========================
ring               2(W-1)                  2(W-1)/W·N                 2W(W-1)
tree               2⌈log₂ W⌉               2⌈log₂ W⌉·N                2(W-1)
halving_doubling   2 log₂ P (+ 2)          2(P-1)/P·N (+ 2N)          2P log₂ P (+ 2(W-P))
=================  ======================  =========================  =========================

P is the largest power of two that is at most W, and the brackets say what W ≠ P adds. A line
through measured times gives α and β of each pattern on *this* machine. The pattern with the
smallest prediction is chosen. One α and β for all patterns would do if messages never got in each
other's way. But on a machine with more ranks than cores the number of all messages counts, too.
Invariant: all ranks make the same choice, because all use the same numbers.

Sources: Thakur, Rabenseifner & Gropp 2005; Hockney 1994 (α, β). NCCL chooses in the same way, from
a latency and a bandwidth for each algorithm (src/graph/tuning.cc).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group
from given.devices import CHOICES
from given.launched import launched
from given.parent import end_with_parent

from .halving_doubling import halving_doubling_all_reduce
from .ring_allreduce import Op, agree, check_arguments
from .segmented_ring import segmented_ring_all_reduce
from .tree_allreduce import tree_all_reduce


class Link(NamedTuple):
    """What a message costs: ``alpha`` seconds, and ``beta`` seconds per byte."""

    alpha: float
    beta: float


class Timing(NamedTuple):
    """An all-reduce of ``nbytes`` bytes over ``world_size`` ranks took ``seconds``."""

    pattern: str
    world_size: int
    nbytes: int
    seconds: float


PATTERNS: dict[str, Callable[..., None]] = {  # where predictions are equal the first is chosen
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "ring": segmented_ring_all_reduce,
}
Links = Mapping[str, Link]


def critical_path(pattern: str, world_size: int, nbytes: int) -> tuple[int, float]:
    """(messages, bytes) that follow one another: the module's table. One rank alone: (0, 0).

    Raises ValueError for an unknown ``pattern``.
    """
    # --- exercise 3.29: start
    # Step 1: the table; mind W = 1
    w, rounds = world_size, (world_size - 1).bit_length()
    core = 1 << (w.bit_length() - 1)
    extra = 0 if w == core else 2
    paths = {
        "tree": (2 * rounds, 2 * rounds * nbytes),
        "halving_doubling": (
            2 * (core.bit_length() - 1) + extra,
            (2 * (core - 1) / core + extra) * nbytes,
        ),
        "ring": (2 * (w - 1), 2 * (w - 1) / w * nbytes),
    }
    if pattern not in paths:
        raise ValueError(f"pattern must be one of {', '.join(paths)}, not {pattern!r}")
    return paths[pattern]
    # --- exercise 3.29: end


def predict(pattern: str, world_size: int, nbytes: int, links: Links) -> float:
    """Seconds of an all-reduce by ``pattern``: messages·α + bytes·β of its critical path."""
    # --- exercise 3.29: start
    # Step 2: the pattern's own α and β
    messages, volume = critical_path(pattern, world_size, nbytes)
    return messages * links[pattern].alpha + volume * links[pattern].beta
    # --- exercise 3.29: end


def least_squares(equations: Sequence[tuple[float, float, float]]) -> Link:
    """α, β >= 0 with the least Σ (messages·α + bytes·β - seconds)² over (messages, bytes, seconds).

    The left sides of at least two equations, (messages, bytes), are no multiples of each other. All
    numbers are positive. It uses plain arithmetic, so it gives the same bits on all ranks, which a
    library need not do.
    """
    # --- exercise 3.29: start
    # Step 3: solve the two normal equations. A negative solution has no meaning: use 0 for it, and
    #         solve for the other alone
    sums = [
        math.fsum(row[i] * row[j] for row in equations)
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    ]
    mm, mb, bb, mt, bt = sums
    determinant = mm * bb - mb * mb
    alpha, beta = (mt * bb - bt * mb) / determinant, (bt * mm - mt * mb) / determinant
    if alpha < 0:
        return Link(0.0, bt / bb)
    return Link(alpha, beta) if beta >= 0 else Link(mt / mm, 0.0)
    # --- exercise 3.29: end


def fit(timings: Sequence[Timing]) -> dict[str, Link]:
    """α and β of each pattern in ``timings``: the line with the least squares of *relative* errors.

    They are relative, because a tensor of 100 MB must not decide what one of 4 bytes costs. Here an
    error counts relative to the geometric mean of measured and predicted time. So twice as long
    counts about like half as long. Timings of one rank alone say nothing and are left out. Neither
    α nor β is negative. Raises ValueError for a pattern with fewer than two different sizes on more
    than one rank.
    """
    # --- exercise 3.29: start
    # Step 4: one equation per timing, messages·α + bytes·β = t, divided by t: least squares
    # Step 5: divide by sqrt(t·prediction) instead and solve again, until nothing changes (20 times
    #         are enough; t/100 is the least prediction that counts)
    links = {}
    for pattern in dict.fromkeys(timing.pattern for timing in timings):
        mine = [t for t in timings if t.pattern == pattern and t.world_size > 1]
        if len({t.nbytes for t in mine}) < 2:
            raise ValueError(f"{pattern}: a line needs timings of at least two sizes, W > 1")
        paths = [(*critical_path(*t[:3]), t.seconds) for t in mine]
        scales = [seconds for _, _, seconds in paths]
        for _ in range(20):
            rows = [(m / s, b / s, t / s) for (m, b, t), s in zip(paths, scales, strict=True)]
            alpha, beta = least_squares(rows)
            scales = [math.sqrt(t * max(m * alpha + b * beta, t / 100)) for m, b, t in paths]
        links[pattern] = Link(alpha, beta)
    return links
    # --- exercise 3.29: end


def choose(world_size: int, nbytes: int, links: Links) -> str:
    """The pattern of ``links`` with the smallest prediction; of equal ones the first in PATTERNS.

    The choice is the same on all ranks if ``links`` is. If each rank chose by what it measured
    alone, the ranks could hang.
    """
    # --- exercise 3.29: start
    # Step 6: take the minimum
    candidates = [pattern for pattern in PATTERNS if pattern in links]
    return min(candidates, key=lambda pattern: predict(pattern, world_size, nbytes, links))
    # --- exercise 3.29: end


# gloo over loopback, 2 to 4 ranks on 2 cores, rounded; fit your own machine's
LINKS: Links = {
    "tree": Link(100e-6, 0.8e-9),
    "halving_doubling": Link(130e-6, 1.6e-9),
    "ring": Link(200e-6, 1.3e-9),
}


def all_reduce(
    tensor: Tensor,
    op: Op = "sum",
    group: Group = None,
    *,
    pattern: str = "auto",
    links: Links = LINKS,
    check: bool = False,
) -> None:
    """Combine ``tensor`` over the ranks of ``group``, in place, by a pattern or the best of them.

    ``pattern``: ``"auto"`` (``choose`` by the tensor's bytes) or a name of PATTERNS, where
    ``"ring"`` is the segmented one. ``links``: ``fit`` of measurements, the same on all ranks.
    ``check``: as in ``ring_all_reduce``, before anything is chosen. Tensors as there. Raises
    ValueError as ``check_arguments`` does, and for an unknown ``pattern``.
    """
    # --- exercise 3.29: start
    # Step 7: agree if ``check`` is set, choose, call
    if check:
        agree(tensor, op, group)
    _, world_size = check_arguments(tensor, op, group)
    if pattern == "auto":
        pattern = choose(world_size, tensor.nbytes, links)
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be auto or one of {', '.join(PATTERNS)}, not {pattern!r}")
    PATTERNS[pattern](tensor, op, group)
    # --- exercise 3.29: end


def for_size(timings: Sequence[Timing], nbytes: int) -> list[Timing]:
    """The timings that tell the cost of ``nbytes``: α from the smallest size that was measured, and
    β from the size that is nearest to ``nbytes``, by ratio.

    A tensor that has outgrown the caches, or the buffers that stay allocated, costs more per byte,
    and one pattern more than another. So one line from 4 bytes to 100 MB misses all patterns, and
    chooses among them by these misses. ``fit`` of these timings goes through the measured times of
    the nearest size. Timings of one rank alone are left out, as in ``fit``.
    """
    several = [timing for timing in timings if timing.world_size > 1]
    sizes = sorted({timing.nbytes for timing in several})
    near = sorted(sizes[1:], key=lambda size: abs(math.log(size / max(nbytes, 1))))
    return [timing for timing in several if timing.nbytes in (*sizes[:1], *near[:1])]


def measure(
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> list[Timing]:
    """Time every pattern on float32 tensors of ``sizes`` bytes; the same list on every rank.

    As in exercise 1.9 all ranks start together, the slowest one counts, and of ``repeats`` runs the
    median does. The patterns take turns, so that a busy moment of the machine hits them all.
    """
    world_size, found = dist.get_world_size(group), []
    for nbytes in sizes:
        tensor = torch.zeros(nbytes // 4, device=device)
        seconds = torch.zeros(repeats + 1, len(PATTERNS), dtype=torch.float64)
        for run in range(repeats + 1):
            for column, reduce in enumerate(PATTERNS.values()):
                dist.barrier(group=group)
                begun = time.perf_counter()
                reduce(tensor, "max", group)
                if tensor.is_cuda:
                    torch.cuda.synchronize(tensor.device)
                seconds[run, column] = time.perf_counter() - begun
        seconds = seconds.to(device)
        tree_all_reduce(seconds, "max", group)
        medians = seconds[1:].median(0).values.tolist()  # the first run warms up
        found += [Timing(p, world_size, nbytes, t) for p, t in zip(PATTERNS, medians, strict=True)]
    return found


def main() -> None:
    """Measure under torchrun; rank 0 prints measured times, those that one line for all sizes
    predicts, and the choice by α and β for the size."""
    end_with_parent()
    parser = argparse.ArgumentParser(description="Measure all-reduces, and choose by formula.")
    parser.add_argument("--device", default="auto", choices=CHOICES)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 4 "
            "-m solutions.phase3_multi_node.allreduce_choice"
        )
    with launched("allreduce_choice", options.device, point_to_point=True) as rank:
        timings = measure([4 * 10**k for k in range(8)], device=rank.device)
        links = fit(timings)
        for t in timings if rank.rank == 0 else []:
            there = fit(for_size(timings, t.nbytes))
            mark = "  chosen" if t.pattern == choose(*t[1:3], there) else ""
            print(
                f"{t.nbytes:12,} bytes  {t.pattern:17}{t.seconds * 1e3:10.3f} ms"
                f"{predict(*t[:3], links) * 1e3:10.3f} predicted{mark}"
            )


if __name__ == "__main__":
    main()
