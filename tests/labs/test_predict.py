"""Predictions: formula, ledger, memory and clocks agree; numbers are read or refused clearly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab import cli
from distlab.course import progress
from distlab.course.catalogue import load_course, root
from distlab.grading.implementation import Implementation
from distlab.grading.sources import find_source
from distlab.labs.predict import answers, graded, machines, outcome, picture
from distlab.labs.predict.catalogue import SCENES, WITHOUT, scene_named, situation
from distlab.labs.predict.machines import questions, step_of
from distlab.labs.predict.sheets import sheet_of


@pytest.fixture
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress and predictions in a folder of their own."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(outcome, "kept_file", lambda: tmp_path / "predictions.json")


@pytest.mark.verdict
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


def test_every_exercise_with_a_cost_has_a_prediction_or_a_reason() -> None:
    """The reason stands in ``WITHOUT``; CONTRIBUTING.md tells how to add a prediction."""
    with_cost = set()
    for phase in load_course().phases:
        text = (root() / phase.folder / "guidelines.md").read_text(encoding="utf-8")
        for section in re.split(r"^## ", text, flags=re.MULTILINE):
            number = re.match(r"\d+\.\d+", section)
            if number and "**Cost.**" in section:
                with_cost.add(number[0])
    assert with_cost == SCENES.keys() | WITHOUT.keys()
    assert not SCENES.keys() & WITHOUT.keys()
    for name, why in WITHOUT.items():
        with pytest.raises(ValueError, match=f"nothing to predict for {name}: {why[:9]}"):
            scene_named(name)


@pytest.mark.parametrize("name", SCENES)
def test_a_tolerance_is_told_and_wrong_numbers_are_not_right(name: str) -> None:
    case = SCENES[name].case(0)
    for quantity in SCENES[name].quantities:
        percent = re.match(r"(\d+) %: ", quantity.why)
        assert (float(percent[1]) / 100 if percent else 0.0) == quantity.tolerance, quantity.name
        value = quantity.value(case)
        assert outcome.agree(value, value, quantity.tolerance)
        assert not outcome.agree(1.3 * value + 1e-9, value, quantity.tolerance), quantity.name


def test_both_answers_occur_where_there_are_two() -> None:
    two = [(s, q) for s in SCENES.values() for q in s.quantities if q.unit in answers.CHOICES]
    assert len(two) >= 4
    for scene, quantity in two:
        assert {quantity.value(scene.case(seed)) for seed in range(30)} == {0.0, 1.0}


def test_a_seed_gives_the_same_case_again() -> None:
    scene = SCENES["3.3"]
    assert scene.case(7) == scene.case(7)
    assert len({str(scene.case(seed)) for seed in range(8)}) > 4


@pytest.mark.parametrize("name", SCENES)
def test_a_sheet_tells_each_number_and_the_machine_once(name: str) -> None:
    assert "{" not in situation(SCENES[name], SCENES[name].case(0))
    timed = any(q.unit in ("seconds", "latency or bytes") for q in SCENES[name].quantities)
    assert sheet_of(f"P{name}", 0).count("Machine:") == timed


@pytest.mark.parametrize("name", ["M18", "M19"])
def test_a_question_tells_the_step_that_one_gpu_needs(name: str) -> None:
    numbers = dict(questions()[name].numbers)
    told = numbers.pop("alone")
    assert f"{told} ms" in questions()[name].text
    assert step_of(**numbers | {"gpus": 1}) * 1e3 == pytest.approx(told, abs=0.06)


def test_twenty_questions_with_numbers() -> None:
    found = questions()
    assert len(found) == 20
    for question in found.values():
        assert question.text.endswith("?") or "." in question.text
        assert question.unit
    assert found["M09"].answer() == pytest.approx(7 / (2 * 32 + 7))


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.5 MB", "bytes", 1.5e6),
        ("1,500,000.5", "bytes", 1_500_000.5),
        ("20 µs", "seconds", 2e-5),
        ("12 %", "share", 0.12),
    ],
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


@pytest.mark.parametrize("text", ["1,5 MB", "1,5e6", "0,125", ",500", "1,2345", "12,345,67"])
def test_a_decimal_comma_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"x: .*write a decimal point, not a comma"):
        answers.read_number(text, "bytes", "x")


def test_all_that_is_wrong_in_a_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "answers.toml"
    path.write_text('mesages = 3\nbytes = "many"\n')
    with pytest.raises(ValueError, match="did you mean messages") as refused:
        answers.from_file(path, {"messages": "messages", "bytes": "bytes"})
    assert len(str(refused.value).splitlines()) == 3


def run(*argv: str) -> int:
    return cli.main(["predict", *argv])


def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 3.7 that took no run."""

    def fake(scene: Any, seed: int, given: dict[str, float], impl: str) -> list[outcome.Outcome]:
        case = scene.case(seed)
        return [
            outcome.Outcome(
                lab=f"P{scene.exercise}",
                name=q.name,
                asks=q.asks,
                unit=q.unit,
                predicted=given[q.name],
                formula=q.formula,
                value=float(q.value(case)),
                tolerance=q.tolerance,
                why=q.why,
            )
            for q in scene.quantities
        ]

    monkeypatch.setattr("distlab.commands.predict.graded", fake)


