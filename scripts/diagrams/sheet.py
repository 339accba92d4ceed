"""A sheet that one diagram is drawn on: text, cells, lines and arrows become one SVG.

All diagrams have the same width, so that letters have one size on a page. Colours are classes of
the SVG's own style, light and dark; no meaning is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .letters import SIZE, SMALL, balanced, width_of, wrapped

WIDTH, MARGIN = 560, 12
INNER = WIDTH - 2 * MARGIN
HEAD = 16
# name: fill and stroke on white, then on black; strokes are colours of text, too
TONES = {
    "blue": ("#d8eafa", "#00558f", "#143a56", "#7cc4f5"),
    "orange": ("#fde6c8", "#8f4700", "#56380f", "#f2b25c"),
    "green": ("#d0efe3", "#00614a", "#0f4a3a", "#5fd6ae"),
    "purple": ("#f3dfed", "#80326a", "#4d2a43", "#e6a3cf"),
    "grey": ("#ececec", "#595959", "#3c3c3c", "#bdbdbd"),
    "red": ("#fadbd6", "#a31f17", "#5a2320", "#ffa596"),
    "plain": ("none", "#1b1b1b", "none", "#f0f0f0"),
}
RANKS = ("blue", "orange", "green", "purple")  # the tone of a rank, beside its number
Point = tuple[float, float]


def number(value: float) -> str:
    """A coordinate: short, and the same on every machine."""
    return f"{round(value, 1):g}"


def style() -> str:
    """The classes of both schemes."""

    def classes(fill: int, stroke: int) -> str:
        return "".join(
            f".f-{name}{{fill:{tone[fill]}}}.s-{name}{{stroke:{tone[stroke]}}}"
            f".t-{name}{{fill:{tone[stroke]}}}"
            for name, tone in TONES.items()
        )

    return (
        "text{font-family:sans-serif}.l{fill:none}.k{stroke-width:3}.d{stroke-dasharray:5 4}"
        + classes(0, 1)
        + f"@media(prefers-color-scheme:dark){{{classes(2, 3)}}}"
    )


class Sheet:
    """What was drawn so far. ``y``: the height that is used up."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.y = float(MARGIN)
        self.parts: list[str] = []
        self.hatched = False
        for line in balanced(title, INNER, HEAD):
            self.text(MARGIN, self.y + 10, line, size=HEAD, bold=True)
            self.y += 22
        self.y += 6

    def text(
        self,
        x: float,
        y: float,
        what: str,
        *,
        anchor: str = "start",
        size: int = SIZE,
        tone: str = "plain",
        bold: bool = False,
    ) -> None:
        """One line, ``y`` is the middle of its letters."""
        at = f'x="{number(x)}" y="{number(y + 0.36 * size)}"'
        more = f' text-anchor="{anchor}"' * (anchor != "start") + ' font-weight="bold"' * bold
        self.parts.append(
            f'<text class="t-{tone}" {at} font-size="{size}"{more}>{escape(what)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        what: str = "",
        tone: str = "grey",
        *,
        strong: bool = False,
        dashed: bool = False,
        hatch: bool = False,
        bold: bool = False,
    ) -> None:
        """A rectangle with lines of text in its middle, as large as they fit; else ValueError."""
        kind = f"f-{tone} s-{tone}" + " k" * strong + " d" * dashed
        area = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"'
        self.parts.append(f'<rect class="{kind}" {area} rx="3"/>')
        if hatch:
            self.hatched = True
            self.parts.append(f'<rect fill="url(#hatch)" {area} rx="3"/>')
        lines = what.split("\n") if what else []
        for size in (SIZE, SMALL) if lines else ():
            widest = max((width_of(line, size, bold=bold) for line in lines), default=0)
            if widest <= w - (4 if size == SIZE else 2) and len(lines) * (size + 3) <= h + 2:
                break
        else:
            if lines:
                raise ValueError(f"{self.title}: {what!r} needs {widest:.0f} of {w - 2:.0f}")
        for index, line in enumerate(lines):
            middle = y + h / 2 + (index - (len(lines) - 1) / 2) * (size + 3)
            self.text(x + w / 2, middle, line, anchor="middle", size=size, bold=bold)

    def path(
        self, points: Sequence[Point], tone: str = "plain", *, dashed: bool = False, k: bool = False
    ) -> None:
        """A line through points."""
        way = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        kind = f"l s-{tone}" + " d" * dashed + " k" * k
        self.parts.append(f'<path class="{kind}" d="{way}"/>')

    def arrow(
        self, points: Sequence[Point], tone: str = "plain", *, dashed: bool = False, k: bool = False
    ) -> None:
        """A line with a head at its last point."""
        self.path(points, tone, dashed=dashed, k=k)
        (x0, y0), (x, y) = points[-2:]
        length = max(((x - x0) ** 2 + (y - y0) ** 2) ** 0.5, 1e-9)
        dx, dy = (x - x0) / length, (y - y0) / length
        back = [(x - 8 * dx + s * 4 * dy, y - 8 * dy - s * 4 * dx) for s in (1, -1)]
        self.path([back[0], (x, y), back[1]], tone, k=k)

    def circle(
        self, x: float, y: float, r: float, tone: str = "grey", *, filled: bool = True
    ) -> None:
        """A circle or a dot."""
        kind = f"f-{tone} s-{tone}" if filled else f"l s-{tone}"
        self.parts.append(
            f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="{number(r)}"/>'
        )

    def note(
        self, what: str, *, tone: str = "plain", bold: bool = False, x: float = MARGIN
    ) -> None:
        """A paragraph below what was drawn."""
        for line in wrapped(what, WIDTH - MARGIN - x, SIZE, bold=bold):
            self.text(x, self.y + 10, line, tone=tone, bold=bold)
            self.y += 20
        self.y += 4

    def gap(self, height: float = 8) -> None:
        """Leave room."""
        self.y += height

    def svg(self, description: str, name: str) -> str:
        """The whole picture."""
        height = number(self.y + MARGIN - 4)
        hatch = (
            f'<defs><pattern id="hatch-{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><path class="s-grey" d="M0 0V6" stroke-width="1.5"/>'
            "</pattern></defs>\n"
        ) * self.hatched
        body = "\n".join(self.parts).replace("url(#hatch)", f"url(#hatch-{name})")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="t-{name} '
            f'd-{name}">\n<title id="t-{name}">{escape(self.title)}</title>\n<desc '
            f'id="d-{name}">{escape(description)}</desc>\n<style>{style()}</style>\n{hatch}{body}\n</svg>\n'
        )
