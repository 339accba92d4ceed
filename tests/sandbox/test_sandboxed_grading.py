"""Grading in a sandbox says what grading without one says."""

from __future__ import annotations

import marshal
import os
from pathlib import Path
from types import CodeType

import pytest

from distlab.course.catalogue import load_course, root
from distlab.grading import answers, command, run
from distlab.grading.implementation import Implementation
from distlab.grading.judge import verdict_of
from distlab.grading.session import Request
from distlab.grading.sources import Source
from distlab.grading.verdicts import Report
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import Mutant, all_mutants, patched
from distlab.ranks.parent import children
from distlab.sandbox import Limits, NotStarted, Sandbox, obstacle

# one of each: gloo's ranks, virtual ones, with another's solution in its stead, a deadlock
WRONG = ("sampler-uneven", "average-summed", "train-rank0-steps", "print-barrier-of-rank-0")
SHORTCUT = "from solutions.phase1_data_parallel.simple_allreduce import *\n"
SECRET = "what the learner prints"
possible = pytest.mark.skipif(bool(obstacle()), reason=f"no sandbox here: {obstacle()}")


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return [m for m in all_mutants() if m.id in WRONG]


@pytest.fixture(scope="module")
def request_of(tmp_path_factory: pytest.TempPathFactory, mutants: list[Mutant]) -> Request:
    """To grade one submission of phase 1, in which much is wrong."""
    folder = tmp_path_factory.mktemp("class") / "student"
    home = folder / "phase1_data_parallel"
    home.mkdir(parents=True)
    for mutant in mutants:
        name = load_course().exercise(mutant.exercise).solution_path.name
        path = home / name
        text = path.read_text(encoding="utf-8") if path.exists() else patched(mutant)
        for find, becomes in ((mutant.text, mutant.becomes), *mutant.more):
            text = text.replace(find, becomes)
        path.write_text(text.replace("model.train()", f"model.train(); print({SECRET!r})"))
    (home / "simple_allreduce.py").write_text(SHORTCUT, encoding="utf-8")
    return Request(
        impl=str(folder),
        device="cpu",
        seed=7,
        exercises=(*sorted(m.exercise for m in mutants), "1.7"),
        checks=(*(m.caught_by for m in mutants), "test_root_combines_all_operators"),
        known=frozenset({"1.2", "1.3"}),
    )


def said(report: Report) -> list[tuple[object, ...]]:
    """All that learners are told, but for the time that it took and what ranks printed."""
    return [
        (e.id, e.used_solution_of, c.name, c.verdict, c.cause, c.message, c.rank, c.line)
        for e in report.exercises
        for c in e.checks
    ]


@possible
def test_verdicts_are_those_of_a_grading_without(
    request_of: Request, mutants: list[Mutant]
) -> None:
    """Verdict, cause, message, rank and line of wrong implementations; nothing is left behind."""
    before = children()
    with WarmGrader() as warm:
        outside = warm.grade(1, request_of)
        inside = warm.grade(1, Request(**vars(request_of) | {"sandbox": Limits()}))
    assert said(inside) == said(outside)
    for mutant in mutants:
        check = inside.check(mutant.caught_by)
        assert check is not None
        assert check.cause in mutant.causes
    shortcut = next(e for e in inside.exercises if e.id == "1.7").decisive
    assert shortcut is not None
    assert shortcut.cause == "shortcut"
    trained = [r.check("test_training_equals_one_process") for r in (outside, inside)]
    assert [SECRET in str(c and c.printed) for c in trained] == [True, False]
    assert children() == before


def test_no_place_for_a_sandbox_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run.sandbox, "obstacle", lambda: "this system allows no namespaces (no)")
    assert command.main(1, ["--sandbox", "--impl", "solutions", "1.4"]) == 2
    told = capsys.readouterr()
    assert told.err.splitlines() == [
        "test_phase1.py: no sandbox can be made here: this system allows no namespaces (no)"
    ]


def test_a_sandbox_that_does_not_start_is_no_mistake_of_the_learners() -> None:
    check = verdict_of(NotStarted("the sandbox did not start: no memory"))
    assert (check.verdict, check.message) == ("error", "the sandbox did not start: no memory")


@possible
def test_an_agent_that_does_not_come_up_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last line that it said."""
    (tmp_path / "trainer.py").touch()
    monkeypatch.setattr("distlab.sandbox.walls.HOSTNAME", "elsewhere")
    with Sandbox(root(), tmp_path) as box, pytest.raises(NotStarted, match="in a sandbox only"):
        box.run_ranks(lambda ctx: None, 1)


@possible
@pytest.mark.parametrize("way", ["link", "folder link", "large"])
def test_files_that_are_none_of_the_submission_are_refused(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The grader reads no file for a learner that is not the learner's."""
    secret, home = tmp_path / "secret", tmp_path / "student" / "phase1_data_parallel"
    secret.mkdir()
    (secret / "trainer.py").write_text("= secret", encoding="utf-8")
    home.parent.mkdir()
    if way == "folder link":
        home.symlink_to(secret)
    else:
        home.mkdir()
        (home / "trainer.py").symlink_to(secret / "trainer.py")
    if way == "large":
        (home / "trainer.py").unlink()
        os.truncate(os.open(home / "trainer.py", os.O_CREAT | os.O_WRONLY), 1 << 30)
    assert command.main(1, ["--sandbox", "--impl", str(home.parent), "1.4"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert ("bytes" if way == "large" else "a link that leaves the submission") in told


def names_in(code: CodeType) -> set[str]:
    """Every name and text that the code has."""
    texts = {each for each in code.co_consts if isinstance(each, str)}
    inner = [names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return texts.union(code.co_names, *inner)


@pytest.mark.parametrize(
    ("graded", "other", "asked"), [("1.4", "1.5", "average_gradients"), ("1.5", "1.4", "train")]
)
def test_the_answer_that_is_asked_for_does_not_go_along(
    graded: str, other: str, asked: str
) -> None:
    """Of the solution of the same file only what other exercises ask for."""
    exercise, substitute = map(load_course().exercise, (graded, other))
    source = Source("x", root() / exercise.phase.folder)
    state = Implementation(source, "trainer", [substitute], exercise).__getstate__()
    module = marshal.loads(state["code"]["solutions.phase1_data_parallel.trainer"])
    functions = {code.co_name: code for code in module.co_consts if isinstance(code, CodeType)}
    assert names_in(functions[asked]) == {"NotImplementedError"}
    assert len(names_in(functions["broadcast_model_state"])) > 5
    assert not answers.program(exercise.phase.folder, "trainer")