def test_json_points_and_curve(
    own_progress: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch)
    case = SCENES["3.7"].case(5)
    sizes = (f"keys={case['W']}", f"groups={case['M'] + case['L'] + 1}")
    common = ("3.7", "--seed", "5", "--impl", "solutions", "--json", str(tmp_path / "one.json"))
    assert run(*common, "--set", *sizes) == 1
    data = json.loads((tmp_path / "one.json").read_text())
    assert (data["lab"], data["seed"], data["points"], data["most"]) == ("P3.7", 5, 1, 2)
    assert [each["right"] for each in data["predictions"]] == [True, False]
    good = (f"keys={case['W']}", f"groups={case['M'] + case['L']}")
    assert run(*common, "--set", *good) == 0
    assert run(*common, "--set", *sizes) == 1
    assert progress.labs()["P3.7"] == {"points": 2, "most": 2}  # the best one counts
    assert run("--json", str(tmp_path / "all.json")) == 0
    listed = json.loads((tmp_path / "all.json").read_text())["predictions"]
    assert listed["P3.7"] == {"points": 2, "most": 2}
    assert listed["PM20"] is None
    assert len(listed) == len(SCENES) + 20
    assert run("--curve", "--out", str(tmp_path), "--json", str(tmp_path / "curve.json")) == 0
    (row,) = json.loads((tmp_path / "curve.json").read_text())["predictions"]
    assert (row["first"], row["last"], row["right"]) == (1, 6, 4)
    assert (tmp_path / "predictions.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_shows_that_predictions_become_better(tmp_path: Path) -> None:
    bad = [{"lab": "P3.3", "name": "bytes", "right": False, "factor": 8.0}] * 10
    good = [{"lab": "P3.3", "name": "bytes", "right": True, "factor": 1.0}] * 10
    points = outcome.curve([*bad, *good])
    assert (points[9].right, points[9].factor) == (0.0, pytest.approx(8.0))
    assert (points[19].right, points[19].factor) == (1.0, pytest.approx(1.0))
    assert points[14].right == 0.5
    picture.draw([*bad, *good, {"right": False, "factor": float("inf")}], tmp_path / "c.png")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["2.3"], "clipping sends nothing"),
        (["3.77"], "did you mean 3.7"),
        (["M99"], "they are M01 to M20"),
        (["M07", "--seed", "3"], "its numbers are fixed"),
        (["3.7", "--impl", "solutions"], "numbers are missing"),
        (["3.7", "--impl", "solutions", "--set", "keys"], "write NAME=NUMBER"),
        (["3.7", "--impl", "solutions", "--answers", "none.toml"], "none.toml can't be read"),
        (["3.7", "--impl", "solutions", "--answers", "a", "--set", "b"], "give one of them"),
        (["3.7", "--impl", "nowhere"], "nowhere"),
        (["3.7", "--json", "none/x.json"], "does not exist"),
        (["--curve"], "nothing was predicted yet"),
    ],
)
def test_bad_input_is_one_line(
    own_progress: None, capfd: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    assert run(*argv) == 2
    told = capfd.readouterr().err
    assert line in told
    assert len(told.splitlines()) == 1


def test_damaged_predictions_are_told_before_anybody_fills_in_numbers(
    own_progress: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "predictions.json").write_text("[1, 2")
    assert run("3.7", "--impl", "solutions", "--set", "keys=1", "groups=1") == 2
    assert "is damaged: move it away" in capfd.readouterr().err
    assert (tmp_path / "predictions.json").read_text() == "[1, 2"


def test_a_sheet_is_filled_in_and_never_overwritten(own_progress: None, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.toml"
    assert run("3.7", "--sheet", str(sheet)) == 0
    text = sheet.read_text()
    assert 'keys = ""' in text
    assert run("3.7", "--sheet", str(sheet)) == 2
    assert sheet.read_text() == text
    sheet.write_text(text.replace('""', '"4"'))
    assert answers.from_file(sheet, {"keys": "keys", "groups": "groups"})["groups"] == 4


def test_a_program_that_fails_is_one_line_and_nothing_is_kept(
    own_progress: None, tmp_path: Path
) -> None:
    exercise = load_course().exercise("3.7")
    source = find_source("solutions", exercise.phase).path(exercise.file)
    broken = source.read_text(encoding="utf-8").replace("texts = [", "raise KeyError(1)\n    [")
    (tmp_path / source.name).write_text(broken)
    with pytest.raises(ValueError, match=r"the run of 3.7 failed: .*KeyError") as refused:
        graded.graded(SCENES["3.7"], 0, {"keys": 1.0, "groups": 1.0}, str(tmp_path))
    assert "raise KeyError(1)" in str(refused.value)
    assert outcome.kept() == []


def test_answers_of_whole_runs_from_formulas() -> None:
    found = questions()
    assert found["M10"].answer() == pytest.approx(15 / (64 + 15))
    assert found["M11"].answer() == 63  # (p-1)/(m+p-1) <= 0.1
    assert found["M12"].answer() == 16
    assert found["M20"].answer() == pytest.approx(1 / 8)
    assert found["M17"].answer() == 101  # 8k(W-1) > 2(W-1)/W·4n, k = n/100
    assert not set(machines.TIMED_ANSWERS) - {question.by for question in found.values()}


def test_a_handout_without_questions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "questions", dict)
    with pytest.raises(ValueError, match="no questions about whole runs"):
        machines.question_named("M01")
