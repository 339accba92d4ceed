"""distlab trace: run an exercise's scenario and draw what its ranks do."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..course.catalogue import Exercise
from ..host.terminal import short
from .scenario import run_scenario, scenario_of


def trace(exercise: Exercise, impl: str, folder: Path, out: Console) -> int:
    """Run the exercise's scenario on 4 ranks and write picture and Chrome trace."""
    # start-up time: it imports torch, and other commands need not wait for that
    from ..picture import chrome_trace, draw, draw_pipeline, spans_of

    scenario = scenario_of(exercise)
    results = run_scenario(exercise, impl, scenario)
    folder.mkdir(parents=True, exist_ok=True)
    spans = spans_of(results.logs)
    name = f"trace-{exercise.id}"
    target, title = folder / f"{name}.png", f"{exercise.id} {exercise.title}: {impl}"
    if scenario.bubble is None:
        picture = draw(spans, target, title)
    else:
        picture = draw_pipeline(spans, target, title, scenario.bubble)
    chrome = chrome_trace(spans, folder / f"{name}.json")
    out.print(f"{short(picture)}  (picture)", highlight=False, soft_wrap=True)
    out.print(f"{short(chrome)}  (for Perfetto)", highlight=False, soft_wrap=True)
    return 0
