"""A learner's work goes along to a new version of the course: region by region, and never lost."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from distlab.course import carry, clones, frames, handout, templates, upgrade
from distlab.course.carry import Old
from distlab.course.catalogue import load_course, root
from distlab.course.version import course_version

BLANK = '''"""A template."""

import torch


def double(x: int) -> int:
    """Twice x."""
    # Step 1: think
    raise NotImplementedError("exercise 9.1")


class Box:
    """A box."""

    def both(self) -> int:
        """Two places."""
        # Step 1: first
        raise NotImplementedError("exercise 9.2")
        self.n += 1
        # Step 2: second
        raise NotImplementedError("exercise 9.2")
        return self.n


def last(x: int) -> int:
    """It is the last one."""
    raise NotImplementedError("exercise 9.3")
'''
RAISE = '    raise NotImplementedError("exercise 9.{}")\n'
MINE = (
    BLANK.replace(RAISE.format(1), "    answer = x + x\n    return answer\n")
    .replace("        # Step 2: second\n    " + RAISE.format(2), "        self.n *= 2  # mine\n")
    .replace("import torch\n", "import math\n\nimport torch\n")
    .replace("class Box:", "def helper() -> int:\n    return 3\n\n\nclass Box:")
)


def carried(new: str, mine: str = MINE, name: str = "t.py", **was: str) -> carry.Carried:
    return carry.carry(name, new, {"t.py": Old("t.py", BLANK, mine)}, was)


def test_an_untouched_template_becomes_the_new_one() -> None:
    new = BLANK.replace("Twice x", "Two times x").replace("# Step 1: think", "# Step 1: think well")
    found = carried(new, BLANK)
    assert (found.text, found.kept, found.conflicts) == (new, [], [])


def test_nothing_new_changes_nothing() -> None:
    found = carried(BLANK)
    assert (found.text, found.kept, found.conflicts) == (MINE, ["9.1", "9.2"], [])


def test_own_code_goes_along_when_its_surroundings_change() -> None:
    """Docstring, steps, imports and the order of functions are the course's; helpers are kept."""
    new = BLANK.replace("Twice x.", "Two times x, exactly.").replace("Step 1: think", "Step 1: add")
    new = new.replace('"""A template."""', '"""A better template."""')
    new = new.replace("class Box:", "LIMIT = 3\n\n\nclass Box:")
    found = carried(new)
    for line in ("    answer = x + x\n", "self.n *= 2  # mine\n", "def helper()", "import math\n"):
        assert line in found.text, line
    for line in ("Two times x, exactly.", "A better template.", "LIMIT = 3"):
        assert line in found.text, line
    assert found.conflicts == []
    assert len(found.notes) == 2  # steps and docstring of 9.1
    compile(found.text, "t.py", "exec")


def test_a_changed_signature_is_a_conflict_with_all_three_texts() -> None:
    new = BLANK.replace("def double(x: int)", "def double(x: int, times: int = 2)")
    found = carried(new)
    assert found.kept == ["9.2"]
    assert RAISE.format(1) in found.text
    (conflict,) = found.conflicts
    assert "exercise 9.1, double" in conflict.where
    assert "def double(x: int) -> int:" in conflict.old
    assert "answer = x + x" in conflict.own
    assert "times: int = 2" in conflict.new


def test_code_moves_with_its_exercise_to_another_file_and_another_number() -> None:
    """``was_in`` of the map says which exercise it was a part of."""
    moved = BLANK[BLANK.index("class Box") :].replace("9.2", "9.7").replace("9.3", "9.8")
    found = carried(moved, name="elsewhere.py", **{"9.7": "9.2"})
    assert "self.n *= 2  # mine" in found.text
    assert found.kept == ["9.7"]
    assert {key for _, key in found.used} >= {("Box.both", 0), ("Box.both", 1)}


def test_a_renamed_function_is_a_conflict() -> None:
    found = carried(BLANK.replace("def double", "def twice"))
    assert [(c.why, "answer = x + x" in c.own) for c in found.conflicts] == [
        ("its signature or the name of the function changed", True)
    ]


@pytest.mark.parametrize(
    ("old", "becomes"),
    [
        ("    # Step 1: think\n    answer", "    x = int(x)\n    answer"),  # steps are no frame
        ('    """Twice x."""\n', '    """Twice x."""\n    # my note\n'),
    ],
)
def test_what_a_learner_does_inside_a_region_is_hers(old: str, becomes: str) -> None:
    mine = MINE.replace(old, becomes)
    assert mine != MINE
    assert carried(BLANK, mine).text == mine


