"""The answers to phase 2's small cases of pipelines: each is computed, and stands in its answer."""

from __future__ import annotations

import re

import pytest

from solutions.phase2_advanced.pipeline_parallel import gpipe, interleaved, one_f_one_b
from solutions.phase2_advanced.pipeline_schedules import (
    Schedule,
    Step,
    peak_live,
    replay,
    validate,
    with_messages,
)
from solutions.phase2_advanced.zero_bubble import zero_bubble
from solutions.phase2_advanced.zero_bubble_v import (
    dual_pipe_v,
    interleaved_zero_bubble,
    zero_bubble_v,
)
from tests.guidelines.folded import answer, says, sections

EQUAL = {"F": 1.0, "B": 2.0}


def drawn(order: Schedule, costs: dict[str, float] | None = None) -> list[list[str]]:
    """Per rank, what it does in each column; the rank's second stage in brackets."""
    found = replay(order, costs)
    rows = [["·"] * int(found.seconds) for _ in order]
    for row, spans in zip(rows, found.spans, strict=True):
        for step, start, end in spans:
            name = f"{step.kind}{step.micro_batch}"
            name = f"[{name}]" if step.stage >= len(order) else name
            row[int(start) : int(end)] = [name] * int(end - start)
    return rows


def pictures(name: str) -> list[list[str]]:
    """The ranks' rows of all pictures of a section."""
    rows = re.findall(r"rank \d +([FBW·\[].*)", sections(2)[name])
    return [re.findall(r"\[?[FBW]\d\]?|·", row) for row in rows]


def test_2_9() -> None:
    lists = with_messages([[Step("F", r, 0), Step("B", r, 0)] for r in range(2)])
    for rank, steps in enumerate(lists):
        says(2, "2.9", f"rank {rank} " + " ".join(map(str, steps)))
    deadlocks = harmless = swaps = 0
    for rank in range(2):
        for first in range(3):
            changed = [[*steps] for steps in lists]
            pair = changed[rank][first : first + 2]
            changed[rank][first : first + 2] = pair[::-1]
            swaps += 1
            try:
                validate(changed, 2, 1)
                harmless += 1
            except ValueError as error:
                deadlocks += str(error).startswith("deadlock")
    says(2, "2.9", f"None of the {swaps} swaps")
    assert (harmless, deadlocks) == (0, 1)


def test_2_21() -> None:
    order = gpipe(2, 2)
    found = replay(order)
    assert found.bubble == pytest.approx(1 / 3)
    assert pictures("2.21") == drawn(order)
    assert peak_live(order) == [2, 2]
    says(2, "2.21", f"It takes {found.seconds:g}", "1/3", "Each rank keeps 2")


def test_2_10() -> None:
    assert replay(gpipe(2, 1)).bubble == 0.5
    enough = next(m for m in range(1, 99) if replay(gpipe(4, m)).bubble < 0.1 + 1e-9)
    says(2, "2.10", "= 1/2", f"from m = {enough} on")


def test_2_11() -> None:
    order = one_f_one_b(3, 2)
    assert pictures("2.11")[-3:] == drawn(order)
    says(2, "2.11", "{}, {} and {}".format(*peak_live(order)))


def test_the_picture_of_2_12() -> None:
    order, plain = interleaved(2, 2, 2), replay(one_f_one_b(2, 2), {"F": 2.0, "B": 4.0})
    text = " ".join(sections(2)["2.12"].split())
    found = replay(order, EQUAL)
    assert f"takes {found.seconds:g} columns" in text
    assert f"idle for {found.bubble * found.seconds:.0f}." in text
    assert f"takes {plain.seconds:g}, and is idle for {plain.bubble * plain.seconds:.0f}" in text


