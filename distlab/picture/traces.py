"""A trace of spans in Chrome's Trace Event Format; ui.perfetto.dev opens it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass
from ..observe.gpu_clock import GPU
from ..ranks.results import RankResults
from .lanes import draw
from .spans import Span, spans_of, stack


def chrome_trace(
    spans: Sequence[Span], path: str | Path, more: Mapping[str, Any] | None = None
) -> Path:
    """Write ``spans`` as a trace for ui.perfetto.dev or chrome://tracing: one process per rank.

    ``more``: further parts of the file, which these programs pass over.
    """
    begin = min((s.start for s in spans), default=0.0)
    clocks = any(s.clock == GPU for s in spans)
    out: list[dict[str, Any]] = []
    for rank in sorted({s.rank for s in spans}):
        out += _named(rank, "process", 0, f"rank {rank}", rank)
        for number, lane in enumerate(("data", "compute", "communication")):
            placed = stack(s for s in spans if s.rank == rank and s.lane == lane)
            for row in sorted({row for _, row in placed}):
                name = lane if row == 0 else f"{lane} {row + 1}"
                out += _named(rank, "thread", 100 * number + row, name, 100 * number + row)
            for span, row in placed:
                out += _traced(span, 100 * number + row, begin, clocks)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"traceEvents": out, "displayTimeUnit": "ms", **(more or {})}
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def _named(rank: int, kind: str, tid: int, name: str, order: int) -> list[dict[str, Any]]:
    """Name and position of a process or thread."""
    head = {"ph": "M", "pid": rank, "tid": tid}
    return [
        {**head, "name": f"{kind}_name", "args": {"name": name}},
        {**head, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _traced(span: Span, tid: int, begin: float, clocks: bool) -> list[dict[str, Any]]:
    """A complete event, and for a message one end of the arrow from send to receive.

    ``clocks``: say whose clock the times are of.
    """
    arguments = {
        "detail": span.detail,
        "bytes": span.nbytes,
        "peer": span.peer,
        "line": span.line,
        "region": span.region,
        "clock": span.clock if clocks else "",
    }
    head = {"pid": span.rank, "tid": tid, "ts": round((span.start - begin) * 1e6, 3)}
    name = f"{span.name} {span.label}".strip()
    event: dict[str, Any] = {**head, "ph": "X", "name": name, "cat": span.lane}
    event["dur"] = round(span.seconds * 1e6, 3)
    event["args"] = {k: v for k, v in arguments.items() if v not in ("", None)}
    if span.message is None:
        return [event]
    arrow = {**head, "name": "message", "cat": "message", "id": span.message}
    end = {"ph": "s"} if span.name == "send" else {"ph": "f", "bp": "e"}
    return [event, {**arrow, **end}]


def trace_run(results: RankResults, out_png: str | Path, title: str = "") -> tuple[Path, Path]:
    """Write the picture of a run and, beside it, its trace: (picture, ``….json``)."""
    spans = spans_of(results)
    picture = draw(spans, out_png, title.rstrip("."))
    return picture, chrome_trace(spans, picture.with_suffix(".json"))
