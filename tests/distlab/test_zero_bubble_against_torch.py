"""Exercise 2.26 beside torch.distributed.pipelining: orders, bubbles, validators."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from solutions.phase2_advanced.pipeline_schedules import (
    Schedule,
    Step,
    peak_live,
    rank_of_stages,
    replay,
    validate,
    with_messages,
)
from solutions.phase2_advanced.zero_bubble_v import (
    dual_pipe_v,
    interleaved_zero_bubble,
    zero_bubble_v,
)

Ours = Callable[[int, int], list[list[Step]]]
KINDS: dict[str, tuple[Ours, list[tuple[int, int]]]] = {
    "ScheduleInterleavedZeroBubble": (
        lambda p, m: interleaved_zero_bubble(p, m, 2),
        [(2, 4), (3, 3), (4, 8), (4, 16)],
    ),
    "ScheduleZBVZeroBubble": (zero_bubble_v, [(2, 1), (2, 4), (3, 4), (4, 8), (4, 11)]),
    "ScheduleDualPipeV": (dual_pipe_v, [(2, 4), (3, 7), (4, 8), (4, 11)]),
}


KIND_OF = {"F": "F", "I": "B", "W": "W", "B": "BW"}  # a full backward is B and W


def torchs(name: str, p: int, m: int) -> dict[int, list[Any]]:
    """The order of torch's schedule, from the method that computes it; it needs no ranks."""
    kind = getattr(schedules, name)
    rounds = max(1, m // p)
    numbers = SimpleNamespace(
        pp_group_size=p,
        num_stages=2 * p,
        n_local_stages=2,
        _n_microbatches=m,
        microbatches_per_round=m // rounds,
    )
    return {r: kind._calculate_single_rank_operations(numbers, r) for r in range(p)}


def as_order(found: dict[int, list[Any]]) -> list[list[Step]]:
    """Torch's actions as steps."""
    order: list[list[Step]] = []
    for actions in found.values():
        every = [a for action in actions if action for a in (action.sub_actions or (action,))]
        order.append([])
        for action in every:
            for kind in KIND_OF[action.computation_type.value]:
                order[-1].append(Step(kind, action.stage_index, action.microbatch_index))
    return order


def as_actions(order: Schedule) -> dict[int, list[Any]]:
    """Steps as torch's actions: B is the backward of the input."""
    names = {"F": "F", "B": "I", "W": "W"}
    return {
        rank: [
            schedules._Action.from_str(f"{step.stage}{names[step.kind]}{step.micro_batch}")
            for step in steps
        ]
        for rank, steps in enumerate(order)
    }


@pytest.mark.parametrize("name", KINDS)
def test_no_longer_and_no_larger_than_torchs(name: str) -> None:
    """Each order passes the other's validator. Ours has no more bubble, and keeps no more."""
    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    make, sizes = KINDS[name]
    for p, m in sizes:
        ours, theirs = make(p, m), as_order(torchs(name, p, m))
        validate(with_messages(theirs), 2 * p, m)
        rank_of = schedules._validate_schedule(as_actions(ours), p, 2 * p, m)
        assert rank_of == rank_of_stages(ours) == rank_of_stages(theirs), (p, m)
        assert replay(ours).bubble <= replay(theirs).bubble + 1e-9, (p, m)
        assert max(peak_live(ours)) <= max(peak_live(theirs)), (p, m)


@pytest.mark.parametrize("name", KINDS)
def test_bubble_of_4_ranks_and_8_micro_batches(name: str) -> None:
    make, _ = KINDS[name]
    assert replay(make(4, 8)).bubble == pytest.approx(3 / 51)
    assert round(replay(make(4, 8)).bubble, 3) == 0.059