def test_2_12() -> None:
    bubbles, messages = [], []
    for chunks in (1, 2, 4):
        order = interleaved(4, 8, chunks)
        bubbles.append(replay(order, {"F": 1 / chunks, "B": 2 / chunks}).bubble)
        steps = [step for steps in with_messages(order) for step in steps]
        messages.append(sum(step.kind.startswith("send") for step in steps))
    says(2, "2.12", "{:.1f} %, {:.1f} % and {:.1f} %".format(*(100 * b for b in bubbles)))
    says(2, "2.12", "{}, {} and {}".format(*messages))


def test_2_13() -> None:
    assert pictures("2.13")[-4:] == [*drawn(one_f_one_b(2, 2)), *drawn(zero_bubble(2, 2))]
    plain, split = (replay(order(2, 2)).seconds for order in (one_f_one_b, zero_bubble))
    says(2, "2.13", f"1F1B takes {plain:g}", f"ZB-H1 {split:g}")
    says(2, "2.13", f"ZB-H1 takes {replay(zero_bubble(4, 2)).seconds:g}")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_time_of_zb_h1(ranks: int) -> None:
    """Section 2.13's two formulas, for enough and for too few micro-batches."""
    for m in range(1, 2 * ranks):
        expected = 3 * m + ranks - 1 if m >= ranks else 2 * (m + ranks) - 1
        assert replay(zero_bubble(ranks, m)).seconds == expected


def sends(order: Schedule) -> int:
    """Messages of all ranks."""
    return sum(step.kind.startswith("send") for steps in with_messages(order) for step in steps)


def test_2_26() -> None:
    order = zero_bubble_v(2, 3)
    assert pictures("2.26") == drawn(order)
    found = replay(order)
    assert found.bubble == pytest.approx(1 / found.seconds)
    says(2, "2.26", f"It takes {found.seconds:g} = 6m + p−1", f"bubble is 1/{found.seconds:g}")
    says(2, "2.26", f"keeps {peak_live(order)[0]} = 2p", f"{sends(order)} = 4m(p−1) messages")


def test_the_table_of_2_26() -> None:
    p, m = 4, 8
    text, unequal = sections(2)["2.26"], {"F": 1.0, "B": 1.2, "W": 0.8}
    for name, order, more in (
        ("1F1B (2.11)", one_f_one_b(p, m), ", twice as large"),
        ("interleaved, v = 2 (2.12)", interleaved(p, m, 2), ""),
        ("ZB-H1 (2.13)", zero_bubble(p, m), ", twice as large"),
        ("interleaved zero bubble, v = 2", interleaved_zero_bubble(p, m, 2), ""),
        ("ZB-V", zero_bubble_v(p, m), ""),
        ("DualPipe-V", dual_pipe_v(p, m), ""),
    ):
        bubble, kept = f"{100 * replay(order).bubble:.1f} %", max(peak_live(order))
        assert f"| {name} | {bubble} | {kept}{more} | {sends(order) // m} |" in text
    assert f"the bubble is {100 * replay(zero_bubble_v(p, m), unequal).bubble:.1f} %" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_times_of_2_26(ranks: int) -> None:
    """The module's table: times, what is kept, and the pairs of DualPipe-V."""
    for m in range(1, 2 * ranks + 2):
        order = zero_bubble_v(ranks, m)
        assert replay(order).seconds == max(6 * m + ranks - 1, 4 * (m + ranks) - 2)
        assert max(peak_live(order)) <= min(2 * m, 2 * ranks)
        if m >= 2 * ranks:
            assert replay(dual_pipe_v(ranks, m)).seconds == 6 * m + ranks - 1
            assert peak_live(dual_pipe_v(ranks, m)) == [2 * ranks + 1] * ranks
        if m % ranks == 0:
            order = interleaved_zero_bubble(ranks, m, 3)
            assert replay(order).seconds == 9 * m + ranks - 1
            assert peak_live(order) == [3 * ranks] * ranks


def test_every_answer_of_pipelines_is_computed() -> None:
    assert all(answer(2, name) for name in ("2.9", "2.21", "2.10", "2.11", "2.12", "2.13", "2.26"))
