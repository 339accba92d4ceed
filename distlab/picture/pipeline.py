"""The picture of a pipeline: for each rank a row of boxes, one per step, with its micro-batch.

A label is the micro-batch, or ``stage.micro-batch`` where a rank has several stages: the later the
stage, the lighter its boxes. Where it is hatched, a rank has no step: it may communicate or wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lanes import EDGE, HATCH, INK, SOFT, _ink_on
from .spans import Span, covered, idle_share, time_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"forward": "#56B4E9", "backward": "#D55E00", "weights": "#009E73"}
LEGEND = {"backward": "backward", "weights": "backward of the weights"}
WIDTH, ROW, TOP, BOTTOM = 12.5, 0.55, 0.8, 0.82  # inches: width, height per rank, margins
LEFT, RIGHT = 0.06, 0.915  # of the width
IDLE = "#EFEFEF"


def draw_pipeline(spans: Sequence[Span], path: str | Path, title: str, bubble: float) -> Path:
    """Write a picture of the named steps of a pipeline and of the idle time between them.

    ``bubble``: the share of idle time in theory, to compare with what was measured.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    spans, path = [span for span in spans if span.label], Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    ranks = sorted({s.rank for s in spans})
    height = TOP + BOTTOM + ROW * max(1, len(ranks))
    with rc_context({"font.size": 9, "hatch.linewidth": 0.5, "svg.hashsalt": "pipeline"}):
        figure = Figure(figsize=(WIDTH, height), dpi=130, facecolor="white")
        figure.subplots_adjust(LEFT, BOTTOM / height, RIGHT, 1 - TOP / height)
        style: dict[str, Any] = {"ha": "left", "va": "top"}
        figure.text(0.012, 1 - 0.12 / height, title, size=12, weight="bold", **style)
        axes = figure.add_subplot()
        if spans:
            text = f"bubble: {idle_share(spans):.1%} measured, {bubble:.1%} in theory"
            figure.text(0.012, 1 - 0.42 / height, text, size=10, color=INK, **style)
            _draw(axes, spans, ranks)
        else:
            axes.text(0.5, 0.5, "no step of a pipeline was recorded", ha="center", color=SOFT)
            axes.set_axis_off()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _draw(axes: Axes, spans: Sequence[Span], ranks: list[int]) -> None:
    from matplotlib.patches import Patch, Rectangle

    begin, end = min(s.start for s in spans), max(s.end for s in spans)
    total = (end - begin) * 1e3
    axes.set(xlim=(0, total), ylim=(len(ranks), 0), yticks=[])
    axes.set_xlabel(time_label(spans), color=SOFT, labelpad=2)
    axes.tick_params(axis="x", colors=SOFT, length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(EDGE)
    beside: dict[str, Any] = {"va": "center", "transform": axes.get_yaxis_transform()}
    for row, rank in enumerate(ranks):
        mine = [s for s in spans if s.rank == rank]
        idle = 1 - covered(mine) / (end - begin)
        axes.text(-0.008, row + 0.5, f"rank {rank}", size=10, weight="bold", ha="right", **beside)
        axes.text(1.008, row + 0.5, f"{idle:.0%} no step", color=SOFT, ha="left", **beside)
        back = {"facecolor": IDLE, "edgecolor": "#D6D6D6", "linewidth": 0, "hatch": HATCH}
        axes.add_patch(Rectangle((0, row + 0.08), total, 0.84, zorder=1, **back))
    stages = sorted({_stage(s) for s in spans})
    depth = max(1, len(stages) // len(ranks))
    for span in spans:
        colour = _lighter(COLOURS[span.name], stages.index(_stage(span)) // len(ranks) / depth)
        x, width = (span.start - begin) * 1e3, span.seconds * 1e3
        box = (x, ranks.index(span.rank) + 0.08), width, 0.84
        axes.add_patch(
            Rectangle(*box, facecolor=colour, edgecolor="white", linewidth=0.8, zorder=2)
        )
        text = span.label.rpartition(".")[2]
        inches = width / total * WIDTH * (RIGHT - LEFT)
        size = min(10.0, inches * 72 / (0.62 * len(text) + 0.3))
        if size >= 4.5:
            y = box[0][1] + 0.42
            style = {"size": size, "ha": "center", "va": "center_baseline", "zorder": 3}
            axes.text(x + width / 2, y, text, color=_ink_on(colour), **style)
    handles = _legend([s.name for s in spans], depth)
    handles.append(Patch(facecolor=IDLE, edgecolor=EDGE, hatch=HATCH, label="no step (bubble)"))
    style = {"frameon": False, "fontsize": 8.5, "handlelength": 1.4}
    axes.figure.legend(handles=handles, loc="lower center", ncols=len(handles), **style)


def _legend(names: Sequence[str], depth: int) -> list[Any]:
    from matplotlib.patches import Patch

    return [
        Patch(
            facecolor=_lighter(colour, own / depth),
            label=LEGEND.get(name, name) + (f", own stage {own}" if depth > 1 else ""),
        )
        for name, colour in COLOURS.items()
        if name in names
        for own in range(depth)
    ]


def _stage(span: Span) -> int:
    """The stage of ``stage.micro-batch``; the rank where only the micro-batch is given."""
    stage, dot, _ = span.label.partition(".")
    return int(stage) if dot else span.rank


def _lighter(colour: str, share: float) -> str:
    """``colour`` mixed with white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (255 - p) * share):02X}" for p in parts)
