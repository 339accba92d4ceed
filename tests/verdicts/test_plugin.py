"""Which tests the record lets out, what comes into it, and what is said about it."""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.course.catalogue import root
from tests.verdicts import digests, plugin, record

FILES = digests.WITH_SUBJECTS


class Item(SimpleNamespace):
    """As much of a test as the plugin looks at."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def item(file: str, name: str, **params: Any) -> Item:
    marked = bool(params)
    return Item(
        name=name,
        nodeid=f"{file}::test_it[{name}]",
        path=root() / file,
        callspec=SimpleNamespace(params=params),
        user_properties=[],
        get_closest_marker=lambda name: marked or None,
    )


def mutants(*exercises: str) -> list[Item]:
    named = ((n, SimpleNamespace(exercise=e)) for n, e in enumerate(exercises))
    return [item(digests.MUTANTS, f"m{n}", mutant=mutant) for n, mutant in named]


def test_tests_with_a_known_verdict_are_left_out_but_one_of_each_exercise() -> None:
    items = [*mutants("1.1", "1.1", "1.2", "1.2", "1.1"), item("tests/test_other.py", "other")]
    known = {(digests.MUTANTS, "1.1")}
    kept = plugin.chosen(items, known, writes=False)
    assert [i.name for i in kept] == ["m0", "m2", "m3", "other"]
    assert plugin.chosen(items, set(), writes=False) == items
    elsewhere = {(digests.ALTERNATIVES, "1.1")}
    assert plugin.chosen(items, elsewhere, writes=False) == items
    assert [i.name for i in plugin.chosen(items, known, writes=True)] == ["m2", "m3"]


def test_a_fixed_sample_of_the_others_runs() -> None:
    items = [item(digests.ALTERNATIVES, f"a{n}", exercise="1.1") for n in range(200)]
    drawn = plugin.chosen(items, {(digests.ALTERNATIVES, "1.1")}, writes=False)
    assert drawn == plugin.chosen(items, {(digests.ALTERNATIVES, "1.1")}, writes=False)
    assert 3 <= len(drawn) <= 30
    assert all(zlib.crc32(i.nodeid.encode()) % plugin.EVERY == 0 for i in drawn if i != items[0])
    notebooks = [item(digests.NOTEBOOKS, n, path=Path(f"{n}.ipynb")) for n in ("one", "two")]
    assert plugin.subject_of(notebooks[1]) == "two"
    known = {(digests.NOTEBOOKS, name) for name in ("one", "two")}
    assert notebooks[0] in plugin.chosen(notebooks, known, writes=False), "the first of a file"


def check(name: str, **params: str) -> Item:
    """A check of exercise 1.4."""
    made = item("tests/phase1/test_trainer.py", name, **params)
    marker = SimpleNamespace(args=("1.4",))
    made.get_closest_marker = lambda name: marker if name == "exercise" else None
    return made


def test_checks_of_solutions_are_left_out_where_their_verdict_does_not_hang_on_the_machine() -> (
    None
):
    tiers = ("virtual", "nccl", "gloo", "cuda", "nodes")
    checks = [check(f"{tier}{n}", tier=tier) for tier in tiers for n in range(30)]
    plain = check("plain")
    known = {("tests/phase1/test_trainer.py", "1.4")}
    kept = plugin.chosen([*checks, plain], known, writes=False)
    assert {c.name for c in checks[90:]} | {"plain", "virtual0"} <= {c.name for c in kept}
    assert len(kept) < 60 + 2 + 30
    assert plugin.chosen([*checks, plain], known, writes=True) == []
    assert plugin.chosen([*checks, plain], set(), writes=True) == checks[:90]


def test_tests_of_a_marked_file_have_the_file_as_their_subject() -> None:
    """Their parameters may have any names."""
    file = "tests/distlab/test_fold.py"
    items = [item(file, f"t{n}", exercise=n, path=Path("x")) for n in range(30)]
    del items[0].callspec  # it has no parameters
    assert {plugin.key_of(each) for each in items} == {(file, "test_fold")}
    kept = plugin.chosen(items, {(file, "test_fold")}, writes=False)
    assert items[0] in kept
    assert len(kept) < 8
    assert plugin.chosen(items, set(), writes=True) == items


def test_every_file_with_a_mark_is_known() -> None:
    """A mark elsewhere would let a test out of which the record knows nothing."""
    found = {path.relative_to(root()).as_posix() for path in digests.marked_files(root())}
    assert found >= {*FILES}
    for path in (root() / "tests").rglob("test_*.py"):
        if re.search(r"\bmark\.verdict\b", path.read_text(encoding="utf-8")):
            name = path.relative_to(root()).as_posix()
            assert name in found or "verdicts" in path.parts, name


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A record of its own, and two verdicts of one file."""
    path = tmp_path / "a.txt"
    path.write_text("a")
    found = [digests.Verdict(digests.MUTANTS, e, frozenset({path}), "") for e in ("1.1", "1.2")]

    def read(sources: Any) -> list[digests.Verdict]:
        sources.root = tmp_path
        return found

    monkeypatch.setattr(plugin, "verdicts", read)
    monkeypatch.setattr(plugin, "RECORD", tmp_path / "record.json")
    monkeypatch.setattr(plugin, "root", lambda: tmp_path)
    return tmp_path


def controller(use: str) -> plugin.Controller:
    return plugin.Controller(SimpleNamespace(getoption=lambda name: use))


def told(end: plugin.Controller, exercise: str, total: int, *outcomes: str) -> None:
    """Tests of the exercise end with these outcomes."""
    for outcome in outcomes:
        for when in ("setup", "call", "teardown"):
            passed = when != "call" or outcome == "passed"
            property_ = ("verdict", [digests.MUTANTS, exercise, total])
            end.pytest_runtest_logreport(
                SimpleNamespace(when=when, passed=passed, user_properties=[property_])
            )


