"""``distlab contribute 3.3``: what a learner's test has found, as a patch of the course."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..course.catalogue import need_solutions
from ..host.terminal import command, say, short
from ..labs import frame
from ..labs.written.command import chosen, exercise_of, file_of, lab_of, outcome_of
from ..labs.written.finds import passes_ours
from ..labs.written.patch import patch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("exercise", help="for example 3.3: its lab `distlab lab tests 3.3`")
    parser.add_argument("--file", type=Path, help="default: tests_for_3_3.py in this folder")
    parser.add_argument("--seed", type=int, help="of inputs and interleavings")
    parser.add_argument("--wrong", type=Path, metavar="FILE", help="as for `distlab lab tests`")
    parser.add_argument("--spoil", action="store_true", help="also where the exercise is not done")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the patches")


def main(options: argparse.Namespace, out: Console) -> int:
    """Write one patch for each find: 0 if there is one, 1 if not, 2 misuse. Nothing is sent."""
    exercise = exercise_of(options.exercise, chosen())
    need_solutions("a lab of tests")
    frame.need_release(exercise.id, lab_of(exercise).id, options.spoil)
    file = file_of(exercise, options.file)
    if not options.out.is_dir():
        raise ValueError(f"--out: there is no folder {options.out}")
    seed = frame.seed_or_own(options.seed)
    outcome = outcome_of(exercise, file, [], seed, own=options.wrong)
    if outcome.refused:
        say(out, f"there is nothing to contribute: {outcome.refused}", "yellow")
        return 1
    finds = [find for find in outcome.finds if passes_ours(find.mutant, exercise, seed)]
    if not finds:
        say(out, f"there is nothing to contribute: {file.name} finds nothing new", "yellow")
        return 1
    for find in finds:
        path = options.out / f"{find.mutant.id}.patch"
        text = patch(exercise, file, find, path.name)
        path.write_text(text, encoding="utf-8")
        say(out, f"{find.test} kills {find.mutant.mistake}")
        command(out, "  patch  ", short(path.resolve()))
    say(out, "Each patch begins with what to do. Nothing was sent.", "dim")
    return 0
