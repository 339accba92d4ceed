"""Predictions on the terminal: what is asked, and how it came out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...course.catalogue import load_course
from ...host.terminal import say, short
from .. import frame
from .answers import CHOICES, read_number
from .case import Case
from .catalogue import situation
from .machines import Question
from .outcome import ROUND, Outcome, curve, keep, kept
from .picture import draw
from .scene import Scene

Asked = list[tuple[str, str, str]]  # name, question, unit
HOW = "Write for example 12, 1.5 MB, 20 µs, 12 % or yes."
MODEL = (
    "Times are those of the α-β model: a message takes α + bytes·β. Real machines differ from it."
)


def title_of(scene: Scene, case: Case, seed: int) -> str:
    """The exercise, its seed, and what is predicted."""
    exercise = load_course().exercise(scene.exercise)
    return f"P{scene.exercise} {exercise.title}, seed {seed}\n{situation(scene, case)}"


def asked_of(subject: Scene | Question) -> Asked:
    """The numbers that a scene, or a question about whole runs, asks for."""
    if isinstance(subject, Question):
        return [("answer", "answer", subject.unit)]
    return [(quantity.name, quantity.asks, quantity.unit) for quantity in subject.quantities]


def prompt(question: str, unit: str, out: Console, may_skip: bool = False) -> float | None:
    """Ask until there is a number; None if nothing was written and that is allowed.

    ValueError where the input ends.
    """
    while True:
        try:
            text = out.input(f"{in_words(question, unit)}: ")
        except EOFError:
            raise ValueError("the input ended before all numbers were there") from None
        if may_skip and not text.strip():
            return None
        try:
            return read_number(text, unit, "your number")
        except ValueError as error:
            say(out, str(error), "red")


def in_words(question: str, unit: str) -> str:
    """The question, with its unit where it does not say it."""
    return question if question.startswith(unit) else f"{question} ({unit})"


def tell(outcomes: Sequence[Outcome], out: Console, scene: Scene | None = None) -> int:
    """Show and remember; returns how many were right."""
    _show(outcomes, out)
    if scene and scene.doubled:
        say(out, f"When W doubles: {scene.doubled}")
    if any(each.timed for each in outcomes):
        say(out, MODEL, "dim")
    right = sum(each.right for each in outcomes)
    say(out, f"{right} of {len(outcomes)} points")
    keep(outcomes)
    for warning in frame.passed(outcomes[0].lab, right, len(outcomes)):
        say(out, warning, "yellow")
    return right


def _show(outcomes: Sequence[Outcome], out: Console) -> None:
    """A table of numbers, then the formulas with their tolerances."""
    who = list(dict.fromkeys(name for each in outcomes for name in each.answers))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for head in ("", "you", "formula" if outcomes[0].answers else "answer", *who, ""):
        table.add_column(head, justify="left" if not head else "right", no_wrap=bool(head))
    for each in outcomes:
        cells = [shown(each.answers[n], each.unit) if n in each.answers else "" for n in who]
        numbers = [shown(each.predicted, each.unit), shown(each.value, each.unit)]
        style = "green" if each.right else "red"
        table.add_row(each.name, *numbers, *cells, f"[{style}]{_verdict(each)}[/]")
    out.print(table)
    for each in outcomes:
        formula = f" = {each.formula}" if each.formula else ""
        say(out, f"{each.name}{formula}  (tolerance: {each.why})", indent="  ")
        if not each.confirmed:
            text = f"{each.name}: the program did not do what the formula says. See the table"
            say(out, text, "yellow", indent="  ")


def _verdict(outcome: Outcome) -> str:
    if outcome.right:
        return "right"
    if outcome.unit in CHOICES or 0 in (outcome.predicted, outcome.value):
        return "wrong"
    if outcome.factor >= 1000:
        return "off by more than 1000 x"
    return f"off by {outcome.factor:.3g} x"


def shown(value: float, unit: str) -> str:
    """A number as a learner reads it."""
    if unit in CHOICES:
        return next(word for word, number in CHOICES[unit].items() if number == value)
    if unit == "seconds":
        for factor, name in ((1.0, "s"), (1e3, "ms")):
            if value * factor >= 1:
                return f"{value * factor:.4g} {name}"
        return f"{value * 1e6:.4g} µs"
    if unit == "bytes":
        return f"{value:,.0f} B" if value < 1e5 else f"{value / 1e6:,.4g} MB"
    if value == round(value):
        return f"{value:,.0f}" + (" GB" if unit == "GB" else "")
    return f"{value:,.4g}" + (" GB" if unit == "GB" else "")


def calibration(folder: Path, out: Console) -> list[dict[str, float]]:
    """How far off predictions were: a table, a picture, and the table as data.

    ValueError if there are none.
    """
    past = kept()
    if not past:
        raise ValueError("nothing was predicted yet: distlab predict 3.3")
    points = curve(past)
    rows: list[dict[str, float]] = []
    table = Table(
        "predictions", "right", "", "off by", box=None, header_style="dim", pad_edge=False
    )
    for first in range(0, len(past), ROUND):
        part = past[first : first + ROUND]
        last = first + len(part)
        right = sum(bool(each["right"]) for each in part)
        factor = points[last - 1].factor if len(part) == ROUND else curve(part)[-1].factor
        rows.append({"first": first + 1, "last": last, "right": right, "factor": factor})
        bar = "█" * round(20 * right / len(part))
        numbers = f"{first + 1} to {last}" if len(part) > 1 else str(last)
        off = f"{factor:.3g} x" if factor < 1000 else "more than 1000 x"
        table.add_row(
            numbers, f"{right / len(part):.0%}", bar, "nothing" if factor < 1.005 else off
        )
    out.print(table)
    say(out, "off by: half of the predictions were closer than this factor", "dim")
    path = folder / "predictions.png"
    draw(past, path)
    say(out, f"{short(path)}  (picture)")
    return rows