def test_a_changed_frame_of_a_function_is_a_conflict_and_the_rest_goes_along() -> None:
    mine = MINE.replace("        self.n += 1\n", "        self.n += 5\n")
    found = carried(BLANK, mine)
    assert found.kept == ["9.1"]
    assert ["self.n += 5" in c.own for c in found.conflicts] == [True]
    assert found.text == MINE.replace(
        "        self.n *= 2  # mine\n", "        # Step 2: second\n    " + RAISE.format(2)
    )


def test_both_changed_the_same_lines() -> None:
    mine = MINE.replace('"""A template."""', '"""My file."""')
    found = carried(BLANK.replace('"""A template."""', '"""Their file."""'), mine)
    assert "Their file." in found.text
    (conflict,) = found.conflicts
    assert '"""My file."""' in conflict.own
    assert "import math" in conflict.own  # beside it, so it is told along
    assert found.kept == ["9.1", "9.2"]


def test_functions_in_another_order_and_broken_files_are_carried_as_they_are() -> None:
    head, tail = MINE.split("class Box:")
    box, last = tail.split("def last")
    swapped = f"{head}def last{last}\n\nclass Box:{box.rstrip()}\n"
    assert carried(BLANK, swapped).text == swapped
    broken = MINE.replace("    answer = x + x\n", "    answer = (x +\n")
    assert carried(BLANK, broken).text == broken


def test_a_deleted_function_is_put_back_blank() -> None:
    start, end = MINE.index("def last"), len(MINE)
    found = carried(BLANK, MINE[:start].rstrip() + "\n" + MINE[end:])
    assert RAISE.format(3) in found.text
    assert "answer = x + x" in found.text


def test_regions_are_found_in_every_template() -> None:
    """Each ``raise`` of each template is a region, in the file's order, with its own name."""
    for exercise in templates.files_of(load_course()):
        text = templates.template_of(exercise)
        found = frames.gaps(text)
        raises = text.splitlines()
        wanted = [line for line in raises if frames.RAISE.match(line)]
        assert [gap.text[-1] for gap in found] == wanted, exercise.file
        assert len({gap.key for gap in found}) == len(found)
        assert frames.opened(text, text).closed == []


def solved(exercise_id: str, folder: Path) -> Path:
    """The exercise's file of a hand-out, solved with the lines of the solution."""
    exercise = load_course().exercise(exercise_id)
    lines = exercise.solution_path.read_text().splitlines()
    text = "\n".join(templates.sibling_import(each, exercise.phase.number) for each in lines)
    path = folder / exercise.phase.folder / exercise.template_path.name
    path.write_text(text + "\n")
    return path


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two hand-outs of this course; in the second a docstring, a check and the version differ."""
    folder = tmp_path_factory.mktemp("versions")
    course = load_course()
    made = []
    for name, ids in (("one", ["1.1", "1.4"]), ("two", ["1.1", "1.2", "1.3", "1.4"])):
        target = folder / name
        target.mkdir()
        handout._fill(course, handout.chosen(course, [], ids), root(), target)
        made.append(target)
    for path in (made[1] / "blank/phase1_data_parallel/template_trainer.py",):
        path.write_text(
            path.read_text().replace("import torch\n", "import math\n\nimport torch\n", 1)
        )
    project = made[1] / "pyproject.toml"
    version = course_version(root())
    project.write_text(project.read_text().replace(f'version = "{version}"', 'version = "9.9"'))
    for target in made:
        handout.write_manifest(load_course(target), target)
    return made[0], made[1]


def test_a_hand_out_becomes_the_newer_one_with_the_work_in_it(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = versions
    mine = tmp_path / "mine"
    subprocess.run(["cp", "-r", str(one), str(mine)], check=True)
    trainer = mine / "phase1_data_parallel/template_trainer.py"
    blank = trainer.read_text()
    own = blank.replace('    raise NotImplementedError("exercise 1.4")', "    return own(model)")
    assert own != blank
    trainer.write_text(own)
    (mine / "phase1_data_parallel/template_data_loader.py").unlink()  # counts as blank
    (mine / "tests/conftest.py").write_text("# mine\n")
    (mine / "notes.txt").write_text("mine, too")
    packed = handout._zip(two, tmp_path / "two.zip")
    (tmp_path / "unpacked").mkdir()
    done, copy = upgrade.replace_hand_out(mine, upgrade.unpacked(packed, tmp_path / "unpacked"))
    assert (done.kept, done.conflicts, done.new) == (["1.4"], [], "9.9")
    now = trainer.read_text()
    assert "    return own(model)" in now
    assert "import math\n\nimport torch" in now
    assert (copy / trainer.relative_to(mine)).read_text() == own
    assert (copy / "tests/conftest.py").read_text() == "# mine\n"
    assert (mine / "notes.txt").read_text() == "mine, too"
    assert handout.made_from(mine) == "9.9"
    assert handout.changed_in(mine) == []
    assert (mine / "phase1_data_parallel/template_data_loader.py").is_file()
    assert [e.id for e in upgrade._course(mine).exercises] == ["1.1", "1.2", "1.3", "1.4"]
    with pytest.raises(ValueError, match=r"you have version 9\.9 already"):
        upgrade.replace_hand_out(mine, two)


def test_what_is_no_hand_out_or_a_damaged_one_changes_nothing(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"is no hand-out: it has no handout\.json"):
        upgrade.unpacked(tmp_path, tmp_path)
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(versions[1]), str(damaged)], check=True)
    (damaged / "LICENSE").write_text("")
    with pytest.raises(ValueError, match="damaged, get it again: LICENSE"):
        upgrade.unpacked(damaged, tmp_path)
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as archive:
        archive.writestr("../outside", "")
    with pytest.raises(ValueError, match="outside of it"):
        upgrade.unpacked(tmp_path / "bad.zip", tmp_path)
    assert not (tmp_path.parent / "outside").exists()


# -- clones ---------------------------------------------------------------------------------------
MAP = """
[[phase]]
number = 1
title = "One"
folder = "phase1"
status = "ready"

