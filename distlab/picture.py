"""The picture of a timeline: for each rank a lane that computes and a lane that communicates.

Cold colours compute, warm colours communicate, grey hatching waits; the palette can be told apart
by readers who are colour-blind (after Okabe & Ito 2008, and Tol). At the right, the share of the
time that each rank computed, communicated (also while it computed) and only waited.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ledger import readable
from .timeline import WAIT, Span, covered, stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "data": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "other": "#A9B4C2",
    WAIT: "#F4F4F4",
    "send": "#E69F00",
    "recv": "#CC79A7",
    "all_reduce": "#D55E00",
    "reduce_scatter": "#B5477B",
    "all_gather": "#EE9A6B",
    "broadcast": "#882255",
    "reduce": "#C44536",
    "gather": "#DDAA33",
    "scatter": "#B07AA1",
    "all_to_all": "#7A3B00",
    "barrier": "#555555",
}
LEGEND = {"data": "load data", "other": "other compute", WAIT: "wait for another rank"}
INK, SOFT, EDGE = "#222222", "#6B6B6B", "#A8A8A8"
WIDTH, ROW, MARGIN = 12.5, 0.86, 1.55  # inches: width, height of a rank, all but the ranks
MOST_LABELS, MOST_ARROWS, MOST_ROWS = 600, 250, 4
COMPUTE = (0.10, 0.44)  # top and bottom of the lanes in the row of a rank, from its top
COMMUNICATION = (0.48, 0.86)


def draw_spans(spans: Sequence[Span], path: Path, title: str) -> Path:
    """Draw ``spans`` to ``path``; see ``timeline.draw``."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style = {"font.size": 9, "hatch.linewidth": 0.6, "svg.hashsalt": "timeline"}
    with rc_context(style):
        ranks = sorted({s.rank for s in spans})
        figure = Figure(figsize=(WIDTH, MARGIN + ROW * max(1, len(ranks))), dpi=130)
        axes = figure.add_subplot()
        if spans:
            _Picture(axes, spans, ranks).draw()
        else:
            axes.text(0.5, 0.5, "nothing was recorded", ha="center", color=SOFT)
            axes.set_axis_off()
        _frame(axes, title, spans, max(1, len(ranks)))
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, facecolor="white")
    return path


def _frame(axes: Axes, title: str, spans: Sequence[Span], rows: int) -> None:
    """Title, legend and margins."""
    from matplotlib.patches import Patch

    height = MARGIN + ROW * rows
    axes.figure.subplots_adjust(0.105, 0.95 / height, 0.885, 1 - 0.6 / height)
    axes.figure.suptitle(
        title, x=0.012, y=1 - 0.1 / height, ha="left", va="top", size=12, weight="bold", color=INK
    )
    used = {s.name for s in spans}
    names = [n for n in COLOURS if n in used] + sorted(used - set(COLOURS))
    patches = [
        Patch(
            facecolor=_colour(name),
            edgecolor=EDGE if name == WAIT else "none",
            hatch="////" if name == WAIT else None,
            label=LEGEND.get(name, name),
        )
        for name in names
    ]
    if patches:
        axes.figure.legend(
            handles=patches,
            loc="lower center",
            ncols=min(8, len(patches)),
            frameon=False,
            fontsize=8.5,
            handlelength=1.4,
            borderaxespad=0.3,
        )


def _colour(name: str) -> str:
    return COLOURS.get(name, "#7F7F7F")


