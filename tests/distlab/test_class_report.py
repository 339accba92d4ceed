"""The report on a class: its numbers and its words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from distlab.classes.misconceptions import misconceptions, recurring
from distlab.classes.outcomes import load_results
from distlab.course.catalogue import load_course
from distlab.explain import mistakes
from distlab.explain.causes import OF_RULES, OF_RUNS, what_they_do
from distlab.grading.wrong import Mutant
from tests.distlab.made_results import entry, failed, made_results, passed, text_of, told

FROZEN = ("frozen-moved", "test_frozen", "Parameters without a gradient are left alone")


def a_class() -> dict[str, list[dict[str, object]]]:
    """Ten students: in 1.3 all pass; in 1.4 four take the plain mean, two move frozen ones, one
    hangs, one is blank, two pass."""
    weights = [failed("1.4", "unweighted-mean", f"test_{i}", f"Mean {i}") for i in (1, 2, 1, 1)]
    rest = [failed("1.4", *FROZEN), failed("1.4", *FROZEN)]
    rest += [failed("1.4", "hang", verdict="hang"), entry("1.4", "blank"), *[passed("1.4")] * 2]
    return {f"student-{i:02}": [passed("1.3"), e] for i, e in enumerate([*weights, *rest])}


def test_numbers_of_a_class_of_ten(tmp_path: Path) -> None:
    page = told(made_results(tmp_path / "r", a_class(), name="Autumn"))
    text = text_of(page)
    assert "Class report: Autumn" in text
    assert (
        "10 submissions 10 graded 13 mean, of 25 points 10 median 10 to 10 the middle half" in text
    )
    assert "2 with all points 0 with no point 0 late" in text
    row = re.search(r"<tr><td>1\.4 Gradient averaging.*?</tr>", page, re.S)
    assert row is not None
    cells = re.findall(r'<td class="n[^"]*">([^<]*)</td>', row[0])
    assert cells == ["15", "2", "6", "1", "1"]  # points; pass, fail, blank, hang
    assert 'aria-label="2 pass, 6 fail, 1 blank, 1 hang"' in row[0]
    assert 'aria-label="students: 40–50: 8, 90–100: 2"' in page
    assert "virtual 30 10 0" in text


def test_misconceptions_are_sentences_by_number(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", a_class())))
    unequal = "4 of 10 take the plain mean over ranks that hold unequal numbers of samples"
    assert f"1. {unequal} 1.4 Gradient averaging, 15 points checks Mean 1; Mean 2" in text
    assert "2. 2 of 10 break this promise: Parameters without a gradient are left alone" in text
    assert "1 of 10 is among those who have ranks that wait for each other for ever" in text
    assert "phase1_data_parallel/guidelines.md, section 1.4" in text
    assert "Pitfalls. Frozen parameters are communicated." in text


def test_weight_counts_students_points_and_what_builds_on_it(tmp_path: Path) -> None:
    """1.5 builds on 1.4 in this class, so the one who fails 1.4 comes before two who fail 1.5."""
    class_ = {f"s{i}": [passed("1.4"), failed("1.5", "only-own")] for i in range(3)}
    class_ |= {f"t{i}": [failed("1.4", "summed"), passed("1.5")] for i in range(2)}
    found = misconceptions(load_results(made_results(tmp_path / "r", class_)).graded, load_course())
    assert [(m.exercise, m.count, m.weight, m.builds_on_it) for m in found] == [
        ("1.4", 2, 2 * 15 * 2, ("1.5",)),
        ("1.5", 3, 3 * 15, ()),
    ]


def test_points_are_those_of_the_class(tmp_path: Path) -> None:
    class_ = {f"s{i}": [failed("1.4", "summed")] for i in range(2)}
    results = load_results(made_results(tmp_path / "r", class_, points={"1.4": 40}))
    assert [m.weight for m in misconceptions(results.graded, load_course())] == [2 * 40]


def test_a_student_counts_once_and_others_are_told_beside(tmp_path: Path) -> None:
    both = entry(
        "1.4",
        "fail",
        [
            {"name": "test_a[virtual]", "verdict": "fail", "title": "A", "cause": "summed"},
            {"name": "test_frozen", "verdict": "fail", "title": "F", "cause": "frozen-moved"},
        ],
    )
    class_ = {"s1": [both], "s2": [failed("1.4", *FROZEN)], "s3": [failed("1.4", *FROZEN)]}
    found = misconceptions(load_results(made_results(tmp_path / "r", class_)).graded, load_course())
    assert [(m.cause, m.count, m.beside) for m in found] == [
        ("frozen-moved", 2, 1),
        ("summed", 1, 0),
    ]


def test_a_cause_in_several_exercises_is_told_once_more(tmp_path: Path) -> None:
    class_ = {
        "s1": [failed("1.4", "summed"), failed("1.6", "summed")],
        "s2": [failed("1.6", "summed"), failed("1.3", "hang", verdict="hang")],
        "s3": [passed("1.6"), failed("1.4", "hang", verdict="hang")],
    }
    results = load_results(made_results(tmp_path / "r", class_))
    found = misconceptions(results.graded, load_course())
    assert recurring(found) == [("summed", 2, ["1.4", "1.6"])]


def test_known_mistakes_are_named(tmp_path: Path) -> None:
    fields = {"exercise": "1.4", "text": "a", "becomes": "b", "told_as": ("frozen-moved", "x")}
    known = Mutant(id="a", mistake="it moves them", caught_by="test_frozen", **fields)
    other = Mutant(id="b", mistake="another check sees it", caught_by="test_other", **fields)
    tier = Mutant(id="c", mistake="of NCCL", caught_by="test_frozen", tier="nccl", **fields)
    text = text_of(told(made_results(tmp_path / "r", a_class()), mutants=(known, other, tier)))
    assert "known mistake it moves them" in text
    assert "another check sees it" not in text
    assert "of NCCL" not in text


def test_every_cause_of_a_rule_has_a_sentence() -> None:
    tree = ast.parse(Path(mistakes.__file__).read_text(encoding="utf-8"))
    causes = {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "Diagnosis"
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(causes) > 10
    assert causes <= {*OF_RULES}
    assert not {*OF_RULES} & {*OF_RUNS}
    assert what_they_do("no such cause") == ""


def test_an_empty_class(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", {})))
    assert "No submission could be graded" in text


def test_a_class_of_one(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", {"solo": [failed("1.4", "summed")]})))
    assert "1 submission 1 graded 0 mean, of 15 points" in text
    assert "No two students made the same mistake" in text
    assert "1 of 1 is among those who do not divide" in text


def test_all_pass(tmp_path: Path) -> None:
    text = text_of(
        told(made_results(tmp_path / "r", {"a1b": [passed("1.4")], "c2d": [passed("1.4")]}))
    )
    assert "2 with all points" in text
    assert text.count("no check failed") == 2


def test_exercises_that_the_course_does_not_have(tmp_path: Path) -> None:
    class_ = {f"s{i}": [failed("9.9", "summed"), passed("1.4")] for i in range(2)}
    text = text_of(told(made_results(tmp_path / "r", class_)))
    assert "Exercises that this course does not have" in text
    assert "9.9 Another exercise 7" in text
    assert "2 of 2 do not divide the sum" in text


def test_what_can_not_be_read_is_told(tmp_path: Path) -> None:
    folder = made_results(tmp_path / "r", {"fine": [passed("1.4")]})
    for name, text in {"a": "{", "b": "[]", "c": '{"student": "c"}', "d": "\xff"}.items():
        (folder / "students" / name).mkdir()
        (folder / "students" / name / "result.json").write_text(text, encoding="latin-1")
    (folder / "class.json").unlink()
    found = load_results(folder)
    assert len(found.unread) == 4
    assert any("'score' is missing" in line for line in found.unread)
    assert "1 submission 1 graded" in text_of(told(folder))
    with pytest.raises(ValueError, match="no folder students/"):
        load_results(folder / "students")
