"""What is handed out: the program, a report as a user would file it, traces, and answer.toml."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...course.version import course_version
from ...picture import chrome_trace, draw, spans_of
from ...player.own import own_document
from ...player.page import page
from .chosen import DebugLab
from .observed import Seen, observe
from .report import report, seen
from .sources import sources_of

MARK, ANSWER, REPORT, AGAIN = "lab.json", "answer.toml", "REPORT.md", "again"
CURVE = 5  # entries that a series of numbers has at least, to be drawn


def write_lab(lab: DebugLab, seed: int, folder: Path) -> Path:
    """Make the lab's folder; ValueError if there is one that would be overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name another folder with --out")
    sources = sources_of(lab)
    right = observe(lab, sources.right, seed)
    wrong = observe(lab, sources.wrong, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / lab.file).write_text(sources.wrong, encoding="utf-8")
    shutil.copyfile(lab.program_path, folder / "program.py")
    (folder / ANSWER).write_text(answer_form(lab), encoding="utf-8")
    pictures = _pictures(lab, wrong, right, folder)
    (folder / REPORT).write_text(report(lab, wrong, right, pictures), encoding="utf-8")
    mark = {"lab": lab.id, "seed": seed, "course_version": course_version()}
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    return folder


def run_again(lab: DebugLab, seed: int, folder: Path, ranks: int) -> tuple[Path, Seen, Seen]:
    """Run the program with the file as it is now: the report in ``again/``, this run, and the one
    that is expected."""
    own = observe(lab, (folder / lab.file).read_text(encoding="utf-8"), seed, ranks)
    right = observe(lab, sources_of(lab).right, seed, ranks)
    made = folder / AGAIN
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    pictures = _pictures(lab, own, right, made)
    title = f"# Lab {lab.id} again, on {ranks} ranks"
    text = f"{title}\n\n{seen(lab, own, right, pictures)}\n"
    (made / REPORT).write_text(text, encoding="utf-8")
    return made / REPORT, own, right


def answer_form(lab: DebugLab) -> str:
    """The file that the learner fills in."""
    several = len(lab.wrong)
    bugs = "one bug" if several == 1 else f"{several} bugs, each with a [[bug]] of its own"
    lines = [
        f"# The program has {bugs}. Fill in ranks, line and cause.",
        "#",
        '# ranks: the ranks whose values in the report are wrong, for example [1, 3], or "all".',
        '#   Write "all" also if all values are right, or if the run does not end well.',
        f"# line: a line with the bug, in {lab.file} as it was handed out. If something is",
        "#   missing there, the line before or after the gap. Two lines off is near enough.",
        "# cause: one of these words:",
        *(f"#   {name}: {about}" for name, about in lab.offered.items()),
        "# why: one sentence for yourself. It is not graded.",
    ]
    form = f'[[bug]]\nranks = ""\nfile = "{lab.file}"\nline = 0\ncause = ""\nwhy = ""\n'
    return "\n".join(lines) + "\n\n" + "\n".join([form] * several)


def _pictures(lab: DebugLab, wrong: Seen, right: Seen, folder: Path) -> list[str]:
    """Curves and the trace, as far as the run has them: their names."""
    made = []
    for name in _series(wrong):
        path = folder / f"{name.replace(' ', '_')}.png"
        _curve(name, wrong, right, path)
        made.append(path.name)
    spans = spans_of(wrong.logs) if any(log.events for log in wrong.logs) else []
    if spans:
        draw(spans, folder / "trace.png", f"lab {lab.id}: what each rank did")
        steps = own_document(spans, f"lab {lab.id}")
        chrome_trace(spans, folder / "trace.json", {"player": steps})
        (folder / "player.html").write_text(page(steps, "own"), encoding="utf-8")
        made.append("trace.png")
    return made


def _series(one: Seen) -> list[str]:
    """Names of what the program returned as a curve."""
    found = one.values[0].items() if one.values else ()
    return [
        name
        for name, value in found
        if isinstance(value, (list, dict))
        and len(value) >= CURVE
        and isinstance(_line(value)[1][0], float)
    ]


def _line(values: list[float] | dict[str, float]) -> tuple[list[int], list[float]]:
    """Where the values of a curve are drawn: at steps from 1, or at the numbers in their names."""
    if isinstance(values, dict):
        return [int(each.split()[1]) for each in values], [*values.values()]
    return [*range(1, len(values) + 1)], values


def _alike(name: str, one: Seen) -> list[tuple[list[int], Any]]:
    """Ranks that have the same curve, which would hide each other, and this curve."""
    found: list[tuple[list[int], Any]] = []
    for rank, mine in enumerate(one.values):
        known = next((ranks for ranks, values in found if values == mine[name]), None)
        if known is None:
            found.append(([rank], mine[name]))
        else:
            known.append(rank)
    return found


def _ranks(which: list[int], one: Seen) -> str:
    if len(which) == len(one.values):
        return "all ranks"
    return f"rank{'s' if len(which) > 1 else ''} {', '.join(map(str, which))}"


def _curve(name: str, wrong: Seen, right: Seen, path: Path) -> None:
    """What was seen on each rank beside what was expected there."""
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(6.4, 3.4), dpi=120, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        colours: dict[int, str] = {}
        for k, (which, values) in enumerate(_alike(name, wrong)):
            colours |= dict.fromkeys(which, f"C{k}")
            axes.plot(*_line(values), lw=1.5, alpha=0.8, color=f"C{k}", label=_ranks(which, wrong))
        expected = _alike(name, right)
        for which, values in expected:
            colour, label = colours[which[0]], f"expected, {_ranks(which, right)}"
            if len(expected) == 1:
                colour, label = "black", "expected"
            axes.plot(*_line(values), "--", lw=1, color=colour, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(next(iter(values)).split()[0] if isinstance(values, dict) else "step")
        axes.set_ylabel(name)
        axes.legend(frameon=False, ncols=2)
        figure.savefig(path)
