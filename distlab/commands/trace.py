"""distlab trace: run an exercise's scenario and draw what its ranks do."""

from __future__ import annotations

import importlib
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console

from ..course import progress
from ..course.catalogue import Exercise, has_solutions
from ..host.terminal import short
from ..player.page import page

IN_TERMINALS = {"www-browser", "links", "elinks", "lynx", "w3m"}


def trace(exercise: Exercise, impl: str, folder: Path, out: Console, show: bool = False) -> int:
    """Run the exercise's scenario on 4 ranks and write picture and Chrome trace.

    ``show``: write a page that plays the run step by step, too, and open it.
    """
    # start-up time: they import torch, which other commands need not wait for
    from ..grading.implementation import Implementation, find_source, protect_this_process
    from ..picture import chrome_trace, draw, draw_pipeline, spans_of
    from ..player.own import own_document
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
    steps = own_document(spans, title)
    chrome = chrome_trace(spans, folder / f"{name}.json", {"player": steps})
    out.print(f"{short(picture)}  (picture)", highlight=False, soft_wrap=True)
    out.print(f"{short(chrome)}  (for Perfetto and players)", highlight=False, soft_wrap=True)
    if show:
        _show(steps, folder / f"{name}.html", out)
    return 0


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


def _scenario(exercise: Exercise) -> Any:
    """The function marked ``@trace(id)`` in the exercise's check files."""
    for path in sorted(exercise.folder.glob(exercise.checks_glob)):
        name = path.relative_to(exercise.folder).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(name)
        for value in vars(module).values():
            if exercise.id in getattr(value, "trace_of", ()):
                return value
    raise ValueError(f"exercise {exercise.id} has no scenario to trace")
