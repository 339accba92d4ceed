"""Labs of tests: the course's own checks earn all, naive ones little, nothing earns nothing."""

from __future__ import annotations

import argparse
import io
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)
from rich.console import Console

from distlab.course import progress
from distlab.course.catalogue import check_files, load_course
from distlab.grading.contract import AXES
from distlab.grading.wrong import all_mutants
from distlab.host.toml import tomllib
from distlab.labs import frame
from distlab.labs.written import command as written
from distlab.labs.written.jury import alternatives, jury
from scripts import lab_tests_measured as measured

SAMPLE = "4.18"  # the quickest of the labs
SEED = 3
MEASURED = tomllib.loads(measured.PATH.read_text(encoding="utf-8"))
LABS = written.chosen()


# -- the data --------------------------------------------------------------------------------------
def test_labs_of_all_phases() -> None:
    assert len(LABS) >= 12
    assert {exercise_id[0] for exercise_id in LABS} == {"1", "2", "3", "4"}


@pytest.mark.parametrize("exercise_id", LABS)
def test_every_wrong_implementation_is_in(exercise_id: str) -> None:
    there = [m.id for m in all_mutants() if m.exercise == exercise_id and not m.tier]
    assert [wrong.mutant.id for wrong in LABS[exercise_id]] == there


def test_data_that_are_not_in_order_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "phase1.toml"
    monkeypatch.setattr(frame, "data_files", lambda kind: [path])
    for entry in (
        'no-such = { axis = "cost", checks = 1 }',
        'all-reduce-half = { axis = "x", checks = 1 }',
        'all-reduce-half = { axis = "cost", checks = 0 }',
    ):
        path.write_text(f'["3.3"]\n{entry}\n')
        with pytest.raises(ValueError, match=r"phase1.toml: 3.3, .* is not in order"):
            written.chosen()


def test_few_checks_weigh_more() -> None:
    one, many = (written.Wrong(all_mutants()[0], "cost", checks) for checks in (1, 4))
    outcome = written.Outcome(killed=[(one, "test_a")], missed=[many])
    assert outcome.share == pytest.approx(0.8)
    assert written.Outcome(refused="why", killed=[(one, "test_a")]).share == 0


# -- what tests earn -------------------------------------------------------------------------------
@pytest.mark.parametrize("exercise_id", LABS)
def test_the_measured_shares_are_up_to_date(exercise_id: str) -> None:
    exercise = load_course().exercise(exercise_id)
    again = f"run: python -m scripts.lab_tests {exercise_id}"
    assert exercise_id in MEASURED, again
    assert MEASURED[exercise_id]["digest"] == measured.digest(exercise, LABS[exercise_id]), again


def test_naive_tests_earn_little_and_the_courses_own_all() -> None:
    assert {*MEASURED} == {*LABS}
    assert statistics.median(row["naive"] for row in MEASURED.values()) < 0.4
    assert {(row["own"], row["empty"]) for row in MEASURED.values()} == {(1.0, 0.0)}
    assert max(row["seconds"] for row in MEASURED.values()) <= 60


def test_a_naive_test_earns_what_was_measured() -> None:
    exercise = load_course().exercise(SAMPLE)
    assert (
        measured.share(exercise, measured.naive(exercise), LABS[SAMPLE], SEED)
        == (MEASURED[SAMPLE]["naive"])
    )


def test_the_courses_own_checks_earn_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "RUNS", 1)
    exercise = load_course().exercise(SAMPLE)
    with jury(exercise, check_files(exercise), course_own=True) as by:
        outcome = written.grade(by, LABS[SAMPLE], SEED)
    assert not outcome.refused
    assert [wrong.mutant.id for wrong in outcome.missed] == []
    assert written.parts_of(outcome, 15)[0].points == 15


# -- as a learner calls it -------------------------------------------------------------------------
Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """``call(text)`` grades a file of tests of 4.18 with two wrong implementations."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(written, "RUNS", 2)
    few = {"4.18": LABS["4.18"][:2]}
    monkeypatch.setattr(written, "chosen", lambda: few)
    monkeypatch.setattr(written, "alternatives", lambda exercise: [])
    monkeypatch.setattr(written, "survivors", lambda exercise: [])
    file = tmp_path / "tests_for_4_18.py"

    def once(text: str | None, *more: str) -> tuple[int, str]:
        if text is not None:
            file.write_text(text, encoding="utf-8")
        parser, shown = argparse.ArgumentParser(), io.StringIO()
        written.add_arguments(parser)
        options = parser.parse_args(["4.18", "--file", str(file), "--seed", str(SEED), *more])
        status = written.main(options, Console(file=shown, width=1000))
        return status, shown.getvalue()

    return once


BODY = """
def test_it(impl, run, seed, cases):
    def body(ctx):
        sampler = impl.ElasticSampler(8, global_batch_size=4, rank=ctx.rank, world_size=2)
        {inside}
        return [*sampler]
    first, second = run(body, 2)
    {outside}
