"""The glossary explains each word once, and every phase's guidelines lead there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from distlab.course.catalogue import load_course, root

PAGE = root() / "docs" / "glossary.md"
# where a rank runs
PLACES = {
    "benchmarks/hierarchical.py",
    "distlab/grading/obstacles.py",
    "distlab/grading/run.py",
    "distlab/grading/runners.py",
    "distlab/grading/session.py",
    "distlab/labs/predict/nodes.py",
    "distlab/labs/written/jury.py",
    "distlab/labs/written/walled.py",
    "given/devices.py",
    "given/launched.py",
    "solutions/phase3_multi_node/topology.py",
    "solutions/phase4_production/engine.py",
    "solutions/phase4_production/mesh_engine.py",
    "solutions/phase4_production/trainer_hooks.py",
    "solutions/phase4_production/trainer_loop.py",
}
# fields older than the glossary: learners' code reads them
KEPT_PLACES = {
    "distlab/reference/workloads.py",
    "solutions/phase2_advanced/model_parallel.py",
    "solutions/phase2_advanced/parallel_gpt.py",
    "solutions/phase3_multi_node/fsdp.py",
    "solutions/phase3_multi_node/fsdp_checkpoint.py",
    "solutions/phase3_multi_node/mesh_layers.py",
    "solutions/phase3_multi_node/parameter_client.py",
    "solutions/phase4_production/watchdog.py",
}


def rows() -> list[tuple[str, str]]:
    """(word, its meaning) of each row, several words in one row apart."""
    lines = re.findall(r"^\| (\*\*.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [(word, text) for words, text in lines for word in re.findall(r"\*\*(.+?)\*\*", words)]


def test_each_word_is_explained_once() -> None:
    words = Counter(word for word, _ in rows())
    assert not [word for word, count in words.items() if count > 1]
    assert {"rank", "chunk", "place", "cut", "exchange", "gather", "stage", "shard"} < set(words)
    assert {"host", "worker", "track", "contract", "FSDP", "straggler", "round"} < set(words)
    assert not [word for word, text in rows() if not text.strip()]


def test_guidelines_lead_to_the_glossary() -> None:
    for phase in load_course().phases:
        folder = root() / phase.folder
        for name in ("guidelines.md", "labs.md"):
            links = re.findall(r"\]\(([^)]*glossary\.md)\)", (folder / name).read_text())
            assert links, (phase.folder, name)
            assert all((folder / link).resolve() == PAGE for link in links)


# -- no word in two meanings -----------------------------------------------------------------------
def other_meanings() -> dict[str, str]:
    """What is not said, by phrase: what to say."""
    table = PAGE.read_text(encoding="utf-8").partition("## Not to be said")[2]
    lines = re.findall(r"^\| (`.+?) \| (.+) \|$", table, re.MULTILINE)
    return {phrase: say for phrases, say in lines for phrase in re.findall(r"`(.+?)`", phrases)}


def pattern(phrase: str) -> str:
    """Of the phrase, its first word in any form; … stands for one to three words."""
    first, *rest = phrase.split(" ")
    if rest:
        first += "@"
    joined = re.escape(" ".join([first, *rest])).replace("@", "(?:s|ting|ing|ed)?")
    return rf"\b{joined}\b".replace("…", r"\S+(?:\ \S+){0,2}")


def said(phrase: str, text: str) -> bool:
    """Whether the text has the phrase."""
    return bool(re.search(pattern(phrase), text, re.IGNORECASE))


def texts() -> Iterator[tuple[str, str]]:
    """(where, text) of headings of guidelines and pages, and of all docstrings."""
    pages = [*root().glob("*.md"), *root().glob("docs/*.md"), *root().glob("phase*/guidelines.md")]
    for page in pages:
        for heading in re.findall(r"^#+ (.+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            yield page.relative_to(root()).as_posix(), heading
    for folder in ("benchmarks", "distlab", "given", "scripts", "solutions"):
        for path in (root() / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = " ".join((ast.get_docstring(node) or "").split())
                    yield path.relative_to(root()).as_posix(), text


def test_no_word_is_used_in_another_meaning() -> None:
    banned = other_meanings()
    any_of_them = re.compile("|".join(map(pattern, banned)), re.IGNORECASE)
    found = [
        f"{where}: {phrase!r}, say {say}"
        for where, text in texts()
        if any_of_them.search(text)
        for phrase, say in banned.items()
        if said(phrase, text)
    ]
    assert not found, "\n".join(found)


def test_what_is_not_said_is_about_words_of_the_glossary() -> None:
    words = {part for word, _ in rows() for part in word.lower().split()}
    assert len(other_meanings()) > 30
    for phrase, say in other_meanings().items():
        parts = re.split(r"[ -]", phrase)
        known = any(word in part for part in parts for word in words)
        assert known, f"{phrase}: none of it is explained"
        assert not said(phrase, say), phrase


@pytest.mark.parametrize(
    ("phrase", "text", "there"),
    [
        ("cut off", "A list is cut off.", True),
        ("cut off", "Cutting off the rest", True),
        ("cut off", "is cut along one dimension", False),
        ("gather … by index", "gathers the wanted rows by index", True),
        ("gather … by index", "gathers the shards; rows are picked by index", False),
        ("place among", "its place among the others", True),
        ("low-rank", "a low-rank matrix", True),
        ("low-rank", "a matrix of low rank", False),
        ("mini-batch", "Mini-batches", False),
        ("mini-batch", "one Mini-batch", True),
    ],
)
def test_phrases_are_found(phrase: str, text: str, there: bool) -> None:
    assert said(phrase, text) == there


def names_in(text: str) -> set[str]:
    """All names, parameters, attributes and definitions of a program."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "arg", "attr", "name"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


def test_a_place_is_where_a_rank_runs() -> None:
    found = set()
    for folder in ("benchmarks", "distlab", "given", "scripts", "solutions"):
        for path in (root() / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "place" in text and {"place", "places"} & names_in(text):
                found.add(path.relative_to(root()).as_posix())
    assert found == PLACES | KEPT_PLACES, "say index, position or point"
