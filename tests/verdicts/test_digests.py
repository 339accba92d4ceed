"""What makes a recorded verdict stale: all that it rests on, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.course.catalogue import check_files, load_course, root
from tests.distlab import rooms
from tests.verdicts import digests
from tests.verdicts.digests import ALTERNATIVES, CHANGES, MESSAGES, MUTANTS, NOTEBOOKS, Verdict
from tests.verdicts.sources import Sources

EXERCISE = """
[[exercise]]
id = "{}"
title = "{}"
file = "{}"
points = 5
uses = {}
requires = []
hints = []
minutes = 10
"""
COURSE = """
[[phase]]
number = 1
title = "One"
folder = "phase1_one"
status = "ready"
"""
MUTANT = """
from distlab.grading.wrong import Mutant

# a comment
MUTANTS = [
    Mutant(id="a", exercise="1.1", mistake="", text="x", becomes="y", caught_by="c", told_as="t"),
    Mutant(
        id="b", exercise="1.2", mistake="", text="x", caught_by="c", told_as="t",
        becomes="import solutions.phase1_one.apart",
    ),
]
"""
CHECK = "def test(): ...\n"
# a course of three exercises: the second uses the first
FILES = {
    "course.toml": COURSE
    + EXERCISE.format("1.1", "First", "first", [])
    + EXERCISE.format("1.2", "Second", "second", ["1.1"])
    + EXERCISE.format("1.3", "Third", "third", []),
    "pyproject.toml": '[project]\nversion = "1"\n[tool.pytest.ini_options]\naddopts = "-q"\n',
    "distlab/__init__.py": '"""Words."""\n',
    "distlab/grading/__init__.py": "",
    "distlab/grading/run.py": '"""Words."""\n\ndef f():\n    # why\n    from ..host import clock\n',
    "distlab/host/__init__.py": "",
    "distlab/host/clock.py": 'COMMAND = "-m", "distlab.host.agent"\nDATA = FOLDER / "clusters"\n',
    "distlab/host/agent.py": 'PROGRAM = HERE.with_name("switch.py")\n',
    "distlab/host/switch.py": f'NO_FILES = "/etc/passwd", "a/../../../x", "{"x/" * 200}"\n',
    "distlab/commands/__init__.py": "",
    "distlab/commands/learn.py": "from ..grading import run\n",
    "clusters/one.yaml": "bandwidth: 1\n",
    "given/__init__.py": "",
    "given/group.py": "",
    "solutions/__init__.py": "",
    "solutions/phase1_one/__init__.py": "",
    "solutions/phase1_one/first.py": '"""Words."""\nfrom given.group import Group\n',
    "solutions/phase1_one/second.py": "from .helper import help\n",
    "solutions/phase1_one/third.py": '"""The first."""\nraise ValueError("the first")\n',
    "solutions/phase1_one/helper.py": "",
    "solutions/phase1_one/apart.py": "",
    "solutions/phase1_one/program.py": "",
    "tests/conftest.py": "",
    "tests/phase1/rounds.py": "",
    "tests/phase1/test_first.py": '@exercise("1.1", "gloo")\n' + CHECK,
    "tests/phase1/test_second.py": 'from tests.phase1.rounds import r\n@exercise("1.2", "gloo")\n'
    + CHECK,
    "tests/phase1/test_third.py": '@exercise("1.3", "gloo")\n' + CHECK + 'impl.module("program")\n',
    "tests/phase1/contract/first.toml": "",
    MUTANTS: "import distlab.grading.run\n",
    MESSAGES: "",
    CHANGES: "",
    ALTERNATIVES: "",
    "tests/mutants/phase1_one.py": MUTANT,
    "tests/mutants/table/phase1_second.toml": "",
    "tests/alternatives/other/first.py": "# for: 1.1\n",
    "tests/alternatives/other/second.py": "# for: 1.2\nfrom .apart import a\n",
    "tests/alternatives/other/beside.py": "",
    NOTEBOOKS: "",
    "notebooks/one.py": "from distlab.host import clock\n",
    "notebooks/one.ipynb": "{}",
    "phase1_one/template_first.py": "",
    "scripts/website/page.py": "",
    "tests/distlab/test_network.py": "from distlab.host import clock\n\n"
    "pytestmark = pytest.mark.verdict\n",
}
Edit = Callable[[str], str]


def course(home: Path, edits: dict[str, Edit]) -> Sources:
    for name, text in FILES.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edits.get(name, str)(text), encoding="utf-8")
    return Sources(home)


def hashes(sources: Sources) -> dict[str, str]:
    """The digest of each verdict, by names as "1.1 mutants"."""
    short = {MUTANTS: "mutants", MESSAGES: "messages", CHANGES: "table", ALTERNATIVES: "others"}
    short[NOTEBOOKS] = "notebook"
    every = digests.verdicts(sources)
    return {f"{v.subject} {short.get(v.file, 'checks')}": v.digest(sources) for v in every}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return hashes(course(tmp_path_factory.mktemp("course"), {}))


def all_of(*exercises: str) -> set[str]:
    kinds = ("checks", "mutants", "messages", "table", "others")
    return {f"{e} {kind}" for e in exercises for kind in kinds}


def longer(text: str) -> str:
    return text + " "


NOTEBOOK, FILE = {"one notebook"}, {"test_network checks"}
BOTH = NOTEBOOK | FILE
EVERY = all_of("1.1", "1.2", "1.3") | NOTEBOOK | FILE
MUTANTS_OF_ALL = {"1.1 mutants", "1.2 mutants", "1.3 mutants"}
EDITS: list[tuple[str, Edit, set[str]]] = [
    ("tests/phase1/test_first.py", longer, all_of("1.1")),
    ("tests/phase1/rounds.py", longer, all_of("1.2")),
    ("tests/conftest.py", longer, EVERY),
    ("solutions/phase1_one/first.py", longer, all_of("1.1", "1.2") | BOTH),
    ("solutions/phase1_one/helper.py", longer, all_of("1.2") | BOTH),
    (
        "solutions/phase1_one/apart.py",
        longer,
        {"1.1 others", "1.2 others", "1.2 mutants"} | BOTH,
    ),
    ("solutions/phase1_one/program.py", longer, all_of("1.3") | BOTH),
    ("given/group.py", longer, all_of("1.1", "1.2") | BOTH),
    ("tests/mutants/phase1_one.py", lambda t: t.replace('"y"', '"Y"'), {"1.1 mutants"}),
    ("tests/mutants/phase1_one.py", longer, set()),
    (MUTANTS, longer, MUTANTS_OF_ALL),
    (NOTEBOOKS, longer, NOTEBOOK),
    ("tests/distlab/test_network.py", longer, FILE),
    ("notebooks/one.ipynb", longer, NOTEBOOK),
    ("phase1_one/template_first.py", longer, BOTH),
    ("tests/phase1/contract/first.toml", longer, {"1.1 messages"}),
    ("tests/mutants/table/phase1_second.toml", longer, {"1.2 table"}),
    ("tests/alternatives/other/second.py", longer, {"1.1 others", "1.2 others"}),
    ("tests/alternatives/other/beside.py", longer, {"1.1 others", "1.2 others"}),
    ("distlab/grading/run.py", lambda t: t + "x = 1\n", MUTANTS_OF_ALL | FILE),
    ("distlab/grading/run.py", lambda t: t.replace("Words", "W").replace("why", "w"), set()),
    ("distlab/host/clock.py", lambda t: t + "x = 1\n", MUTANTS_OF_ALL | BOTH),
    ("distlab/host/agent.py", lambda t: t + "x = 1\n", MUTANTS_OF_ALL | BOTH),
    ("distlab/host/switch.py", lambda t: t + "x = 1\n", MUTANTS_OF_ALL | BOTH),
    ("clusters/one.yaml", longer, MUTANTS_OF_ALL | BOTH),
    ("distlab/commands/learn.py", lambda t: t + "x = 1\n", FILE),
    ("scripts/website/page.py", lambda t: t + "x = 1\n", set()),
    ("pyproject.toml", lambda t: t.replace('"-q"', '"-v"'), EVERY),
    ("pyproject.toml", lambda t: t.replace('"1"', '"2"'), set()),
    ("course.toml", lambda t: t.replace("First", "The first"), all_of("1.1") | BOTH),
    ("course.toml", lambda t: t.replace("minutes = 10", "minutes = 20"), set()),
]


@pytest.mark.parametrize(("file", "edit", "expected"), EDITS)
def test_an_edit_makes_stale_what_rests_on_it(
    tmp_path: Path, before: dict[str, str], file: str, edit: Edit, expected: set[str]
) -> None:
    assert edit(FILES[file]) != FILES[file]
    after = hashes(course(tmp_path, {file: edit}))
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == expected


def test_a_file_that_changes_after_it_was_read_is_noticed(tmp_path: Path) -> None:
    sources = course(tmp_path, {})
    paths = next(iter(digests.verdicts(sources))).paths
    assert sources.unchanged(paths)
    (tmp_path / "solutions/phase1_one/first.py").write_text("longer than before" * 9)
    assert not sources.unchanged(paths)


@pytest.fixture(scope="module")
def known() -> list[Verdict]:
    """The verdicts of this course."""
    return list(digests.verdicts(Sources(root())))


def graded(known: list[Verdict]) -> list[Verdict]:
    """Those on exercises: notebooks and simulations use all rooms."""
    ids = {exercise.id for exercise in load_course().exercises}
    return [verdict for verdict in known if verdict.subject in ids]


def marked_alone() -> set[str]:
    """The files that are their own subject."""
    names = {path.relative_to(root()).as_posix() for path in digests.marked_files(root())}
    return names - {*digests.WITH_SUBJECTS}


def test_every_exercise_rests_on_its_own_files(known: list[Verdict]) -> None:
    course_ = load_course()
    ready = [e for e in course_.exercises if e.phase.ready]
    files = (MUTANTS, MESSAGES, CHANGES, ALTERNATIVES)
    keys = {(file, e.id) for file in files for e in ready}
    keys |= {(path.relative_to(root()).as_posix(), e.id) for e in ready for path in check_files(e)}
    assert {v.key for v in graded(known)} == keys
    rest = {v.key for v in known} - keys
    assert {file for file, _ in rest} == {NOTEBOOKS, *marked_alone()}
    others = digests.alternatives(root())
    for verdict in graded(known):
        exercise = course_.exercise(verdict.subject)
        used = {course_.exercise(name).solution_path for name in exercise.uses}
        own = {exercise.solution_path, root() / verdict.file, root() / "tests" / "conftest.py"}
        assert verdict.paths >= own | used | {*check_files(exercise)}
        assert verdict.file != ALTERNATIVES or verdict.paths >= {*others[verdict.subject]}


def test_notebooks_and_simulations_rest_on_solutions_and_clusters(known: list[Verdict]) -> None:
    """On those that they start by a name in a string, too."""
    solutions = {*root().glob("solutions/*/*.py")}
    clusters = {*root().glob("clusters/*.yaml")}
    assert solutions
    assert clusters
    for verdict in known:
        if verdict.file == NOTEBOOKS:
            assert verdict.paths >= solutions
    (folded,) = [v for v in known if v.subject == "test_fold"]
    assert folded.paths >= clusters | {root() / "distlab" / "simulate" / "plan.py"}


def test_rooms_after_grading_and_texts_make_nothing_stale(known: list[Verdict]) -> None:
    later = rooms.ROOMS[rooms.ROOMS.index("grading") + 1 :]
    assert later[-2:] == ("commands", "cli")
    outside = (*(f"distlab/{name}" for name in later), "scripts/website", "labs/", "docs/")
    paths = frozenset[Path]().union(*(verdict.paths for verdict in graded(known)))
    names = [path.relative_to(root()).as_posix() for path in paths]
    assert not [name for name in names if name.startswith(outside) or name.endswith(".md")]


def test_grading_is_what_all_rest_on(known: list[Verdict]) -> None:
    """Modules that are only started, too: a network's switch, a sandbox's agent."""
    names = ("grading/plugin", "virtual/scheduler", "netcluster/switch", "sandbox/agent")
    modules = {root() / "distlab" / f"{name}.py" for name in names}
    for verdict in graded(known):
        assert verdict.paths >= modules
