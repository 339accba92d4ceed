"""distlab trace: run an exercise's scenario and draw what its ranks do."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..course import progress
from ..course.catalogue import Exercise, has_solutions
from ..host.terminal import short


def trace(exercise: Exercise, impl: str, folder: Path, out: Console) -> int:
    """Run the exercise's scenario on 4 ranks and write picture and Chrome trace."""
    # start-up time: they import torch, which other commands need not wait for
    from ..grading.implementation import Implementation, find_source, protect_this_process
    from ..picture import chrome_trace, draw, draw_pipeline, shares, spans_of
    from ..ranks.results import RankFailure
    from ..ranks.run import run_ranks

    protect_this_process()
    source = find_source(impl, exercise.phase)
    passes = set(progress.known_passes(exercise.phase)) | {exercise.id}
    others = [e for e in exercise.phase.exercises if e.id not in passes]
    replaced = others if impl == "templates" and has_solutions() else []
    scenario = _scenario(exercise)
    body = scenario(Implementation(source, exercise.file, replaced))
    try:
        results = run_ranks(body, 4, timeout=60, learner_files=source.files())
    except RankFailure as failure:
        where = f"\n  your line: {failure.line}" if failure.line else ""
        raise ValueError(f"the run of {exercise.id} failed: {failure.message}{where}") from None
    folder.mkdir(parents=True, exist_ok=True)
    spans = spans_of(results.logs)
    name = f"trace-{exercise.id}"
    target, title = folder / f"{name}.png", f"{exercise.id} {exercise.title}: {impl}"
    if scenario.bubble is None:
        picture = draw(spans, target, title)
    else:
        picture = draw_pipeline(spans, target, title, scenario.bubble)
    chrome = chrome_trace(spans, folder / f"{name}.json")
    out.print(_table(shares(spans)))
    out.print(f"{short(picture)}  (picture)", highlight=False, soft_wrap=True)
    out.print(f"{short(chrome)}  (for Perfetto)", highlight=False, soft_wrap=True)
    return 0


def _table(found: dict[int, dict[str, int]]) -> Table:
    """How each rank spent the time of the run; a row adds up to 100 %."""
    table = Table("rank", box=None, header_style="dim", pad_edge=False)
    for what in next(iter(found.values()), {}):
        table.add_column(what, justify="right")
    for rank, parts in found.items():
        table.add_row(str(rank), *(f"{percent} %" for percent in parts.values()))
    return table


def _scenario(exercise: Exercise) -> Any:
    """The function marked ``@trace(id)`` in the exercise's check files."""
    for path in sorted(exercise.folder.glob(exercise.checks_glob)):
        name = path.relative_to(exercise.folder).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(name)
        for value in vars(module).values():
            if exercise.id in getattr(value, "trace_of", ()):
                return value
    raise ValueError(f"exercise {exercise.id} has no scenario to trace")
