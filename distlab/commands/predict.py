"""``distlab predict 3.8``: fill in numbers, then the program runs and answers.

Ledger, memory and virtual clock stand beside the formula and the learner's number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..course import progress
from ..course.catalogue import load_course, need_solutions
from ..course.version import course_version
from ..grading.command import check_writable
from ..host.terminal import command, say
from ..labs import frame
from ..labs.predict.answers import from_file, from_options, sheet
from ..labs.predict.catalogue import SCENES, scene_named
from ..labs.predict.graded import answered, chosen_impl, graded, runnable
from ..labs.predict.machines import question_named, questions
from ..labs.predict.outcome import Outcome, kept
from ..labs.predict.screen import (
    HOW,
    Asked,
    asked_of,
    calibration,
    in_words,
    prompt,
    tell,
    title_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("what", nargs="?", help="an exercise (3.8) or a question (M07)")
    parser.add_argument("--seed", type=int, help="of the sizes; default: of this folder")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="a TOML file with numbers")
    parser.add_argument("--set", nargs="+", metavar="NAME=NUMBER", help="numbers, without a file")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="write a file to fill in")
    parser.add_argument("--impl", help="templates, solutions or a folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result for machines")
    parser.add_argument("--curve", action="store_true", help="how good your predictions are")
    parser.add_argument("--out", type=Path, default=Path(".distlab"), help="folder for the picture")
    parser.add_argument(
        "--always", choices=["on", "off"], help="ask for it before test_phaseN.py grades"
    )


def main(options: argparse.Namespace, out: Console) -> int:
    """Ask, run, and show: 0 if every prediction is right."""
    if options.json is not None:
        check_writable(options.json)
    if options.always is not None:
        return _always(options.always == "on", out)
    if options.curve:
        rows = calibration(options.out, out)
        return _write_json(options.json, {"predictions": rows}) if options.json else 0
    if options.what is None:
        return _list(options.json, out)
    kept()  # a damaged file is told before anybody fills in numbers
    if options.what.startswith("M"):
        return _question(options, out)
    return _exercise(options, out)


def _exercise(options: argparse.Namespace, out: Console) -> int:
    """Predict numbers of an exercise's run."""
    scene = scene_named(options.what)
    seed = frame.seed_or_own(options.seed)
    title, asked = title_of(scene, scene.case(seed), seed), asked_of(scene)
    if options.sheet is not None:
        return _write_sheet(options, seed, sheet(title, asked), out)
    exercise = load_course().exercise(scene.exercise)
    impl = options.impl or chosen_impl(exercise)
    runnable(exercise, impl)
    say(out, title)
    given = _numbers(options, asked, out)
    with out.status("the program runs on virtual ranks"):
        outcomes = graded(scene, seed, given, impl)
    return _finish(options, outcomes, tell(outcomes, out, scene), seed)


def _question(options: argparse.Namespace, out: Console) -> int:
    """Answer a question about a whole run."""
    question = question_named(options.what)
    if options.seed is not None or options.impl is not None:
        raise ValueError(f"{question.id} has no --seed and no --impl: its numbers are fixed")
    title, asked = f"{question.id}: {question.text}", asked_of(question)
    if options.sheet is not None:
        return _write_sheet(options, None, sheet(title, asked), out)
    need_solutions(f"question {question.id}")
    say(out, title)
    given = _numbers(options, asked, out)
    with out.status("computing the answer"):
        outcomes = [answered(question, given["answer"])]
    return _finish(options, outcomes, tell(outcomes, out), None)


def _finish(
    options: argparse.Namespace, outcomes: Sequence[Outcome], right: int, seed: int | None
) -> int:
    if options.json is not None:
        data: dict[str, object] = {"course_version": course_version(), "lab": outcomes[0].lab}
        data |= {"seed": seed, "points": right, "most": len(outcomes)}
        _write_json(options.json, data | {"predictions": [each.row() for each in outcomes]})
    return 0 if right == len(outcomes) else 1


def _write_json(path: Path, data: object) -> int:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


def _always(on: bool, out: Console) -> int:
    for warning in progress.choose_predicts_first(on):
        say(out, warning, "yellow")
    if on:
        say(out, "From now on `python test_phase3.py 3.3` asks for your prediction of 3.3 first.")
        say(out, "It asks once, at a terminal, for exercises that you name. Enter leaves it out.")
    else:
        say(out, "Gradings ask for no predictions.")
    return 0


def _numbers(options: argparse.Namespace, asked: Asked, out: Console) -> dict[str, float]:
    """The learner's numbers: from a file, from options, or asked for one by one."""
    units = {name: unit for name, _, unit in asked}
    if options.answers is not None and options.set is not None:
        raise ValueError("--answers and --set: give one of them")
    if options.answers is not None:
        return from_file(options.answers, units)
    if options.set is not None:
        return from_options(options.set, units)
    if not (out.is_terminal and sys.stdin.isatty()):
        for name, question, unit in asked:
            say(out, f"{name}: {in_words(question, unit)}", indent="  ")
        raise ValueError(
            f"numbers are missing: give --set {asked[0][0]}=NUMBER …, or write a file with "
            "--sheet answers.toml, fill it in, and give --answers answers.toml"
        )
    say(out, HOW, "dim")
    given = ((name, prompt(question, unit, out)) for name, question, unit in asked)
    return {name: number for name, number in given if number is not None}


def _write_sheet(options: argparse.Namespace, seed: int | None, text: str, out: Console) -> int:
    if options.sheet.exists():
        raise ValueError(f"{options.sheet} exists already: choose another name")
    options.sheet.write_text(text, encoding="utf-8")
    also = "" if seed is None or options.seed is None else f" --seed {seed}"
    line = f"distlab predict {options.what}{also} --answers {options.sheet}"
    command(out, "fill it in, then: ", line)
    return 0


def _list(file: Path | None, out: Console) -> int:
    """All that can be predicted, with what was reached."""
    done, course = frame.results(), load_course()
    titles = {e.id: e.title for e in course.exercises if e.id in SCENES}
    titles |= {question.id: question.text for question in questions().values()}
    table = Table("", "points", "what to predict", box=None, header_style="dim", pad_edge=False)
    for name, title in titles.items():
        table.add_row(name, _reached(done.get(f"P{name}")), title)
    out.print(table)
    command(out, "for example: ", "distlab predict 3.3")
    if file is not None:
        reached = {f"P{name}": done.get(f"P{name}") for name in titles}
        return _write_json(file, {"course_version": course_version(), "predictions": reached})
    return 0


def _reached(entry: dict[str, float] | None) -> str:
    return f"{entry['points']:g}/{entry['most']:g}" if entry else "-"
