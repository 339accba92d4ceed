"""Review labs: what is shown, asked and told, and graded without a free lunch."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.course import progress
from distlab.grading.contract import AXES
from distlab.host.terminal import console
from distlab.labs import frame
from distlab.labs.review import command
from distlab.labs.review.answer import RULES, Answer, answer_of, asked, graded, number_in
from distlab.labs.review.change import faults
from distlab.labs.review.chosen import Review, all_reviews, review_called

REVIEWS = all_reviews()


@pytest.fixture
def learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner who has no points yet, in an empty folder."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked_for(line: str) -> Namespace:
    parser = ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(line.split())


def test_the_file_hides_what_is_not_done(learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.3 is in the file of 3.1, and its lines keep their numbers."""
    monkeypatch.setattr(command, "may_see", lambda exercise: exercise != "3.3")
    monkeypatch.setattr(command, "need_release", lambda *_: None)
    command.main(asked_for("R3.04"), console())
    text = (learner / "my_labs" / "R3.04" / "ring_allreduce.py").read_text()
    assert "new_empty(len(chunks[0]))" in text
    assert "def agree" in text
    assert "distance" not in text.partition("def agree")[2].partition('"""\n')[2]
    assert len(text.splitlines()) == len(review_called("R3.04").texts()[1].splitlines())


def points(review: Review, answer: Answer) -> float:
    parts = graded(review, answer)
    assert sum(part.most for part in parts) == review.points, "the most does not tell the kind"
    return sum(part.points for part in parts) / review.points


def test_what_an_answer_earns() -> None:
    harmless, defect = review_called("R1.04"), review_called("R1.03")
    (line, *_) = sorted(faults(defect), reverse=True)
    assert points(harmless, Answer(True)) == 1
    assert points(harmless, Answer(False, 3, "cost")) == -0.5
    assert points(defect, Answer(True)) == -1
    assert points(defect, Answer(False, line, "dtype")) == pytest.approx(1)
    assert points(defect, Answer(False, line, "cost")) == pytest.approx(0.8)
    assert points(defect, Answer(False, line + 9, "dtype")) == pytest.approx(0.7)


@pytest.mark.parametrize("lab_id", ["R1.03", "R1.04"])
@pytest.mark.parametrize("line", [9999, -9999])
def test_a_line_that_is_not_there_grades_nothing(lab_id: str, line: int, learner: Path) -> None:
    """Whether the change is harmless or not: the refusal does not tell."""
    call = asked_for(f"{lab_id} --spoil --verdict refuse --line {line} --axis cost")
    with pytest.raises(ValueError, match=rf"^there is no line {line}: .*; nothing is graded$"):
        command.main(call, console())
    assert lab_id not in frame.results(), "the answer is still free"


def test_every_axis_that_is_right_is_explained() -> None:
    review = review_called("R4.03")
    line = max(faults(review))
    told = graded(review, Answer(False, line, "dtype"))[-1].text
    assert all(f"{axis} ({AXES[axis]})" in told for axis in (*review.axes, "dtype"))
    assert "You said" not in graded(review, Answer(False, line, "resources"))[-1].text
    for axis in review_called("R2.05").axes:
        assert points(review_called("R2.05"), Answer(False, 72, axis)) == pytest.approx(1)


def test_the_rules_are_told_before_the_answer(learner: Path) -> None:
    command.main(asked_for("R1.03 --spoil"), console())
    folder = learner / "my_labs" / "R1.03"
    parser = ArgumentParser()
    command.add_arguments(parser)
    helped = " ".join(parser.format_help().split())
    for rule in RULES:
        assert rule in helped
        assert rule in (folder / "review.md").read_text()
        assert f"# {rule}" in (folder / "answer.toml").read_text()
    assert re.findall(r"\d+%", " ".join(RULES)) == ["50%", "30%", "20%", "50%", "100%"]


@pytest.mark.parametrize("always", [Answer(True), Answer(False, 1, "alone")])
def test_one_answer_to_all_earns_nothing(always: Answer) -> None:
    assert sum(points(review, always) * review.points for review in REVIEWS) < 80
    share = sum(points(review, always) for review in REVIEWS) / len(REVIEWS)
    assert share < 0.1


def test_a_seed_deals_the_same_and_others_other_ones(learner: Path) -> None:
    def dealt(line: str) -> Review:
        return command._chosen(asked_for(f"{line} --spoil"), asked_for(line).seed)

    assert dealt("--seed 5") == dealt("--seed 5")
    several = {dealt(f"--seed {seed}").id for seed in range(12)}
    assert len(several) > 3
    assert {review_called(each).level for each in several} == {1}
    assert dealt("3.25 --level 2 --seed 1").exercise == "3.25"
    assert dealt("--phase 4 --seed 1").about.phase.number == 4


def test_all_that_fit_are_answered(learner: Path) -> None:
    for review in REVIEWS:
        if review.exercise == "1.4":
            progress.update_lab(review.id, points=0, most=review.points)
    with pytest.raises(ValueError, match=r"answered all reviews of exercise 1\.4 that"):
        command.main(asked_for("1.4 --spoil"), console())


