"""A hand-out: it shows no solution, and a learner can work in it far away from the course."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from distlab import cli
from distlab.course import catalogue, handout, leaks, shares, templates
from distlab.course.catalogue import load_course, root
from distlab.course.regions import regions_of
from distlab.course.version import course_version
from distlab.grading import answers, implementation, judge
from distlab.labs.index import SOLVED
from distlab.ranks.results import RankFailure
from distlab.simulate.plan import Plan

COURSE = load_course()
SECRET = leaks.secret_of(COURSE)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All exercises, without the proof that nothing leaks."""
    folder = tmp_path_factory.mktemp("everything")
    part = handout.chosen(COURSE, [p.number for p in COURSE.phases], [])
    handout._fill(COURSE, part, root(), folder)
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.1, 1.2 and 1.4, made as the command makes them."""
    folder = tmp_path_factory.mktemp("few") / "mine"
    handout.hand_out(COURSE, handout.chosen(COURSE, [], ["1.1", "1.2", "1.4"]), root(), folder)
    return folder


# -- nothing is shown -----------------------------------------------------------------------------
def test_no_part_of_a_region_is_in_a_hand_out_of_everything(everything: Path) -> None:
    assert leaks.leaks(COURSE, everything) == []


def test_each_exception_is_needed(everything: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reason for a text that is not there any more would hide the next one."""
    allowed = set(leaks.SHARED)
    monkeypatch.setattr(leaks, "SHARED", {})
    found = leaks.leaks(COURSE, everything)
    said = {(line.split()[0], line.split("exercise ")[1].split(":")[0]) for line in found}
    assert said == allowed


def test_every_region_would_be_noticed() -> None:
    """Each region as it is, and one whose lines are broken elsewhere; short ones have no part that
    is long enough to be anybody's."""
    silent, regions = [], 0
    for exercise in templates.files_of(COURSE):
        text = exercise.solution_path.read_text(encoding="utf-8")
        for region in regions_of(text):
            body = text.splitlines()[region.start : region.end - 1]
            code = [leaks.COMMENT.sub("", line).rstrip() for line in body]
            regions += 1
            if region.exercise not in leaks.shown_in("\n".join(code), SECRET):
                silent.append((region.exercise, len(leaks.TOKEN.findall("\n".join(code)))))
            joined = leaks.shown_in(" ".join(" ".join(code).split()), SECRET)
            assert joined or len(leaks.TOKEN.findall("\n".join(code))) < 60, region
    assert len(silent) < regions / 10
    assert all(tokens < 60 for _, tokens in silent)


