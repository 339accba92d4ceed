"""Put the diagrams into the guidelines: each in its section, in place of a drawing in text."""

from __future__ import annotations

import re
from pathlib import Path

from distlab.course.catalogue import load_course

from .registry import Placed, placed

SECTION = re.compile(r"(?=^## )", re.MULTILINE)


def place_all(root: Path) -> list[str]:
    """Change all guidelines below ``root``, or none; gives back the files that changed.

    Raises ValueError if a place is not found.
    """
    entries = placed()
    texts: dict[Path, tuple[str, str]] = {}
    for phase in load_course().phases:
        path = root / phase.folder / "guidelines.md"
        text = path.read_text(encoding="utf-8")
        mine = [each for each in entries if each.exercise.startswith(f"{phase.number}.")]
        texts[path] = (text, put_in(text, mine))
    changed = [path for path, (before, after) in texts.items() if before != after]
    for path in changed:
        path.write_text(texts[path][1], encoding="utf-8", newline="\n")
    return [str(path.relative_to(root)) for path in changed]


def put_in(text: str, entries: list[Placed]) -> str:
    """The guideline with its diagrams; once more changes nothing."""
    parts = SECTION.split(text)
    where = {part.split()[1]: index for index, part in enumerate(parts) if part.startswith("## ")}
    for each in entries:
        if each.exercise not in where:
            raise ValueError(f"no section for {each.name}")
        index = where[each.exercise]
        parts[index] = _placed(parts[index], each)
    return "".join(parts)


def _placed(section: str, each: Placed) -> str:
    """The section with one diagram in it."""
    there = re.compile(rf"^!\[.*\]\(\.\./docs/diagrams/{re.escape(each.name)}\.svg\)$", re.M)
    if there.search(section):
        return there.sub(lambda _: each.image, section)
    if not each.replaces:
        return _after(section, each)
    drawing = re.compile(rf"^```\n{re.escape(each.replaces)}\n.*?^```$", re.M | re.S)
    if not drawing.search(section):
        raise ValueError(f"{each.name}: no drawing begins with {each.replaces!r}")
    return drawing.sub(lambda _: each.image, section, count=1)


def _after(section: str, each: Placed) -> str:
    """Behind the paragraph, with what belongs to it (a drawing, a table, a list) left below."""
    paragraphs = section.split("\n\n")
    found = [n for n, words in enumerate(paragraphs) if words.startswith(each.after)]
    if not each.after or len(found) != 1:
        raise ValueError(f"{each.name}: {len(found)} paragraphs begin with {each.after!r}")
    paragraphs.insert(found[0] + 1, each.image)
    return "\n\n".join(paragraphs)
