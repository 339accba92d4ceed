"""Debugging labs: what the report and its pictures say, and what is planted and offered."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course import progress
from distlab.course.catalogue import root
from distlab.grading.wrong import all_mutants
from distlab.labs.debug import chosen, folder, observed, report, sources
from distlab.labs.frame import data_files, read_toml
from tests.labs.debugging import LABS
from tests.labs.debugging import learner as learner

FILES = {path.name: read_toml(path) for path in data_files("debug")}


# -- what is planted and offered -------------------------------------------------------------------
@pytest.mark.parametrize("name", FILES)
def test_what_is_planted_differs_from_the_wrong_implementation_and_is_used(name: str) -> None:
    known = {mutant.id: mutant for mutant in all_mutants()}
    own = {mutant.id: mutant for lab in LABS.values() for mutant in lab.wrong}
    used = {each for entry in FILES[name]["lab"] for each in entry["wrong"]}
    assert used >= {*FILES[name]["planted"]}
    for each in FILES[name]["planted"]:
        changed = (own[each].text, own[each].becomes, *own[each].more)
        assert changed != (known[each].text, known[each].becomes, *known[each].more)
        assert own[each].caught_by == known[each].caught_by


@pytest.mark.parametrize("name", FILES)
def test_causes_that_fit_as_well_are_not_offered(name: str) -> None:
    for entry in FILES[name]["lab"]:
        also_true = {*entry.get("not_offered", ())}
        assert also_true <= {*FILES[name]["causes"]}
        assert not also_true & {*LABS[entry["id"]].offered}


def test_a_misspelt_cause_or_planted_name_is_told() -> None:
    with pytest.raises(KeyError, match="sent-agian"):
        chosen._offered("D1.01", (), {"sent-again": ""}, ("sent-agian",))
    with pytest.raises(ValueError, match=r"phase1\.toml: planted: .* 'nothing'"):
        chosen._planted({"nothing": [("a", "b")]}, {}, "phase1.toml")


@pytest.mark.parametrize("lab_id", LABS)
def test_planted_code_looks_like_the_code_around_it(lab_id: str) -> None:
    found = sources.sources_of(LABS[lab_id])
    new = {*found.wrong.splitlines()} - {*found.right.splitlines()}
    for line in new:
        assert line.strip() != "pass"
        assert "'" not in line, "the files have double quotes"
        assert not line.strip().startswith("del ")
        assert len(line) <= 100


# -- where a bug is, and how much was changed ------------------------------------------------------
def test_the_line_before_a_gap_counts_like_the_line_after_it() -> None:
    (spot,) = sources.sources_of(LABS["D3.25"]).spots[0]
    assert spot.gap
    assert [spot.near(spot.first + k) for k in (-4, -3, 2, 3)] == [False, True, True, False]
    assert not sources.Spot(10, 10).near(7)


def test_a_moved_line_counts_once() -> None:
    before = "a = 1\nb = 2\nc = 3\nd = 4\n"
    assert sources.changed_lines(before, "c = 3\nd = 4\na = 1\nb = 2\n") == 2
    assert sources.changed_lines(before, "a = 1\nb = 5\nc = 3\n") == 2
    assert sources.changed_lines(before, "if a:\n    a = 1\nb = 2\nc = 3\nd = 4\n") == 2


# -- what the report says --------------------------------------------------------------------------
def test_a_job_with_fewer_ranks_goes_on_behind_what_was_read() -> None:
    lab = LABS["D4.08"]
    seen = observed.observe(lab, sources.sources_of(lab).right, 3).values[0]
    batches = [seen[f"before, batch {k} of all ranks"] for k in range(4)]
    assert [seen[f"after the restart, batch {k} of all ranks"] for k in range(2)] == batches[2:]
    assert "after the restart, batch 2 of all ranks" not in seen


def test_a_place_is_told_once_and_no_other_ranks_line_with_it() -> None:
    lab = LABS["D1.22"]
    seen = observed.observe(lab, sources.sources_of(lab).wrong, 3)
    assert seen.failure.count("dist.send(") == lab.world
    assert seen.failure.endswith("never posted the matching receive")
    assert seen.at_the_end == [f"rank {rank}: waits" for rank in range(lab.world)]


def test_rows_say_where_the_difference_begins() -> None:
    right = [float(k) for k in range(20)]
    wrong = [*right[:11], *(k + 0.5 for k in right[11:])]
    seen, expected = report._short(wrong, right)
    assert seen.startswith("(from step 10; first difference at step 12) 9, 10, 11.5")
    assert expected.startswith("(from step 10) 9, 10, 11")
    assert report._short([4, 1, 2], [4, 2, 1])[0] == "(first difference at entry 2) 4, 1, 2"
    assert report._short([2.0], [1.0]) == ("2", "1")


def test_of_named_entries_those_that_differ_most_are_shown() -> None:
    right = {f"word {k}": 1.0 for k in range(20)}
    assert report._short(right | {"word 13": 2.0}, right) == ("word 13: 2", "word 13: 1")
    assert report._short({"word 1": 2.0}, {"word 1": 0.0}) == ("word 1: 2", "word 1: 0")
    wrong = {name: 1.0 + k / 100 for k, name in enumerate(right)}
    seen, expected = report._short(wrong, right)
    assert seen.startswith("word 19: 1.19, word 18: 1.18")
    assert seen.endswith("word 12: 1.12, …")
    assert expected.startswith("word 19: 1, word 18: 1")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures: list[Any] = []
    monkeypatch.setattr(folder.Figure, "savefig", lambda figure, path: figures.append(figure))
    return figures


def test_the_legend_says_what_is_drawn(drawn: list[Any], tmp_path: Path) -> None:
    loss = [3.0, 2.0, 1.0, 0.5, 0.2]
    wrong = observed.Seen(values=[{"loss": loss}, {"loss": loss}, {"loss": loss[::-1]}])
    right = observed.Seen(values=[{"loss": [1.0] * 5}] * 3)
    folder._curve("loss", wrong, right, tmp_path / "loss.png")
    folder._curve("loss", right, wrong, tmp_path / "loss.png")
    (axes,), (other,) = (figure.axes for figure in drawn)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["ranks 0, 1", "rank 2", "expected"]
    assert axes.lines[-1].get_color() == "black"
    assert [line.get_label() for line in other.lines] == [
        *("all ranks", "expected, ranks 0, 1", "expected, rank 2")
    ]
    assert len({line.get_color() for line in axes.lines}) == 3


def test_words_are_drawn_at_their_numbers(drawn: list[Any], tmp_path: Path) -> None:
    one = observed.Seen(values=[{"loss of each word": {f"word {k}": 1.0 for k in range(6)}}])
    assert folder._series(one) == ["loss of each word"]
    folder._curve("loss of each word", one, one, tmp_path / "x.png")
    (axes,) = drawn[0].axes
    assert axes.get_xlabel() == "word"
    assert [*axes.lines[0].get_xdata()] == [*range(6)]


# -- points that are remembered --------------------------------------------------------------------
def test_two_writers_at_once_lose_nothing(learner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = progress._read

    def slow() -> tuple[dict[str, Any], list[str]]:
        found = read()
        time.sleep(0.005)
        return found

    monkeypatch.setattr(progress, "_read", slow)
    with ThreadPoolExecutor(4) as pool:
        told = [*pool.map(lambda k: progress.update_lab(f"D1.{k}", points=k), range(12))]
    assert told == [[]] * 12
    assert progress.labs() == {f"D1.{k}": {"points": k} for k in range(12)}


def test_no_test_of_labs_forgets_whose_progress_it_writes() -> None:
    for path in (root() / "tests" / "labs").glob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "progress" in text:
            assert '"progress_file"' in text or "import learner" in text, path.name