def test_show_answer_and_first_answer_counts(
    learner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = console()
    assert command.main(asked_for("R1.03 --spoil"), out) == 0
    said = capsys.readouterr().out
    assert "global_metrics: half the bytes" in said
    assert "dtype=torch.float32, device=device)" in said
    folder = learner / "my_labs" / "R1.03"
    assert {path.name for path in folder.iterdir()} >= {"review.md", "change.diff", "answer.toml"}
    line = max(faults(review_called("R1.03")))
    right = f"R1.03 --spoil --verdict refuse --line {line} --axis dtype --json {learner / 'x.json'}"
    assert command.main(asked_for(right), out) == 0
    data = json.loads((learner / "x.json").read_text())
    assert (data["lab"], data["points"], data["kind"]) == ("R1.03", 10, "review")
    assert data["answer"] == {"approve": False, "line": line, "axis": "dtype"}
    with pytest.raises(ValueError, match="first answer counts"):
        command.main(asked_for(right), out)
    assert command.main(asked_for("R1.04 --spoil --verdict refuse --line 9 --axis cost"), out) == 1
    assert "false alarm" in capsys.readouterr().out
    assert frame.results()["R1.04"]["points"] == -5
    command.main(asked_for("--list"), out)
    assert re.search(r"R1\.04 +1 +1 +-5/10", capsys.readouterr().out)


def test_an_answer_in_a_file(learner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The printed commands work as they are; who has the folder has seen the change."""
    command.main(asked_for("R1.04 --spoil"), console())
    said = capsys.readouterr().out
    assert "distlab lab review R1.04 --spoil --verdict approve\n" in said
    assert "distlab lab review R1.04 --spoil --verdict refuse --line … --axis …\n" in said
    assert "distlab lab review --grade my_labs/R1.04\n" in said
    folder = learner / "my_labs" / "R1.04"
    with pytest.raises(ValueError, match="verdict must be"):
        command.main(asked_for(f"--grade {folder}"), console())
    (folder / "answer.toml").write_text('verdict = "approve"\n')
    command.main(asked_for("R1.04 --spoil"), console())
    assert "approve" in (folder / "answer.toml").read_text(), "an answer is never overwritten"
    assert command.main(asked_for(f"--grade {folder}"), console()) == 0


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: answer_of({"verdict": "maybe"}, "answer.toml"), "answer.toml: verdict must be"),
    (lambda: answer_of({"verdict": "refuse"}, "x"), "line must be a number"),
    (lambda: answer_of({"verdict": "refuse", "line": "9"}, "x"), "line must be a number"),
    (lambda: answer_of({"verdict": "refuse", "line": 9, "axis": "dtypes"}, "x"), "axis must be"),
    (lambda: answer_of({"verdict": "approve", "axes": 1}, "x"), "no field 'axes'"),
    (lambda: answer_of({"verdict": "approve", "line": 9}, "x"), "takes no line and no axis"),
    (lambda: answer_of({"verdict": "approve", "axis": "cost"}, "x"), "takes no line and no axis"),
    (
        lambda: command.main(
            asked_for("R1.04 --spoil --verdict refuse --line foo --axis cost"), console()
        ),
        "line must be a number of the right column",
    ),
    (
        lambda: command.main(asked_for("1.3 --level 2"), console()),
        "no reviews of exercise 1.3, lev",
    ),
    (lambda: review_called("R9.99"), "no review R9.99"),
    (lambda: command.main(asked_for("R1.04"), console()), "not written yet"),
    (lambda: command.main(asked_for("--spoil --axis cost"), console()), "needs its review"),
    (
        lambda: command.main(asked_for("R1.04 --spoil --verdict approve --json no/x"), console()),
        "no folder no",
    ),
    (lambda: command.main(asked_for("--grade nowhere"), console()), "can't be read"),
    (lambda: command.main(asked_for("9.9"), console()), "9.9"),
]


@pytest.mark.parametrize(("call", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input_is_one_line(call: Callable[[], object], text: str, learner: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_questions_in_a_terminal() -> None:
    told = iter(["refuse", "-38", "cost"])
    assert asked(lambda question: next(told)) == Answer(False, -38, "cost")
    assert asked(lambda question: "approve") == Answer(True)
    with pytest.raises(ValueError, match="verdict must be"):
        asked(lambda question: "")
    told = iter(["refuse", "--38", "cost"])
    with pytest.raises(ValueError, match="line must be"):
        asked(lambda question: next(told))


def test_numbers_that_are_typed() -> None:
    assert [number_in(text) for text in ("9", "-38", "+9", "1e3", "")] == [9, -38, "+9", "1e3", ""]


def test_input_that_ends_grades_nothing() -> None:
    def ends(question: str) -> str:
        raise EOFError

    with pytest.raises(ValueError, match="nothing is graded"):
        asked(ends)