class _Picture:
    """Where each span lies, and the parts of the picture that are drawn from it."""

    def __init__(self, axes: Axes, spans: Sequence[Span], ranks: list[int]) -> None:
        self.axes = axes
        self.spans = spans
        self.begin = min(s.start for s in spans)
        self.total = max(max(s.end for s in spans) - self.begin, 1e-9)
        self.row_of = {rank: row for row, rank in enumerate(ranks)}
        self.box: dict[Span, tuple[float, float, float, float]] = {}  # x0, x1, top, bottom
        for rank, row in self.row_of.items():
            for lane, (top, bottom) in (("compute", COMPUTE), ("communication", COMMUNICATION)):
                mine = [
                    s
                    for s in spans
                    if s.rank == rank and (s.lane == "communication") == (lane == "communication")
                ]
                self._place(mine, row + top, row + bottom)

    def _place(self, spans: list[Span], top: float, bottom: float) -> None:
        """Give each span its box; what overlaps shares the height of the lane."""
        rows = stack(spans)
        count = min(MOST_ROWS, max(rows.values(), default=0) + 1)
        height = (bottom - top) / count
        for span, row in rows.items():
            y = top + min(row, count - 1) * height
            self.box[span] = (self.ms(span.start), self.ms(span.end), y, y + height)

    def ms(self, moment: float) -> float:
        """A moment as milliseconds since the begin of the picture."""
        return (moment - self.begin) * 1e3

    @property
    def inches_per_ms(self) -> float:
        """Inches on paper per millisecond."""
        return WIDTH * 0.78 / (self.total * 1e3)

    def draw(self) -> None:
        """All of it."""
        self._axes()
        self._regions()
        self._boxes()
        self._arrows()
        self._labels()
        self._shares()

    def _axes(self) -> None:
        axes, rows = self.axes, len(self.row_of)
        axes.set_xlim(0, self.total * 1e3)
        axes.set_ylim(rows, 0)
        axes.set_xlabel("milliseconds", color=SOFT, labelpad=2)
        axes.tick_params(axis="x", colors=SOFT, length=3)
        axes.tick_params(axis="y", length=0)
        axes.set_yticks([])
        axes.grid(axis="x", color="#E6E6E6", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(EDGE)
        for rank, row in self.row_of.items():
            self._aside(-0.100, row + 0.48, f"rank {rank}", size=10.5, weight="bold", color=INK)
            self._aside(-0.008, row + sum(COMPUTE) / 2, "compute", ha="right")
            self._aside(-0.008, row + sum(COMMUNICATION) / 2, "network", ha="right")
            if row:
                axes.axhline(row - 0.02, color="#D8D8D8", linewidth=0.7, zorder=0.5)

    def _aside(self, x: float, y: float, text: str, **style: Any) -> None:
        """Text beside the axes: x in widths of the axes, y in rows."""
        style = {"size": 7.5, "color": SOFT, "ha": "left", "va": "center"} | style
        self.axes.text(x, y, text, transform=self.axes.get_yaxis_transform(), **style)

    def _boxes(self) -> None:
        from matplotlib.collections import PolyCollection

        by_name: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            by_name[span.name].append(span)
        for name, spans in by_name.items():
            corners = []
            edges = []
            for span in spans:
                x0, x1, y0, y1 = self.box[span]
                corners.append([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
                wide = (x1 - x0) * self.inches_per_ms > 0.03
                edges.append(EDGE if name == WAIT else "white" if wide else _colour(name))
            self.axes.add_collection(
                PolyCollection(
                    corners,
                    facecolors=_colour(name),
                    edgecolors=edges,
                    linewidths=0.5,
                    hatch="////" if name == WAIT else None,
                    zorder=1.5 if name == WAIT else 2,
                )
            )

    def _arrows(self) -> None:
        """From each send to its receive, unless there are too many to follow."""
        ends: dict[int, dict[str, Span]] = defaultdict(dict)
        for span in self.spans:
            if span.message is not None:
                ends[span.message][span.name] = span
        pairs = [e for e in ends.values() if len(e) == 2]
        if len(pairs) > MOST_ARROWS:
            return
        for pair in pairs:
            x0, _, y0, y1 = self.box[pair["send"]]
            _, x1, y2, y3 = self.box[pair["recv"]]
            self.axes.annotate(
                "",
                xy=(x1, (y2 + y3) / 2),
                xytext=(x0, (y0 + y1) / 2),
                arrowprops={
                    "arrowstyle": "-|>,head_length=0.35,head_width=0.16",
                    "color": "#333333",
                    "linewidth": 0.7,
                    "alpha": 0.75,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
                zorder=3,
            )

    def _labels(self) -> None:
        """The name on each span that is wide enough for it, the widest first."""
        spans = sorted(self.spans, key=lambda s: -s.seconds)[:MOST_LABELS]
        for span in spans:
            x0, x1, y0, y1 = self.box[span]
            size = 7.5 if y1 - y0 > 0.15 else 6.0
            if (y1 - y0) * ROW * 72 < size:
                continue
            room = (x1 - x0) * self.inches_per_ms * 72 - 5
            text = next((t for t in _texts(span) if len(t) * size * 0.56 < room), "")
            self.axes.text(
                (x0 + x1) / 2,
                (y0 + y1) / 2,
                text,
                size=size,
                ha="center",
                va="center_baseline",
                color=_ink_on(_colour(span.name)),
                zorder=4,
                bbox={"facecolor": "#F4F4F4", "edgecolor": "none", "pad": 0.8}
                if text and span.name == WAIT
                else None,
            )

    def _regions(self) -> None:
        """A bracket over the picture for each named region of the program."""
        inside: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            if span.region:
                inside[span.region].append(span)
        for number, (name, spans) in enumerate(inside.items()):
            x0 = self.ms(min(s.start for s in spans))
            x1 = self.ms(max(s.end for s in spans))
            if number % 2 == 0:
                self.axes.axvspan(x0, x1, color="#F5F7FA", zorder=0)
            if len(name) * 8 * 0.6 < (x1 - x0) * self.inches_per_ms * 72:
                self.axes.text((x0 + x1) / 2, -0.06, name, size=8, ha="center", color=INK)
            self.axes.plot([x0, x1], [0, 0], color=INK, linewidth=1.6, clip_on=False)

    def _shares(self) -> None:
        """At the right: how much of the time each rank computed, communicated, only waited."""
        for rank, row in self.row_of.items():
            mine = [s for s in self.spans if s.rank == rank]
            waits = [s for s in mine if s.name == WAIT]
            computes = [s for s in mine if s.lane != "communication"]
            moves = [s for s in mine if s.lane == "communication" and s.name != WAIT]
            only_waits = covered(mine) - covered([*computes, *moves])
            shares = (
                ("computes", covered(computes)),
                ("communicates", covered(moves)),
                ("waits", only_waits if waits else 0.0),
            )
            for line, (what, seconds) in enumerate(shares):
                y = row + 0.24 + 0.24 * line
                self._aside(1.045, y, f"{seconds / self.total:.0%}", ha="right", color=INK)
                self._aside(1.051, y, what)


def _texts(span: Span) -> list[str]:
    """What may be written on a span, the longest first."""
    if span.name == WAIT:
        return [f"wait for rank {span.peer}", f"wait for {span.peer}", f"{span.peer}?"]
    size = f" {readable(span.nbytes)}" if span.nbytes else ""
    if span.name in ("send", "recv") and span.peer is not None:
        arrow = f"to {span.peer}" if span.name == "send" else f"from {span.peer}"
        return [f"{span.name} {arrow},{size}", f"{span.name} {arrow}", arrow]
    name = LEGEND.get(span.name, span.name)
    return [f"{name}{size}", name]


def _ink_on(colour: str) -> str:
    """Black or white, whichever is readable on ``colour`` (relative luminance)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
