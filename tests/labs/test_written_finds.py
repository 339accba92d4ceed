"""Finds of learners' tests become patches, and strangers' tests run in a sandbox."""

from __future__ import annotations

import argparse
import io
import subprocess
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)
from rich.console import Console

from distlab import sandbox
from distlab.commands import contribute
from distlab.course import progress
from distlab.course.catalogue import load_course, root
from distlab.grading.contract import AXES
from distlab.grading.wrong import Mutant, all_mutants, patched
from distlab.labs import frame
from distlab.labs.written import command as written
from distlab.labs.written import finds, jury
from distlab.labs.written.look import look
from distlab.sandbox import Limits
from scripts.mutate.changes import changes, solution_text
from scripts.mutate.table import read

EXERCISE = load_course().exercise("4.18")
SEED = 3
TEST = '''"""Tests of mine."""

HALF = 0.25


def test_other(impl, run):
    run(lambda ctx: impl.loss_weight(1, 8, 2), 1)


def test_weight(impl, run):
    """Half of the ranks' share."""
    assert [*run(lambda ctx: impl.loss_weight(1, 8, 2), 1)] == [HALF]
'''


def planted() -> Mutant:
    """A wrong implementation that no check of the course kills, as far as anybody knows."""
    (known,) = (m for m in all_mutants() if m.id == "elastic-unweighted")
    return finds.named(EXERCISE, "loss_weight: equal: a mean", known.text, known.becomes)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A learner's file of tests that finds what was planted."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(written, "RUNS", 1)
    monkeypatch.setattr(written, "alternatives", lambda exercise: [])
    monkeypatch.setattr(written, "survivors", lambda exercise: [planted()])
    monkeypatch.setattr(contribute, "passes_ours", lambda mutant, exercise, seed: True)
    file = tmp_path / "tests_for_4_18.py"
    file.write_text(TEST, encoding="utf-8")
    return file


def called(module: object, *arguments: str) -> tuple[int, str]:
    parser, shown = argparse.ArgumentParser(), io.StringIO()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    options = parser.parse_args(["4.18", "--seed", str(SEED), *arguments])
    status = module.main(options, Console(file=shown, width=1000))  # type: ignore[attr-defined]
    return status, shown.getvalue()


def test_a_find_is_told_in_capitals(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "chosen", lambda: {"4.18": []})
    _, shown = called(written, "--file", str(mine))
    assert "YOUR TEST KILLS A WRONG IMPLEMENTATION THAT THE COURSE'S OWN CHECKS MISS" in shown
    assert "test_weight kills loss_weight: equal: a mean" in shown
    assert "distlab contribute 4.18" in shown
    assert planted().becomes.strip() not in shown


def test_a_find_becomes_a_patch_that_git_applies(mine: Path, tmp_path: Path) -> None:
    status, shown = called(contribute, "--file", str(mine), "--out", str(tmp_path), "--spoil")
    assert status == 0
    assert "Nothing was sent" in shown
    (made,) = tmp_path.glob("*.patch")
    assert "git apply" in made.read_text("utf-8").split("diff --git")[0]
    clone = tmp_path / "clone"
    folder = clone / "tests" / "mutants"
    folder.mkdir(parents=True)
    name = "phase4_elastic_sampler.py"
    (folder / name).write_bytes((root() / "tests" / "mutants" / name).read_bytes())
    subprocess.run(["git", "init", "-q", str(clone)], check=True)
    subprocess.run(["git", "apply", str(made)], check=True, cwd=clone)
    *_, added = all_mutants(folder)
    assert patched(added) == patched(planted())
    assert (added.caught_by, added.mistake) == ("test_weight", planted().mistake)
    assert added.causes == ("unusable",), "the cause that the grader tells of an assert"
    test = (clone / "tests" / "phase4" / "test_elastic_sampler_weight.py").read_text("utf-8")
    assert '@exercise("4.18", "virtual")\ndef test_weight(impl, run):' in test
    assert "HALF = 0.25" in test
    assert "test_other" not in test
    compile(test, "test", "exec")


def test_what_the_courses_checks_kill_is_no_find(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contribute, "passes_ours", finds.passes_ours)
    status, shown = called(contribute, "--file", str(mine), "--out", str(tmp_path), "--spoil")
    assert status == 1
    assert "there is nothing to contribute" in shown
    assert not [*tmp_path.glob("*.patch")]


def test_a_patch_shows_no_solution_that_is_not_done(mine: Path) -> None:
    with pytest.raises(ValueError, match="pass its exercises or give them up first"):
        called(contribute, "--file", str(mine))


