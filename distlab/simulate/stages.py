"""All stages of a pipeline, predicted from few stages, layers and micro-batches.

All ranks of a tensor group do the same, and so do copies of the model. Stages differ only at the
ends. So one copy runs, with 2 and 3 stages, 1 and 2 layers per stage, and two numbers of
micro-batches. The time of a step is S·m + I for m micro-batches: S is the slowest stage's time of
one, I that of filling and draining. S is the same for any number of stages, and I grows by the
same with each; both grow by the same with each layer. The bytes that a stage keeps grow in the same
way. A test compares with a run of all stages.

The copies then sum their gradients, which nothing hides in the simulated program: one all-reduce
more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ..hardware.clusters import load_cluster
from ..hardware.collectives import collective_time
from .plan import Plan
from .prediction import simulate

STAGES, LAYERS = (2, 3), (1, 2)  # that are run
# the step and what the first stage keeps, but neither a stage's state nor the last stage's peak
GROWING = np.array([1, 0, 0, 1, 1, 0])
ROUNDS, FEW = (2, 3), (1, 2)  # micro-batches per stage; with one stage nothing is filled
GRADIENTS = 4 / 18  # of the bytes before a step in mixed precision: masters.py
# an array: step; bytes before it on the largest and the smallest rank; kept; the first and the last
# stage's peak
Numbers = Any


class Found(NamedTuple):
    """Seconds of a step; bytes of weights, gradients and optimizer on the rank that has most and
    on the one that has least; bytes of activations that the first rank keeps for backward; the most
    bytes of a rank."""

    step: float
    most: float
    least: float
    kept: float
    memory: float


def all_stages(plan: Plan) -> Found:
    """A step of the plan with all its GPUs."""
    layers = plan.spec.layers / (plan.pipeline * plan.chunks)
    ends = [_over_layers(plan, stages, layers) for stages in STAGES if stages <= plan.pipeline]
    if plan.pipeline == 1:
        ends = [_over_layers(plan, 1, layers)]
    slope, begin = ends[-1]
    if plan.pipeline > STAGES[1]:
        per_stage = GROWING * (begin - ends[0][1])
        begin = begin + (plan.pipeline - STAGES[1]) * per_stage
    numbers = (float(value) for value in slope * _micro_batches(plan) + begin)
    step, most, least, kept, *peaks = numbers
    return Found(step + _reduced(plan, GRADIENTS * most), most, least, kept, max(peaks))


def _micro_batches(plan: Plan) -> int:
    return plan.micro_batches or 1


def _over_layers(plan: Plan, stages: int, layers: float) -> tuple[Numbers, Numbers]:
    """Slope and begin over micro-batches, on so many stages of ``layers`` layers each."""
    if layers <= LAYERS[1]:
        return _over_micro_batches(plan, stages, round(layers))
    few, more = (_over_micro_batches(plan, stages, count) for count in LAYERS)
    beyond = (layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    slope, begin = (a + beyond * (b - a) for a, b in zip(few, more, strict=True))
    return slope, begin


def _over_micro_batches(plan: Plan, stages: int, layers: int) -> tuple[Numbers, Numbers]:
    few, more = ROUNDS if stages > 1 else FEW
    at = [_run(plan, stages, layers, count * stages) for count in (few, more)]
    slope = (at[1] - at[0]) / ((more - few) * stages)
    return slope, at[0] - few * stages * slope


def _run(plan: Plan, stages: int, layers: int, micro_batches: int) -> Numbers:
    """One copy of a smaller model."""
    one = dataclasses.replace(
        plan,
        gpus=(plan.tensor * stages,),
        pipeline=stages,
        layers=layers * stages * plan.chunks,
        micro_batches=micro_batches,
        copy_batch=plan.samples // _micro_batches(plan) * micro_batches,
    )
    (answer,) = simulate(one)
    kept = max(0, answer.kept[0] - answer.states[0])
    peaks = answer.peaks[0], answer.peaks[-1]
    return np.array([answer.step, max(answer.states), min(answer.states), kept, *peaks])


def _reduced(plan: Plan, nbytes: float) -> float:
    """Seconds in which the copies of the model sum their gradients."""
    copies = plan.gpus[0] // plan.model_ranks
    group = tuple(range(0, copies * plan.tensor, plan.tensor))
    return collective_time("all_reduce", nbytes, group, load_cluster(plan.cluster))
