"""Predictions: formula, ledger, memory and clocks agree; numbers are read or refused clearly."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.course.catalogue import load_course
from distlab.grading.implementation import Implementation
from distlab.grading.sources import find_source
from distlab.labs.predict import answers, outcome
from distlab.labs.predict.catalogue import SCENES
from distlab.labs.predict.machines import questions


@pytest.mark.parametrize("name", SCENES)
def test_formula_ledger_and_clock_agree(name: str) -> None:
    scene, exercise = SCENES[name], load_course().exercise(name)
    source = find_source("solutions", exercise.phase)
    case = scene.case(0)
    seen = scene.seen(case, Implementation(source, exercise.file), source.files())
    for quantity in scene.quantities:
        assert quantity.answers, quantity.name
        for who, of in quantity.answers.items():
            wanted, got = quantity.value(case), of(seen)
            assert outcome.agree(got, wanted, quantity.tolerance), (quantity.name, who, got, wanted)


def test_a_seed_gives_the_same_case_again() -> None:
    scene = SCENES["3.3"]
    assert scene.case(7) == scene.case(7)
    assert len({str(scene.case(seed)) for seed in range(8)}) > 4


def test_twenty_questions_with_numbers() -> None:
    found = questions()
    assert len(found) == 20
    for question in found.values():
        assert question.text.endswith("?") or "." in question.text
        assert question.unit
    assert found["M09"].answer() == pytest.approx(7 / (2 * 32 + 7))


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("1.5 MB", "bytes", 1.5e6), ("20 µs", "seconds", 2e-5), ("12 %", "share", 0.12)],
)
def test_units_are_read(text: str, unit: str, value: float) -> None:
    assert answers.read_number(text, unit, "x") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"), [("many", "bytes"), ("3 GB", "seconds"), ("-1", "bytes")]
)
def test_a_wrong_number_is_one_line(text: str, unit: str) -> None:
    with pytest.raises(ValueError, match=r"^x: ") as refused:
        answers.read_number(text, unit, "x")
    assert "\n" not in str(refused.value)


def test_all_that_is_wrong_in_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answers.toml"
    path.write_text('mesages = 3\nbytes = "many"\n')
    with pytest.raises(ValueError, match="did you mean messages") as refused:
        answers.from_file(path, {"messages": "messages", "bytes": "bytes"})
    assert len(str(refused.value).splitlines()) == 3
