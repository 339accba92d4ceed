"""The instructor's guide: its tables are computed, its plan can be taught, its commands exist."""

from __future__ import annotations

import re

import pytest

from distlab.course.catalogue import load_course, root
from scripts import workload

GUIDE = (root() / "docs" / "instructors.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_course() -> None:
    course = load_course()
    for name in workload.PAGES:
        text = (root() / name).read_text(encoding="utf-8")
        assert workload.filled(course, name, text) == text, "python -m scripts.workload --write"
        stale = text
        for table in workload.PAGES[name]:
            assert table(course)[-1] in stale
            stale = stale.replace(table(course)[-1], "| of last year |")
        assert workload.filled(course, name, stale) == text


def test_minutes_follow_from_words_lines_and_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = load_course().exercise("1.3")
    assert workload.lines(exercise) == 5
    monkeypatch.setattr(workload, "promises", lambda _: 7)
    monkeypatch.setattr(workload, "words", lambda _: 130)
    assert workload.minutes(exercise) == 35  # 10 + 1 + 5 lines x 2 + 7 promises x 2
    monkeypatch.setattr(workload, "words", lambda _: 260)
    assert workload.minutes(exercise) == 40  # rounded up to 5


def test_folded_answers_are_no_part_of_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = load_course().exercise("1.3")
    text = "## 1.3 Title\n\none two <details>three\nfour</details> five\n\n## 1.4 Title\n\nsix\n"
    monkeypatch.setattr(type(exercise.guidelines_path), "read_text", lambda *_, **__: text)
    assert workload.words(exercise) == 6


def test_difficulty_grows_with_lines_and_ways_to_err(monkeypatch: pytest.MonkeyPatch) -> None:
    exercise = load_course().exercise("1.3")
    found = []
    for lines, ways in ((5, 5), (15, 15), (22, 22), (30, 30), (20, 80), (90, 90)):
        monkeypatch.setattr(workload, "lines", lambda _, lines=lines: lines)
        monkeypatch.setattr(workload, "ways_to_err", lambda ways=ways: {"1.3": ways})
        found.append(workload.difficulty(exercise))
    assert found == [1, 2, 3, 4, 5, 5]


def test_hours_in_the_text_are_the_sum() -> None:
    (hours,) = re.findall(r"All four phases are about (\d+) hours", GUIDE)
    assert abs(int(hours) - sum(e.minutes for e in load_course().exercises) / 60) <= 10


def test_estimates_are_those_of_the_map() -> None:
    text = (root() / "course.toml").read_text(encoding="utf-8")
    stale = re.sub(r"^minutes = .*", "minutes = 1", text, flags=re.M)
    stale = re.sub(r"^difficulty = .*\n", "", stale, flags=re.M)
    assert workload.estimated(load_course(), stale) == text, "python -m scripts.workload --write"


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
