"""``docs/validation.md`` from the published rows and the recorded predictions."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from distlab.course.catalogue import root
from distlab.hardware.kernels import MOST_FITTED, fitted_numbers, load_kernels
from distlab.simulate.published import Row, error_of, nine_in_ten, recorded, rows

from . import this_machine
from .prediction_fit import FITTED, held_out, rows_of, table_of
from .predictions_picture import draw
from .predictions_words import (
    AFTER,
    INTRODUCTION,
    LEFT_OUT,
    NOT_SIMULATED,
    THIS_MACHINE,
    WHY,
    WORST,
)
from .scaling_page import table

LARGE = 2**22  # bytes of a collective that counts in the short table
SHOWN_WORST = 8
PAGE = root() / "docs" / "validation.md"
PICTURE = root() / "docs" / "validation.svg"
Errors = Sequence[float]


def in_sample(row: Row) -> float:
    """The error of the prediction as the files stand now."""
    return float(recorded()[row.id]["predicted"]) / row.value - 1


def simulated() -> list[Row]:
    """The rows that are recorded."""
    return [row for row in rows() if row.id in recorded()]


def counts(row: Row) -> bool:
    """Whether a row is in the short tables: a small collective is not."""
    return not row.is_collective or row.run["nbytes"] >= LARGE


def spread(errors: Errors) -> list[str]:
    """Rows, median, nine in ten, and the worst with its sign."""
    sizes = [abs(error) for error in errors]
    return [
        str(len(errors)),
        f"{statistics.median(sizes):.1%}",
        f"{nine_in_ten(sizes):.0%}",
        f"{max(errors, key=abs):+.0%}",
    ]


def grouped(
    chosen: Iterable[Row], name: Callable[[Row], str], without: Callable[[Row], float] = error_of
) -> list[list[str]]:
    """A row of the table for each group: errors now, and ``without`` the row's own data."""
    groups: dict[str, list[Row]] = {}
    for row in chosen:
        groups.setdefault(name(row), []).append(row)
    found = []
    for each, members in groups.items():
        now, apart = (spread([f(row) for row in members]) for f in (in_sample, without))
        found.append([each, *now, *apart[1:]])
    return found


def kind_in_words(row: Row) -> str:
    """The kind, as the tables name it."""
    return f"collectives, {row.kind.way}" if row.is_collective else str(row.kind)


def untouched() -> list[Row]:
    """The trainings of projects of which no row was fitted."""
    fitted = {row.project for row in rows() if row.rests_on.startswith("loads")}
    return [row for row in simulated() if row.is_training and row.project not in fitted]


def left_out() -> list[list[str]]:
    """All trainings of other projects, then each table of the fitted one, predicted with constants
    from the other tables."""
    values = held_out(recorded(), table_of)
    used = [row for row in rows() if row.id in values]
    others = grouped(untouched(), lambda row: "all other projects")
    return others + grouped(
        used,
        lambda row: table_of(row).partition('"')[2].rstrip('"'),
        lambda row: values[row.id] / row.value - 1,
    )


HEADS = ["rows", "median", "9 in 10", "worst", "apart: median", "9 in 10", "worst"]


def constants() -> list[list[str]]:
    """The fitted constants of each GPU, and how many rows they rest on."""
    found = []
    for name in FITTED:
        kernels = load_kernels(name)
        values = [f"{what} {value:g}" for what, value in kernels.load.items()]
        used = len(rows_of(name, recorded()))
        fitted = f"{len(fitted_numbers(kernels))} of at most {min(MOST_FITTED, used // 3)}"
        found.append([name.upper(), *values, f"growth {kernels.growth:g}", fitted, str(used)])
    return found


def worst(chosen: Sequence[Row]) -> list[list[str]]:
    """The rows with the largest errors, and the reason as far as it is known."""
    order = sorted(chosen, key=lambda row: -abs(in_sample(row)))[:SHOWN_WORST]
    return [
        [row.id, row.system, row.config, f"{in_sample(row):+.0%}", WHY[row.id]] for row in order
    ]


def number(value: float) -> str:
    """A value with as many digits as it needs."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def all_rows(chosen: Iterable[Row]) -> list[list[str]]:
    """Every prediction."""
    found = []
    for row in chosen:
        said = recorded()[row.id]["predicted"]
        mark = {"": "", "curve": "curve"}.get(row.rests_on, "fitted")
        what = [row.id, row.system, row.config or row.what, f"{number(row.value)} {row.unit}"]
        found.append([*what, number(said), f"{in_sample(row):+.1%}", f"{error_of(row):+.1%}", mark])
    return found


def on_this_machine() -> list[str]:
    """The section of the machine that was calibrated; empty before one was."""
    record = this_machine.read()
    if record is None:
        return []
    words = THIS_MACHINE.format(
        calibrated=record.calibrated,
        verdict=this_machine.verdict(record.points),
        machine=record.machine,
        date=record.date,
    ).strip()
    heads = ["program", "ranks", "measured, ms", "predicted, ms", "error", "of all rounds"]
    return [
        "## This machine",
        words,
        table(list(this_machine.HEADER), this_machine.by_program(record.points)),
        table(heads, this_machine.all_points(record.points)),
    ]


def page() -> str:
    """The text of the page."""
    known = simulated()
    large = [row for row in known if counts(row)]
    reasons = Counter(row.why_not for row in rows() if row.why_not)
    sources = dict.fromkeys(row.source for row in known)
    parts = [
        INTRODUCTION.format(rows=len(rows()), simulated=len(known)).strip(),
        "![Published and predicted values: nearly all lie near the diagonal](validation.svg)",
        "## In short",
        table(["kind", *HEADS], grouped(large, kind_in_words)),
        AFTER.strip(),
        "## By source",
        table(["source", *HEADS], grouped(large, lambda row: row.project)),
        "## Whole sources left out",
        LEFT_OUT.strip(),
        table(["table", *HEADS], left_out()),
        "## Constants that published runs gave",
        table(["GPU", *["load of"] * 3, "per doubling", "fitted", "rows"], constants()),
        *on_this_machine(),
        "## What is worst, and why",
        WORST.strip(),
        table(["row", "system", "run", "error", "why"], worst(large)),
        "## What is not simulated",
        NOT_SIMULATED.strip(),
        table(["why not", "rows"], [[why, str(n)] for why, n in reasons.most_common()]),
        "## All rows",
        table(
            ["row", "system", "run", "published", "predicted", "error", "apart", "rests on it"],
            all_rows(known),
        ),
        "Sources:",
        "\n".join(f"- {source}" for source in sources),
    ]
    return "\n\n".join(parts) + "\n"


def write() -> Path:
    """The page and its picture."""
    draw(simulated(), PICTURE)
    PAGE.write_text(page(), encoding="utf-8")
    return PAGE
