"""A learner's numbers: read from text, from a file or from options, and refused with one line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..frame import read_toml

BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
UNITS = {"bytes": BYTES, "seconds": SECONDS, "share": {"%": 0.01}, "GB": {"gb": 1.0, "mb": 1e-3}}
NUMBER = re.compile(r"([-+]?[\d_,]*\.?\d+(?:e[-+]?\d+)?)\s*([^\s\d]*)", re.IGNORECASE)
CHOICES = {
    "yes or no": {"yes": 1.0, "no": 0.0},
    "latency or bytes": {"latency": 1.0, "bytes": 0.0},
}


def read_number(text: object, unit: str, what: str) -> float:
    """The number in ``text``, in ``unit``: "1,5e6", "1.5 MB", "20 µs", "12 %" or "yes".

    ValueError with one line that names ``what`` for anything else.
    """
    written = str(text).strip()
    if isinstance(text, bool):
        written = "yes" if text else "no"
    if unit in CHOICES:
        if written.lower() not in CHOICES[unit]:
            raise ValueError(f"{what}: answer {unit}, not {written!r}")
        return CHOICES[unit][written.lower()]
    known = UNITS.get(unit, {})
    match = NUMBER.fullmatch(written)
    if match is None:
        raise ValueError(f"{what}: {written!r} is no number; write for example {_example(unit)}")
    number, given = float(match[1].replace(",", "").replace("_", "")), match[2].lower()
    if given and given != unit.lower() and given not in known:
        there = ", ".join([*known, unit])
        raise ValueError(f"{what}: the unit {match[2]!r} is not one of {there}")
    value = number * known.get(given, 1.0)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what}: {written!r} must be a finite number that is not negative")
    return value


def _example(unit: str) -> str:
    return {"bytes": "1.5 MB", "seconds": "20 µs", "share": "0.12"}.get(unit, "12")


def from_file(path: Path, units: Mapping[str, str]) -> dict[str, float]:
    """The numbers in a TOML file. All that is wrong with it is told at once."""
    return complete(read_toml(path), units, path.name)


def from_options(given: Iterable[str], units: Mapping[str, str]) -> dict[str, float]:
    """The numbers in words NAME=NUMBER."""
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--set {word}: write NAME=NUMBER, for example {next(iter(units))}=12")
        found[name.strip()] = value
    return complete(found, units, "--set")


def complete(given: Mapping[str, Any], units: Mapping[str, str], where: str) -> dict[str, float]:
    """A number for each name in ``units``, and no others; ValueError with a line per problem."""
    problems, found = [], {}
    for name, value in given.items():
        if name in units:
            try:
                found[name] = read_number(value, units[name], f"{where}: {name}")
            except ValueError as error:
                problems.append(str(error))
            continue
        near = difflib.get_close_matches(name, units, 1, 0.5)
        guess = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"{where}: nothing called {name!r} is asked for{guess}")
    problems += [f"{where}: {name} is missing" for name in units if name not in given]
    if problems:
        raise ValueError("\n".join(problems))
    return {name: found[name] for name in units}


def sheet(title: str, asked: Iterable[tuple[str, str, str]]) -> str:
    """A file to fill in: (name, question, unit) each."""
    lines = [f"# {line}" for line in title.splitlines()]
    for name, question, unit in asked:
        lines += ["", f"# {question} ({unit})", f'{name} = ""']
    return "\n".join(lines) + "\n"
