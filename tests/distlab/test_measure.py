"""``distlab measure``: the numbers of a run with known times, what is kept, what is refused."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from distlab import cli
from distlab.commands import measure
from distlab.course.catalogue import load_course
from distlab.picture import Span
from distlab.picture.measured import QUANTITIES
from tests.distlab.pretend_driver import text_of

FOUND = {
    "says": "the run takes {} ms",
    "values": [1.0, 2.5, 1234.5],
    "scenario": "Three steps",
    "impl": "templates",
    "ranks": 4,
    "cores": 2,
    "date": "2026-01-31",
}


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / ".distlab" / "measured.json"
    monkeypatch.setattr(measure, "kept_file", lambda: path)
    return path


def test_numbers_of_a_known_run() -> None:
    """Rank 0 computes for 6 ms and communicates from 4 to 8; rank 1 waits for 5 of 10 ms."""
    spans = [
        Span(0, "compute", "forward", 0.000, 0.006),
        Span(0, "communication", "send", 0.004, 0.008),
        Span(1, "communication", "wait", 0.000, 0.005),
        Span(1, "communication", "recv", 0.005, 0.010),
    ]
    found = {name: quantity.of(spans) for name, quantity in QUANTITIES.items()}
    assert found["time"] == pytest.approx(10)
    assert found["hidden"] == pytest.approx(100 * 2 / (4 + 10))
    assert found["waiting"] == pytest.approx(25)
    assert found["bubble"] == pytest.approx(10)
    labelled = [Span(0, "compute", "forward", 0, 1, label="0"), Span(0, "compute", "x", 1, 9)]
    assert QUANTITIES["bubble"].of(labelled) == pytest.approx(0)


def test_every_exercise_has_a_number_to_measure() -> None:
    """Also where one scenario serves several exercises, each by its own number."""
    for exercise in load_course().exercises:
        scenario = measure.scenario_of(exercise)
        assert scenario.trace_of[exercise.id] in QUANTITIES
        assert (scenario.__doc__ or "").strip(), exercise.id
    strategies = measure.scenario_of(load_course().exercise("1.8"))
    assert strategies.trace_of == {"1.7": "time", "1.8": "waiting"}


def test_a_run_is_measured_kept_and_listed(kept_in: Path) -> None:
    measure.keep("2.1", FOUND)
    options = argparse.Namespace(exercise="1.4", impl="solutions", starts=1)
    status, text = text_of(measure.main, options)
    data = json.loads(kept_in.read_text())
    assert status == 0
    assert data["2.1"] == FOUND
    assert data["1.4"]["values"][0] > 0
    assert "the run takes " in text
    assert "4 ranks on" in text
    status, text = text_of(measure.main, argparse.Namespace(exercise=None))
    assert status == 0
    assert "2.50 ms (1 to 1234 in 3 starts)" in text.replace("2.5 ms", "2.50 ms")
    assert text.index("1.4 ") < text.index("2.1 ")


@pytest.mark.usefixtures("kept_in")
def test_what_can_not_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each; a damaged file is left as it is."""
    assert cli.main(["measure"]) == 1
    assert capsys.readouterr().err == "distlab: nothing was measured yet: distlab measure 1.4\n"
    assert cli.main(["measure", "1.4", "--starts", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    exercise = load_course().exercise("1.4")
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(exercise.template_path, folder / "trainer.py")
    blank = 'raise NotImplementedError("exercise 1.4")'
    (folder / "trainer.py").write_text(f"def average_gradients():\n    {blank}\n")
    assert cli.main(["measure", "1.4", "--impl", str(folder)]) == 2
    assert "exercise 1.4 is blank in" in capsys.readouterr().err
    measure.kept_file().parent.mkdir(exist_ok=True)
    measure.kept_file().write_text('{"1.4": {"values": []}}')
    assert cli.main(["measure"]) == 2
    assert "is damaged: delete it, and measure again" in capsys.readouterr().err
    assert measure.kept_file().read_text() == '{"1.4": {"values": []}}'