[[exercise]]
id = "1.1"
title = "Double"
file = "double"
points = 1
uses = []
requires = []
hints = []
"""
SOLUTION = '''"""Double."""


def double(x: int) -> int:
    """Twice x."""
    # --- exercise 1.1: start
    # Step 1: add
    return x + x
    # --- exercise 1.1: end
'''


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def publish(folder: Path, solution: str, version: str) -> None:
    """Write and commit a course of one exercise."""
    (folder / "solutions/phase1").mkdir(parents=True, exist_ok=True)
    (folder / "phase1").mkdir(exist_ok=True)
    (folder / "solutions/phase1/double.py").write_text(solution)
    (folder / "phase1/template_double.py").write_text(templates.generate(solution, 1))
    (folder / "course.toml").write_text(MAP)
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    git(folder, "add", "-A")
    git(folder, "commit", "-m", version)


@pytest.fixture
def clone(tmp_path: Path) -> tuple[Path, Path]:
    """A course, and a learner's clone of its first version in which 1.1 is written."""
    course, mine = tmp_path / "course", tmp_path / "mine"
    course.mkdir()
    git(course, "init", "-b", "main")
    publish(course, SOLUTION, "1")
    git(tmp_path, "clone", str(course), str(mine))
    for key in ("name", "email"):
        git(mine, "config", f"user.{key}", "a")
    path = mine / "phase1/template_double.py"
    raised = 'raise NotImplementedError("exercise 1.1")'
    path.write_text(path.read_text().replace(raised, "return 2 * x  # mine"))
    publish(course, SOLUTION.replace("Twice x.", "Two times x."), "2")
    return course, mine


@pytest.mark.parametrize("committed", [False, True])
def test_a_clone_gets_the_new_version_with_the_work_in_it(
    clone: tuple[Path, Path], tmp_path: Path, committed: bool
) -> None:
    """Also where the learner has committed her work."""
    _, mine = clone
    if committed:
        git(mine, "commit", "-am", "my work")
    done, copy = clones.merge_clone(mine, "", tmp_path)
    text = (mine / "phase1/template_double.py").read_text()
    assert '"""Two times x."""' in text
    assert "return 2 * x  # mine" in text
    assert (done.old, done.new, done.kept) == ("1", "2", ["1.1"])
    assert "Two times x." in (mine / "solutions/phase1/double.py").read_text()
    assert "Twice x." in (copy / "phase1/template_double.py").read_text()
    with pytest.raises(ValueError, match="nothing newer"):
        clones.merge_clone(mine, "", tmp_path)


def test_a_merge_that_git_refuses_leaves_everything_as_it_was(
    clone: tuple[Path, Path], tmp_path: Path
) -> None:
    _, mine = clone
    (mine / "pyproject.toml").write_text('[project]\nversion = "mine"\n')
    before = (mine / "phase1/template_double.py").read_text()
    with pytest.raises(ValueError, match=r"pyproject\.toml.*your files are as they were"):
        clones.merge_clone(mine, "", tmp_path)
    assert (mine / "phase1/template_double.py").read_text() == before
    assert 'version = "mine"' in (mine / "pyproject.toml").read_text()
