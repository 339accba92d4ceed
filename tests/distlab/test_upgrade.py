"""A folder comes to a new version of the course with the learner's work: hand-outs and clones."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from distlab.course import clones, handout, templates, upgrade
from distlab.course.catalogue import load_course, root
from distlab.course.version import course_version


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
