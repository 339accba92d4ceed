"""The glossary explains each word once, and every phase's guidelines lead there."""

from __future__ import annotations

import re
from collections import Counter

from distlab.course.catalogue import load_course, root

PAGE = root() / "docs" / "glossary.md"


def rows() -> list[tuple[str, str]]:
    """(word, its meaning) of each row, several words in one row apart."""
    lines = re.findall(r"^\| (\*\*.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(word, text) for words, text in lines for word in re.findall(r"\*\*(.+?)\*\*", words)]


def test_each_word_is_explained_once() -> None:
    words = Counter(word for word, _ in rows())
    assert not [word for word, count in words.items() if count > 1]
    assert {"rank", "chunk", "place", "cut", "exchange", "gather", "stage", "shard"} < set(words)
    assert not [word for word, text in rows() if not text.strip()]


def test_guidelines_lead_to_the_glossary() -> None:
    for phase in load_course().phases:
        folder = root() / phase.folder
        links = re.findall(r"\]\(([^)]*glossary\.md)\)", (folder / "guidelines.md").read_text())
        assert links, phase.folder
        assert all((folder / link).resolve() == PAGE for link in links)
