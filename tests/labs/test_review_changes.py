"""Changes of review labs are what they claim, are shown whole, and do not tell the verdict."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.grading.contract import AXES, contract
from distlab.grading.warm import WarmGrader
from distlab.labs.review.change import faults, hunks, numbered, unified
from distlab.labs.review.chosen import Review, all_reviews, review_called
from scripts.reviews import problem

REVIEWS = all_reviews()
DEFECTS = [review for review in REVIEWS if review.mutant is not None]
HARMLESS = [review for review in REVIEWS if review.mutant is None]


def named(review: Review) -> str:
    return review.id


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
    assert "this scaler's interval, the scale grows" in shown, "of a method that sets the same"
    assert "aminmax" not in shown, "but not its body"
    assert "binomial tree of" in numbered(hunks(*review_called("R3.01").texts())), "what it calls"


def test_what_a_method_does_not_need_is_not_shown() -> None:
    shown = numbered(hunks(*review_called("R4.01").texts()))
    assert "class CheckpointFolder" in shown
    assert len(shown.splitlines()) < 25, "one line was changed"
    shown = numbered(hunks(*review_called("R4.03").texts()))
    assert "def problem" in shown, "it is called"
    assert "def prune" not in shown
    assert "def __len__" in numbered(hunks(*review_called("R1.06").texts())), "len(self)"


def test_the_constructor_of_the_base_is_shown_with_its_body() -> None:
    shown = numbered(hunks(*review_called("R3.09").texts()))
    assert "expect_alike(state, group)" in shown
    assert "def finish" not in shown


ARGUING = {"so", "because", "since", "need", "needs", "enough", "nobody", "must", "should", "never"}


def test_descriptions_of_both_kinds_are_alike() -> None:
    """As many of each argue, and they are equally long: neither tells the verdict."""

    def arguing(reviews: list[Review]) -> float:
        words = [{*re.findall(r"[a-z]+", each.description.lower())} for each in reviews]
        return sum(bool(each & ARGUING) for each in words) / len(reviews)

    def length(reviews: list[Review]) -> float:
        return sum(len(each.description) for each in reviews) / len(reviews)

    assert abs(arguing(DEFECTS) - arguing(HARMLESS)) < 0.1
    assert 0.4 < arguing(DEFECTS) < 0.6
    assert 0.9 < length(DEFECTS) / length(HARMLESS) < 1.1


def test_changed_lines_are_as_a_formatter_leaves_them(tmp_path: Path) -> None:
    """What it would join or split tells that nobody wrote it."""
    files = {tmp_path / f"{each.id}.py": each.texts() for each in REVIEWS}
    for path, (_, after) in files.items():
        path.write_text(after, encoding="utf-8")
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    call = [sys.executable, "-m", "ruff", "format", "--quiet", "--config", config, str(tmp_path)]
    subprocess.run(call, check=True)
    for path, (before, after) in files.items():
        old, new = after.splitlines(), path.read_text(encoding="utf-8").splitlines()
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        moved = {
            k + 1
            for tag, i, i_end, _, _ in matcher.get_opcodes()
            for k in range(i, i_end)
            if tag != "equal"
        }
        made = {line.new for hunk in hunks(before, after) for line in hunk if line.sign == "+"}
        assert not moved & made, f"{path.stem}: lines {sorted(moved & {*filter(None, made)})}"


def test_lines_that_may_be_named() -> None:
    assert faults(review_called("R1.03")) == {-37, 37}, "changed"
    assert faults(review_called("R3.05")) == {213}, "added"
    assert faults(review_called("R3.09")) == {-153, 149}, "moved"
    assert faults(review_called("R1.02")) == {-97, 97}, "not the harmless part"