"""


def test_a_file_to_begin_with_tests_nothing_yet(call: Call) -> None:
    status, shown = call(None)
    assert (status, shown.count("\n")) == (1, 1)
    assert "is there to begin with" in shown
    status, shown = call(None)
    assert status == 1
    assert "0 of 2 killed" in shown
    assert "0 of 15 points" in shown


def test_missed_ones_are_told_by_axis_and_after_a_hint_by_cause(call: Call) -> None:
    text = BODY.format(inside="", outside="assert len(first) == 2")
    missed = LABS["4.18"][:2]
    _, shown = call(text)
    assert all(axis in shown for axis in {wrong.axis for wrong in missed})
    assert not any(wrong.mutant.mistake in shown for wrong in missed)
    _, shown = call(text, "--hint")
    assert all(wrong.mutant.mistake in shown for wrong in missed)
    assert not any(wrong.mutant.becomes in shown for wrong in missed)


REFUSED = {
    "no Python": ("def", "tests_for_4_18.py:1: no valid Python"),
    "no tests": ("x = 1\n", "tests nothing: it has no function test_"),
    "no impl": ("def test_it(run):\n    pass\n", "no test takes the fixture impl"),
    "an import that fails": (
        "import no_such\n" + BODY.format(inside="", outside=""),
        "can't be imported: .*no_such",
    ),
    "solutions imported": (
        "from solutions.phase4_production import elastic_sampler\n"
        + BODY.format(inside="", outside=""),
        r"tests_for_4_18.py:1: it imports solutions\S* where the answers are",
    ),
    "wrong implementations imported": (
        "from distlab.grading.wrong import all_mutants\n" + BODY.format(inside="", outside=""),
        "it imports distlab.grading.wrong",
    ),
    "another exercise's": (
        "from distlab.grading import exercise\n@exercise('4.4', 'virtual')"
        + BODY.format(inside="", outside=""),
        "tests nothing of 4.18: none is for this exercise",
    ),
}


@pytest.mark.parametrize(("text", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_used_is_one_clear_line(call: Call, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as raised:
        call(text)
    assert "\n" not in str(raised.value)


def test_a_check_of_the_course_is_no_test_of_ones_own(call: Call) -> None:
    own = check_files(load_course().exercise("4.18"))[0].read_text(encoding="utf-8")
    own = own.replace("from tests.", "from somewhere.")
    with pytest.raises(ValueError, match=r"test_\w+ is a check of the course: write your own"):
        call(own)


EARN_NOTHING = {
    "prints endlessly": ("", "while True: print('x' * 9999)", "prints more than 1,000,000"),
    "opens the solution": (
        "",
        f"open({str(load_course().exercise('4.18').solution_path)!r})",
        "where the answers are",
    ),
    "opens the file under test": (
        "import sys; open(sys.modules[sampler.__class__.__module__].__file__)",
        "",
        "where the answers are",
    ),
    "looks at the source": (
        "import inspect; inspect.getsource(sampler.__class__)",
        "",
        "where the answers are",
    ),
    "imports the solution by its name": (
        "",
        "__import__('importlib').import_module('solutions.phase4_production.elastic_sampler')",
        "where the answers are",
    ),
    "asks git": ("", "__import__('os').system('git show HEAD')", "starts another program"),
    "asks for the solution": (
        "impl.solution(4, 'elastic_sampler')",
        "",
        "where the answers are",
    ),
    "refuses the solution": ("", "assert False", "refuses the course's solution"),
    "depends on the seed": ("", f"assert seed == {SEED}", "depends on timing or on the seed"),
}


@pytest.mark.parametrize(("inside", "outside", "told"), EARN_NOTHING.values(), ids=EARN_NOTHING)
def test_what_earns_nothing_and_why(call: Call, inside: str, outside: str, told: str) -> None:
    status, shown = call(BODY.format(inside=inside, outside=outside))
    assert status == 1
    assert told in shown
    assert "0 of 15 points" in shown


def test_what_hangs_is_ended(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.labs.written.jury.LIMIT", 3)
    status, shown = call(BODY.format(inside="", outside="while True: pass"))
    assert status == 1
    assert "it hangs or ends its own process" in shown
    with pytest.raises(ValueError, match="can't be imported: it hangs"):
        call("while True: pass\n" + BODY.format(inside="", outside=""))


def test_who_asks_for_more_than_the_contract_is_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rank takes which sample of a batch is free."""
    monkeypatch.setattr(written, "alternatives", alternatives)
    order = (
        "__import__('torch').randperm(8, generator=__import__('torch').Generator().manual_seed(0))"
    )
    _, shown = call(BODY.format(inside="", outside=f"assert first[0] == {order}.tolist()[:4:2]"))
    assert "refuses a right implementation that is written differently" in shown


def test_axes_are_told_in_words() -> None:
    assert {*written.SHOWN_AXES} == {*AXES, written.VALUES}
