"""What soaking has found, for README.md (a row per phase) and soak.md (a row per check)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .common import Table
from .page import page
from .run import PAIRED, paired
from .soak_book import Book, Count, upper_bound

TITLE = "Wrong verdicts on right code"
NOTE = (
    "`make soak` grades the solutions again and again, and the alternatives on gloo ranks. Each "
    "grading has a new seed. *Idle*: other programs used less than 10 % of the processors. "
    "*Loaded*: three busy processes per core ran beside the grading. *Disturbed*: the grading "
    "began as idle, but something else ran. A grading counts when all checks of its row were "
    "judged as they are now. A check begins anew when its code, the code that it judges or the "
    "toolkit changes. A bound is the share of wrong verdicts that the gradings rule out with "
    "95 % confidence (Clopper-Pearson). One bound is for any verdict of the row, and one for the "
    "check with the fewest gradings. [soak.md](soak.md) has every check."
)
Keys = dict[str, dict[str, list[str]]]


def write(book: Book, current: Keys, folder: Path) -> str:
    """Write both pages into ``folder``; returns the table per phase.

    ``current``: for each subject its checks, and what they depend on now.
    """
    table = summary(book, current)
    path = folder / "README.md"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(page(old, [paired(name) for name in PAIRED], [table]), encoding="utf-8")
    (folder / "soak.md").write_text(details(book, current), encoding="utf-8")
    return table.markdown()


def summary(book: Book, current: Keys) -> Table:
    """A row for each phase, and one for all alternatives."""
    phases = [name for name in current if name.startswith("phase ")]
    rows = [_row(f"solutions, {name}", book, {name: current[name]}) for name in phases]
    others = {name: keys for name, keys in current.items() if name not in phases}
    rows.append(_row(f"{len(others)} alternatives, gloo, each", book, others))
    header = ["what", "checks", "gradings idle", "loaded", "disturbed"]
    header += ["verdicts", "wrong", "bound, any verdict", "bound, least tried check"]
    return Table(TITLE, header, rows, NOTE)


def _row(title: str, book: Book, current: Keys) -> list[str]:
    counts = [count for name in current for _, count in _counts(book, name, current[name])]
    gradings = [
        str(min((book.gradings(name, c, current[name]) for name in current), default=0))
        for c in ("idle", "loaded", "disturbed")
    ]
    runs, wrong = sum(c.all_runs for c in counts), sum(c.all_wrong for c in counts)
    bounds = _bounds(counts)
    worst = _percent(max(bounds)) if bounds else ""
    any_verdict = _percent(upper_bound(runs, wrong)) if runs else ""
    return [title, str(len(counts)), *gradings, f"{runs:,}", str(wrong), any_verdict, worst]


def _bounds(counts: Iterable[Count]) -> list[float]:
    return [upper_bound(c.all_runs, c.all_wrong) for c in counts if c.all_runs]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _counts(book: Book, name: str, keys: dict[str, list[str]]) -> list[tuple[str, Count]]:
    """The checks of a subject that were judged as they are now."""
    found = book.counts.get(name, {})
    return [(c, found[c]) for c in sorted(keys) if c in found and found[c].key == keys[c]]


def details(book: Book, current: Keys) -> str:
    """The page with every check, every wrong verdict, and every count that was begun anew."""
    lines = [
        "# Soaking, check by check",
        "",
        "Written by `make soak`. [README.md](README.md) sums it up.",
    ]
    lines += ["", *_list("Wrong verdicts", [_wrong(w) for w in book.wrong]), ""]
    anew: dict[tuple[str, str, str], list[int]] = {}
    for one in book.anew:
        total = anew.setdefault((one["at"], one["what"], one["changed"]), [0, 0, 0])
        for column, number in enumerate((1, one["runs"], one["wrong"])):
            total[column] += number
    told = [
        f"{at}, {what}: {checks} checks ({runs} verdicts, {wrong} wrong before), because of a "
        f"change in {changed}"
        for (at, what, changed), (checks, runs, wrong) in anew.items()
    ]
    lines += [*_list("Counts begun anew", told), ""]
    for name, keys in current.items():
        rows = [_details_row(check, count) for check, count in _counts(book, name, keys)]
        header = ["check", "idle", "loaded", "disturbed", "wrong", "upper bound"]
        if rows:
            lines += [Table(name, header, rows).markdown(), ""]
    return "\n".join(lines)


def _details_row(check: str, count: Count) -> list[str]:
    runs = [str(n) for n in count.runs.values()]
    bound = upper_bound(count.all_runs, count.all_wrong) if count.all_runs else 1.0
    return [f"`{check}`", *runs, str(count.all_wrong), _percent(bound)]


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *([f"- {line}" for line in lines] or ["None."])]


def _wrong(story: dict[str, object]) -> str:
    message = str(story["message"]).strip().replace("\n", " ")
    return (
        f"{story['at']}, {story['what']} {story['check']}, {story['condition']}, seed "
        f"{story['seed']}: {story['verdict']}: {message}"
    )
