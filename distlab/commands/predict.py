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

from ..course.catalogue import load_course
from ..host.terminal import command, say, short
from ..labs import frame
from ..labs.predict.answers import from_file, from_options, read_number, sheet
from ..labs.predict.catalogue import SCENES, scene_named, situation
from ..labs.predict.graded import answered, chosen_impl, graded
from ..labs.predict.machines import questions
from ..labs.predict.outcome import ROUND, Outcome, curve, keep, kept
from ..labs.predict.picture import draw

Asked = list[tuple[str, str, str]]  # name, question, unit


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


def main(options: argparse.Namespace, out: Console) -> int:
    """Ask, run, and show: 0 if every prediction is right."""
    if options.curve:
        return _curve(options.out, out)
    if options.what is None:
        return _list(out)
    kept()  # a damaged file is told before anybody fills in numbers
    question = questions().get(options.what) if options.what.startswith("M") else None
    scene = None if question else scene_named(options.what)
    seed = frame.seed_of_this_folder() if options.seed is None else options.seed
    asked: Asked = []
    if question:
        title, asked = f"{question.id}: {question.text}", [("answer", "answer", question.unit)]
    if scene:
        case = scene.case(seed)
        exercise = load_course().exercise(scene.exercise)
        title = f"P{scene.exercise} {exercise.title}, seed {seed}\n{situation(scene, case)}\n"
        title += f"Machine: {case.place}."
        asked = [(q.name, q.asks, q.unit) for q in scene.quantities]
    if options.sheet is not None:
        return _write_sheet(options, sheet(title, asked), out)
    say(out, title)
    given = _numbers(options, asked, out)
    with out.status("the program runs on virtual ranks"):
        if scene:
            outcomes = graded(scene, seed, given, options.impl or chosen_impl(exercise))
        else:
            assert question is not None
            outcomes = [answered(question, given["answer"])]
    keep(outcomes)
    _show(outcomes, out)
    if scene and scene.doubled:
        say(out, f"When W doubles: {scene.doubled}")
    right = sum(each.right for each in outcomes)
    for warning in frame.passed(outcomes[0].lab, right, len(outcomes)):
        say(out, warning, "yellow")
    if options.json is not None:
        data = {"lab": outcomes[0].lab, "seed": seed, "points": right, "most": len(outcomes)}
        data["predictions"] = [each.row() for each in outcomes]
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if right == len(outcomes) else 1


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
            say(out, f"{name}: {question} ({unit})", indent="  ")
        raise ValueError(
            f"numbers are missing: give --set {asked[0][0]}=NUMBER …, or write a file with "
            "--sheet answers.toml, fill it in, and give --answers answers.toml"
        )
    return {name: _prompt(question, unit, out) for name, question, unit in asked}


def _prompt(question: str, unit: str, out: Console) -> float:
    """Ask until there is a number."""
    while True:
        try:
            return read_number(out.input(f"{question} ({unit}): "), unit, "your number")
        except EOFError:
            raise ValueError("the input ended before all numbers were there") from None
        except ValueError as error:
            say(out, str(error), "red")


def _write_sheet(options: argparse.Namespace, text: str, out: Console) -> int:
    if options.sheet.exists():
        raise ValueError(f"{options.sheet} exists already: choose another name")
    options.sheet.write_text(text, encoding="utf-8")
    seed = f" --seed {options.seed}" if options.seed is not None else ""
    line = f"distlab predict {options.what}{seed} --answers {options.sheet}"
    command(out, "fill it in, then: ", line)
    return 0


def _show(outcomes: Sequence[Outcome], out: Console) -> None:
    """A table of numbers, then the formulas with their tolerances."""
    who = list(dict.fromkeys(name for each in outcomes for name in each.answers))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("", "you", "formula" if outcomes[0].formula else "answer", *who, ""):
        table.add_column(head, justify="left" if not head else "right", no_wrap=bool(head))
    for each in outcomes:
        cells = [shown(each.answers[n], each.unit) if n in each.answers else "" for n in who]
        verdict = "right" if each.right else f"off by {each.factor:.3g} x"
        numbers = [shown(each.predicted, each.unit), shown(each.value, each.unit)]
        style = "green" if each.right else "red"
        table.add_row(each.name, *numbers, *cells, f"[{style}]{verdict}[/]")
    out.print(table)
    for each in outcomes:
        formula = f" = {each.formula}" if each.formula else ""
        say(out, f"{each.name}{formula}  (tolerance: {each.why})", indent="  ")
        if not each.confirmed:
            text = f"{each.name}: the program did not do what the formula says. See the table"
            say(out, text, "yellow", indent="  ")


def shown(value: float, unit: str) -> str:
    """A number as a learner reads it."""
    if unit == "yes or no":
        return "yes" if value else "no"
    if unit == "seconds":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.4g} {name}"
        return f"{value * 1e6:.4g} µs"
    if unit == "bytes":
        return f"{value:,.0f} B" if value < 1e5 else f"{value / 1e6:,.4g} MB"
    return f"{value:,.4g}" + (" GB" if unit == "GB" else "")


def _list(out: Console) -> int:
    """All that can be predicted, with what was reached."""
    done, course = frame.results(), load_course()
    table = Table("", "points", "what to predict", box=None, header_style="dim", pad_edge=False)
    for exercise in course.exercises:
        if exercise.id in SCENES:
            table.add_row(exercise.id, _reached(done.get(f"P{exercise.id}")), exercise.title)
    for question in questions().values():
        table.add_row(question.id, _reached(done.get(f"P{question.id}")), question.text)
    out.print(table)
    return 0


def _reached(entry: dict[str, float] | None) -> str:
    return f"{entry['points']:g}/{entry['most']:g}" if entry else "-"


def _curve(folder: Path, out: Console) -> int:
    """How far off predictions were, in words and as a picture."""
    past = kept()
    if not past:
        print("distlab: nothing was predicted yet: distlab predict 3.3", file=sys.stderr)
        return 1
    points = curve(past)
    table = Table(
        "predictions", "right", "", "off by", box=None, header_style="dim", pad_edge=False
    )
    for end in [*range(ROUND, len(past), ROUND), len(past)]:
        first, point = (end - 1) // ROUND * ROUND + 1, points[end - 1]
        part = past[first - 1 : end]
        right = sum(bool(each["right"]) for each in part) / len(part)
        bar = "█" * round(20 * right)
        table.add_row(f"{first} to {end}", f"{right:.0%}", bar, f"{point.factor:.3g} x")
    out.print(table)
    path = folder / "predictions.png"
    draw(past, path)
    say(out, f"{short(path)}  (picture)")
    return 0
