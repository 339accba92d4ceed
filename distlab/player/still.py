"""The still picture of a player: a step of a scene as an SVG file that needs no script.

It draws shapes as ``player.js`` does, and takes the looks from ``player.css``: colours are light,
and dark where the reader's system asks for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from .scene import Shape

CSS = Path(__file__).with_name("player.css")
LETTER, LINE = 6.6, 18.0  # of the legend: the width of a letter, the height of a line
STRIP = 3.0  # room between a cell's frame and its strips
PAIR = re.compile(r"light-dark\((#\w+), (#\w+)\)")


def still(found: Mapping[str, Any], key: str, step: int, name: str = "still") -> str:
    """The scene ``key`` of a player's file at a step, as an SVG document.

    ``name``: what the ids in it begin with, for a page with several.
    """
    scene = found["scenes"][key]
    steps = scene["steps"][: step + 1] if step >= 0 else scene["steps"]
    texts: dict[str, str] = {}
    for each in steps:
        texts |= each.get("texts", {})
    names = {index: label for label, index in scene["names"].items()}
    shapes = [Shape(*data) for data in scene["shapes"]]
    for index, shape in enumerate(shapes):
        shape.text = texts.get(names.get(index, ""), shape.text)
    drawn = [part for shape in shapes for part in _drawn(shape, name)]
    drawn += [part for data in scene["timed"] for part in _drawn(Shape(*data), name)]
    head = f'marker-end="url(#{name}-head)"'
    drawn += [
        f'<path class="move {looks}" d="{path}" {head}/>'
        for path, looks in steps[-1].get("moves", ())
    ]
    width, height = scene["size"]
    legend, below = _legend(scene["legend"], width, height)
    height += below
    title, said = escape(found["title"]), escape(f"{found['about']} {steps[-1]['say']}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="player" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="{name}-title">',
        f'<title id="{name}-title">{title}</title>',
        f"<desc>{said}</desc>",
        f"<style>{looks_of_shapes()}</style>",
        f'<marker id="{name}-head" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" '
        'markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse">'
        '<path d="M0 0L8 4L0 8Z" class="head"/></marker>',
        f'<rect width="{width}" height="{height}" fill="var(--paper)"/>',
        *drawn,
        f"<g>{''.join(legend)}</g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


@cache
def looks_of_shapes() -> str:
    """The rules of ``player.css`` for what is inside of an SVG.

    Pictures are shown by programs that don't know ``light-dark`` yet: each colour stands twice.
    """
    css = re.sub(r"/\*.*?\*/\n?", "", CSS.read_text(encoding="utf-8").split("/* shapes */")[0])
    colours = dict(re.findall(r"(--\w+): (light-dark\(.*?\));", css))
    pairs = {name: PAIR.fullmatch(value) for name, value in colours.items()}
    light, dark = ("".join(f"{n}:{p[k]};" for n, p in pairs.items() if p) for k in (1, 2))
    shapes = CSS.read_text(encoding="utf-8").split("/* shapes */")[1]
    return (
        f"\n.player{{{light}font-family:system-ui,sans-serif}}\n"
        f"@media (prefers-color-scheme:dark){{.player{{{dark}}}}}{shapes}"
    )


def _legend(pairs: Sequence[Sequence[str]], width: float, top: float) -> tuple[list[str], float]:
    """The legend, which a page has beside the picture, and the height that it takes."""
    parts, x, y = [], 2.0, top + 6
    for looks, words in pairs:
        taken = 22 + LETTER * len(words)
        if x > 2 and x + taken > width:
            x, y = 2.0, y + LINE
        parts += _box(Shape("box", looks, x, y, 12, 12), "")
        parts += _text(Shape("text", "small", x + 17, y + 11, text=words), "")
        x += taken + 10
    return parts, y + LINE - top


def _drawn(shape: Shape, name: str) -> list[str]:
    return DRAW[shape.kind](shape, name)


def _place(shape: Shape) -> str:
    return f'x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}"'


def _box(shape: Shape, _: str) -> list[str]:
    parts = [f'<rect class="box {shape.looks}" {_place(shape)} rx="2"/>']
    if shape.text:
        x, y = shape.x + shape.width / 2, shape.y + shape.height / 2
        looks = f"label {shape.looks}"
        parts.append(f'<text class="{looks}" x="{x:g}" y="{y:g}">{escape(shape.text)}</text>')
    return parts


def _cell(shape: Shape, _: str) -> list[str]:
    full = " full" if "0" not in shape.text else ""
    parts = [f'<rect class="cell {shape.looks}{full}" {_place(shape)} rx="3"/>']
    strip = (shape.width - 2 * STRIP) / max(1, len(shape.text))
    for rank, bit in enumerate(shape.text):
        if bit == "1":
            x, y = shape.x + STRIP + rank * strip, shape.y + STRIP
            part = Shape("box", "", x, y, strip, shape.height - 2 * STRIP)
            parts.append(f'<rect class="part rank{rank}" {_place(part)}/>')
    return parts


def _text(shape: Shape, _: str) -> list[str]:
    where = f'class="{shape.looks}" x="{shape.x:g}" y="{shape.y:g}"'
    return [f"<text {where}>{escape(shape.text)}</text>"]


def _line(shape: Shape, _: str, head: str = "") -> list[str]:
    x2, y2 = shape.x + shape.width, shape.y + shape.height
    ends = f'x1="{shape.x:g}" y1="{shape.y:g}" x2="{x2:g}" y2="{y2:g}"'
    return [f'<line class="line {shape.looks}" {ends}{head}/>']


def _arrow(shape: Shape, name: str) -> list[str]:
    return _line(shape, name, f' marker-end="url(#{name}-head)"')


def _area(shape: Shape, _: str) -> list[str]:
    return [f'<path class="area {shape.looks}" d="{shape.text}"/>']


DRAW: dict[str, Callable[[Shape, str], list[str]]] = {
    "box": _box,
    "cell": _cell,
    "text": _text,
    "line": _line,
    "arrow": _arrow,
    "area": _area,
}
