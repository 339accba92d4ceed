"""Which of the course's own checks kill which wrong implementation: data of the labs of tests.

``python -m scripts.lab_tests 3.3`` grades all wrong implementations of an exercise by all its
checks, on the first tier of each, and writes labs/tests/phase3.toml. The axis of an entry that is
there already stays: it is chosen by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from distlab.course.catalogue import Exercise, check_files, load_course, root
from distlab.grading.contract import AXES, contract
from distlab.grading.session import Request
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import Mutant, all_mutants, patched
from distlab.host.toml import tomllib
from distlab.labs.written.command import KIND, VALUES
from distlab.labs.written.jury import jury

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


def killing_checks(warm: WarmGrader, exercise: Exercise, impl: str) -> set[str]:
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
        (result,) = warm.grade(exercise.phase.number, request).exercises
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


def entries(
    exercise: Exercise, known: dict[str, dict[str, object]]
) -> dict[str, dict[str, object]]:
    """An entry for each wrong implementation that no tier of NCCL's rules is needed for."""
    found: dict[str, dict[str, object]] = {}
    with jury(exercise, check_files(exercise), course_own=True) as by:
        for mutant in all_mutants():
            if mutant.exercise != exercise.id or mutant.tier:
                continue
            checks = killing_checks(by.warm, exercise, str(by.stand(patched(mutant))))
            axis = known.get(mutant.id, {}).get("axis") or axis_of(mutant, exercise)
            found[mutant.id] = {"axis": axis, "checks": len(checks)}
            print(f"{exercise.id} {mutant.id}: {axis}, killed by {len(checks)}", flush=True)
    return found


def write(path: Path, data: dict[str, dict[str, dict[str, object]]]) -> None:
    """All labs of a phase, in the order of the course."""
    lines = ["# axis: chosen by hand; checks: how many of the course's own kill it, written by"]
    lines += ["# python -m scripts.lab_tests"]
    for exercise in load_course().exercises:
        if exercise.id in data:
            lines += ["", f'["{exercise.id}"]']
            for name, entry in data[exercise.id].items():
                lines.append(f'{name} = {{ axis = "{entry["axis"]}", checks = {entry["checks"]} }}')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(ids: Sequence[str]) -> int:
    """Write the entries of these exercises."""
    for exercise_id in ids:
        exercise = load_course().exercise(exercise_id)
        path = root() / "labs" / KIND / f"phase{exercise.phase.number}.toml"
        data = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        data[exercise_id] = entries(exercise, data.get(exercise_id, {}))
        write(path, data)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
