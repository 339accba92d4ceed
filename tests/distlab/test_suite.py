"""How the project's own tests are spread over workers."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

from distlab.course.catalogue import root
from distlab.grading.wrong import all_mutants
from tests import suite
from tests.alternatives.test_alternatives import CASES


def item(file: str, name: str) -> SimpleNamespace:
    """As much of a test as the plugin looks at."""
    return SimpleNamespace(path=root() / file, name=name, nodeid=f"{file}::test_it[{name}]")


def test_what_waits_comes_first_on_one_worker_and_short_tests_last() -> None:
    mutants = [item("tests/mutants/test_mutants.py", str(n)) for n in range(3)]
    check = item("tests/phase1/test_trainer.py", "check")
    notebook = item("tests/notebooks/test_notebooks.py", "notebook")
    shared = item("tests/phase4/test_imagenet_trainer.py", "shared")
    waits = [item("tests/distlab/test_cluster_run.py", "w1")]
    waits += [item("tests/phase4/test_watchdog.py", "w2")]
    waits += [item("tests/mutants/test_mutants.py", suite.WAITING[0])]
    items = [*mutants, waits[2], check, waits[0], notebook, shared, waits[1]]
    options = SimpleNamespace(getoption=lambda name: False)
    hook = suite.pytest_collection_modifyitems(options, items)
    next(hook)
    assert next(hook, None) is None
    names = [suite.WAITING[0], "w1", "w2", "notebook", "shared", "check", "2", "1", "0"]
    assert [i.name for i in items] == names
    groups = ["", "waits", "waits", "", "test_imagenet_trainer", "", "", "", ""]
    assert [suite.group(i.path) for i in items] == groups


def test_groups_stay_on_one_worker() -> None:
    """Told from a test's file: xdist's own marks of groups are lost on some versions of pytest."""
    scope = functools.partial(suite.Groups._split_scope, None)
    assert scope("tests/phase4/test_watchdog.py::test_hung_ranks[gloo]") == "waits"
    assert scope("tests/phase4/test_train_elastic.py::test_it") == "waits"
    assert scope(f"tests/mutants/test_mutants.py::test_it[{suite.WAITING[0]}]") == "waits"
    alone = "tests/phase1/test_trainer.py::test_it[a::b]"
    assert scope(alone) == alone


def test_one_wrong_implementation_per_exercise() -> None:
    items = [item("tests/mutants/test_mutants.py", name) for name in "abcd"]
    for one, exercise in zip(items, ("1.1", "1.1", "1.2", "1.1"), strict=True):
        one.callspec = SimpleNamespace(params={"mutant": SimpleNamespace(exercise=exercise)})
    other = item("tests/mutants/test_mutants.py", "ids_are_unique")
    assert [i.name for i in suite.one_each([*items, other])] == ["a", "c", "ids_are_unique"]


def test_files_that_are_named_exist() -> None:
    """A file that was renamed would wait beside the others again."""
    for pattern in (*suite.WAITS, *suite.LONG, *suite.SHORT):
        assert list(Path(root()).glob(pattern)), pattern
    mutants = {mutant.id for mutant in all_mutants()}
    alternatives = {f"{folder.name}-{exercise}" for folder, exercise in CASES}
    assert set(suite.WAITING) <= mutants | alternatives
    assert suite.pytest_xdist_auto_num_workers() >= 2
