"""`distlab lab tests 3.3`: the learner writes the tests, and wrong implementations grade them.

They must pass the solution and every right alternative, five times under other seeds and
interleavings. Then each wrong implementation that they kill earns its weight: 1 / the number of
the course's own checks that kill it. What they kill and the course's own checks do not is a find.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ...course import progress
from ...course.catalogue import Exercise, load_course, need_solutions
from ...grading.contract import AXES
from ...grading.wrong import Mutant, all_mutants, patched
from ...host.terminal import say, short
from ...sandbox import Limits
from .. import frame
from .finds import OWN, Find, brought, drawn, found, passes_ours, survivors
from .jury import Jury, alternatives, jury, test_name
from .look import begin, look

KIND = "tests"
LEVEL = 2
RUNS = 5  # on the solution, each under another seed and other interleavings
VALUES = "values"
SHOWN_AXES = {VALUES: "what comes back"} | AXES


@dataclass(frozen=True)
class Wrong:
    """A wrong implementation: on which axis of the contract, and how many of the course's own
    checks kill it."""

    mutant: Mutant
    axis: str
    checks: int

    @property
    def weight(self) -> float:
        """What few checks see counts more."""
        return 1 / self.checks


@dataclass
class Outcome:
    """What came of a file of tests. ``refused``: why it earns nothing."""

    refused: str = ""
    killed: list[tuple[Wrong, str]] = field(default_factory=list)  # and by which test
    missed: list[Wrong] = field(default_factory=list)
    finds: list[Find] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The weight of what is killed, of all."""
        killed = sum(wrong.weight for wrong, _ in self.killed)
        total = killed + sum(wrong.weight for wrong in self.missed)
        return killed / total if total and not self.refused else 0.0


def chosen() -> dict[str, list[Wrong]]:
    """The wrong implementations of each lab, by exercise; ValueError if the data are not whole."""
    mutants = {mutant.id: mutant for mutant in all_mutants()}
    found: dict[str, list[Wrong]] = {}
    for path in frame.data_files(KIND):
        for exercise_id, entries in frame.read_toml(path).items():
            for name, entry in entries.items():
                mutant = mutants.get(name)
                axis, checks = entry.get("axis"), entry.get("checks")
                known = mutant is not None and mutant.exercise == exercise_id
                if not (known and axis in SHOWN_AXES and checks):
                    raise ValueError(f"{path.name}: {exercise_id}, {name} is not in order")
                found.setdefault(exercise_id, []).append(Wrong(mutants[name], axis, int(checks)))
    return found


def lab_of(exercise: Exercise) -> frame.Lab:
    """The lab about an exercise."""
    title = f"Write the tests: {exercise.title}"
    return frame.Lab(
        id=f"T{exercise.id}", kind=KIND, exercise=exercise.id, level=LEVEL, title=title
    )


def grade(by: Jury, wrong: Iterable[Wrong], seed: int) -> Outcome:
    """Grade the tests of a jury; NoVerdict if they can't be used."""
    by.collect()
    refused = _refused(by, seed)
    if refused:
        return Outcome(refused=refused)
    outcome = Outcome()
    for each in wrong:
        failed = by.judge(patched(each.mutant), seed)
        if failed is None or not failed.name:  # no name: the tests themselves were ended
            outcome.missed.append(each)
        else:
            outcome.killed.append((each, test_name(failed)))
    return outcome


def _refused(by: Jury, seed: int) -> str:
    """Why the tests are wrong or depend on timing; empty if all that is right passes."""
    solution = by.exercise.solution_path.read_text(encoding="utf-8")
    for number in range(RUNS):
        failed = by.judge(solution, seed + number)
        if failed is not None:
            name = f"{test_name(failed)} " if failed.name else ""
            if not number:
                return f"{name}refuses the course's solution: {failed.message}"
            return (
                f"{name}depends on timing or on the seed: it passes the solution, and refuses it "
                f"with --seed {seed + number}: {failed.message}"
            )
    for each in alternatives(by.exercise):
        failed = by.judge(None, seed, each.folder)
        if failed is not None:
            name = f"{test_name(failed)} " if failed.name else ""
            return (
                f"{name}refuses a right implementation that is written differently "
                f"({each.about}): {failed.message}"
            )
    return ""