def said(end: plugin.Controller) -> str:
    lines: list[str] = []
    end.pytest_terminal_summary(SimpleNamespace(write_line=lines.append))
    assert len(lines) == 1
    return lines[0]


def recorded() -> set[str]:
    return {exercise for _, exercise in record.valid(plugin.RECORD)}


def test_an_exercise_is_recorded_when_all_its_tests_have_passed(home: Path) -> None:
    end = controller("write")
    end.asked = 2
    told(end, "1.1", 2, "passed")
    assert recorded() == set()
    told(end, "1.1", 2, "passed")
    assert recorded() == {"1.1"}, "at once: what comes later may be interrupted"
    told(end, "1.2", 2, "passed")
    assert said(end) == "verdicts: 1 written into record.json, 1 left"
    again = controller("write")
    assert {exercise for _, exercise in again.known} == {"1.1"}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_an_exercise_with_a_failure_or_a_skip_is_not_recorded(home: Path, outcome: str) -> None:
    end = controller("write")
    end.asked = 1
    told(end, "1.2", 3, "passed", outcome, "passed")
    assert recorded() == set()
    assert said(end).endswith(f"A test did not pass, or a file has changed: 1.2 of {FILES[0]}")


def test_a_file_that_changes_meanwhile_is_not_recorded(home: Path) -> None:
    end = controller("write")
    (home / "a.txt").write_text("another")
    told(end, "1.1", 1, "passed")
    assert recorded() == set()
    assert "1.1 of" in said(end)


def test_a_file_that_its_digest_leaves_out_spoils_a_verdict(home: Path) -> None:
    (home / "b.txt").write_text("b")
    for names, left in ((["a.txt"], "0 left"), (["b.txt"], "1 left")):
        end = controller("write")
        end.asked = 1
        (verdict, _) = end.now[digests.MUTANTS, "1.1"]
        verdict = replace(verdict, file="tests/test_one.py", subject="test_one")
        end.now[verdict.key] = verdict, "x"
        told = ("verdict", [*verdict.key, 1])
        opened = ("opened", [str(home / name) for name in names])
        for when in ("call", "teardown"):
            end.pytest_runtest_logreport(
                SimpleNamespace(when=when, passed=True, user_properties=[told, opened])
            )
        assert left in said(end)
    assert said(end).endswith("test_one of tests/test_one.py. Opened, but in no digest: b.txt")


def test_nothing_is_written_unless_it_is_asked_for(home: Path) -> None:
    for use in ("write", "record"):
        end = controller(use)
        told(end, "1.1" if use == "write" else "1.2", 1, "passed")
    assert recorded() == {"1.1"}
    assert end.known == {(digests.MUTANTS, "1.1")}
    end.left_out = 1234
    assert "1,234 tests were left out" in said(end)
    assert "make test-all" in said(end)


@pytest.mark.parametrize("name", ["torch", "python", "system"])
def test_with_another_torch_python_or_system_all_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    told(controller("write"), "1.1", 1, "passed")
    assert controller("record").known
    other = record.environment() | {name: "another"}
    monkeypatch.setattr(record, "environment", lambda: other)
    end = controller("record")
    assert not end.known
    assert "all were taken" in said(end)
    end = controller("write")
    told(end, "1.2", 1, "passed")
    assert recorded() == {"1.2"}, "what was known of the other is gone"


@pytest.mark.parametrize(
    ("names", "one_each"), [(["tests/a.py::test_it"], False), (["tests/a.py"], True)]
)
def test_a_part_of_a_file_gives_no_verdict(names: list[str], one_each: bool) -> None:
    options = {"verdicts": "write", "one_each": one_each, "impl": "solutions"}
    config = SimpleNamespace(args=names, getoption=options.__getitem__)
    with pytest.raises(pytest.UsageError, match="name files"):
        plugin.pytest_configure(config)


def test_nothing_to_write_is_no_error(home: Path) -> None:
    session = SimpleNamespace(exitstatus=5)
    for use, status in (("record", 5), ("write", 0)):
        controller(use).pytest_sessionfinish(session, 5)
        assert session.exitstatus == status


def test_workers_are_told_and_tell(home: Path) -> None:
    told(controller("write"), "1.1", 2, "passed", "passed")
    end = controller("record")
    node = SimpleNamespace(workerinput={})
    end.pytest_configure_node(node)
    config = SimpleNamespace(
        workerinput=node.workerinput,
        workeroutput={},
        getoption=lambda name: "record",
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
    )
    items = mutants("1.1", "1.1", "1.2")
    for each in items:
        each.path = home / digests.MUTANTS
    plugin.Worker(config).pytest_collection_modifyitems(config, items)
    assert [i.name for i in items] == ["m0", "m2"]
    assert items[1].user_properties == [("verdict", [digests.MUTANTS, "1.2", 1])]
    end.pytest_testnodedown(SimpleNamespace(workeroutput=config.workeroutput), None)
    assert end.left_out == 1
    end.pytest_testnodedown(SimpleNamespace(), "crashed")
    assert end.left_out == 1


def test_the_record_is_read_by_everybody(tmp_path: Path) -> None:
    """One line for each verdict, in the order of the course: branches merge line by line."""
    path = tmp_path / "record.json"
    assert record.read(path) == ({}, {})
    hashes = {("b", "1.10"): "x", ("b", "1.9"): "y", ("a", "2.1"): "z"}
    record.write(path, hashes)
    assert record.read(path) == (record.environment(), hashes)
    lines = path.read_text().splitlines()
    assert [line.strip(' ,"').split('"')[0] for line in lines if "." in line][-3:] == [
        *("2.1", "1.9", "1.10")
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]
