# for: 3.29
"""Written from the docstrings alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

from .halving_doubling import halving_doubling_all_reduce
from .ring_allreduce import Op, agree, check_arguments
from .segmented_ring import segmented_ring_all_reduce
from .tree_allreduce import tree_all_reduce


class Link(NamedTuple):
    alpha: float
    beta: float


class Timing(NamedTuple):
    pattern: str
    world_size: int
    nbytes: int
    seconds: float


PATTERNS: dict[str, Callable[..., None]] = {
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
    "ring": segmented_ring_all_reduce,
}
Links = Mapping[str, Link]


def critical_path(pattern: str, world_size: int, nbytes: int) -> tuple[int, float]:
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}, not {pattern!r}")
    if world_size == 1:
        return (0, 0.0)
    power = 1 << world_size.bit_length() - 1
    if pattern == "ring":
        return (2 * (world_size - 1), 2 * (world_size - 1) / world_size * nbytes)
    if pattern == "tree":
        rounds = 2 * (world_size - 1).bit_length()
        return (rounds, float(rounds * nbytes))
    more = 2 if world_size != power else 0
    return (2 * (power.bit_length() - 1) + more, 2 * (power - 1) / power * nbytes + more * nbytes)


def predict(pattern: str, world_size: int, nbytes: int, links: Links) -> float:
    messages, length = critical_path(pattern, world_size, nbytes)
    return messages * links[pattern].alpha + length * links[pattern].beta


def least_squares(equations: Sequence[tuple[float, float, float]]) -> Link:
    mm = math.fsum((m * m for m, _, _ in equations))
    mb = math.fsum((m * b for m, b, _ in equations))
    bb = math.fsum((b * b for _, b, _ in equations))
    mt = math.fsum((m * t for m, _, t in equations))
    bt = math.fsum((b * t for _, b, t in equations))
    det = mm * bb - mb * mb
    alpha, beta = ((mt * bb - bt * mb) / det, (bt * mm - mt * mb) / det)
    if alpha < 0:
        return Link(0.0, bt / bb)
    if beta < 0:
        return Link(mt / mm, 0.0)
    return Link(alpha, beta)


def fit(timings: Sequence[Timing]) -> dict[str, Link]:
    links = {}
    for pattern in dict.fromkeys(timing.pattern for timing in timings):
        mine = [t for t in timings if t.pattern == pattern and t.world_size > 1]
        if len({t.nbytes for t in mine}) < 2:
            raise ValueError(f"{pattern}: a line needs two sizes on more than one rank")
        paths = [(*critical_path(*t[:3]), t.seconds) for t in mine]
        weights = [seconds for _, _, seconds in paths]
        for _ in range(21):
            link = least_squares(
                [(m / w, b / w, t / w) for (m, b, t), w in zip(paths, weights, strict=False)]
            )
            guess = [max(m * link.alpha + b * link.beta, t / 100) for m, b, t in paths]
            weights = [math.sqrt(t * g) for (_, _, t), g in zip(paths, guess, strict=False)]
        links[pattern] = link
    return links


def choose(world_size: int, nbytes: int, links: Links) -> str:
    best, least = ("", math.inf)
    for pattern in [p for p in PATTERNS if p in links]:
        seconds = predict(pattern, world_size, nbytes, links)
        if not best or seconds < least:
            best, least = (pattern, seconds)
    return best


LINKS: Links = {
    "tree": Link(0.0001, 8e-10),
    "halving_doubling": Link(0.00013, 1.6e-09),
    "ring": Link(0.0002, 1.3e-09),
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
    if check:
        agree(tensor, op, group)
    check_arguments(tensor, op, group)
    if pattern != "auto" and pattern not in PATTERNS:
        raise ValueError(f"unknown pattern {pattern!r}")
    if pattern == "auto":
        nbytes = tensor.numel() * tensor.element_size()
        pattern = choose(dist.get_world_size(group), nbytes, links)
    PATTERNS[pattern](tensor, op, group)


def measure(
    sizes: Sequence[int],
    *,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    group: Group = None,
) -> list[Timing]:
    world_size, found = (dist.get_world_size(group), [])
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
        medians = seconds[1:].median(0).values.tolist()
        found += [Timing(p, world_size, nbytes, t) for p, t in zip(PATTERNS, medians, strict=True)]
    return found
