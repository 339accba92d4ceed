"""What can be seen in a diagram: boxes of its text, and what they lie on, in both schemes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations, pairwise
from xml.etree import ElementTree

from scripts.diagrams.letters import width_of

SVG = "{http://www.w3.org/2000/svg}"
PAGES = {"light": "#ffffff", "dark": "#1e1e1e"}


@dataclass(frozen=True)
class Area:
    """A rectangle; ``name`` is the text or the class."""

    left: float
    top: float
    right: float
    bottom: float
    name: str

    def meets(self, other: Area, slack: float = 0.5) -> bool:
        return (
            self.left < other.right - slack
            and other.left < self.right - slack
            and self.top < other.bottom - slack
            and other.top < self.bottom - slack
        )

    def holds(self, other: Area, slack: float = 1.0) -> bool:
        return (
            self.left <= other.left + slack
            and self.right >= other.right - slack
            and self.top <= other.top + slack
            and self.bottom >= other.bottom - slack
        )

    def crossed(self, a: tuple[float, float], b: tuple[float, float]) -> bool:
        """Whether the line from a to b goes through (Liang and Barsky)."""
        first, last = 0.0, 1.0
        for start, step, low, high in (
            (a[0], b[0] - a[0], self.left + 1, self.right - 1),
            (a[1], b[1] - a[1], self.top + 1, self.bottom - 1),
        ):
            if abs(step) < 1e-9:
                if not low < start < high:
                    return False
                continue
            near, far = sorted(((low - start) / step, (high - start) / step))
            first, last = max(first, near), min(last, far)
        return first < last


class Picture:
    """An SVG of ``scripts.diagrams``, read again."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.root = ElementTree.fromstring(source)
        _, _, self.width, self.height = map(float, self.root.attrib["viewBox"].split())
        self.shapes = list(self.root)

    def texts(self) -> list[tuple[int, Area, ElementTree.Element]]:
        """(place in the drawing order, area, element) of each line of text."""
        return [(n, area_of_text(e), e) for n, e in enumerate(self.shapes) if e.tag == f"{SVG}text"]

    def boxes(self) -> list[tuple[int, Area]]:
        return [(n, area_of_box(e)) for n, e in enumerate(self.shapes) if e.tag == f"{SVG}rect"]

    def problems(self) -> list[str]:
        """Text over text, over edges and lines, or outside."""
        texts, found = self.texts(), []
        page = Area(0, 0, self.width, self.height, "the page")
        found += [f"{a.name!r} is outside" for _, a, _ in texts if not page.holds(a, 0)]
        found += [f"a box is outside: {a}" for _, a in self.boxes() if not page.holds(a, 0)]
        found += [
            f"{a.name!r} meets {b.name!r}"
            for (_, a, _), (_, b, _) in combinations(texts, 2)
            if a.meets(b)
        ]
        for order, area, _ in texts:
            found += [
                f"{area.name!r} is on the edge of {box}"
                for _, box in self.boxes()
                if box.meets(area) and not box.holds(area)
            ]
            covered = [n for n, box in self.boxes() if n < order and box.holds(area)]
            for n, shape in enumerate(self.shapes):
                if shape.tag != f"{SVG}path" or (covered and n < max(covered)):
                    continue
                points = points_of(shape)
                if any(area.crossed(a, b) for a, b in pairwise(points)):
                    found.append(f"{area.name!r} is crossed by a line")
        for shape in self.shapes:
            if shape.tag == f"{SVG}path":
                out = [
                    p
                    for p in points_of(shape)
                    if not (0 <= p[0] <= self.width and 0 <= p[1] <= self.height)
                ]
                found += [f"a line leaves at {p}" for p in out]
        return found

    def contrasts(self) -> list[tuple[str, str, float]]:
        """(scheme, text, ratio) of each line of text and what it lies on."""
        found = []
        for scheme, page in PAGES.items():
            colours = colours_of(self.source, scheme)
            for order, area, element in self.texts():
                under = page
                for n, box in self.boxes():
                    fill = colours.get(self.shapes[n].attrib.get("class", "").split(" ")[0], "none")
                    if n < order and box.holds(area) and fill != "none":
                        under = fill
                colour = colours[element.attrib["class"]]
                found.append((scheme, area.name, contrast(colour, under)))
        return found


def area_of_text(element: ElementTree.Element) -> Area:
    size, text = float(element.attrib["font-size"]), element.text or ""
    width = width_of(text, size, bold="font-weight" in element.attrib)
    left = float(element.attrib["x"])
    left -= width * {"start": 0.0, "middle": 0.5, "end": 1.0}[element.get("text-anchor", "start")]
    base = float(element.attrib["y"])
    return Area(left, base - 0.76 * size, left + width, base + 0.2 * size, text)


def area_of_box(element: ElementTree.Element) -> Area:
    x, y, w, h = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
    return Area(x, y, x + w, y + h, element.get("class", ""))


def points_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(word) for word in re.findall(r"-?[\d.]+", element.attrib["d"])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def colours_of(source: str, scheme: str) -> dict[str, str]:
    """Class to colour; the dark scheme overrides."""
    style = re.search(r"<style>(.*?)</style>", source, re.S)
    assert style
    light, _, dark = style[1].partition("@media(prefers-color-scheme:dark)")
    rules = re.findall(
        r"\.([\w-]+)\{(?:fill|stroke):(#\w+|none)\}", light + dark * (scheme == "dark")
    )
    return dict(rules)


def contrast(first: str, second: str) -> float:
    """The ratio of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
