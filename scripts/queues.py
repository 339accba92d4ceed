"""Draw two queues that block each other: ``python -m scripts.queues``.

``docs/queues.svg`` shows what two ranks issue on one communicator of NCCL, first above: one after
the other, and as one batch. The arrows follow from ``QUEUES``; a test runs both programs on virtual
ranks by NCCL's rules, and compares the picture's description with the arrows.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from distlab.picture.lanes import COLOURS, EDGE, INK, SOFT

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "queues.svg"
Operation = tuple[int, str]  # rank, and "recv" or "send", from or to the other one
Entry = tuple[str, ...]  # messages that are issued at once
QUEUES: dict[str, tuple[Entry, ...]] = {  # on both ranks
    "one after the other: no rank goes on": (("recv",), ("send",)),
    "one batch: both messages pass": (("recv", "send"),),
}
WORDS = {"recv": "receive from {}", "send": "send to {}"}
WIDTH, HEIGHT = 1.7, 0.5  # of a box
LEFT, APART, BELOW = 1.3, 3.1, 1.35  # middles of the first column, of columns and of rows
PANEL, HIGH = 6.2, 4.0
BLOCKED, PASSES = "#B3261E", "#0B6E4F"


def matches() -> list[tuple[Operation, Operation]]:
    """A receive ends only together with its send."""
    return [((0, "recv"), (1, "send")), ((1, "recv"), (0, "send"))]


def behind(queue: tuple[Entry, ...]) -> list[tuple[Operation, Operation]]:
    """(the message that can't begin, the one before it) on each rank."""
    pairs: list[tuple[str, str]] = []
    for number, entry in enumerate(queue):
        earlier = [op for before in queue[:number] for op in before]
        pairs += [(late, early) for late in entry for early in earlier]
    return [((rank, late), (rank, early)) for rank in (0, 1) for late, early in pairs]


def told(queue: tuple[Entry, ...]) -> str:
    """The arrows in words."""
    words = [f"{_shown(a)} needs {_shown(b)}" for a, b in matches()]
    return "; ".join(words + [f"{_shown(a)} is behind {_shown(b)}" for a, b in behind(queue)])


def _shown(operation: Operation) -> str:
    rank, op = operation
    return f"rank {rank}'s {op}"


def draw(target: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(PANEL * len(QUEUES) * 0.8, HIGH * 0.8))
    for number, (title, queue) in enumerate(QUEUES.items()):
        where = (number / len(QUEUES), 0, 1 / len(QUEUES), 1)
        axes = figure.add_axes(where, xlim=(-0.4, PANEL - 0.4), ylim=(0, HIGH))
        axes.axis("off")
        _panel(axes, title, queue)
    description = ". ".join(f"{title}: {told(queue)}" for title, queue in QUEUES.items())
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "queues"}):
        metadata = {"Date": None, "Title": "Two queues", "Description": description}
        known = metadata if target.suffix == ".svg" else None
        figure.savefig(target, metadata=known, facecolor="white")


def _panel(axes: Axes, title: str, queue: tuple[Entry, ...]) -> None:
    stuck = behind(queue)
    colour = BLOCKED if stuck else PASSES
    axes.text(LEFT + APART / 2, HIGH - 0.25, title, ha="center", color=colour, fontsize=12)
    for rank in (0, 1):
        axes.text(
            LEFT + rank * APART,
            HIGH - 0.75,
            f"queue of rank {rank}, first above",
            ha="center",
            color=INK,
        )
        for op in WORDS:
            _box(axes, (rank, op))
        if not stuck:
            _frame(axes, rank)
    for one, other in matches():
        _arrow(axes, one, other, colour, "-")
    for one, other in stuck:
        _arrow(axes, one, other, INK, "--")
    more = "┅▶  is behind" if stuck else "frame: one batch"
    legend = f"━▶  ends only together with      {more}"
    axes.text(LEFT + APART / 2, 0.15, legend, ha="center", color=SOFT, fontsize=9)


def _middle(operation: Operation) -> tuple[float, float]:
    rank, op = operation
    return LEFT + rank * APART, HIGH - 1.4 - BELOW * (op == "send")


def _box(axes: Axes, operation: Operation) -> None:
    (x, y), (rank, op) = _middle(operation), operation
    corner = x - WIDTH / 2, y - HEIGHT / 2
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": COLOURS[op], "ec": INK}
    axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, **style))
    axes.text(x, y, WORDS[op].format(1 - rank), ha="center", va="center", fontsize=10)


def _frame(axes: Axes, rank: int) -> None:
    """Around a batch."""
    (x, low), (_, high) = _middle((rank, "send")), _middle((rank, "recv"))
    corner = x - WIDTH / 2 - 0.15, low - HEIGHT / 2 - 0.15
    size = WIDTH + 0.3, high - low + HEIGHT + 0.3
    style = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": "none", "ec": EDGE, "ls": "--"}
    axes.add_patch(FancyBboxPatch(corner, *size, **style))


def _arrow(axes: Axes, begin: Operation, end: Operation, colour: str, line: str) -> None:
    (x, y), (to_x, to_y) = _middle(begin), _middle(end)
    side = WIDTH / 2 * (1 if to_x > x else -1)
    ends = ((x + side, y), (to_x - side, to_y))
    if begin[0] == end[0]:  # upwards in one queue
        ends = (x, y + HEIGHT / 2), (to_x, to_y - HEIGHT / 2)
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.6, "linestyle": line}
    axes.add_patch(FancyArrowPatch(*ends, shrinkA=0, shrinkB=0, color=colour, **style))


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE.relative_to(PICTURE.parents[1])}")