def test_a_leak_stops_the_hand_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it, then."""
    leaking = COURSE.exercise("1.4").solution_path.read_text(encoding="utf-8")
    monkeypatch.setattr(shares, "makefile_of", lambda text: leaking)
    with pytest.raises(ValueError, match=r"Makefile shows a part of exercise 1\.\d: .*handed out"):
        handout.hand_out(COURSE, handout.chosen(COURSE, [], ["1.7"]), root(), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_in_it_that_tells_answers(everything: Path) -> None:
    names = [path.relative_to(everything).as_posix() for path in handout.files_in(everything)]
    for word in ("solutions/", "mutants", "alternatives", "benchmarks", "/test_distlab"):
        assert not [name for name in names if word in name], word
    found = (path.read_text(encoding="utf-8") for path in everything.glob("notebooks/*"))
    assert not [text for text in found if 'IMPL = "solutions"' in text]


def test_only_what_was_chosen_is_in_it(few: Path) -> None:
    """Map, hints, sections, checks and templates of other exercises stay behind."""
    here = load_course(few)
    assert [e.id for e in here.exercises] == ["1.1", "1.2", "1.4"]
    guidelines = (few / "phase1_data_parallel/guidelines.md").read_text()
    assert "## 1.4 " in guidelines
    assert "## 1.5 " not in guidelines
    checks = "".join(path.read_text() for path in few.glob("tests/phase1/*.py"))
    assert '@exercise("1.4"' in checks
    assert '"1.3"' not in checks
    assert not list(few.glob("phase[234]*"))
    assert [track.name for track in here.tracks] == ["all"], "the others are not whole"
    assert (few / "distlab/commands/certificate.html").is_file()
    assert not list(few.glob("notebooks/*"))
    assert not (few / "test_phase2.py").exists()
    for path in few.glob("phase*/template_*.py"):
        assert path.read_text() == (few / "blank" / path.relative_to(few)).read_text()


def test_pages_link_to_what_is_there(everything: Path) -> None:
    """Pictures and pages of ``docs/`` that a learner is sent to."""
    for page in [*everything.glob("phase*/guidelines.md"), everything / "README.md"]:
        for match in shares.LINKED.finditer(page.read_text(encoding="utf-8")):
            if match[1]:
                assert (everything / "docs" / match[2]).is_file(), (page.name, match[0])


def test_what_a_prediction_rests_on_is_in_it(few: Path) -> None:
    for kind in ("clusters/*.yaml", "clusters/kernels/*.yaml", "published/*"):
        assert names_in(root(), kind) == names_in(few, kind) != []


def names_in(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_what_an_exercise_builds_on_must_come_along(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"builds on other exercises.*--exercises 3\.9 3\.10 3\.12$"
    ):
        handout.chosen(COURSE, [4], [])
    with pytest.raises(ValueError, match="nothing is chosen"):
        handout.chosen(COURSE, [], [])
    (tmp_path / "there.zip").touch()
    with pytest.raises(ValueError, match=r"there\.zip is there already"):
        handout.hand_out(COURSE, COURSE, root(), tmp_path / "there")


# -- the manifest ---------------------------------------------------------------------------------
def test_a_submission_tells_what_it_was_made_from(few: Path, tmp_path: Path) -> None:
    """The version, and which files of toolkit and checks are others; templates may be."""
    with zipfile.ZipFile(few.with_name("mine.zip")) as archive:
        archive.extractall(tmp_path)
    mine = tmp_path / "mine"
    assert handout.made_from(mine) == course_version(root())
    assert handout.changed_in(mine) == []
    (mine / "phase1_data_parallel/template_trainer.py").write_text("")
    (mine / "tests/phase1/test_data_loader.py").write_text("")
    (mine / "distlab/cli.py").unlink()
    assert handout.changed_in(mine) == ["distlab/cli.py", "tests/phase1/test_data_loader.py"]
    for text in ("", "[]", '{"files": 3}'):
        (mine / "handout.json").write_text(text)
        assert handout.made_from(mine) is None
    assert handout.made_from(tmp_path) is None


def test_the_same_course_gives_the_same_zip(few: Path, tmp_path: Path) -> None:
    again = handout._zip(few, tmp_path / "again.zip")
    assert again.read_bytes() == few.with_name("mine.zip").read_bytes()


def test_pages_about_labs_come_without_solved_ones(everything: Path) -> None:
    """What makes labs, and their answers, stay behind."""
    for phase in COURSE.phases:
        text = (everything / phase.folder / "labs.md").read_text(encoding="utf-8")
        assert "## How to" in text
        assert "## Solved" not in text
        assert not [lab for lab in SOLVED if lab in text]
    assert not (everything / "labs").exists()
    assert not (everything / "tests" / "mutants").exists()


# -- the loop -------------------------------------------------------------------------------------
class Learner:
    """Somebody who has nothing but the hand-out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}

    def call(self, *arguments: str) -> tuple[int, str]:
        """Exit status, and what was printed."""
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    def writes(
        self, exercise_id: str, becomes: tuple[str, str] = ("", ""), blank: str = ""
    ) -> None:
        """Fill the exercise's file with the solution's lines, with one text changed.

        ``blank``: an exercise that stays as it is.
        """
        exercise = COURSE.exercise(exercise_id)
        lines = exercise.solution_path.read_text(encoding="utf-8").splitlines()
        for region in reversed(regions_of("\n".join(lines))):
            if region.exercise == blank:
                lines[region.start - 1 : region.end] = templates._blank(lines, region)
        assert becomes[0] in "\n".join(lines)
        text = "\n".join(templates.sibling_import(line, exercise.phase.number) for line in lines)
        path = self.folder / exercise.phase.folder / exercise.template_path.name
        path.write_text(text.replace(*becomes) + "\n" if becomes[0] else text + "\n")


