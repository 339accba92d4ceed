"""Review labs: changes are what they claim to be, shown whole, and graded without a free lunch."""

from __future__ import annotations

import json
import re
import subprocess
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distlab.course import progress
from distlab.grading.contract import AXES, contract
from distlab.grading.warm import WarmGrader
from distlab.host.terminal import console
from distlab.labs import frame
from distlab.labs.review import command
from distlab.labs.review.answer import Answer, answer_of, asked, graded
from distlab.labs.review.change import faults, hunks, numbered, unified
from distlab.labs.review.chosen import Review, all_reviews, review_called
from scripts.reviews import problem

REVIEWS = all_reviews()
DEFECTS = [review for review in REVIEWS if review.mutant is not None]
HARMLESS = [review for review in REVIEWS if review.mutant is None]


def named(review: Review) -> str:
    return review.id


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


def test_enough_of_them_and_half_are_harmless() -> None:
    assert len(REVIEWS) >= 30
    assert abs(len(DEFECTS) - len(HARMLESS)) <= 2
    for phase in range(1, 5):
        mine = [review for review in REVIEWS if review.about.phase.number == phase]
        kinds = Counter(review.mutant is None for review in mine)
        assert min(kinds[True], kinds[False]) >= 4, f"phase {phase}"
    assert len({*map(named, REVIEWS)}) == len(REVIEWS)
    for level in (1, 2, 3):
        kinds = Counter(review.mutant is None for review in REVIEWS if review.level == level)
        assert min(kinds[True], kinds[False]) >= 3, f"level {level} tells the verdict"


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


@pytest.mark.parametrize("lab_id", ["R1.03", "R1.04", "R1.07"])
def test_a_change_is_what_it_claims_to_be(lab_id: str, grader: WarmGrader) -> None:
    """Some of phase 1; ``python -m scripts.reviews`` grades all."""
    assert problem(review_called(lab_id), grader.grade, once=True) == ""


@pytest.mark.parametrize("review", DEFECTS, ids=named)
def test_a_defect_is_shown_and_lies_on_its_axis(review: Review) -> None:
    changed = [line for hunk in hunks(*review.texts()) for line in hunk if line.sign != " "]
    numbers = {line.new or -(line.old or 0) for line in changed}
    assert faults(review) & numbers, "the line of the defect is in the diff"
    assert review.mutant is not None
    assert review.mutant.exercise == review.exercise
    told = {
        key
        for key, checks in contract(review.about).asserted.items()
        if review.mutant.caught_by in checks
    }
    assert review.axes, "it has an axis"
    assert review.axes[0] in told, "the check that fails asserts the first axis"
    assert {*review.axes} <= {*AXES}


@pytest.mark.parametrize("review", HARMLESS, ids=named)
def test_a_harmless_change_has_no_axis(review: Review) -> None:
    assert review.axes == ()
    assert faults(review) == set()
    assert review.parts


@pytest.mark.parametrize("review", REVIEWS, ids=named)
def test_descriptions_do_not_name_the_cause(review: Review) -> None:
    text = f"{review.title} {review.description}".lower()
    words = {*re.findall(r"[a-z]+", re.sub(r"`.*?`", "", text))}
    assert not words & {"bug", "defect", "mutant", "wrong", "harmless", *review.axes}
    assert review.why not in text
    if review.mutant is not None:
        assert review.mutant.mistake.lower() not in text
        for cause in review.mutant.causes:
            assert not {*cause.split("-")} <= words


@pytest.mark.parametrize("review", REVIEWS, ids=named)
def test_the_patch_makes_the_file_and_names_no_exercise(review: Review, tmp_path: Path) -> None:
    before, after = review.texts()
    found = hunks(before, after)
    assert not re.search(r"# Step|# --- exercise", numbered(found))
    name = review.about.solution_path.name
    (tmp_path / name).write_text(before, encoding="utf-8")
    patch = tmp_path / "change.diff"
    patch.write_text(unified(found, name), encoding="utf-8")
    done = subprocess.run(
        ["git", "apply", "--unsafe-paths", patch.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name).read_text(encoding="utf-8") == after


def test_a_function_is_shown_with_its_contract() -> None:
    shown = numbered(hunks(*review_called("R2.06").texts()))
    assert "class LossScaler" in shown
    assert "growth_interval`` steps in" in shown, "the docstring of the class"
    assert "End the step: adapt the scale" in shown, "the docstring of the method"
    assert "this scaler's interval, the scale grows" in shown, "what other methods promise"
    assert "aminmax" not in shown, "but not how"
    assert "binomial tree of" in numbered(hunks(*review_called("R3.01").texts())), "what it calls"


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


def test_lines_that_may_be_named() -> None:
    assert faults(review_called("R1.03")) == {-37, 37}, "changed"
    assert faults(review_called("R3.05")) == {213}, "added"
    assert faults(review_called("R3.09")) == {-153, 149}, "moved"
    assert faults(review_called("R1.02")) == {-97, 97}, "not the harmless part"


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


def test_an_answer_in_a_file(learner: Path) -> None:
    command.main(asked_for("R1.04 --spoil"), console())
    folder = learner / "my_labs" / "R1.04"
    with pytest.raises(ValueError, match="verdict must be"):
        command.main(asked_for(f"--grade {folder} --spoil"), console())
    (folder / "answer.toml").write_text('verdict = "approve"\n')
    command.main(asked_for("R1.04 --spoil"), console())
    assert "approve" in (folder / "answer.toml").read_text(), "an answer is never overwritten"
    assert command.main(asked_for(f"--grade {folder} --spoil"), console()) == 0


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: answer_of({"verdict": "maybe"}, "answer.toml"), "answer.toml: verdict must be"),
    (lambda: answer_of({"verdict": "refuse"}, "x"), "line must be a number"),
    (lambda: answer_of({"verdict": "refuse", "line": "9"}, "x"), "line must be a number"),
    (lambda: answer_of({"verdict": "refuse", "line": 9, "axis": "dtypes"}, "x"), "axis must be"),
    (lambda: answer_of({"verdict": "approve", "axes": 1}, "x"), "no field 'axes'"),
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


def test_input_that_ends_grades_nothing() -> None:
    def ends(question: str) -> str:
        raise EOFError

    with pytest.raises(ValueError, match="nothing is graded"):
        asked(ends)
