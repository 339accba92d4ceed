"""Pages of the course itself: a page per phase and per section of its guidelines, and the map.

Below an exercise's section stand what to write, the hints and the solution, folded.
"""

from __future__ import annotations

import ast
import html
import re
from dataclasses import dataclass
from pathlib import Path

from mdit_py_plugins.anchors.index import slugify

from distlab.course.catalogue import Course, Exercise, Phase, functions_of
from distlab.course.excerpts import excerpts
from distlab.course.regions import functions_in
from distlab.course.templates import template_of
from scripts.workload import hours

from .links import CODE, Places

HINTS = ("the idea", "the invariant", "the line")
FENCED = re.compile(CODE, re.M | re.S)


@dataclass(frozen=True)
class Section:
    """A section of the guidelines that has a page of its own; ``text`` begins with its heading."""

    page: str
    heading: str
    text: str

    @property
    def exercise(self) -> str:
        """The number of its exercise; empty if it is about none."""
        number = re.match(r"\d+\.\d+(?= )", self.heading)
        return number[0] if number else ""


def guidelines(phase: Phase, root: Path) -> tuple[str, list[Section]]:
    """What the guidelines of a phase begin with, and their sections."""
    text = (root / phase.folder / "guidelines.md").read_text(encoding="utf-8")
    first, *others = re.split(r"^## (?=\S)", text, flags=re.M)
    found = []
    for part in others:
        heading = part.partition("\n")[0].strip()
        number = re.match(r"\d+\.\d+(?= )", heading)
        name = number[0] if number else slugify(heading)
        found.append(Section(f"{phase.folder}/{name}", heading, f"# {_higher(part)}"))
    return first, found


def _higher(text: str) -> str:
    """A section whose own headings are one level higher."""
    codes = [found[0] for found in FENCED.finditer(text)]
    parts = FENCED.sub("\0", text)
    parts = re.sub(r"^#(#+ )", r"\1", parts, flags=re.M)
    return re.sub("\0", lambda _: codes.pop(0), parts)


def headings(text: str) -> list[str]:
    """The anchors of a text's headings, as a code host makes them."""
    plain = FENCED.sub("", text)
    return [slugify(each.replace("`", "")) for each in re.findall(r"^#+ +(.+?) *$", plain, re.M)]


def pages(course: Course, root: Path, places: Places) -> dict[str, str]:
    """The text of all pages of the course, by name."""
    found = {"exercises": the_map(course)}
    parts = {phase.number: guidelines(phase, root) for phase in course.phases}
    for phase in course.phases:
        origin = f"{phase.folder}/guidelines.md"
        for section in parts[phase.number][1]:
            for anchor in headings(section.text):
                places.anchors.setdefault((origin, anchor), section.page)
    for phase in course.phases:
        origin = f"{phase.folder}/guidelines.md"
        beginning, sections = parts[phase.number]
        names = [section.page.rpartition("/")[2] for section in sections]
        start = places.rewritten(beginning, origin, f"{phase.folder}/guidelines")
        table = exercise_table(course, phase.exercises)
        found[f"{phase.folder}/guidelines"] = f"{start}\n{table}\n{toctree(names)}"
        for section in sections:
            text = places.rewritten(section.text, origin, section.page)
            if section.exercise:
                exercise = course.exercise(section.exercise)
                heading, _, rest = text.partition("\n")
                text = f"{heading}\n\n{facts(course, exercise, places)}\n{rest}\n{work(exercise)}"
            found[section.page] = text
    return found


def toctree(names: list[str], caption: str = "") -> str:
    """A list of pages that shows in the navigation only."""
    options = ":hidden:\n:titlesonly:\n" + (f":caption: {caption}\n" if caption else "")
    return "```{toctree}\n" + options + "\n" + "\n".join(names) + "\n```\n"


def linked(exercise: Exercise) -> str:
    """The exercise's number as a link to its page."""
    return f"[{exercise.id}](/{exercise.phase.folder}/{exercise.id}.md)"


def facts(course: Course, exercise: Exercise, places: Places) -> str:
    """One line: where it is written, how much work it is, what it builds on."""
    file = f"{exercise.phase.folder}/{exercise.template_path.name}"
    items = [f"`{file}`", f"{exercise.points} points", f"about {exercise.minutes} minutes"]
    items.append(f"difficulty {exercise.difficulty} of 5")
    if places.address:
        items[0] = f"[{items[0]}]({places.address}/blob/HEAD/{file})"
    if exercise.builds_on:
        below = [linked(e) for e in course.exercises if e.id in exercise.builds_on]
        items.append("builds on " + ", ".join(below))
    return " · ".join(items) + "\n"


def work(exercise: Exercise) -> str:
    """What to write and how to grade it, the hints, the solution."""
    names = functions_of(exercise)
    shown = "\n\n\n".join(_functions(template_of(exercise), names))
    grade = f"python test_phase{exercise.phase.number}.py {exercise.id}"
    watch = f"distlab watch {exercise.id}".ljust(len(grade))
    parts = [
        "## Write it\n",
        f"You write {_and([f'`{name}`' for name in names])} in "
        f"`{exercise.phase.folder}/{exercise.template_path.name}`.\n",
        f"```text\n{grade}  # grade it\n{watch}  # grade it at every save\n```\n",
        folded("The template: the docstring is the contract", f"```python\n{shown}\n```"),
        "## Hints\n",
    ]
    for number, (kind, hint) in enumerate(zip(HINTS, exercise.hints, strict=True), start=1):
        parts.append(folded(f"Hint {number}: {kind}", f"<p>{_as_html(hint)}</p>"))
    solution = "\n\n\n".join(excerpt.text for excerpt in excerpts(exercise))
    parts += ["## Solution\n", folded("Show the solution", f"```python\n{solution}\n```")]
    return "\n".join(parts)


def _functions(text: str, names: list[str]) -> list[str]:
    """The functions with these names, as they stand in a text."""
    lines, found = text.splitlines(), []
    for name, node in functions_in(ast.parse(text)):
        if name in names:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            indent = " " * node.col_offset
            cut = [line.removeprefix(indent) for line in lines[first - 1 : node.end_lineno]]
            found.append("\n".join(cut))
    return found


def _and(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _as_html(hint: str) -> str:
    """A hint, which is plain text but for its code spans."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(hint, quote=False))


def folded(title: str, body: str) -> str:
    """A text that shows after a click."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>\n"


def exercise_table(course: Course, exercises: list[Exercise]) -> str:
    """Exercises with their points, estimates and tracks."""
    parts = [track for track in course.tracks if len(track.exercises) < len(course.exercises)]
    rows = ["| exercise | title | points | minutes | difficulty | track |", "|---" * 6 + "|"]
    for e in exercises:
        tracks = ", ".join(track.name for track in parts if e.id in track.exercises)
        cells = [linked(e), e.title, e.points, e.minutes, f"{e.difficulty} of 5", tracks]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def the_map(course: Course) -> str:
    """All exercises on one page, with the tracks through them."""
    lines = [
        "# All exercises\n",
        "Minutes and difficulty are estimates: [how](/docs/start.md).\n",
    ]
    for track in course.tracks:
        chosen = [e for e in course.exercises if e.id in track.exercises]
        size = f"{len(chosen)} exercises, {hours(chosen)} hours"
        lines.append(f"- **{track.title}**: {track.about}. {size}.")
    for phase in course.phases:
        lines.append(f"\n## Phase {phase.number}\n\n{phase.title}.\n")
        lines.append(exercise_table(course, phase.exercises))
    return "\n".join(lines)
