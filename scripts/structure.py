"""Draw the toolkit's rooms and their imports: ``python -m scripts.structure``.

``docs/structure.svg`` is made from the imports themselves. A room stands above all rooms that it
imports from. A thin grey arrow is an import that a path through other rooms shows as well. A test
compares the picture's list of arrows with the imports.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from tests.distlab.rooms import ROOMS, imports, room

ROOT = Path(__file__).resolve().parent.parent
Arrow = tuple[str, str]
PICTURE = ROOT / "docs" / "structure.svg"
WIDTH, HEIGHT = 1.5, 0.5  # of a box
APART, ABOVE = 2.4, 1.25  # boxes' middles


def arrows() -> list[Arrow]:
    """(room, room that it imports from), each once."""
    found = {(room(each.source), room(each.target)) for each in imports(ROOT / "distlab")}
    return sorted((a, b) for a, b in found if a != b and a in ROOMS)


def told(found: list[Arrow]) -> str:
    """The arrows as the picture's description."""
    return "; ".join(f"{a} imports {b}" for a, b in found)


def levels(found: list[Arrow]) -> dict[str, int]:
    """A room's level, one below the lowest room that imports from it; the last room is at 0."""
    level: dict[str, int] = {}
    for name in reversed(ROOMS):  # in an order in which importers come first
        level[name] = min((level[a] for a, b in found if b == name), default=1) - 1
    return level


def is_shown_by_others(arrow: Arrow, found: list[Arrow]) -> bool:
    """Whether another path leads from the one room to the other."""
    begin, end = arrow
    seen: set[str] = set()
    left = [b for a, b in found if a == begin and b != end]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += [b for a, b in found if a == name]
    return end in seen


def positions(found: list[Arrow]) -> dict[str, tuple[float, float]]:
    """The middles of the boxes; a row's rooms stand over the rooms that they import from."""
    level, position = levels(found), dict[str, tuple[float, float]]()
    for number in sorted(set(level.values())):
        row = [name for name in ROOMS if level[name] == number]
        below = {
            name: [position[b][0] for a, b in found if a == name and b in position] or [0.0]
            for name in row
        }
        row.sort(key=lambda name: sum(below[name]) / len(below[name]))
        for column, name in enumerate(row):
            position[name] = (column - (len(row) - 1) / 2) * APART, number * ABOVE
    return position


def draw(found: list[Arrow], target: Path) -> None:
    """Write the picture."""
    position = positions(found)
    xs, ys = zip(*position.values(), strict=True)
    left, right = min(xs) - WIDTH / 2 - 0.5, max(xs) + WIDTH / 2 + 0.5
    low, high = min(ys) - HEIGHT / 2 - 0.2, max(ys) + HEIGHT / 2 + 0.2
    figure = Figure(figsize=(right - left, high - low))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(left, right), ylim=(low, high))
    axes.axis("off")
    for arrow in sorted(found, key=lambda each: not is_shown_by_others(each, found)):
        _arrow(axes, position[arrow[0]], position[arrow[1]], is_shown_by_others(arrow, found))
    for name, (x, y) in position.items():
        corner = x - WIDTH / 2, y - HEIGHT / 2
        style = {"boxstyle": "round,pad=0,rounding_size=0.1", "fc": "#eef3fb", "ec": "#33507a"}
        axes.add_patch(FancyBboxPatch(corner, WIDTH, HEIGHT, **style))
        axes.text(x, y, name, ha="center", va="center", fontsize=12, family="monospace")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rooms"}):
        metadata = {"Date": None, "Title": "The rooms of distlab", "Description": told(found)}
        figure.savefig(target, metadata=metadata, facecolor="white")


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], thin: bool) -> None:
    """From the lower edge of the one box to the upper edge of the other."""
    start = begin[0], begin[1] - HEIGHT / 2
    stop = end[0], end[1] + HEIGHT / 2
    far = abs(begin[1] - end[1]) > 1.5 * ABOVE and abs(begin[0] - end[0]) < 0.8 * APART
    axes.add_patch(
        FancyArrowPatch(
            start,
            stop,
            arrowstyle="-|>",
            mutation_scale=8 if thin else 12,
            connectionstyle=f"arc3,rad={0.35 if far else 0.0}",
            shrinkA=0,
            shrinkB=0,
            color="#c4cbd6" if thin else "#33507a",
            linewidth=0.7 if thin else 1.4,
            zorder=0.5,
        )
    )


if __name__ == "__main__":
    draw(arrows(), PICTURE)
    print(f"wrote {PICTURE.relative_to(ROOT)}: {len(arrows())} arrows")
