"""Small pictures of counts, as SVG inside a page, with patterns and numbers beside the colours.

These are own functions and not matplotlib's: text stays text, patterns stay sharp on paper, and a
picture has a few hundred bytes. The colours are those of Okabe and Ito, which colour-blind readers
can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from xml.etree import ElementTree

from markupsafe import Markup

INK, PALE = "#222222", "#767676"
# verdict: colour, and the lines of its pattern in a square of 8 by 8
LOOKS: dict[str, tuple[str, str]] = {
    "pass": ("#009E73", ""),
    "fail": ("#D55E00", "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"),
    "blank": ("#FFFFFF", ""),
    "error": ("#E69F00", "M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4"),
    "hang": ("#0072B2", "M4,0 v8"),
    "crash": ("#CC79A7", "M0,0 l8,8 M8,0 l-8,8"),
    "needs": ("#56B4E9", "M2,2 h2 M6,6 h2"),
    "blocked": ("#F0E442", "M0,4 h8"),
}
PLAIN = ("#56B4E9", "#E69F00")  # the colour of bars that show no verdicts


def _element(
    parent: ElementTree.Element | None, name: str, text: str = "", **attributes: object
) -> ElementTree.Element:
    shown = {k.rstrip("_").replace("_", "-"): _number(v) for k, v in attributes.items()}
    made = (
        ElementTree.Element(name, shown)
        if parent is None
        else ElementTree.SubElement(parent, name, shown)
    )
    made.text = text or None
    return made


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _markup(element: ElementTree.Element) -> Markup:
    """ElementTree has escaped what stands in it."""
    return Markup(ElementTree.tostring(element, encoding="unicode"))


def _canvas(width: int, height: int, label: str) -> ElementTree.Element:
    svg = _element(None, "svg", viewBox=f"0 0 {width} {height}", width=width, role="img")
    svg.set("aria-label", label)
    return svg


def patterns() -> Markup:
    """The patterns of all verdicts. A page has them once, before its pictures."""
    svg = _element(None, "svg", width=0, height=0, class_="patterns", aria_hidden="true")
    defs = _element(svg, "defs")
    for verdict, (colour, lines) in LOOKS.items():
        pattern = _element(
            defs, "pattern", id=f"p-{verdict}", width=8, height=8, patternUnits="userSpaceOnUse"
        )
        _element(pattern, "rect", width=8, height=8, fill=colour)
        if lines:
            _element(pattern, "path", d=lines, stroke=INK, stroke_width=1, fill="none")
    return _markup(svg)


def swatch(verdict: str) -> Markup:
    """A small square with the verdict's pattern, for a legend."""
    svg = _canvas(16, 12, verdict)
    _filled(svg, verdict, 0.5, 0.5, 15.0, 11.0)
    return _markup(svg)


def shares(counts: Mapping[str, int], width: int = 260) -> Markup:
    """One bar in which each verdict has its share, with the number where there is room."""
    total = sum(counts.values())
    told = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    svg = _canvas(width, 18, told or "nobody")
    x = 0.5
    for verdict, n in counts.items():
        if not n:
            continue
        wide = (width - 1) * n / total
        _filled(svg, verdict, x, 0.5, wide, 17.0)
        if wide >= 9 + 7 * len(str(n)):
            _label_in_bar(svg, str(n), x + wide / 2)
        x += wide
    return _markup(svg)


def _filled(svg: ElementTree.Element, verdict: str, x: float, y: float, w: float, h: float) -> None:
    fill = f"url(#p-{verdict})"
    _element(svg, "rect", x=x, y=y, width=w, height=h, fill=fill, stroke=INK, stroke_width=0.7)


def _label_in_bar(svg: ElementTree.Element, text: str, x: float) -> None:
    """On a white plate, as the pattern runs below."""
    wide = 6.0 + 7 * len(text)
    _element(svg, "rect", x=x - wide / 2, y=2.5, width=wide, height=13, rx=2, fill="#FFFFFF")
    _element(svg, "text", text, x=x, y=13, text_anchor="middle", font_size=11, fill=INK)


def columns(
    counts: Sequence[int],
    labels: Sequence[str],
    *,
    what: str,
    below: str,
    line: tuple[float, str] | None = None,
    colour: int = 0,
    width: int = 660,
    height: int = 190,
) -> Markup:
    """A column per count. ``line``: the position (0 to 1 over all) and the label of a dashed line.
    ``what`` is counted; ``below`` says what the labels mean."""
    svg = _canvas(width, height, f"{what}: " + ", ".join(_pairs(labels, counts)))
    left, top, bottom = 34, 46, height - 40
    room, highest = width - left - 6, max([*counts, 1])
    _element(svg, "text", what, x=2, y=12, font_size=12, fill=PALE)
    step = room / max(len(counts), 1)
    for index, (count, label) in enumerate(zip(counts, labels, strict=True)):
        tall = (bottom - top) * count / highest
        x, middle = left + index * step, left + (index + 0.5) * step
        if count:
            _element(
                svg,
                "rect",
                x=x + step * 0.08,
                y=bottom - tall,
                width=step * 0.84,
                height=tall,
                fill=PLAIN[colour],
                stroke=INK,
                stroke_width=0.7,
            )
            _text(svg, str(count), middle, bottom - tall - 4)
        if label:
            _text(svg, label, middle, bottom + 15)
    _element(svg, "path", d=f"M{left},{bottom} H{width - 6}", stroke=INK, stroke_width=1)
    _text(svg, below, left + room / 2, height - 6, 12, PALE)
    if line is not None:
        at = left + room * line[0]
        path = f"M{at:.1f},18 V{bottom}"
        _element(svg, "path", d=path, stroke=INK, stroke_width=1.5, stroke_dasharray="5 4")
        anchor = "end" if line[0] > 0.6 else "start"
        _text(svg, line[1], at + (-5 if anchor == "end" else 5), 24, 12, INK, anchor)
    return _markup(svg)


def _pairs(labels: Iterable[str], counts: Iterable[int]) -> list[str]:
    return [f"{label}: {n}" for label, n in zip(labels, counts, strict=True) if n]


def _text(
    svg: ElementTree.Element,
    text: str,
    x: float,
    y: float,
    size: int = 11,
    fill: str = INK,
    anchor: str = "middle",
) -> None:
    _element(svg, "text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor)
