"""Diagrams of phase 4: a profile is read."""

from __future__ import annotations

from given.intervals import Interval, length, without
from given.profile_files import Span, Trace
from solutions.phase4_production.profile_reading import (
    LOST,
    PARTS,
    bottleneck,
    growth,
    parts,
    read_trace,
)

from .letters import SMALL, width_of
from .registry import ROOT, diagram
from .sheet import INNER, MARGIN, Sheet
from .times import Bar, lanes, ticks

TONES = dict(zip(PARTS, ("blue", "orange", "green", "purple", "red", "grey"), strict=True))


def moments(trace: Trace) -> dict[str, list[Interval]]:
    """The intervals of each part; their lengths are those of ``parts``."""
    left, found = [trace.window], dict[str, list[Interval]]()
    for part in PARTS:
        spans = [trace.window] if part == LOST[-1] else [(s.begin, s.end) for s in trace.of(part)]
        rest = without(left, spans)
        found[part], left = without(left, rest), rest
    assert {part: length(found[part]) for part in PARTS} == parts(trace)
    return found


@diagram("4.19", "Each moment belongs to the first part that fits")
def profile(sheet: Sheet) -> None:
    host, compute, nccl = (1, 1), (0, 7), (0, 20)
    spans = [
        Span("step", "step", host, 0, 100, 0),
        Span("data", "data", host, 0, 20, 0),
        Span("compute", "forward", compute, 32, 48, 27),
        Span("communication", "all-gather", nccl, 38, 62, 36),
        Span("compute", "backward", compute, 62, 78, 40),
        Span("optimizer", "optimizer", host, 74, 96, 74),
        Span("compute", "", compute, 86, 89, 85),
    ]
    trace = Trace(tuple(spans))

    def bars(lane: tuple[int, int]) -> list[Bar]:
        mine = [s for s in trace.spans if s.lane == lane and s.kind != "step"]
        return [Bar(s.begin, s.end, s.name, TONES[s.kind]) for s in mine]

    short = {"communication": "exposed", "optimizer": "opt"}
    read = [
        Bar(begin, end, short.get(part, part) if end - begin > 7 else "", TONES[part], strong=True)
        for part, found in moments(trace).items()
        for begin, end in found
    ]
    rows = {"host": bars(host), "stream 7": bars(compute), "stream 20": bars(nccl), "parts": read}
    where = lanes(sheet, rows, 100, h=30)
    ticks(sheet, where, {0: "0", 27: "launched", 48: "48", 62: "62", 100: "100 µs"})
    found = ", ".join(f"{part} {ns}" for part, ns in parts(trace).items() if ns)
    sheet.note(
        f"Parts in µs: {found}; together {sum(parts(trace).values())}. The first kernel was "
        "launched at 27 µs. So until then the stream waited for the host."
    )


@diagram("4.19-2", "Five recorded runs, and what the reading finds")
def recorded(sheet: Sheet) -> None:
    left, width, h = MARGIN + 116.0, INNER - 116.0, 26
    x = MARGIN + 20.0
    for part in PARTS:
        if part != "copy":
            sheet.box(x, sheet.y + 4, 14, 14, "", TONES[part], hatch=part == "launch")
            sheet.text(x + 19, sheet.y + 11, part, size=SMALL)
            x += 36 + width_of(part, SMALL)
    sheet.gap(30)
    for path in sorted((ROOT / "given" / "profiles").glob("*.json.gz")):
        trace = read_trace(path)
        found, lost = bottleneck(trace), parts(trace)
        x = left
        sheet.text(MARGIN, sheet.y + h / 2, path.name.partition(".")[0], size=SMALL, bold=True)
        for part, ns in lost.items():
            w = width * ns / sum(lost.values())
            words = f"{ns / sum(lost.values()):.0%}" if w > 34 else ""
            mine = part == found.part
            if w >= 1:
                sheet.box(x, sheet.y, w, h, words, TONES[part], strong=mine, hatch=part == "launch")
            x += w
        sheet.y += h + 4
        told = f"{found.part}: {found.amount / 1e6:.0f} of {found.whole / 1e6:.0f} ms"
        if found.part == "memory":
            kept = min(growth(trace, trace.changes)) / 2**20
            told = f"memory: each step keeps {kept:g} MiB"
        sheet.text(left, sheet.y + 8, told + (f", {found.detail}" * bool(found.detail)), size=SMALL)
        sheet.gap(26)
    sheet.note("The name of a row is the planted reason. The bold part is the one that was found.")
