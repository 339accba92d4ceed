"""The map, the templates and progress: complete, in step, and robust."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
from pathlib import Path

import pytest

from distlab.commands.scenario import scenario_of
from distlab.course import progress, templates
from distlab.course.catalogue import (
    Phase,
    functions_of,
    load_course,
    places_of,
    root,
    write_index,
)
from distlab.course.complete import validate
from distlab.course.excerpts import Excerpt, excerpts, excerpts_of
from distlab.course.regions import regions_of
from distlab.grading.implementation import Implementation
from distlab.grading.wrong import mutants_per_exercise

COURSE = load_course()
SOLUTION = '''"""Module."""

from given.agreement import rank_in
from .trainer import thing


def f(x):
    """Contract."""
    # --- exercise 1.1: start
    # Step 1: double it,
    #         carefully
    # a private remark
    secret_value = 2 * x
    return secret_value
    # --- exercise 1.1: end


class C:
    def m(self):
        # --- exercise 1.2: start
        # Step 1: nothing
        return rank_in(thing)
        # --- exercise 1.2: end
'''


def test_every_exercise_is_complete() -> None:
    assert validate(COURSE, mutants_per_exercise()) == []


def test_templates_are_in_step() -> None:
    assert templates.check(COURSE) == []


def test_generator() -> None:
    text = templates.generate(SOLUTION, 1)
    assert "secret_value" not in text
    assert "private remark" not in text
    assert "    # Step 1: double it,\n    #         carefully\n" in text
    assert '    raise NotImplementedError("exercise 1.1")' in text
    assert '        raise NotImplementedError("exercise 1.2")' in text
    assert "from .template_trainer import thing" in text
    assert "from given.agreement import rank_in" in text
    assert "python test_phase1.py 1.1" in text
    ast.parse(text)


@pytest.mark.parametrize(
    "line",
    [
        "from .digits import thing",  # beside, without exercises
        "from solutions.phase1_data_parallel.trainer import thing",
        "        import solutions.phase1_data_parallel.trainer",
    ],
)
def test_a_template_never_imports_what_learners_lack(line: str) -> None:
    with pytest.raises(ValueError, match="learners lack"):
        templates.generate(SOLUTION.replace("from .trainer import thing", line), 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    # --- exercise 1.1: end\n", "", "has not ended"),
        ("1.2: end", "1.3: end", "without its start"),
        ("exercise 1.2: start", "exercise 1.2 start", "not a region marker"),
        ("        # --- exercise 1.2: end\n", "", "never ends"),
    ],
)
def test_broken_regions_are_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regions_of(SOLUTION.replace(old, new))


def test_functions_of_an_exercise() -> None:
    assert functions_of(COURSE.exercise("1.4")) == ["average_gradients"]
    assert "ShardedSampler.__iter__" in functions_of(COURSE.exercise("1.1"))
    assert functions_of(COURSE.exercise("1.2"))[0] == "split_batch"


def test_unknown_exercise_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"did you mean 1\.4"):
        COURSE.exercise("1.44")
    with pytest.raises(ValueError, match="no phase 9"):
        COURSE.phase(9)


def test_every_exercise_can_be_traced() -> None:
    """Each has a scenario, also where its checks import what their phase shares."""
    for exercise in COURSE.exercises:
        assert callable(scenario_of(exercise))


def test_scenarios_call_what_their_file_has() -> None:
    """A learner's file has what its solution has, and nothing of the files beside it."""
    for exercise in COURSE.exercises:
        solution = f"solutions.{exercise.phase.folder}.{exercise.file}"
        has = {*dir(importlib.import_module(solution)), *dir(Implementation)}
        tree = ast.parse(inspect.getsource(scenario_of(exercise)))
        called = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "impl"
        }
        assert called <= has, exercise.id


def test_fingerprint_follows_what_checks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root() / "tests" / "phase3", tmp_path / "tests" / "phase3")
    monkeypatch.setattr(progress, "root", lambda: tmp_path)
    exercise = COURSE.exercise("3.1")
    before = progress.fingerprint(exercise)
    with (tmp_path / "tests" / "phase3" / "reductions.py").open("a") as file:
        file.write("# changed\n")
    assert progress.fingerprint(exercise) != before


@pytest.fixture
def own_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / ".distlab" / "progress.json"
    monkeypatch.setattr(progress, "progress_file", lambda: file)
    return file


