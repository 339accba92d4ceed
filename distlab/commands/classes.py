"""``distlab class``: grade a class, grade it again after a change of checks, explain its rules."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..classes.config import ClassConfig, load_class
from ..course.catalogue import load_course, need_solutions, root
from ..host.terminal import say
from . import class_report

RULES = "class.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command's parts."""
    parts = parser.add_subparsers(dest="part", title="parts", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("submissions", type=Path, help="a folder with one entry for each student")
    both.add_argument("--out", type=Path, required=True, help="folder for the results")
    both.add_argument("--config", type=Path, help="the rules, for example class.toml")
    both.add_argument("--phases", type=int, nargs="+", help="default: those handed in")
    both.add_argument("--jobs", type=int, default=os.cpu_count(), help="submissions at once")
    both.add_argument(
        "--unsafe", action="store_true", help="without a sandbox: only code that you trust"
    )
    both.add_argument(
        "--container",
        action="store_true",
        help="this machine is a container for a class: no namespaces, code runs as another user",
    )
    parts.add_parser("grade", parents=[both], help="grade what has not been graded yet")
    again = parts.add_parser(
        "regrade", parents=[both], help="show whose points other checks or rules change, and why"
    )
    again.add_argument("--accept", action="store_true", help="put the new results in place")
    class_report.add_arguments(parts)
    shown = parts.add_parser("check", help="say what a file of rules means")
    shown.add_argument("config", type=Path, nargs="?", default=Path(RULES))
    given = parts.add_parser("labs", help="a folder and a zip with labs for each student")
    given.add_argument("out", type=Path, help="folder that does not exist yet")
    given.add_argument("--config", type=Path, default=Path(RULES), help="the rules")
    zipped = parts.add_parser("gradescope", help="write the zip of Gradescope's autograder")
    zipped.add_argument("out", type=Path, help="the zip to write")
    zipped.add_argument("--config", type=Path, help="the rules, for example class.toml")
    pushed = parts.add_parser("github", help="write the workflow of GitHub Classroom")
    pushed.add_argument("out", type=Path, nargs="?", help="the file to write; default: printed")
    pushed.add_argument("--phases", type=int, nargs="+", default=[1])


def main(options: argparse.Namespace, out: Console) -> int:
    """Do what is asked for; returns the exit status."""
    if options.part == "check":
        return check(load_class(options.config), out)
    if options.part in ("gradescope", "github"):
        # start-up time: it imports torch, which other commands need not wait for
        from . import class_places

        if options.part == "gradescope":
            return class_places.gradescope(options.out, options.config, out)
        return class_places.workflow(options.out, options.phases, out)
    if options.part == "labs":
        return hand_out_labs(load_class(options.config), options.out, out)
    if options.part == "report":
        return class_report.report(options, out)
    if options.part == "similar":
        return class_report.similar(options, out)
    config = load_class(options.config)
    if options.phases:
        known = [p.number for p in load_course().phases if p.exercises]
        wrong = [n for n in options.phases if n not in known]
        if wrong:
            raise ValueError(f"--phases: there is no phase {wrong[0]}: there are {known}")
        config = dataclasses.replace(config, phases=tuple(sorted({*options.phases})))
        if not config.exercises():
            raise ValueError("--phases: none of the exercises in [exercises] only is in them")
    if options.jobs < 1:
        raise ValueError("--jobs: at least 1")
    why = "" if options.unsafe else _obstacle(options)
    if why:
        raise ValueError(
            f"no sandbox can be made here: {why}. --unsafe grades without one: submissions then "
            "run with your rights, so use it in a container or for code that you trust"
        )
    return (grade if options.part == "grade" else regrade)(config, options, out)


def _obstacle(options: argparse.Namespace) -> str:
    # start-up time: it imports torch, which other commands need not wait for
    from ..sandbox import container, obstacle

    if not options.container:
        return obstacle()
    os.umask(0o077)  # learner code runs on this machine, too, and must not read results
    return container.obstacle(root()) or container.is_open(options.submissions)


def grade(config: ClassConfig, options: argparse.Namespace, out: Console) -> int:
    """Grade the class; 1 if the grading of a submission did not finish."""
    return _grade_into(options.out, config, options, out)


def _grade_into(to: Path, config: ClassConfig, options: argparse.Namespace, out: Console) -> int:
    # start-up time: it imports torch, which other commands need not wait for
    from ..classes.engine import grade_class
    from ..classes.graders import ClassGrader
    from ..classes.progress import Progress
    from ..classes.submissions import find_entries

    entries = find_entries(options.submissions, config)
    inside = to.resolve().is_relative_to(options.submissions.resolve())
    if inside:
        raise ValueError(f"--out {to} lies among the submissions: choose a folder elsewhere")
    final = grade_class(
        config,
        entries,
        to,
        jobs=options.jobs,
        grader=ClassGrader(walls=not options.unsafe, container=options.container),
        way="unsafe" if options.unsafe else "container" if options.container else "sandbox",
        progress=Progress(out),
    )
    for student, attempt in final.items():
        if attempt.problem:
            say(out, attempt.problem, "yellow", label=f"{student}: ")
    graded = sum(not a.problem for a in final.values())
    out.print(f"{graded} of {len(final)} graded", highlight=False)
    say(out, str(to / "grades.csv"), label="table: ")
    return 1 if any(a.found.problem for a in final.values()) else 0


def regrade(config: ClassConfig, options: argparse.Namespace, out: Console) -> int:
    """Grade into a folder beside, show what changes, and put the results in
    place if --accept is given."""
    # start-up time: it imports torch, which other commands need not wait for
    from ..classes import regrade as again

    if not (options.out / "class.json").is_file():
        raise ValueError(f"{options.out} has no results: `distlab class grade` makes them")
    beside = again.beside(options.out)
    status = _grade_into(beside, config, options, out)
    found = again.changes(options.out, beside)
    for change in found:
        head = f"{change.student}: {change.before:g} → {change.after:g}"
        out.print(Text(head, "bold"), soft_wrap=True)
        for reason in change.reasons:
            say(out, reason, indent="  ")
    out.print(f"{len(found)} of {_count(beside)} change", highlight=False)
    if not options.accept:
        say(out, f"nothing was overwritten; the new results are in {beside}")
        say(out, "to put them in place: the same command with --accept")
        return status
    say(out, f"in place; the old results are in {again.accept(options.out)}")
    return status


def hand_out_labs(config: ClassConfig, to: Path, out: Console) -> int:
    """Write the labs of each student."""
    need_solutions("distlab class labs")
    # start-up time: it imports torch, which other commands need not wait for
    from ..classes.lab_packs import write_packs

    packed = write_packs(config, to)
    say(out, f"{len(config.labs)} labs for each of {len(packed)}, as a folder and as a zip: {to}")
    return 0


def _count(folder: Path) -> int:
    return len(list(folder.glob("students/*/result.json")))


def check(config: ClassConfig, out: Console) -> int:
    """Explain the rules in sentences."""
    for line in meaning(config):
        say(out, line.lstrip(), indent="  " if line.startswith(" ") else "")
    return 0


def meaning(config: ClassConfig) -> Iterator[str]:
    """One sentence for each rule."""
    yield f"class: {config.name}; times are in {config.time_zone}"
    yield from _what_counts(config)
    if config.labs:
        total = sum(config.labs.values())
        yield f"labs: {len(config.labs)} with {total:g} points beside those of exercises"
        yield from (f"  {name}: {worth:g} points" for name, worth in config.labs.items())
    if config.released:
        yield f"solutions that labs may show: {', '.join(config.released)}"
    yield from _when(config)
    first = "the best submission" if config.counts == "best" else "the last submission in time"
    last = "" if config.counts == "best" else " (the last of all, if none is)"
    yield f"of several submissions of a student {first} counts{last}"
    some = "a share of its points for a share of its checks" if config.partial else "all or nothing"
    yield f"an exercise gives {some}; inputs come from seed {config.seed}"
    if config.students:
        yield f"students: {len(config.students)}; who hands in nothing gets 0 points"
    else:
        yield "students: whoever hands something in"
    for team, members in config.teams.items():
        yield f"team {team}: {', '.join(members)} hand in together, and get the same points"
    caps = config.caps
    yield (
        f"a submission may take {caps.seconds:g} s, {caps.memory_gb:g} GB of memory for each "
        f"process, {caps.unpacked_mb:g} MB and {caps.files:,} files"
    )


def _what_counts(config: ClassConfig) -> Iterator[str]:
    exercises = config.exercises()
    if not config.phases:
        yield "what counts: every exercise of the phases that anybody hands something in for"
        yield from (f"  {number}: {worth:g} points" for number, worth in config.points.items())
        return
    total = sum(map(config.worth, exercises))
    yield f"what counts: {len(exercises)} exercises with {total:g} points"
    for e in exercises:
        usual = "" if config.worth(e) == e.points else f" instead of {e.points}"
        yield f"  {e.id} {e.title}: {config.worth(e):g} points{usual}"


def _when(config: ClassConfig) -> Iterator[str]:
    def shown(when: object) -> str:
        return f"{when:%A %Y-%m-%d %H:%M:%S %z}"

    if config.release is not None:
        yield f"released: {shown(config.release)}; what was made before is noted"
    if config.due is None:
        yield "due: never, nobody is late"
        return
    late = config.late
    grace = f"; up to {late.grace_minutes:g} minutes later nobody is late yet"
    yield f"due: {shown(config.due)}{grace if late.grace_minutes else ''}"
    yield f"late: each day that has begun costs {late.percent_per_day:g} % of the points"
    if late.cut_off_days is not None:
        yield f"  after {late.cut_off_days:g} days there are no points"
    for who, date in config.extensions.items():
        yield f"  {who} has time until {shown(date)}"
