"""A scene: what a player shows of one run. Shapes are laid out once, steps change them.

The layout is done here, in Python, once. The page's script (``player.js``) and the still picture
(``still``) only draw what a scene says, each shape in a few lines, so the two agree.

A shape has a kind, looks (class names of ``player.css``), a place and a text:

========  ======================================  ==========================================
kind      place                                   text
========  ======================================  ==========================================
box       corner, width, height                   written in its middle
cell      corner, width, height                   one 0 or 1 per rank: whose parts are in it
text      begin of the text (looks: end, middle)  the text
line      from a point, by (width, height)        none
arrow     the same, with a head                   none
area      none                                    a path
========  ======================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WIDTH = 420  # of a scene: on a phone of 390 px a text of 15 units has 12 px
FORMAT = "distlab player 1"


@dataclass
class Shape:
    """One thing that is drawn; see the module's table."""

    kind: str
    looks: str
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    text: str = ""

    def data(self) -> list[Any]:
        """As in a player's file: trailing zeros and an empty text are left out."""
        places = [_short(v) for v in (self.x, self.y, self.width, self.height)]
        values = [self.kind, self.looks, *places, self.text]
        while values and values[-1] in (0, ""):
            values.pop()
        return values


@dataclass
class Move:
    """What moves in one step: along a path, from its first point to its last."""

    path: str
    looks: str


@dataclass
class Step:
    """What a step says and changes: texts of shapes by name, what moves, how far the clock is."""

    say: str
    texts: Mapping[str, str] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)
    reached: float | None = None  # timed shapes are shown up to this x


@dataclass
class Scene:
    """All that a player draws of one run.

    ``timed`` shapes come into sight from the left, up to a step's ``reached``. ``names`` are those
    of shapes whose text changes. ``ended``: by name, what the recorded run ended with; the last
    step must show it. ``still``: the step that the still picture shows.
    """

    height: float
    shapes: list[Shape] = field(default_factory=list)
    timed: list[Shape] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    legend: list[tuple[str, str]] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    still: int = -1
    clock: tuple[float, float] = (0.0, 0.0)  # from where to where down its line goes

    def add(self, shape: Shape, name: str = "") -> None:
        """Draw a shape, above those before it."""
        if name:
            self.names[name] = len(self.shapes)
        self.shapes.append(shape)

    def write(self, x: float, y: float, text: str, looks: str = "", name: str = "") -> None:
        """Draw a text."""
        self.add(Shape("text", looks, x, y, text=text), name)

    def shown(self, step: int) -> dict[str, str]:
        """The texts of the named shapes at a step."""
        texts = {name: self.shapes[index].text for name, index in self.names.items()}
        for each in self.steps[: step + 1]:
            texts |= each.texts
        return texts

    def data(self) -> dict[str, Any]:
        """As in a player's file."""
        return {
            "size": [WIDTH, _short(self.height)],
            "shapes": [shape.data() for shape in self.shapes],
            "timed": [shape.data() for shape in self.timed],
            "names": self.names,
            "steps": [_step_data(step) for step in self.steps],
            "clock": [_short(y) for y in self.clock],
            "legend": [list(pair) for pair in self.legend],
            "ended": self.ended,
        }


@dataclass(frozen=True)
class Choice:
    """What a reader can choose: its name and the values, as they are shown."""

    name: str
    values: tuple[str, ...]


def document(
    title: str,
    about: str,
    choices: Iterable[Choice],
    scenes: Mapping[tuple[str, ...], Scene],
    start: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A player's file: a scene for each combination of what can be chosen; ``start`` is first."""
    return {
        "format": FORMAT,
        "title": title,
        "about": about,
        "choices": [{"name": choice.name, "values": list(choice.values)} for choice in choices],
        "start": list(start),
        "scenes": {" | ".join(key): scene.data() for key, scene in scenes.items()},
    }


def _step_data(step: Step) -> dict[str, Any]:
    data: dict[str, Any] = {"say": step.say}
    if step.texts:
        data["texts"] = dict(step.texts)
    if step.moves:
        data["moves"] = [[move.path, move.looks] for move in step.moves]
    if step.reached is not None:
        data["reached"] = _short(step.reached)
    return data


def _short(number: float) -> float | int:
    """With one decimal at most."""
    rounded = round(number, 1)
    return int(rounded) if rounded == int(rounded) else rounded