def test_progress_is_remembered_and_its_loss_is_harmless(own_progress: Path) -> None:
    assert progress.load() == ({}, [])
    assert progress.update("1.4", hints=2) == []
    assert progress.hints_used("1.4") == 2
    own_progress.write_text("{broken")
    entries, warnings = progress.load()
    assert entries == {}
    assert "no work is lost" in warnings[0]
    progress.update("1.5", verdict="pass")
    assert progress.entry("1.5") == {"verdict": "pass"}


def test_unwritable_progress_is_a_warning(
    own_progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(progress.tempfile, "mkstemp", refuse)
    assert "could not be saved" in progress.update("1.1", hints=1)[0]


def test_fingerprint_ignores_other_exercises(tmp_path: Path) -> None:
    exercise = COURSE.exercise("1.4")
    text = templates.template_of(exercise)
    copy = tmp_path / exercise.phase.folder / exercise.template_path.name
    copy.parent.mkdir()
    seen = []
    for old, new in (("", ""), ('"exercise 1.3"', '"x"'), ('"exercise 1.4"', '"x"')):
        copy.write_text(text.replace(old, new) if old else text)
        moved = type(exercise)(**{**vars(exercise), "folder": tmp_path})
        solution = tmp_path / "solutions" / exercise.phase.folder
        solution.mkdir(parents=True, exist_ok=True)
        (solution / "trainer.py").write_text(exercise.solution_path.read_text())
        seen.append(progress._without(ast.parse(copy.read_text()), {"broadcast_model_state"}))
        assert moved.template_path == copy
    dumps = [ast.dump(tree) for tree in seen]
    assert dumps[0] == dumps[1]
    assert dumps[0] != dumps[2]


SHARED = '''class C:
    """Both exercises write in step()."""

    @torch.no_grad()
    def step(self):
        """Contract."""
        # --- exercise 1.1: start
        # Step 1: begin
        x = 1
        # --- exercise 1.1: end
        given = x
        # --- exercise 1.2: start
        if given:
            return secret
        # --- exercise 1.2: end
        # --- exercise 1.1: start
        return given
        # --- exercise 1.1: end

    def other(self):
        return 3


def last():
    # --- exercise 1.1: start
    return 4
    # --- exercise 1.1: end
'''
STEP = '''@torch.no_grad()
def step(self):
    """Contract."""
    # Step 1: begin
    x = 1
    given = x
{}
    return given'''


def test_a_solution_is_shown_in_whole_functions_without_markers() -> None:
    theirs = "    if given:\n        return secret"
    both = [
        Excerpt("C.step", 4, STEP.format(theirs)),
        Excerpt("last", 24, "def last():\n    return 4"),
    ]
    assert excerpts_of(SHARED, "1.1") == both
    assert excerpts_of(SHARED, "1.2") == both[:1]
    hidden = excerpts_of(SHARED, "1.1", secret={"1.2"})[0]
    assert hidden.text == STEP.format("    ...  # exercise 1.2")


@pytest.mark.parametrize("phase", COURSE.phases, ids=lambda p: str(p.number))
def test_every_solution_can_be_shown(phase: Phase) -> None:
    """Each function once, all steps, nothing of the markers."""
    for exercise in phase.exercises:
        shown = excerpts(exercise)
        assert [each.name for each in shown] == functions_of(exercise)
        assert not any("# --- " in each.text for each in shown)
        lines = exercise.solution_path.read_text(encoding="utf-8").splitlines()
        own = [r for r in regions_of("\n".join(lines)) if r.exercise == exercise.id]
        steps = {
            lines[i].strip() for r in own for i in range(r.start, r.end) if "# Step" in lines[i]
        }
        assert steps <= {line.strip() for each in shown for line in each.text.splitlines()}
        for each in shown:
            ast.parse(each.text)
            assert lines[each.line - 1].strip() == each.text.splitlines()[0]


def test_an_index_stands_for_the_solutions_where_there_are_none(tmp_path: Path) -> None:
    """It says the same of every exercise, and holds names and numbers only."""
    shutil.copy(root() / "course.toml", tmp_path)
    elsewhere = load_course(tmp_path).exercise("1.4")
    with pytest.raises(ValueError, match=r"neither .*trainer\.py nor course\.index\.json is here"):
        functions_of(elsewhere)
    text = write_index(COURSE, tmp_path).read_text()
    for here, there in zip(COURSE.exercises, load_course(tmp_path).exercises, strict=True):
        assert (functions_of(there), places_of(there)) == (functions_of(here), places_of(here))
    words = set(re.findall(r"[^\W\d]\w*", text))
    named = {word for e in COURSE.exercises for name in functions_of(e) for word in name.split(".")}
    assert words - named == {"exercises", "functions", "regions"}
