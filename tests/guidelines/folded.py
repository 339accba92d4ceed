"""The folded answer of a guideline's small case, and whether computed numbers stand in it."""

from __future__ import annotations

import re
from functools import cache

from distlab.course.catalogue import load_course, root

ANSWER = re.compile(r"<details><summary>Answer</summary>\n\n(.*?)\n\n</details>", re.DOTALL)
CASE = re.compile(r"^\*\*Small case(?: for paper)?\.\*\*", re.MULTILINE)


@cache
def sections(phase: int) -> dict[str, str]:
    """The phase's sections by the first word of the heading, an exercise's number as a rule."""
    folder = root() / load_course().phase(phase).folder
    parts = re.split(r"^## ", (folder / "guidelines.md").read_text(encoding="utf-8"), flags=re.M)
    return {part.split(None, 1)[0]: part for part in parts[1:]}


def cases(phase: int) -> set[str]:
    """The sections with a small case."""
    return {name for name, text in sections(phase).items() if CASE.search(text)}


def answer(phase: int, name: str) -> str:
    """The folded answer that follows the section's small case, with single blanks."""
    _, _, after = CASE.search(sections(phase)[name]).string.partition("**Small case")
    return " ".join(ANSWER.search(after)[1].split())


def says(phase: int, name: str, *expected: str) -> None:
    """Assert that each text, made from computed numbers, stands in the answer as whole words."""
    text = answer(phase, name)
    for words in expected:
        pattern = rf"(?<![\w.,]){re.escape(words)}(?![\w]|[.,]\d)"
        assert re.search(pattern, text), f"{name} does not say {words!r}: {text}"
