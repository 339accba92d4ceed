"""Data of the labs of tests: which checks kill which wrong implementation, what tests earn.

``python -m scripts.lab_tests 3.3`` writes three things about an exercise:

- labs/tests/phase3.toml: how many of the course's own checks kill each wrong implementation. The
  axis of an entry that is there already stays: it is chosen by hand.
- labs/tests/survivors.toml: the changes of the solution that pass all checks (scripts.mutate).
- tests/labs/measured.toml: what a naive test, the course's own checks and an empty test earn, and
  how long the lab takes at most. ``--measured`` writes this alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.course.catalogue import Exercise, check_files, load_course, root
from distlab.grading.contract import AXES, contract
from distlab.grading.session import Request
from distlab.grading.wrong import Mutant, all_mutants, patched
from distlab.host.toml import tomllib
from distlab.labs.written.command import KIND, VALUES, chosen
from distlab.labs.written.finds import SURVIVORS, entry
from distlab.labs.written.jury import Grader, jury

from . import lab_tests_measured as measured
from .mutate.changes import changes, solution_text
from .mutate.table import read

SEED = 1
BY_CAUSE = {
    "accepted": "refusals",
    "late-check": "refusals",
    "cost": "cost",
    "too-many-bytes": "cost",
    "too-few-bytes": "cost",
    "too-much-memory": "resources",
    "dtype": "dtype",
    "group": "group",
}
Entries = dict[str, dict[str, object]]


def killing_checks(grader: Grader, exercise: Exercise, impl: str) -> set[str]:
    """The checks that fail; those that a hang has kept from running are asked alone."""
    failing: set[str] = set()
    left: tuple[str, ...] = ()
    while True:
        request = Request(
            impl=impl,
            device="cpu",
            seed=SEED,
            exercises=(exercise.id,),
            checks=left,
            trusted=True,
            guarded=False,
            once=True,
        )
        (result,) = grader.grade(exercise.phase.number, request).exercises
        failing |= {check.name.split("[")[0] for check in result.failing}
        blocked = {c.name.split("[")[0] for c in result.checks if c.verdict == "blocked"}
        left = tuple(sorted(blocked - failing))
        if not left or len(blocked) == len(result.checks):
            return failing


def axis_of(mutant: Mutant, exercise: Exercise) -> str:
    """A first choice: what its check asserts, or what its cause is about."""
    asserted = contract(exercise).asserted
    axes = [axis for axis in AXES if mutant.caught_by in asserted.get(axis, ())]
    by_cause = BY_CAUSE.get(mutant.causes[0], "")
    return by_cause or (axes[0] if len(axes) == 1 else VALUES)


def entries(exercise: Exercise, known: Entries) -> Entries:
    """An entry for each wrong implementation that no tier of NCCL's rules is needed for."""
    found: Entries = {}
    with jury(exercise, check_files(exercise), course_own=True) as by:
        for mutant in all_mutants():
            if mutant.exercise != exercise.id or mutant.tier:
                continue
            checks = killing_checks(by.grader, exercise, str(by.stand(patched(mutant))))
            axis = known.get(mutant.id, {}).get("axis") or axis_of(mutant, exercise)
            found[mutant.id] = {"axis": axis, "checks": len(checks)}
            print(f"{exercise.id} {mutant.id}: {axis}, killed by {len(checks)}", flush=True)
    return found


def write_entries(exercise: Exercise) -> None:
    """Write those of the exercise; all labs of a phase stand in the order of the course."""
    path = root() / "labs" / KIND / f"phase{exercise.phase.number}.toml"
    data: dict[str, Entries] = _data(path)
    data[exercise.id] = entries(exercise, data.get(exercise.id, {}))
    lines = ["# axis: chosen by hand; checks: how many of the course's own kill it, written by"]
    lines += ["# python -m scripts.lab_tests"]
    for each in _in_order(data):
        lines += ["", f'["{each}"]']
        for name, fields in data[each].items():
            lines.append(f'{name} = {{ axis = "{fields["axis"]}", checks = {fields["checks"]} }}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def survivors(exercise: Exercise) -> list[dict[str, Any]]:
    """The changes that pass all checks, without those that only a GPU could tell."""
    known = read(exercise)[exercise.id].survivors
    with jury(exercise, check_files(exercise), course_own=True) as by:
        return [
            entry(exercise, change.function, known[change.name], change.text)
            for change in changes(exercise, solution_text(exercise))
            if change.name in known
            and "GPU" not in known[change.name]
            and by.judge(change.text, SEED) is None
        ]


def write_survivors(exercise: Exercise) -> None:
    """Write those of the exercise."""
    path, mine = root() / "labs" / KIND / SURVIVORS, survivors(exercise)
    data: dict[str, list[dict[str, Any]]] = _data(path) | {exercise.id: mine}
    lines = [
        "# Changes of solutions that pass all checks, and why they break no promise, written by"
    ]
    lines += ["# python -m scripts.lab_tests"]
    for each in _in_order(data):
        for fields in data[each]:
            lines += ["", f'[["{each}"]]']
            lines += [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in fields.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_measured(exercise: Exercise) -> None:
    """Write what tests of the exercise earn."""
    began = time.monotonic()
    row = measured.row(exercise, chosen()[exercise.id], SEED)
    data: dict[str, dict[str, Any]] = _data(measured.PATH) | {exercise.id: row}
    print(f"{exercise.id}: {row}, after {time.monotonic() - began:.0f} s", flush=True)
    lines = [f"# {line}" for line in measured.ABOUT]
    for each in _in_order(data):
        lines += ["", f'["{each}"]']
        lines += [f"{key} = {json.dumps(value)}" for key, value in data[each].items()]
    measured.PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _data(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _in_order(data: Mapping[str, object]) -> list[str]:
    return [each.id for each in load_course().exercises if data.get(each.id)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data of these exercises."""
    parser = argparse.ArgumentParser(prog="python -m scripts.lab_tests")
    parser.add_argument("exercises", nargs="+", metavar="ID", help="for example 3.3")
    parser.add_argument("--measured", action="store_true", help="only what tests earn")
    parser.add_argument("--survivors", action="store_true", help="only these")
    asked = parser.parse_args(arguments)
    parts = [write_entries, write_survivors, write_measured]
    if asked.measured or asked.survivors:
        parts = [write_measured if asked.measured else write_survivors]
    for exercise in map(load_course().exercise, asked.exercises):
        for part in parts:
            part(exercise)
    return 0


if __name__ == "__main__":
    sys.exit(main())
