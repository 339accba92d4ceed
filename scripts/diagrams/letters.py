"""How wide text is, without a font: as wide as in the widest of the usual sans-serif fonts."""

from __future__ import annotations

SIZE, SMALL = 15, 13
_GROUPS = {
    0.34: "iljI|.,:;'!· ",
    0.39: "()[]",
    0.41: "ftr/-‖",
    0.98: "mMW@%—…",
    0.84: "w+=<>≤≥≠~±►→←↓↑⇄−×÷▶◀✓✗",
    0.79: "DGHNOQUΨΘ",
    0.7: "ABCJKPRSVXYZΣΔ",
    0.45: "⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉⁻",
}
_WIDTHS = {letter: width for width, letters in _GROUPS.items() for letter in letters}


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """An upper estimate of the text's width in pixels."""
    return sum(_WIDTHS.get(letter, 0.63) for letter in text) * size * (1.1 if bold else 1.0)


def wrapped(text: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Lines that are at most ``width`` wide, cut at blanks."""
    lines: list[str] = []
    for part in text.split("\n"):
        line = ""
        for word in part.split(" "):
            longer = f"{line} {word}".strip()
            if line and width_of(longer, size, bold=bold) > width:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return lines


def balanced(text: str, width: float, size: float) -> list[str]:
    """Bold lines, as few as fit and about equally long."""
    count = len(wrapped(text, width, size, bold=True))
    narrow = width / 2
    while len(wrapped(text, narrow, size, bold=True)) > count:
        narrow += 10
    return wrapped(text, narrow, size, bold=True)
