"""What is handed out: the program, a report as a user would file it, traces, and answer.toml."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ...course.version import course_version
from ...observe.log import readable
from ...picture import chrome_trace, draw, spans_of
from ...player.own import own_document
from ...player.page import page
from .chosen import DebugLab
from .observed import Seen, observe, rounded
from .sources import sources_of

MARK, ANSWER, REPORT = "lab.json", "answer.toml", "REPORT.md"
ROWS = 8  # of a series in the report's table


def write_lab(lab: DebugLab, seed: int, folder: Path) -> Path:
    """Make the lab's folder; ValueError if there is one that would be overwritten."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name another folder with --out")
    sources = sources_of(lab)
    right = observe(lab, sources.right, seed)
    wrong = observe(lab, sources.wrong, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / lab.file).write_text(sources.wrong, encoding="utf-8")
    shutil.copyfile(lab.program_path, folder / "program.py")
    (folder / ANSWER).write_text(answer_form(lab), encoding="utf-8")
    pictures = _pictures(lab, wrong, right, folder)
    (folder / REPORT).write_text(_report(lab, wrong, right, pictures), encoding="utf-8")
    mark = {"lab": lab.id, "seed": seed, "course_version": course_version()}
    (folder / MARK).write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
    return folder


def answer_form(lab: DebugLab) -> str:
    """The file that the learner fills in."""
    several = len(lab.wrong)
    bugs = "one bug" if several == 1 else f"{several} bugs, each with a [[bug]] of its own"
    lines = [
        f"# The program has {bugs}. Fill in what is between the quotes, and the line.",
        '# ranks: "all", or those of which the report is not as expected, for example [1, 3]',
        f"# line: of {lab.file} as it was handed out",
        "# cause: one of these words",
        *(f"#   {name}: {about}" for name, about in sorted(lab.offered.items())),
        "# why: one sentence for yourself; it is not graded",
    ]
    form = f'[[bug]]\nranks = ""\nfile = "{lab.file}"\nline = 0\ncause = ""\nwhy = ""\n'
    return "\n".join(lines) + "\n\n" + "\n".join([form] * several)


def _pictures(lab: DebugLab, wrong: Seen, right: Seen, folder: Path) -> list[str]:
    """Curves and the trace, as far as the run has them: their names."""
    made = []
    for name in _series(right):
        _curve(name, wrong, right, folder / f"{name}.png")
        made.append(f"{name}.png")
    spans = spans_of(wrong.logs) if any(log.events for log in wrong.logs) else []
    if spans:
        draw(spans, folder / "trace.png", f"lab {lab.id}: what each rank did")
        steps = own_document(spans, f"lab {lab.id}")
        chrome_trace(spans, folder / "trace.json", {"player": steps})
        (folder / "player.html").write_text(page(steps, "own"), encoding="utf-8")
        made.append("trace.png")
    return made


def _series(seen: Seen) -> list[str]:
    """Names of what the program returned as a curve."""
    found = seen.values[0].items() if seen.values else ()
    return [
        name
        for name, value in found
        if isinstance(value, list) and len(value) > 2 and isinstance(value[0], float)
    ]


def _curve(name: str, wrong: Seen, right: Seen, path: Path) -> None:
    """What was seen on each rank beside what was expected."""
    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(6.4, 3.4), dpi=120, facecolor="white", layout="constrained")
        axes = figure.add_subplot()
        for rank, values in enumerate(right.values):
            label = "expected" if rank == 0 else None
            axes.plot(range(1, len(values[name]) + 1), values[name], "k--", lw=1, label=label)
        for rank, values in enumerate(wrong.values):
            steps = range(1, len(values[name]) + 1)
            axes.plot(steps, values[name], lw=1.5, alpha=0.8, label=f"rank {rank}")
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        axes.legend(frameon=False, ncols=2)
        figure.savefig(path)


def _report(lab: DebugLab, wrong: Seen, right: Seen, pictures: Sequence[str]) -> str:
    """The report, as Markdown."""
    cluster = lab.run.get("cluster", "laptop")
    parts = [
        f"# Lab {lab.id}: {lab.title}",
        f"Level {lab.level}, {lab.points} points.",
        "## What a user wrote",
        lab.told.strip(),
        f"## What was run\n\n`program.py` on {lab.world} ranks of the cluster `{cluster}`, with "
        f"`{lab.file}`. Nothing else is wrong.",
        "## What was seen",
    ]
    if lab.fine_at:
        sizes = " and ".join(map(str, lab.fine_at))
        parts.append(f"On {sizes} ranks the same program gives what is expected.")
    if wrong.failure:
        ends = "\n".join(wrong.at_the_end)
        parts.append(f"The run did not end well:\n\n```\n{wrong.failure}\n{ends}\n```")
    else:
        parts += [_values(wrong, right), "## Time and memory", _costs(wrong, right)]
        parts += ["## Ledger: what each rank sent and received", _ledger(wrong)]
    if wrong.failure and right.ledger:
        parts += ["## Ledger of a run as it should be", _ledger(right)]
    if pictures:
        parts += ["## Pictures", *(f"![{name}]({name})" for name in pictures)]
    if "trace.png" in pictures:
        parts.append("`player.html` plays the trace step by step. Perfetto opens `trace.json`.")
    parts += ["## What to do", _to_do(lab)]
    return "\n\n".join(parts) + "\n"


def _to_do(lab: DebugLab) -> str:
    return (
        f"1. Find the bug, and answer in `{ANSWER}`.\n"
        f"2. Mend `{lab.file}` with few lines: at most three times those that are wrong.\n"
        "3. Run the program again with `distlab lab debug --again FOLDER`.\n"
        "4. Grade it with `distlab lab debug --grade FOLDER`."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _values(wrong: Seen, right: Seen) -> str:
    rows = []
    for rank, (got, expected) in enumerate(zip(wrong.values, right.values, strict=True)):
        for name in got:
            shown, should = _short(got[name], expected[name])
            rows.append([str(rank), name, shown, should])
    return _table(["rank", "value", "seen", "expected"], rows)


def _short(got: Any, expected: Any) -> tuple[str, str]:
    """Both values; of long series the first entries, and those around the first difference."""
    got, expected = rounded(got), rounded(expected)
    if not isinstance(got, list):
        return str(got), str(expected)
    pairs = list(zip(got, expected, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
    begin = max(0, min(first - 2, len(got) - ROWS))
    texts = []
    for values in (got, expected):
        text = ", ".join(map(str, values[begin : begin + ROWS]))
        before = f"(from entry {begin + 1}) " if begin else ""
        texts.append(before + text + (", …" if len(values) > begin + ROWS else ""))
    return texts[0], texts[1]


def _costs(wrong: Seen, right: Seen) -> str:
    rows = []
    for rank, seconds in enumerate(wrong.seconds):
        row = [str(rank), _ms(seconds), _ms(right.seconds[rank])]
        if wrong.peaks and wrong.peaks[rank]:
            row += [readable(wrong.peaks[rank]), readable(right.peaks[rank])]
        rows.append(row)
    head = ["rank", "time (virtual)", "expected", "peak memory", "expected"]
    return _table(head[: len(rows[0])], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _ledger(seen: Seen) -> str:
    rows = [
        [str(rank), op, str(count), readable(sent), readable(received)]
        for rank, mine in enumerate(seen.ledger)
        for op, count, sent, received in mine
    ]
    if not rows:
        return "No rank sent anything."
    return _table(["rank", "operator", "times", "sent", "received"], rows)
