"""A part of an exercise's section in the guidelines, for a page: its pitfalls, or its beginning."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markupsafe import Markup

from ..course.catalogue import Exercise

PITFALLS = "**Pitfalls.**"


def quoted(exercise: Exercise) -> Markup:
    """The paragraph with the pitfalls, else the first paragraph, as HTML; empty if there is no
    section.

    Nothing in it is taken from the network: pictures and raw HTML are left out.
    """
    path = exercise.guidelines_path
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    heading = rf"^## {re.escape(exercise.id)} [^\n]*\n(.*?)(?=^## |\Z)"
    section = re.search(heading, text, re.M | re.S)
    if section is None:
        return Markup("")
    blocks = [block.strip() for block in re.split(r"\n\s*\n", section[1]) if block.strip()]
    index = next((i for i, block in enumerate(blocks) if block.startswith(PITFALLS)), None)
    chosen = blocks[0] if index is None else blocks[index]
    if index is not None and chosen == PITFALLS:  # a list below it
        chosen = "\n\n".join(blocks[index : index + 2])
    reader = MarkdownIt("commonmark", {"html": False}).disable(["image"])
    return Markup(reader.render(chosen))


def place_of(exercise: Exercise) -> str:
    """Where the section stands, from the course's folder."""
    return f"{exercise.phase.folder}/guidelines.md, section {exercise.id}"