@pytest.fixture
def learner(few: Path, tmp_path: Path) -> Learner:
    with zipfile.ZipFile(few.with_name("mine.zip")) as archive:
        archive.extractall(tmp_path)
    return Learner(tmp_path / "mine")


def test_nothing_of_the_course_is_near(learner: Learner) -> None:
    code = "import importlib.util as u, distlab, given; print(distlab.__file__, given.__file__)"
    _, said = learner.call("-c", f"{code}; print(u.find_spec('solutions'))")
    here = str(learner.folder)
    assert said == f"{here}/distlab/__init__.py {here}/given/__init__.py\nNone\n"


def test_right_blank_and_wrong_code_is_graded(learner: Learner) -> None:
    """1.1 as in the solution, 1.4 with the gradients of all samples summed."""
    learner.writes("1.1", blank="1.2")
    learner.writes("1.4", ("num_samples / max(total, 1)", "num_samples"))
    status, said = learner.call("test_phase1.py", "1.1", "1.2", "1.4", "--json", "report.json")
    assert status == 1, said
    report = json.loads((learner.folder / "report.json").read_text())
    verdicts = [e["verdict"] for e in report["exercises"]]
    assert verdicts == ["pass", "blank", "fail"], said
    assert "your line: template_trainer.py" in said


def test_commands_without_solutions(learner: Learner) -> None:
    """The map and hints work; what needs solutions says so in one line; reset makes blank again."""
    status, said = learner.call("-m", "distlab", "hint", "1.4")
    assert status == 0
    assert said.startswith("hint 1 of 3")
    status, said = learner.call("-m", "distlab", "solution", "1.1")
    assert (status, said) == (
        2,
        "distlab: distlab solution needs the solutions, and this hand-out has none\n",
    )
    path = learner.folder / "phase1_data_parallel/template_trainer.py"
    before = path.read_text()
    path.write_text("mine")
    status, said = learner.call("-m", "distlab", "reset", "1.4", "--yes")
    assert path.read_text() == before
    status, said = learner.call("-m", "distlab", "lab", "debug")
    told = "debugging labs need the solutions, which are not here: ask your instructor"
    assert (status, said) == (2, f"distlab: {told}\n")
    status, said = learner.call("-m", "distlab")
    assert "next: 1.1 Sharded sampler" in said
    assert "Phase 2" not in said


def test_watching_an_exercise_that_needs_an_unsolved_one(
    learner: Learner, interruptible: None
) -> None:
    """It grades once by itself, and says in one line what is to be solved first."""
    learner.writes("1.2", blank="1.1")
    command = [sys.executable, "-m", "distlab", "watch", "1.2"]
    out = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=learner.folder, env=learner.environment, stdout=out, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("watching template_data_loader.py"):
                break
        process.send_signal(signal.SIGINT)
    said = "".join(lines)
    assert "grading 1.2 Distributed data loading" in said
    assert "1.2 is blocked: needs your own 1.1, which does not pass yet\n" in said
    assert "score: 0 of 10 points" in said


def test_the_command_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["handout", str(tmp_path / "new"), "--phases", "4"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("distlab: what is chosen builds on other exercises")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_needs_is_believed_only_where_there_are_no_solutions(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a learner's file could raise it, to be spared a check."""
    monkeypatch.setattr(judge, "has_solutions", lambda: there)
    monkeypatch.setattr(answers, "has_solutions", lambda: False)
    with pytest.raises(implementation.NotHandedOut, match="own fsdp of phase 3") as raised:
        implementation.solution(COURSE.phase(3), "fsdp")
    error = raised.value
    failure = RankFailure(error.message, kind=error.kind, cause=error.cause)
    assert judge.verdict_of(failure).verdict == ("fail" if there else "needs")


def test_solutions_are_not_simulated_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "has_solutions", lambda: False)
    with pytest.raises(ValueError, match=r"^impl solutions needs the solutions, and this hand-out"):
        Plan(impl="solutions")
    assert Plan(impl="mine").impl == "mine"
