"""Sentences are short in all texts of the complete phases, and lists say which texts were read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distlab.course.catalogue import load_course, root
from scripts.readability import (
    MEANT,
    MOST,
    PAGES,
    Sentence,
    hints,
    p90,
    sentences,
    sentences_in,
)

PHASES = [phase.number for phase in load_course().phases]
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def texts(phase: int) -> list[Path]:
    """The guidelines, all solutions, and what else the phase's list names."""
    folder = load_course().phase(phase).folder
    found = [root() / folder / "guidelines.md", root() / folder / "labs.md"]
    found += sorted((root() / "solutions" / folder).rglob("*.py"))
    found += sorted((root() / "solutions" / folder).rglob("*.md"))
    found += [root() / name for name in rows(f"phase{phase}") if name.startswith("given/")]
    return [path for path in found if path.name != "__init__.py"]


def pages() -> list[Path]:
    """What a reader of no single phase meets."""
    folders = [root() / "docs", root() / "benchmarks"]
    return [root() / name for name in PAGES] + [p for f in folders for p in sorted(f.glob("*.md"))]


def rows(name: str) -> dict[str, list[str]]:
    """The cells of each file's row in a list of read texts."""
    page = (root() / "docs" / "prose" / f"{name}.md").read_text(encoding="utf-8")
    lines = [line.strip("| \n").split("|") for line in page.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[1:]}


def by_kind(phase: int) -> dict[str, list[Sentence]]:
    every = [each for path in texts(phase) for each in sentences(path)]
    every += hints((root() / "course.toml").read_text(encoding="utf-8"), phase)
    found: dict[str, list[Sentence]] = {}
    for each in every:
        found.setdefault(each.kind, []).append(each)
    return found


@pytest.mark.parametrize("phase", PHASES)
def test_sentences_are_short(phase: int) -> None:
    found = by_kind(phase)
    assert set(found) == {"prose", "docstring", "comment", "message", "hint"}
    assert_short(found)


def test_sentences_of_the_toolkit_are_short() -> None:
    for folder in ("distlab/", "scripts/", "benchmarks/", "tests/"):
        names = [name for name in rows("toolkit") if name.startswith(folder)]
        every = [each for name in names for each in sentences(root() / name)]
        kinds = ("docstring", "comment", "message")
        found = {kind: [each for each in every if each.kind == kind] for kind in kinds}
        assert all(found.values())
        assert_short(found)


def assert_short(found: dict[str, list[Sentence]]) -> None:
    long = [f"{s.words} words: {s.text}" for each in found.values() for s in each if s.words > MOST]
    assert not long
    assert {kind: p90([s.words for s in each]) <= MEANT for kind, each in found.items()} == (
        dict.fromkeys(found, True)
    )


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.relative_to(root()).as_posix())
def test_sentences_of_pages_are_short(path: Path) -> None:
    found = sentences(path)
    assert not [f"{s.words} words: {s.text}" for s in found if s.words > MOST]
    assert p90([s.words for s in found]) <= MEANT


@pytest.mark.parametrize("name", [*(f"phase{phase}" for phase in PHASES), "docs", "toolkit"])
def test_every_text_was_read(name: str) -> None:
    listed = rows(name)
    read = {"docs": pages, "toolkit": list}.get(name, lambda: texts(int(name[-1])))
    for path in read():
        assert path.relative_to(root()).as_posix() in listed
    for file, (*marks, date) in listed.items():
        assert all(marks), file
        assert DATE.fullmatch(date), file


def test_every_given_file_is_in_one_list() -> None:
    every = [name for phase in load_course().phases for name in rows(f"phase{phase.number}")]
    for path in (root() / "given").glob("[a-z]*.py"):
        assert every.count(f"given/{path.name}") == 1


def test_a_sentence_is_measured_without_code_tables_and_formulas() -> None:
    text = (
        "# A heading is no sentence\n\n**The idea.** Rank 0 sends `dist.send(x, 1)` twice.\nThen it"
        " waits: t = 2·(α + N·β).\n\n| a table | is none |\n|---|---|\n| of | them |\n\n"
        "```\ncode\n```"
    )
    found = [(each.line, each.words) for each in sentences_in(text, 1, "prose")]
    assert found == [(3, 5), (4, 4)]
