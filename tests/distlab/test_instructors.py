"""The instructor's guide: its tables are computed, its plan can be taught, its commands exist."""

from __future__ import annotations

import re

from distlab.course.catalogue import load_course, root
from scripts import workload

GUIDE = (root() / "docs" / "instructors.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_course() -> None:
    course = load_course()
    for table in (workload.phases(course), workload.term(course), workload.each(course)):
        assert "\n".join(table) in GUIDE, "again: python -m scripts.workload"


def test_minutes_follow_from_words_and_lines() -> None:
    exercise = load_course().exercise("1.3")
    assert workload.lines(exercise) == 5
    assert workload.minutes(exercise) == 30  # 10 + 172 words / 130 + 5 lines x 3, rounded up


def test_the_plan_keeps_the_order_of_learning() -> None:
    """What an exercise builds on comes before it, or in the same week before it."""
    course = load_course()
    order = " ".join(workload.TERM).split()
    assert len({*order}) == len(order)
    for position, each in enumerate(order):
        exercise = course.exercise(each)
        missing = exercise.builds_on - {*order[:position]}
        assert not missing, f"week of {each}: {missing} come later or never"


def test_hours_of_the_predicted_runs_follow_from_the_rates() -> None:
    rows = re.findall(r"\| 8 \| ([\d.]+) \| (\d+) \| \d+ p \|.*?: ([\d,]+) images/s", GUIDE)
    assert len(rows) == 2
    for hours, gpu_hours, rate in rows:
        true = 90 * 1_281_167 / int(rate.replace(",", "")) / 3600
        assert abs(true - float(hours)) < 0.06
        assert abs(8 * true - float(gpu_hours)) < 1


def test_what_is_called_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (root() / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {*re.findall(r"`make (\w+)`", GUIDE)} <= {*targets}
    for module in re.findall(r"-m ((?:solutions|scripts)\.[\w.]+)", GUIDE):
        assert (root() / f"{module.replace('.', '/')}.py").is_file(), module
    for link in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (root() / "docs" / link).exists(), link
