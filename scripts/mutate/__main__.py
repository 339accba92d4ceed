"""``python -m scripts.mutate 3.10 …``: grade every change of an exercise and note the survivors."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from distlab.course.catalogue import Exercise, load_course
from distlab.host.processes import become_subreaper

from .changes import Change, changes, fingerprint, solution_text
from .grading import Outcome, in_parallel
from .table import Entry, read, write


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a survivor has no reason."""
    parser = argparse.ArgumentParser(prog="python -m scripts.mutate", description=__doc__)
    parser.add_argument("exercises", nargs="+", metavar="ID", help="1.4, or 1 for a whole phase")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="show the changes, grade nothing")
    parser.add_argument("--only", default="", help="changes whose name holds this text")
    parser.add_argument("--again", action="store_true", help="only survivors without a reason")
    parser.add_argument("--verbose", action="store_true", help="show every change and its killer")
    asked = parser.parse_args(arguments)
    become_subreaper()
    unexplained = 0
    for exercise in _chosen(asked.exercises):
        text = solution_text(exercise)
        every = [c for c in changes(exercise, text) if asked.only in c.name]
        if asked.list:
            print(*(f"{exercise.id} {c.name}" for c in every), sep="\n")
            continue
        if asked.again:
            open_ = read(exercise).get(exercise.id, Entry()).unexplained
            every = [c for c in every if c.name in open_]
        survivors = _graded(exercise, every, asked.jobs, asked.verbose)
        whole = not asked.only and not asked.again
        unexplained += _noted(exercise, every, survivors, whole=whole)
    return 1 if unexplained else 0


def _chosen(words: list[str]) -> list[Exercise]:
    course = load_course()
    found = [e for e in course.exercises if e.id in words or str(e.phase.number) in words]
    unknown = {*words} - {e.id for e in found} - {str(e.phase.number) for e in found}
    if unknown:
        raise SystemExit(f"there is no exercise {sorted(unknown)[0]}; write 1.4, or 1 for a phase")
    return found


def _graded(exercise: Exercise, every: list[Change], jobs: int, verbose: bool) -> list[Change]:
    began, killed, survivors = time.monotonic(), Counter[str](), list[Outcome]()
    for outcome in in_parallel(exercise, every, jobs):
        killed[outcome.check] += 1
        if outcome.survived:
            survivors.append(outcome)
        if verbose:
            told = f"{outcome.check}: {outcome.cause}" if outcome.check else "SURVIVED"
            print(f"{exercise.id} {every[outcome.change].name}\n    {told}", flush=True)
    took = time.monotonic() - began
    share = f"{len(every) - len(survivors)} of {len(every)} killed"
    print(f"{exercise.id} {exercise.title}: {share}, {took:.0f} s", flush=True)
    return [every[o.change] for o in sorted(survivors, key=lambda o: o.change)]


def _noted(exercise: Exercise, every: list[Change], survivors: list[Change], *, whole: bool) -> int:
    """Write the table, keep the reasons given before; returns how many survivors have none."""
    entry = read(exercise).get(exercise.id, Entry())
    now = {change.name: entry.survivors.get(change.name, "") for change in survivors}
    if whole:
        entry = Entry(len(every), fingerprint(exercise, solution_text(exercise)), now)
    else:
        graded = {change.name for change in every}
        left = {name: reason for name, reason in entry.survivors.items() if name not in graded}
        entry.survivors = left | now
    write(exercise, entry)
    open_ = [name for name, reason in now.items() if not reason]
    for name in open_:
        print(f"    survived: {name}")
    return len(open_)


if __name__ == "__main__":
    sys.exit(main())