def parts_of(outcome: Outcome, most: float) -> list[frame.Part]:
    """The points, and one line that says why."""
    if outcome.refused:
        return [frame.Part("right implementations", 0, most, outcome.refused)]
    points = math.floor(10 * most * outcome.share + 1e-6) / 10
    total = len(outcome.killed) + len(outcome.missed)
    text = f"{len(outcome.killed)} of {total} killed, {outcome.share:.0%} by weight"
    if not outcome.killed:
        text += ": do the tests call impl, and judge what comes back?"
    return [frame.Part("wrong implementations", points, most, text)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `distlab lab tests`."""
    parser.add_argument("exercise", nargs="?", help="for example 3.3; without: all there are")
    parser.add_argument("--file", type=Path, help="default: tests_for_3_3.py in this folder")
    parser.add_argument("--seed", type=int, help="of inputs and interleavings")
    parser.add_argument("--hint", action="store_true", help="tell missed ones by their cause")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as data")
    parser.add_argument("--sandbox", action="store_true", help="tests that somebody else wrote")
    parser.add_argument(
        "--wrong",
        type=Path,
        metavar="FILE",
        help="an implementation of your own that you think is wrong",
    )


def main(options: argparse.Namespace, out: Console) -> int:
    """Grade the learner's tests, or write a file to begin with: 0 full points, 1 not, 2 misuse."""
    labs = chosen()
    if options.exercise is None:
        return _show_all(labs, out)
    exercise = exercise_of(options.exercise, labs)
    need_solutions("a lab of tests")
    frame.check_folder(options.json)
    file = file_of(exercise, options.file)
    lab = lab_of(exercise)
    if not file.parent.is_dir():
        raise ValueError(f"--file: there is no folder {short(file.parent)}")
    if not file.exists():
        begin(exercise, file)
        say(out, f"{file.name} is there to begin with: write tests, and call this again")
        return 1
    seed = frame.seed_or_own(options.seed)
    limits = Limits() if options.sandbox else None
    outcome = outcome_of(exercise, file, labs[exercise.id], seed, limits, options.wrong)
    missed = Counter(wrong.axis for wrong in outcome.missed)
    data = {"refused": outcome.refused, "killed": len(outcome.killed), "seed": seed}
    data |= {"missed": dict(missed), "finds": [find.mutant.id for find in outcome.finds]}
    status = frame.told(lab.id, parts_of(outcome, lab.points), out, options.json, data)
    _tell(lab, outcome, options.hint, out)
    return status


def exercise_of(exercise_id: str, labs: Collection[str]) -> Exercise:
    """The exercise; ValueError if it has no lab of tests."""
    course = load_course()
    exercise = course.exercise(exercise_id)
    if exercise.id not in labs:
        there = ", ".join(e.id for e in course.exercises if e.id in labs)
        raise ValueError(f"there is no lab of tests for {exercise.id}: there are {there}")
    return exercise


def file_of(exercise: Exercise, asked: Path | None) -> Path:
    """The learner's file of tests."""
    return (asked or Path(f"tests_for_{exercise.id.replace('.', '_')}.py")).resolve()


def outcome_of(
    exercise: Exercise,
    file: Path,
    wrong: Iterable[Wrong],
    seed: int,
    limits: Limits | None = None,
    own: Path | None = None,
) -> Outcome:
    """What comes of a file of tests; ValueError with one line if it can't be used.

    ``limits``: of a sandbox, for tests of a stranger. ``own``: a wrong implementation that the
    learner brings.
    """
    look(exercise, file)
    changes = drawn(survivors(exercise), seed) + ([brought(exercise, own)] if own else [])
    with jury(exercise, [file], limits=limits) as by:
        outcome = grade(by, wrong, seed)
        if not outcome.refused:
            outcome.finds = [
                find
                for find in found(by, changes, seed)
                if find.mutant.mistake != OWN or passes_ours(find.mutant, exercise, seed)
            ]
    return outcome


def _tell(lab: frame.Lab, outcome: Outcome, hint: bool, out: Console) -> None:
    """What was missed, by axis or by cause, and what the course's own checks miss."""
    for find in outcome.finds:
        text = "YOUR TEST KILLS A WRONG IMPLEMENTATION THAT THE COURSE'S OWN CHECKS MISS"
        say(out, f"{text}: {find.test} kills {find.mutant.mistake}", "bold green")
    if outcome.finds:
        say(
            out,
            "Read the docstring again. Either it promises what your test asks for: then "
            f"`distlab contribute {lab.exercise}` writes a patch. Or it does not: then your test "
            "asks for too much.",
        )
    missed = Counter(wrong.axis for wrong in outcome.missed)
    if not missed:
        return
    out.print("missed, by axis of the contract:" if not hint else "missed:")
    for axis, about in SHOWN_AXES.items():
        if missed[axis]:
            say(out, f"{missed[axis]} × {axis}: {about}", indent="  ")
        if hint:
            for wrong in outcome.missed:
                if wrong.axis == axis:
                    say(out, f"- {wrong.mutant.mistake}", indent="    ")
    if hint:
        progress.update_lab(lab.id, hints=1)
    else:
        say(out, "--hint tells each one's cause", "dim")


def _show_all(labs: dict[str, list[Wrong]], out: Console) -> int:
    done = frame.results()
    for exercise in load_course().exercises:
        if exercise.id in labs:
            lab = lab_of(exercise)
            points = done.get(lab.id, {}).get("points", 0)
            about = f"{len(labs[exercise.id])} wrong implementations, {points:g} of {lab.points}"
            say(out, f"{lab.id:<6} {exercise.title}: {about} points")
    return 0
