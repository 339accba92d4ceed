"""The glossary explains each word once, and every phase's guidelines lead there."""

from __future__ import annotations

import ast
import re
from collections import Counter

from distlab.course.catalogue import load_course, root

PAGE = root() / "docs" / "glossary.md"
# where a rank runs
PLACES = {
    "benchmarks/hierarchical.py",
    "distlab/grading/obstacles.py",
    "distlab/grading/run.py",
    "distlab/grading/runners.py",
    "distlab/grading/session.py",
    "given/devices.py",
    "given/launched.py",
    "solutions/phase3_multi_node/topology.py",
    "solutions/phase4_production/trainer_hooks.py",
}
# fields older than the glossary: learners' code reads them
KEPT_PLACES = {
    "distlab/reference/workloads.py",
    "solutions/phase2_advanced/model_parallel.py",
    "solutions/phase2_advanced/parallel_gpt.py",
    "solutions/phase3_multi_node/fsdp.py",
    "solutions/phase3_multi_node/fsdp_checkpoint.py",
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
    assert not [word for word, text in rows() if not text.strip()]


def test_guidelines_lead_to_the_glossary() -> None:
    for phase in load_course().phases:
        folder = root() / phase.folder
        links = re.findall(r"\]\(([^)]*glossary\.md)\)", (folder / "guidelines.md").read_text())
        assert links, phase.folder
        assert all((folder / link).resolve() == PAGE for link in links)


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
