"""Predictions for zero bubble with stages in a V."""

from __future__ import annotations

import random

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .pipelines import of_schedule, sends
from .scene import Found, Scene, Work
from .schedules import BUBBLE


def _draw(random_: random.Random) -> Case:
    """At least 2p-1 micro-batches."""
    case: Case = draws("2.26", [2, 3, 4, 6])(random_)
    sizes = case.sizes | {"m": 2 * case["W"] + random_.choice([-1, 0, 4, 8])}
    return Case(case.exercise, case.cluster, sizes, case.spread)


def _placed(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    schedules = impl.module("pipeline_schedules")

    def work() -> Found:
        order = impl.zero_bubble_v(case["W"], case["m"])
        bubble, kept = schedules.replay(order).bubble, schedules.peak_live(order)[0]
        return {
            "bubble": float(bubble),
            "kept": float(kept),
            "all_messages": sends(schedules.with_messages(order), order),
        }

    return work


SCENES = (
    Scene(
        exercise="2.26",
        tells="p = {W} ranks run ZB-V with m = {m} micro-batches: rank r has the stages r and "
        "2p-1-r. F, B and W of a stage take 1 each, messages nothing.",
        draw=_draw,
        prepare=_placed,
        doubled=BUBBLE,
        quantities=(
            of_schedule(
                "all_messages",
                lambda c: 4 * c["m"] * (c["W"] - 1),
                "4m(p-1): the turn at the last rank sends nothing",
                asks="messages of all ranks with an activation or its gradient",
                unit="messages",
            ),
            of_schedule(
                "bubble",
                lambda c: (c["W"] - 1) / (6 * c["m"] + c["W"] - 1),
                "(p-1)/(6m + p-1)",
                asks="bubble: the idle share of the ranks' time, to the end of the last (0 to 1)",
                unit="share",
                tolerance=0.01,
                why="1 %: three digits are enough",
            ),
            of_schedule(
                "kept",
                lambda c: 2 * c["W"],
                "2p, each half as large as a rank's share",
                asks="activations of a stage and micro-batch that the first rank keeps at most",
                unit="activations",
            ),
        ),
    ),
)
