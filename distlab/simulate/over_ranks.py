"""Numbers of all ranks of a simulated step, from those that ran: each one stands for its role."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from ..hardware.clusters import Cluster
from ..observe.log import P2P, Log
from ..picture import Span, covered, spans_of
from ..virtual.reports import VirtualResults
from .plan import Plan

SHOWN_RANKS = 8  # in the timeline, where all do the same
FROM_STAGES = {*P2P, "broadcast"}  # activations, gradients, the loss


def shown(plan: Plan, gpus: int) -> range:
    """The ranks in the timeline: one of each stage, as the others of a stage do the same."""
    if plan.model_ranks == 1:
        return range(min(gpus, SHOWN_RANKS))
    stage = gpus // plan.pipeline
    return range(0, gpus, stage)


def shown_spans(plan: Plan, run_by: tuple[int, ...], results: VirtualResults) -> list[Span]:
    """The timeline: a rank that did not run has the spans of the one that ran in its place."""
    shown_ranks = shown(plan, len(run_by))
    logs = [dataclasses.replace(results.logs[run_by[rank]], rank=rank) for rank in shown_ranks]
    return spans_of(logs)


def _steps(results: VirtualResults) -> list[tuple[float, float, Log]]:
    """(begin, end, log) of the step of each rank that ran."""
    ran = [(r, log) for r, log in zip(results, results.logs, strict=True) if r is not None]
    return [(begin, end, log) for (begin, end, *_), log in ran]


def bubble(results: VirtualResults, times: Counter[int]) -> float:
    """The share of all ranks' steps in which a rank has nothing to do but wait for a stage.

    ``times``: how many ranks each one stands for.
    """
    shares: list[float] = []
    for begin, end, log in _steps(results):
        rest = [Span(log.rank, "compute", n, a, b) for n, a, b in log.spans if a >= begin]
        messages: list[Span] = []
        for event in log.events:
            if event.start >= begin:
                span = Span(log.rank, "communication", event.op, event.start, event.end or end)
                (messages if event.op in FROM_STAGES else rest).append(span)
        share = (covered([*rest, *messages]) - covered(rest)) / (end - begin)
        shares += [share] * times[log.rank]
    return math.fsum(shares) / len(shares)  # fsum rounds once, in whatever order they come


def sent(cluster: Cluster, results: VirtualResults, times: Counter[int]) -> dict[str, int]:
    """Bytes that all ranks together sent in the step: inside the nodes, and between them."""
    total = {"inside": 0, "between": 0}
    near: dict[int, bool] = {}  # by the identity of a group
    for begin, _, log in _steps(results):
        for event in log.events:
            if event.start < begin:
                continue
            if event.peer is not None:
                together = cluster.node(log.rank) == cluster.node(event.peer)
            else:
                key = id(event.group)
                if key not in near:
                    near[key] = len({cluster.node(rank) for rank in event.group}) == 1
                together = near[key]
            total["inside" if together else "between"] += event.sent * times[log.rank]
    return total
