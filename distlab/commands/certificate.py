"""``distlab certificate``: a page that says that a phase is done, and whether a page is intact.

The hash is made of the page's own records. It shows accidental changes. Everybody can compute it,
so it proves neither who wrote the code nor that a grader ran.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console

from ..course import progress
from ..course.catalogue import Exercise, Phase, load_course
from ..course.version import course_version
from ..host.terminal import say, short
from ..reference.sealed import digest

RECORDS = re.compile(r'<script type="application/json" id="records">(.*?)</script>', re.S)
SHOWN = re.compile(r'<code id="hash">([0-9a-f]{64})</code>')
LONGEST = 100  # characters of a name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("phase", nargs="?", type=int, help="a phase in which everything passes")
    what.add_argument("--verify", metavar="FILE", type=Path, help="whether a page is as written")
    parser.add_argument("--name", default="", help="your name, as the page shall show it")
    parser.add_argument("--out", metavar="FILE", type=Path, help="default: certificate-phaseN.html")


def main(options: argparse.Namespace, out: Console) -> int:
    """Write a certificate, or verify one; 1 if it was changed."""
    if options.verify:
        return verify(options.verify, out)
    phase = load_course().phase(options.phase)
    path = options.out or Path(f"certificate-phase{phase.number}.html")
    if path.exists():
        raise ValueError(f"{path} is there already: name another file with --out")
    records = records_of(phase, options.name)
    path.write_text(page(records), encoding="utf-8")
    say(out, f"written to {short(path.resolve())}")
    say(out, f"verify it with: distlab certificate --verify {short(path.resolve())}", "dim")
    return 0


def records_of(phase: Phase, name: str) -> dict[str, Any]:
    """What a certificate says; ValueError names what is lacking."""
    name = " ".join(name.split())
    if not name or len(name) > LONGEST:
        raise ValueError(f'say whose certificate it is: --name "…", at most {LONGEST} characters')
    passes = progress.known_passes(phase.exercises)
    open_ones = [e for e in phase.exercises if e.id not in passes]
    if open_ones:
        raise ValueError(
            f"phase {phase.number} is not done: {', '.join(e.id for e in open_ones)} must pass, "
            f"with the code as it is now: python test_phase{phase.number}.py"
        )
    entries, _ = progress.load()
    exercises = [_record(e, entries[e.id]) for e in phase.exercises]
    return {
        "name": name,
        "phase": phase.number,
        "title": phase.title,
        "points": sum(each["points"] for each in exercises),
        "max_points": sum(e.points for e in phase.exercises),
        "date": datetime.date.today().isoformat(),
        "course_version": course_version(),
        "exercises": exercises,
    }


def _record(exercise: Exercise, entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": exercise.id,
        "title": exercise.title,
        "points": entry["points"],
        "max_points": exercise.points,
        "passed_on": entry.get("passed_on", ""),
        "hints": entry.get("hints", 0),
        "gave_up": bool(entry.get("gave_up")),
        "code_and_checks": entry["fingerprint"],
    }


def page(records: dict[str, Any]) -> str:
    """The page, in one file that needs no network."""
    loader = jinja2.PackageLoader("distlab", "commands")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("certificate.html")
    return template.render(**records, records=records, hash=digest(records)) + "\n"


def verify(path: Path, out: Console) -> int:
    """Say whether a page is as it was written: 0 if it is, 1 if not."""
    text = path.read_text(encoding="utf-8", errors="replace")
    records, shown = RECORDS.search(text), SHOWN.search(text)
    if not records or not shown:
        raise ValueError(f"{path} is no certificate: it has no records, or no hash")
    try:
        data = json.loads(records[1])
        again = page(data)
    except (ValueError, TypeError, jinja2.UndefinedError):
        say(out, f"{path}: changed: its records can't be read", "bold red")
        return 1
    if digest(data) != shown[1]:
        say(out, f"{path}: changed: its hash is not that of its records", "bold red")
        return 1
    if data["course_version"] == course_version() and again != text:
        say(out, f"{path}: changed: its records hold, but the text around them differs", "bold red")
        return 1
    whose = f"{data['name']}, phase {data['phase']}, {data['points']} points, {data['date']}"
    say(out, f"{path}: as it was written ({whose})", "bold green")
    say(
        out, "The hash shows accidental changes. It is no signature: anybody can compute it.", "dim"
    )
    return 0
