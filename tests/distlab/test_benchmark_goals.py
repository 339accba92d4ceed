"""Goals and claims, attempts where goals are missed, and whether two runs agree."""

from __future__ import annotations

import random
import statistics
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks import agreement, book, goals, run
from benchmarks.claims import broken, claims
from benchmarks.goals import Goal
from benchmarks.pairs import Case, Paired, Start
from benchmarks.ratio import Ratio, over_starts
from distlab.course import progress
from distlab.course.catalogue import root

GOAL = Goal("A table", "ours", "theirs", 1.0, rows=("2",))
TABLES = {each.title: each for each in map(run.paired, run.PAIRED)}


def table(**ratios: float) -> Paired:
    """Rows "2 a", "4 b" …: the number of ranks and a name."""

    def start(ratio: float, rounds: int, number: int) -> Start:
        return Start({"ours": [ratio + number / 1e3] * rounds, "theirs": [1.0] * rounds})

    cases = [Case((n[1:], n), partial(start, r)) for n, r in ratios.items()]
    return Paired("A table", ("ranks", ""), "ms", [("ours", "theirs")], lambda: cases, 1, "")


def measured(paired: Paired) -> book.Book:
    found = book.new_book(paired)
    for case in paired.cases():
        starts = [{"alone": True, "facts": {}, "values": case.start(1, n).values} for n in range(9)]
        found.cases[case.name] = {"sources": "", "starts": starts}
    return found


def test_a_goal_counts_the_rows_that_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    paired = table(a2=0.9, b2=1.1, c4=2.0)
    missed, count = GOAL.missed(paired, [measured(paired)])
    assert ([case.name for case in missed], count) == (["2, b2"], 2)
    monkeypatch.setattr(goals, "goals", lambda: (GOAL, replace(GOAL, table="Another")))
    words = [*goals.in_words(paired, [measured(paired)])]
    assert words == [
        "Goal: the upper end of ours : theirs is at most 1.00 in rows with 2. "
        "It is so in 1 of 2 rows."
    ]
    better = table(b2=0.95)  # a newer run that has only one of the rows
    assert GOAL.missed(paired, [measured(paired), measured(better)]) == ([], 2)
    explained = replace(GOAL, tried=("one loop: 1.04.", "no loop: 1.06."), stays="Python stays.")
    monkeypatch.setattr(goals, "goals", lambda: (explained,))
    (told,) = goals.in_words(paired, [measured(paired)])
    assert told.endswith("Tried:\n\n- one loop: 1.04.\n- no loop: 1.06.\n\nPython stays.")


@pytest.mark.parametrize(
    ("tried", "stays", "enough"),
    [
        (("a: 1.04", "b: 1.06"), "why", True),
        (("a: 1.04",), "why", False),
        (("a: 1.04", "b is slow"), "why", False),
        (("a: 1.04", "b: 1.06"), "", False),
    ],
)
def test_two_attempts_with_numbers_and_a_reason(
    tried: tuple[str, ...], stays: str, enough: bool
) -> None:
    assert replace(GOAL, tried=tried, stays=stays).explained == enough


def test_goals_name_tables_that_exist() -> None:
    for goal in goals.goals():
        paired = TABLES[goal.table]
        assert (goal.ours, goal.theirs) in paired.pairs
        labels = {label for case in paired.cases() for label in case.labels}
        assert {*goal.rows} <= labels


def test_goals_that_are_missed_are_explained() -> None:
    for goal in goals.goals():
        paired = TABLES[goal.table]
        books = [b for name in book.runs() if (b := book.read(name, paired)).cases]
        if books and goal.missed(paired, books)[0]:
            assert goal.explained, goal


def test_runs_bear_what_texts_claim() -> None:
    """Each sentence is there, names a case that exists, and every run that is kept bears it."""
    for claim in claims():
        text = " ".join((root() / claim.file).read_text(encoding="utf-8").split())
        assert claim.words in text, claim.where
        paired = run.paired(claim.table)
        assert claim.case in {case.name for case in paired.cases()}, claim.where
        assert (claim.ours, claim.theirs) in paired.pairs, claim.where
        for name in book.runs():
            assert broken(claim, book.read(name, paired)) is None, (claim.where, name)


def test_runs_agree_where_intervals_overlap_and_words_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = table(a2=0.9, b2=1.1, c4=0.996, d4=0.9, f8=0.9)
    second = table(a2=0.9, b2=1.2, c4=0.999, f8=1.2)
    between, runs = table(e8=1.0), ("2026-01-01-a", "2026-01-02-a", "2026-01-03-a")
    monkeypatch.setattr(book, "root", lambda: tmp_path)
    assert agreement.compared([first]) is None
    for name, paired in zip(runs, (first, between, second), strict=True):
        found = measured(paired)
        path = book.path_of(name, paired)
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        progress.write(path, asdict(found))
    first_run, second_run = (
        {key: over_starts(each) for key, each in agreement.starts([first], name).items()}
        for name in (runs[0], runs[2])
    )
    assert agreement.counts(first_run, second_run) == (4, 2, 2, 1)
    shown = agreement.compared([first])
    assert shown is not None
    assert shown.rows == [[runs[0], runs[2], "4", "2 (50%)", "2 (50%)", "1 (25%)", "100%"]]


def test_chance_changes_words_where_an_interval_ends_at_a_border() -> None:
    draw = random.Random(0)
    near = [draw.gauss(0.95, 0.03) for _ in range(9)]
    middle = statistics.median(near)
    for high, least, most in ((1.0, 0.4, 0.7), (0.95, 0.95, 1.0)):
        share = agreement.by_chance(Ratio(middle, 0.9, high, 9), near)
        assert least < share <= most
    same = agreement.by_chance(over_starts([0.9] * 9), [0.9] * 9)
    assert same == 1
