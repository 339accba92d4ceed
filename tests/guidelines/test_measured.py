"""Each section says what ``distlab measure`` tells of its exercise, in step with the scenario."""

from __future__ import annotations

import pytest

from distlab.course.catalogue import Phase, load_course
from scripts.measured import HEAD, filled, line


@pytest.mark.parametrize("phase", load_course().phases, ids=lambda phase: str(phase.number))
def test_lines_are_in_step(phase: Phase) -> None:
    """Else ``python -m scripts.measured --write``."""
    text = phase.exercises[0].guidelines_path.read_text(encoding="utf-8")
    assert text.count(HEAD) == len(phase.exercises)
    assert filled(text, phase) == text


def test_a_changed_line_is_replaced_and_a_missing_one_is_added() -> None:
    phase = load_course().phases[0]
    text = phase.exercises[0].guidelines_path.read_text(encoding="utf-8")
    paragraph = line(phase.exercises[3])
    assert filled(text.replace(paragraph, f"{HEAD} Something else,\nin two lines."), phase) == text
    assert filled(text.replace(f"{paragraph}\n\n", ""), phase) == text
