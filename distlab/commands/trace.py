"""distlab trace: run an exercise's scenario and draw what its ranks do."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..course.catalogue import Exercise
from ..host.terminal import short
from ..player.page import page
from .scenario import run_scenario, scenario_of

IN_TERMINALS = {"www-browser", "links", "elinks", "lynx", "w3m"}


def trace(
    exercise: Exercise,
    impl: str,
    folder: Path,
    out: Console,
    show: bool = False,
    record: Path | None = None,
) -> int:
    """Run the exercise's scenario on 4 ranks and write picture and Chrome trace.

    ``show``: write a page that plays the run step by step, too, and open it. ``record``: write what
    was communicated, with its values, for ``distlab diff``.
    """
    # start-up time: they import torch, which other commands need not wait for
    from ..observe.runs import write_run
    from ..picture import chrome_trace, draw, draw_pipeline, shares, spans_of
    from ..player.own import own_document

    scenario = scenario_of(exercise)
    results = run_scenario(exercise, impl, scenario, values=record is not None)
    folder.mkdir(parents=True, exist_ok=True)
    spans = spans_of(results.logs)
    name = f"trace-{exercise.id}"
    target, title = folder / f"{name}.png", f"{exercise.id} {exercise.title}: {impl}"
    if scenario.bubble is None:
        picture = draw(spans, target, title)
    else:
        picture = draw_pipeline(spans, target, title, scenario.bubble)
    steps = own_document(spans, title)
    chrome = chrome_trace(spans, folder / f"{name}.json", {"player": steps})
    out.print(_table(shares(spans)))
    out.print(f"{short(picture)}  (picture)", highlight=False, soft_wrap=True)
    out.print(f"{short(chrome)}  (for Perfetto and players)", highlight=False, soft_wrap=True)
    if record is not None:
        write_run(record, [(log.rank, log.events) for log in results.logs], title)
        out.print(f"{short(record)}  (for distlab diff)", highlight=False, soft_wrap=True)
    if show:
        _show(steps, folder / f"{name}.html", out)
    return 0


def _table(found: dict[int, dict[str, int]]) -> Table:
    """How each rank spent the time of the run; a row adds up to 100 %."""
    table = Table("rank", box=None, header_style="dim", pad_edge=False)
    for what in next(iter(found.values()), {}):
        table.add_column(what, justify="right")
    for rank, parts in found.items():
        table.add_row(str(rank), *(f"{percent} %" for percent in parts.values()))
    return table


def _show(steps: dict[str, Any], target: Path, out: Console) -> None:
    """Write the page that plays a run, and open it; where no browser is, its path is all."""
    target.write_text(page(steps, "own"), encoding="utf-8")
    opened = _opened(target.resolve().as_uri())
    about = "opened in the browser" if opened else "step by step; open it in a browser"
    out.print(f"{short(target)}  ({about})", highlight=False, soft_wrap=True)


def _opened(address: str) -> bool:
    """Whether a browser shows it; those of terminals run no scripts, and take the terminal."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    named = Path(getattr(browser, "name", "")).name
    return named not in IN_TERMINALS and browser.open(address)
