"""Numbers as players show them."""

from __future__ import annotations

UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def duration(seconds: float) -> str:
    """``"3.4 µs"``, ``"12 ms"``: three digits at most."""
    size, unit = next((u for u in UNITS if seconds >= 0.9995 * u[0]), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"


def amount(nbytes: float) -> str:
    """``"768 B"``, ``"3.84 MB"``: three digits at most."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def several(count: int, noun: str) -> str:
    """``"1 rank"``, ``"3 ranks"``, ``"2 pushes"``."""
    ending = "es" if noun.endswith(("sh", "ch", "s", "x")) else "s"
    return f"{count} {noun}" + (ending if count != 1 else "")
