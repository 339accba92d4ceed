"""Debugging labs: each fits its solution, shows its bug, can be solved, and is dealt by a seed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course import progress
from distlab.course.catalogue import root
from distlab.grading.warm import WarmGrader
from distlab.labs import frame
from distlab.labs.debug import chosen, command, folder, observed, sources
from scripts import try_labs
from tests.labs.debugging import LABS, SOURCES, TRIED, ask, asked_for
from tests.labs.debugging import grader as grader
from tests.labs.debugging import learner as learner
from tests.labs.debugging import made as made
from tests.labs.debugging import once as once

SAMPLE = ["D1.23", "D1.24", "D2.26", "D2.27", "D3.08", "D3.22", "D4.09", "D4.26"]


# -- the labs that were chosen ---------------------------------------------------------------------
def test_enough_labs_of_each_phase_and_level() -> None:
    assert len(LABS) == len(chosen.all_labs()), "each has an id of its own"
    for phase in range(1, 5):
        levels = Counter(lab.level for lab in LABS.values() if lab.id.startswith(f"D{phase}."))
        assert levels.total() >= 20, f"phase {phase}"
        assert min(levels[level] for level in (1, 2, 3)) >= 4, f"phase {phase}"
        assert levels[4] >= 1, f"phase {phase}"


@pytest.mark.parametrize("lab_id", LABS)
def test_each_lab_fits_its_solution(lab_id: str) -> None:
    lab = LABS[lab_id]
    found = sources.sources_of(lab)
    assert len(found.spots) == len(lab.causes) == len(lab.wrong) == (2 if lab.level == 4 else 1)
    assert all(found.spots)
    assert sources.changed_lines(found.wrong, found.right) > 0
    assert "# --- exercise" not in found.wrong
    assert lab.program_path.is_file()
    assert lab_id.startswith(f"D{lab.about.phase.number}.")
    assert {mutant.exercise for mutant in lab.wrong} <= {*lab.spoils}
    assert not any(mutant.tier for mutant in lab.wrong), "the first tier of its checks sees it"
    assert len(lab.offered) == 12
    assert {*lab.causes} <= {*lab.offered}


@pytest.mark.parametrize("lab_id", LABS)
def test_the_user_does_not_tell_the_cause(lab_id: str) -> None:
    lab = LABS[lab_id]
    text = f"{lab.title} {lab.told}".lower()
    assert not re.search(r"\d\.\d|exercise|mutant", text)
    for cause, mutant in zip(lab.causes, lab.wrong, strict=True):
        assert lab.offered[cause] not in text
        assert mutant.mistake.lower() not in text
        assert mutant.id not in text


def test_each_lab_was_tried() -> None:
    """To try one in full takes seconds: a digest tells whether it still is what was tried."""
    known = try_labs.tried()
    changed = [lab.id for lab in LABS.values() if known.get(lab.id) != try_labs.digest(lab)]
    assert not changed, f"run: python -m scripts.try_labs {' '.join(changed)}"


@pytest.mark.parametrize("lab_id", SAMPLE)
def test_a_lab_shows_its_bug_and_can_be_solved(
    lab_id: str, grader: WarmGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, with their pictures: python -m scripts.try_labs."""
    monkeypatch.setattr(folder, "_pictures", lambda *_: [])
    assert try_labs.doubts(LABS[lab_id], grader.grade) == ""


def test_programs_all_belong_to_labs() -> None:
    files = {path.stem for path in (root() / "labs" / "debug" / "programs").glob("*.py")}
    assert files == {lab.program for lab in LABS.values()}


def test_a_bug_that_does_not_show_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    right = observed.Seen(values=[{"x": 1.0}] * 3, ledger=[[]] * 3, seconds=[0.0] * 3)
    monkeypatch.setattr(try_labs, "observe", lambda *_: right)
    assert "nothing of it is seen" in try_labs.shown(TRIED, SOURCES)
    runs = iter([right, observed.Seen(values=[{"x": 2.0}] * 3)])
    monkeypatch.setattr(try_labs, "observe", lambda *_: next(runs))
    assert "ranks (0, 1, 2)" in try_labs.shown(TRIED, SOURCES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.json", TRIED.wrong[0].id),
        ("REPORT.md", TRIED.causes[0]),
        ("lab.json", "trainer.py"),
        (".notes", "x"),
    ],
)
def test_a_folder_that_tells_the_cause_is_found(made: Path, name: str, text: str) -> None:
    assert try_labs.told_too_much(TRIED, made) == ""
    (made / name).write_text(text, encoding="utf-8")
    assert name in try_labs.told_too_much(TRIED, made)


# -- which lab -------------------------------------------------------------------------------------
def test_the_same_seed_deals_the_same_lab_of_the_lowest_level(learner: Path) -> None:
    def dealt(seed: int, more: str = "") -> chosen.DebugLab:
        options = asked_for(f"--phase 3 --spoil --seed {seed} {more}")
        return command._chosen(options, seed)

    labs = [dealt(seed) for seed in range(20)]
    assert labs == [dealt(seed) for seed in range(20)]
    assert len({lab.id for lab in labs}) > 3, "learners have different ones"
    assert {lab.level for lab in labs} == {1}, "of the same difficulty"
    assert dealt(1, "--level 4").level == 4


def test_without_a_seed_solved_labs_are_left_out(learner: Path) -> None:
    options = asked_for("1.4 --level 2 --spoil")
    fitting = [x for x in LABS.values() if x.exercise == "1.4" and x.level == 2]
    for lab in fitting:
        assert command._chosen(options, 1) in fitting
        frame.passed(lab.id, 1, lab.points)
    with pytest.raises(ValueError, match="points for all labs that fit"):
        command._chosen(options, 1)


REFUSED = {
    "D1.02": "pass its exercises or give them up first",
    "1.4": "pass the exercises or give them up first",
    "D9.99 --spoil": "no lab 'D9.99'",
    "4.13 --spoil": "there is no debugging lab that fits",
    "D1.02 --spoil --out lab": "name another folder with --out",
    "--again lab --ranks 9": "--ranks is a number from 1 to 3",
    "--hint lab --ranks 2": "--ranks goes with --again FOLDER",
    "--again nowhere": "is no folder of a lab",
    "--grade lab --json no/where.json": "nothing is graded",
    "--hint .": "is no folder of a lab",
}


@pytest.mark.parametrize(("line", "told"), REFUSED.items(), ids=REFUSED)
def test_what_is_refused(made: Path, line: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)) as error:
        ask(line)
    assert "\n" not in str(error.value)


def test_all_exercises_of_the_file_are_released(learner: Path) -> None:
    progress.update("1.4", passed_once=True)
    with pytest.raises(ValueError, match="not written yet"):
        ask("D1.02")


def test_without_solutions_there_are_no_labs(
    learner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "has_solutions", lambda: False)
    with pytest.raises(ValueError, match="need the solutions, which are not here"):
        ask("--list")


def test_list_and_hints(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3):
        assert ask("--hint lab") == 0
        told = capsys.readouterr().out
        assert re.findall(r"hint (\d) of 3: ", told) == [str(number)], "those before are known"
    assert ask("--hint lab") == 0
    told = capsys.readouterr().out
    assert re.findall(r"hint (\d) of 3: ", told) == ["1", "2", "3"], "there is no further one"
    assert TRIED.causes[0] in told
    assert "average_gradients" in told
    frame.passed("D1.02", 7, 10)
    assert ask("--list --phase 1") == 0
    told = capsys.readouterr().out
    assert re.search(r"D1.02 +1 +1 +7/10 +3 +Only one rank", told)
    assert "D2.01" not in told
