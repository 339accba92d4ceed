"""All layers of a model, and all batches of a step, predicted from few of them.

Equal layers take equal times, and so do the batches of a step that accumulates. So few of them run,
and the line through their values gives the rest. ``stages`` does so for pipelines. A test compares
with a run of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .plan import Plan
from .prediction import Answer, simulate

LAYERS, BATCHES = (4, 6), (1, 2)  # that are run, of models with more layers and batches
LINEAR = ("fsdp",)  # strategies whose messages belong to a layer

Values = dict[str, float]


def times(plan: Plan) -> Values:
    """The seconds of a step: each kind of kernel, and the time in which the GPU waits."""
    foldable = plan.strategy in LINEAR and plan.spec.layers > LAYERS[1]
    return all_layers(plan, times_of) if foldable else times_of(run(plan))


def times_of(answer: Answer) -> Values:
    """The seconds of a step that was run."""
    return {"waits": answer.exposed + answer.host, **answer.parts}


def run(plan: Plan) -> Answer:
    """The answer for a plan with one number of GPUs."""
    (answer,) = simulate(plan)
    return answer


def all_layers(plan: Plan, read: Callable[[Answer], Values]) -> Values:
    """What ``read`` finds in the plan's answer, from runs of few layers and batches."""
    return from_batches(plan, few_batches(plan, read))


def from_batches(plan: Plan, ends: list[Values]) -> Values:
    """The values for all batches of the plan's step, from those of one, or of one and of two."""
    beyond = (plan.accumulate - BATCHES[0]) / (BATCHES[1] - BATCHES[0])
    return ends[0] if len(ends) == 1 else on_line(ends[0], ends[1], beyond)


def few_batches(plan: Plan, read: Callable[[Answer], Values]) -> list[Values]:
    """The same for one batch, and for two if the step has more than one."""
    beyond = (plan.spec.layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    ends = []
    for count in BATCHES[: plan.accumulate]:
        few, more = (
            read(run(dataclasses.replace(plan, layers=layers, accumulate=count)))
            for layers in LAYERS
        )
        ends.append(on_line(few, more, beyond))
    return ends


def on_line(at_0: Values, at_1: Values, at: float) -> Values:
    """The value at ``at`` of the line through the values at 0 and 1."""
    return {name: at_0[name] + at * (at_1[name] - at_0[name]) for name in at_1}
