"""Every promise of every exercise has a check, and every axis a check or a reason."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from distlab.cli import main
from distlab.course.catalogue import Exercise, Phase, load_course
from distlab.grading import contract as contracts
from distlab.grading.contract import AXES, contract

EXERCISES = [e for e in load_course().exercises if e.phase.ready]

SOLUTION = '''
def double(x: int) -> int:
    """Twice ``x``. Raises ValueError if ``x`` is negative.

    Cost: no message.
    """
    # --- exercise 9.1: start
    return 2 * x
    # --- exercise 9.1: end
'''
CHECKS = '''
@exercise("9.1", "virtual", asserts="twice cost")
def test_double(impl, run):
    """It doubles."""
'''
ENTRY = """
["9.1".promises.double]
"Twice" = "twice"
"Raises" = "refusals"
"Cost" = "cost"
["9.1".excluded]
"""


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_contract_is_complete(exercise: Exercise) -> None:
    assert contract(exercise).problems == []


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exercise:
    """An exercise of its own project: a solution, one check, and a contract file."""
    monkeypatch.setattr(contracts, "root", lambda: tmp_path)
    (tmp_path / "solutions" / "nine").mkdir(parents=True)
    (tmp_path / "solutions" / "nine" / "double.py").write_text(SOLUTION)
    checks = tmp_path / "test_double.py"
    checks.write_text(CHECKS)
    monkeypatch.setattr(contracts, "check_files", lambda exercise: [checks])
    phase = Phase(9, "nine", "nine", "ready")
    return Exercise(
        id="9.1",
        title="Double",
        file="double",
        points=1,
        uses=(),
        requires=(),
        hints=(),
        phase=phase,
        folder=tmp_path,
    )


def written(toy: Exercise, entry: str, excluded: dict[str, str]) -> list[str]:
    folder = toy.folder / "tests" / "phase9" / "contract"
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f'{axis} = "{reason}"\n' for axis, reason in excluded.items())
    (folder / "double.toml").write_text(entry + lines)
    contracts._entries.cache_clear()
    return contract(toy).problems


REASON = "It is one line of arithmetic."
OTHERS = {axis: REASON for axis in AXES if axis not in ("cost", "refusals")}


def test_promise_without_a_check(toy: Exercise) -> None:
    assert written(toy, ENTRY, OTHERS) == [
        "no check asserts 'refusals'",
        "axis refusals: neither a check nor a reason",
    ]


def test_sentence_without_an_entry(toy: Exercise) -> None:
    entry = ENTRY.replace('"Raises" = "refusals"\n', "")
    assert written(toy, entry, OTHERS | {"refusals": REASON}) == [
        "double: no entry for the sentence: Raises ValueError if ``x`` is negative."
    ]


def test_entry_without_a_sentence(toy: Exercise) -> None:
    entry = ENTRY.replace("Raises", "Returns")
    assert "double: its docstring has no sentence: Returns" in written(toy, entry, OTHERS)


def test_check_of_what_nobody_promises(toy: Exercise) -> None:
    entry = ENTRY.replace('"twice"', '""')
    problems = written(toy, entry, OTHERS)
    assert "test_double asserts 'twice', which no sentence promises" in problems


def test_excuse_is_no_reason(toy: Exercise) -> None:
    problems = written(toy, ENTRY, OTHERS | {"refusals": "n/a"})
    assert "axis refusals: neither a check nor a reason" in problems


def test_keys_are_one_string(toy: Exercise) -> None:
    (toy.folder / "test_double.py").write_text(CHECKS.replace('"twice cost"', '"twice" + " cost"'))
    problems = written(toy, ENTRY, OTHERS)
    assert "test_double: asserts= must be one string in quotes" in problems


def test_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    main(["contract", "1.4"])
    printed = capsys.readouterr().out
    assert "After the call ``p.grad`` is" in printed
    for axis in AXES:
        assert textwrap.indent(axis, "    ") in printed