def test_a_learner_may_bring_a_wrong_implementation(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "survivors", lambda exercise: [])
    monkeypatch.setattr(written, "passes_ours", lambda mutant, exercise, seed: True)
    own = tmp_path / "elastic_sampler.py"
    own.write_text(patched(planted()), encoding="utf-8")
    more = "--file", str(mine), "--out", str(tmp_path), "--spoil", "--wrong"
    assert called(contribute, *more, str(own))[0] == 0
    assert len([*tmp_path.glob("*.patch")]) == 1
    with pytest.raises(ValueError, match=r"elastic_sampler.py: it is the solution itself"):
        called(contribute, *more, str(EXERCISE.solution_path))
    with pytest.raises(ValueError, match=r"absent.py can't be read"):
        called(contribute, *more, str(tmp_path / "absent.py"))


CHANGES = {
    "one line": ("a\nb\nc\n", "a\nx\nc\n", ("b\n", "x\n")),
    "a line more": ("a\nb\n", "a\nx\nb\n", ("a\nb\n", "a\nx\nb\n")),
    "a line that is there twice": ("a\nb\na\n", "a\nb\nx\n", ("b\na\n", "b\nx\n")),
}


@pytest.mark.parametrize(("before", "after", "told"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_text_that_occurs_once(before: str, after: str, told: tuple[str, str]) -> None:
    text, becomes = finds.difference(before, after)
    assert before.count(text) == 1
    assert before.replace(text, becomes) == after
    assert len(text) <= len(told[0])


def test_the_changes_are_those_of_the_tables() -> None:
    """What is written down is what scripts.mutate calls a survivor, today."""
    data = frame.read_toml(root() / "labs" / "tests" / finds.SURVIVORS)
    for exercise_id, entries in data.items():
        exercise = load_course().exercise(exercise_id)
        known = read(exercise)[exercise_id].survivors
        every = changes(exercise, solution_text(exercise)) if exercise_id == "4.18" else []
        now = [finds.entry(exercise, c.function, known.get(c.name, ""), c.text) for c in every]
        for each in entries:
            assert each["reason"] in known.values(), exercise_id
            assert not every or each in now
        assert all(map(patched, finds.survivors(exercise)))


# -- in a sandbox ----------------------------------------------------------------------------------
NO_SANDBOX = pytest.mark.skipif(bool(sandbox.obstacle()), reason=sandbox.obstacle())
HOSTILE = """
import os, pathlib

def test_whole(impl, run):
    assert not pathlib.Path({solution!r}).exists()
    assert not pathlib.Path({mutants!r}).exists()
    note = pathlib.Path(__file__).with_name("note")
    assert not note.exists()
    note.write_text("the first one is right")
    print("\\033[2J" * 9)
    assert [*run(lambda ctx: impl.loss_weight(1, 8, 2), 1)] == [0.25], "\\033[2J" + "x" * 9999
"""


@NO_SANDBOX
def test_a_strangers_tests_find_no_answers_and_leave_no_notes(tmp_path: Path) -> None:
    """They judge in the sandbox as outside, and what comes out is short plain text."""
    file = tmp_path / "tests_for_4_18.py"
    mutants = root() / "tests" / "mutants" / "phase4_elastic_sampler.py"
    text = HOSTILE.format(solution=str(EXERCISE.solution_path), mutants=str(mutants))
    file.write_text(text, encoding="utf-8")
    with jury.jury(EXERCISE, [file], limits=Limits()) as by:
        by.collect()
        assert by.judge(None, SEED) is None
        assert by.judge(None, SEED) is None
        failed = by.judge(patched(planted()), SEED)
    assert failed is not None
    assert failed.name.startswith("test_whole")
    assert len(failed.message) <= 500
    assert failed.message.isprintable()


@NO_SANDBOX
def test_a_sandbox_ends_what_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jury, "LIMIT", 3)
    file = tmp_path / "tests_for_4_18.py"
    file.write_text("def test_it(impl, run):\n    while True: pass\n", encoding="utf-8")
    outcome = written.outcome_of(EXERCISE, file, [], SEED, Limits())
    assert "it hangs or ends its own process" in outcome.refused


@NO_SANDBOX
def test_a_strangers_file_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tests_for_4_18.py"
    file.write_text("import no_such\ndef test_it(impl, run):\n    pass\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"can't be imported: .*no_such") as raised:
        written.outcome_of(EXERCISE, file, [], SEED, Limits())
    assert "\n" not in str(raised.value)


def test_the_example_of_the_page_is_a_test(tmp_path: Path) -> None:
    page = (root() / "docs" / "write_a_test.md").read_text(encoding="utf-8")
    file = tmp_path / "tests_for_3_3.py"
    file.write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    exercise = load_course().exercise("3.3")
    look(exercise, file)
    (wrong,) = (m for m in all_mutants() if m.id == "all-reduce-half")
    with jury.jury(exercise, [file]) as by:
        assert by.judge(solution_text(exercise), SEED) is None
        assert by.judge(patched(wrong), SEED) is not None


def test_axes_are_told_in_words() -> None:
    assert {*written.SHOWN_AXES} == {*AXES, written.VALUES}
