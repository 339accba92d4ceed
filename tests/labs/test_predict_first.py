"""Predictions before a grading: asked where a learner sits, told after a pass, never elsewhere."""

from __future__ import annotations

import argparse
import io
from typing import Any

import pytest
from rich.console import Console

from distlab.commands import grade, predict
from distlab.course import progress
from distlab.course.catalogue import root
from distlab.grading import command
from distlab.labs.predict import first, outcome, screen

PLAIN: dict[str, Any] = {
    "impl": "templates",
    "json": None,
    "junitxml": None,
    "keyword": "",
    "sandbox": False,
    "exercises": ["3.3"],
}


@pytest.fixture
def own_progress(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress and predictions in a folder of their own."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(outcome, "kept_file", lambda: tmp_path / "predictions.json")
    monkeypatch.delenv("CI", raising=False)


def terminal(*answers: str) -> Console:
    """A terminal at which somebody types."""
    out = Console(file=io.StringIO(), force_terminal=True, width=100, no_color=True)
    typed = iter(answers)

    def read(question: str) -> str:
        out.print(question)
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    out.input = read  # type: ignore[method-assign, assignment]
    return out


def printed(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def graded_with(
    monkeypatch: pytest.MonkeyPatch, out: Console, argv: list[str], sits: bool = True
) -> list[str]:
    """For which exercises ``python test_phase3.py ARGV`` asks, and tells."""
    seen: list[str] = []

    def first_(ids: Any, _: Console) -> Any:
        seen.extend(f"ask {each}" for each in ids)
        return lambda: seen.extend(f"tell {each}" for each in ids)

    def grades(*_: Any) -> int:
        seen.append("grade")
        return 0

    monkeypatch.setattr(command, "console", lambda: out)
    monkeypatch.setattr(command, "_grade_and_print", grades)
    monkeypatch.setattr("sys.stdin", argparse.Namespace(isatty=lambda: sits))
    assert command.main(3, argv, first=first_) == 0
    return seen


def test_a_learner_is_asked_before_and_told_after(
    own_progress: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graded_with(monkeypatch, terminal(), ["3.3"]) == ["ask 3.3", "grade", "tell 3.3"]


@pytest.mark.parametrize(
    "argv",
    [
        ["3.3", "--json", "out.json"],
        ["3.3", "--junitxml", "out.xml"],
        ["3.3", "--impl", "solutions"],
        ["3.3", "-k", "ring"],
        ["3.3", "--sandbox"],
    ],
)
def test_machines_are_not_asked(
    own_progress: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, argv: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert graded_with(monkeypatch, terminal(), argv) == ["grade"]


def test_nobody_at_the_terminal_is_not_asked(
    own_progress: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert graded_with(monkeypatch, terminal(), ["3.3"], sits=False) == ["grade"]
    assert graded_with(monkeypatch, Console(file=io.StringIO()), ["3.3"]) == ["grade"]
    monkeypatch.setenv("CI", "true")
    assert graded_with(monkeypatch, terminal(), ["3.3"]) == ["grade"]


def test_the_switch_is_remembered(own_progress: None) -> None:
    out = terminal("")
    assert grade._predicted(["3.7"], out) is None
    assert printed(out) == ""
    for word, on in (("on", True), ("off", False)):
        options = argparse.Namespace(always=word, json=None)
        assert predict.main(options, out) == 0
        assert progress.predicts_first() is on
    progress.choose_predicts_first(True)
    assert grade._predicted(["3.7"], out) is not None
    assert "P3.7 Who shares a node" in printed(out)


def test_enter_leaves_it_out_and_a_prediction_waits_for_the_pass(own_progress: None) -> None:
    first.ask_first(["3.7"], terminal(""))
    assert progress.waiting_predictions() == {}
    out = terminal("many", "12", "7")
    after = first.ask_first(["3.7", "2.3"], out)  # nothing can be predicted for 2.3
    assert "'many' is no number" in printed(out)
    waiting = progress.waiting_predictions()["3.7"]
    assert waiting["numbers"] == {"keys": 12.0, "groups": 7.0}
    again = terminal()
    after()
    first.ask_first(["3.7"], again)()  # given once, and the exercise does not pass yet
    assert printed(again) == ""
    assert progress.waiting_predictions() == {"3.7": waiting}


def test_a_pass_brings_the_outcome(own_progress: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def graded(scene: Any, seed: int, given: Any, impl: str) -> list[outcome.Outcome]:
        assert (scene.exercise, impl) == ("3.7", "templates")
        fields = {"lab": "P3.7", "asks": "", "unit": "keys", "formula": "W", "why": "counted"}
        return [outcome.Outcome(name="keys", predicted=12.0, value=12.0, tolerance=0.0, **fields)]

    monkeypatch.setattr(first, "graded", graded)
    out = terminal("12", "7")
    after = first.ask_first(["3.7"], out)
    progress.update("3.7", verdict="pass")
    after()
    assert "1 of 1 points" in printed(out)
    assert progress.waiting_predictions() == {}
    assert progress.labs()["P3.7"] == {"points": 1, "most": 1}
    assert len(outcome.kept()) == 1
    first.ask_first(["3.7"], terminal())  # predicted already: it does not ask


def test_input_that_ends_is_one_line(own_progress: None) -> None:
    with pytest.raises(ValueError, match="input ended"):
        screen.prompt("messages", "messages", terminal())


def test_test_phase_files_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners' commands ask; what else grades does not come this way."""
    given = {}
    monkeypatch.setattr(grade, "grade", lambda *args, **more: given.update(more) or 0)
    assert grade.main(2, ["2.3"]) == 0
    assert given == {"first": grade._predicted}
    for phase in range(1, 5):
        text = (root() / f"test_phase{phase}.py").read_text(encoding="utf-8")
        assert "from distlab.commands.grade import main" in text
