"""The report of a run as a user would file it: values, time, memory, ledger, or how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...observe.log import readable
from .chosen import DebugLab
from .observed import Seen, rounded

ROWS = 8  # of a series in the report's table
Table = list[list[str]]


def report(lab: DebugLab, wrong: Seen, right: Seen, pictures: Sequence[str]) -> str:
    """The report that is handed out, as Markdown."""
    parts = [
        f"# Lab {lab.id}: {lab.title}",
        f"Level {lab.level}, {lab.points} points.",
        "## What a user wrote",
        lab.told.strip(),
        "## What was run",
        f"`program.py` on {lab.world} ranks{_machine(lab)}. {_bugs(lab)}",
        seen(lab, wrong, right, pictures),
        "## What to do",
        f"1. Find {'the bug' if len(lab.wrong) == 1 else 'the bugs'}, and answer in `answer.toml`."
        f"\n2. Mend `{lab.file}`. Change few lines: more than three times as many as needed count "
        "half. A moved line counts once.\n3. Run the program again: `distlab lab debug --again "
        "FOLDER`. `--ranks 2` takes fewer ranks.\n4. Grade it: `distlab lab debug --grade FOLDER`. "
        "Its checks ask for more than this report.\n\n"
        "`distlab lab debug --hint FOLDER` helps, three times.",
    ]
    return "\n\n".join(parts) + "\n"


def _machine(lab: DebugLab) -> str:
    options = lab.run
    found = f" of the simulated cluster `{options.get('cluster', 'laptop')}`"
    for rank, factor in options.get("slow_links", {}).items():
        found += f", on which the links of rank {rank} are {factor:g} times slower"
    return found


def _bugs(lab: DebugLab) -> str:
    name = f"`{lab.file}`"
    if len(lab.wrong) == 1:
        return f"There is one bug, and it is in {name}. The program itself is right."
    return f"There are {len(lab.wrong)} bugs, all in {name}. The program itself is right."


def seen(lab: DebugLab, wrong: Seen, right: Seen, pictures: Sequence[str]) -> str:
    """What one run has shown beside what is expected, as Markdown."""
    parts = ["## What was seen"]
    if lab.fine_at and len(wrong.values or right.values) == lab.world:
        sizes = " and ".join(map(str, lab.fine_at))
        ranks = "rank" if sizes == "1" else "ranks"
        parts.append(f"On {sizes} {ranks} the same program gives what is expected.")
    if wrong.failure:
        ends = "\n".join(wrong.at_the_end)
        parts.append(f"The run did not end well:\n\n```\n{wrong.failure}\n\n{ends}\n```")
        if right.ledger:
            parts += ["## Ledger of a run as it should be", _ledger(right)]
    else:
        clock = "communication only" if lab.run.get("compute", "none") == "none" else "all work"
        parts.append(_values(wrong, right))
        if any((*wrong.seconds, *right.seconds)):
            parts += ["## Time and memory", f"The time is virtual: the clock counts {clock}."]
            parts.append(_costs(wrong, right))
        parts += ["## Ledger: what each rank sent and received", _ledgers(wrong, right)]
    if pictures:
        parts += ["## Pictures", *(f"![{name}]({name})" for name in pictures)]
    if "trace.png" in pictures:
        parts.append(
            "`trace.png` shows what was seen. `player.html` plays it step by step in a "
            "browser. ui.perfetto.dev opens `trace.json`."
        )
    return "\n\n".join(parts)


def _table(head: Sequence[str], rows: Table) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _together(rows: Table, ranks: int) -> Table:
    """One row for ranks whose rows are equal; the first cell of each row is a rank."""
    found: dict[tuple[str, ...], list[str]] = {}
    for rank, *rest in rows:
        found.setdefault(tuple(rest), []).append(rank)
    return [
        ["all" if len(which) == ranks else ", ".join(which), *rest] for rest, which in found.items()
    ]


def _values(wrong: Seen, right: Seen) -> str:
    """What differs on some rank, as a table, and the names of the rest."""
    differing = {
        name: any(rounded(a.get(name)) != rounded(b.get(name)) for a, b in _pairs(wrong, right))
        for values in wrong.values
        for name in values
    }
    fine = [name for name, differs in differing.items() if not differs]
    rows = [
        [str(rank), name, *_short(got[name], expected.get(name))]
        for name in filter(differing.get, differing)
        for rank, (got, expected) in enumerate(_pairs(wrong, right))
        if name in got
    ]
    rows = _together(rows, len(wrong.values))
    parts = [_table(["rank", "value", "seen", "expected"], rows)] if rows else []
    if fine:
        parts.append(f"As expected on all ranks: {'; '.join(fine)}.")
    return "\n\n".join(parts)


def _pairs(wrong: Seen, right: Seen) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return list(zip(wrong.values, right.values, strict=True))


def _apart(got: float, expected: float) -> float:
    """The difference as a part of what is expected; infinite if that is 0."""
    return abs(got - expected) / abs(expected) if expected else float("inf")


def _short(got: Any, expected: Any) -> tuple[str, str]:
    """Both values; of long series the entries around the first difference, and of entries with
    names those that differ most, in parts of what is expected."""
    value = got[0] if isinstance(got, list) and got else got
    got, expected = rounded(got), rounded(expected)
    if isinstance(got, dict) and isinstance(expected, dict):
        names = [name for name in got if got[name] != expected[name]]
        names.sort(key=lambda name: _apart(float(got[name]), float(expected[name])), reverse=True)
        rest = ", …" if len(names) > ROWS else ""
        seen, should = (
            ", ".join(f"{name}: {values[name]}" for name in names[:ROWS]) + rest
            for values in (got, expected)
        )
        return seen, should
    if not isinstance(got, list) or not isinstance(expected, list):
        return str(got), str(expected)
    pairs = list(zip(got, expected, strict=False))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    begin = max(0, min(first - 2, len(got) - ROWS))
    unit = "step" if isinstance(value, float) else "entry"
    start = [f"from {unit} {begin + 1}"] if begin else []
    change = [f"first difference at {unit} {first + 1}"] if first else []
    texts = []
    for values, notes in ((got, start + change), (expected, start)):
        text = ", ".join(map(str, values[begin : begin + ROWS]))
        before = f"({'; '.join(notes)}) " if notes else ""
        texts.append(before + text + (", …" if len(values) > begin + ROWS else ""))
    return texts[0], texts[1]


def _costs(wrong: Seen, right: Seen) -> str:
    rows = []
    for rank, seconds in enumerate(wrong.seconds):
        row = [str(rank), _ms(seconds), _ms(right.seconds[rank])]
        if wrong.peaks and wrong.peaks[rank]:
            row += [readable(wrong.peaks[rank]), readable(right.peaks[rank])]
        rows.append(row)
    rows = _together(rows, len(wrong.seconds))
    head = ["rank", "time", "expected time", "peak memory", "expected peak memory"]
    return _table(head[: len(rows[0])], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _ledgers(wrong: Seen, right: Seen) -> str:
    """The operators of each rank, those that are expected and missing among them."""
    rows = []
    for rank, (mine, theirs) in enumerate(zip(wrong.ledger, right.ledger, strict=True)):
        got = {op: rest for op, *rest in mine}
        should = {op: rest for op, *rest in theirs}
        for op in dict.fromkeys((*got, *should)):
            a, b = got.get(op, [0, 0, 0]), should.get(op, [0, 0, 0])
            row = [str(rank), op, str(a[0]), str(b[0]), readable(a[1]), readable(b[1])]
            rows.append([*row, readable(a[2]), readable(b[2])])
    if not rows:
        return "No rank sent anything."
    head = ["rank", "operator", "times", "expected", "sent", "expected", "received", "expected"]
    return _table(head, _together(rows, len(wrong.ledger)))


def _ledger(one: Seen) -> str:
    rows = [
        [str(rank), op, str(count), readable(sent), readable(received)]
        for rank, mine in enumerate(one.ledger)
        for op, count, sent, received in mine
    ]
    head = ["rank", "operator", "times", "sent", "received"]
    return _table(head, _together(rows, len(one.ledger)))
