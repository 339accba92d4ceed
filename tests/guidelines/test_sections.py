"""Every exercise's section has its parts, in one order, and five questions with answers."""

from __future__ import annotations

import re

import pytest

from distlab.course.catalogue import load_course
from tests.guidelines.folded import sections

# the parts that every section has; others may stand between Why and Cost, or beside Cost
PARTS = ["Why", "Cost", "Pitfalls", "Now you can", "Small case", "Questions", "Read"]
HEADED = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)
QUESTION = re.compile(r"<details><summary>([^<\n]+\?)</summary>\n\n(.+?)\n\n</details>", re.DOTALL)
PINNED = re.compile(r"v\d+\.\d+[\w.-]*\b|\b\d+\.\d+\.\d+\b|\bcommit [0-9a-f]{7}\b")
FILE = re.compile(r"`[\w/]+\.(?:py|cc|cpp|h|cu)`")

EXERCISES = [exercise.id for exercise in load_course().exercises]


def section(exercise: str) -> str:
    return sections(int(exercise.split(".")[0]))[exercise]


def part(exercise: str, begin: str, end: str) -> str:
    """The text of a section between two of its parts."""
    _, _, after = section(exercise).partition(f"\n**{begin}")
    return after.partition(f"\n**{end}")[0] if end else after


@pytest.mark.parametrize("exercise", EXERCISES)
def test_parts_stand_in_order(exercise: str) -> None:
    found = [
        name.rstrip(".").removesuffix(" for paper") for name in HEADED.findall(section(exercise))
    ]
    assert [name for name in found if name in PARTS] == PARTS
    assert found[0] == "Why"
    assert found[-1] == "Read"


@pytest.mark.parametrize("exercise", EXERCISES)
def test_cost_says_what_travels(exercise: str) -> None:
    """A formula or a number, and messages or bytes, if it says that there are none."""
    cost = part(exercise, "Cost.**", "Pitfalls")
    assert re.search(r"\d|·|=|no (?:message|byte|communication)", cost, re.IGNORECASE)
    assert re.search(
        r"message|byte|communication|all-reduce|all-gather|broadcast|key|barrier", cost
    )


@pytest.mark.parametrize("exercise", EXERCISES)
def test_five_questions_have_answers(exercise: str) -> None:
    found = QUESTION.findall(part(exercise, "Questions.**", "Read"))
    assert len(found) == 5
    assert len({question for question, _ in found}) == 5
    for question, answer in found:
        assert 5 <= len(answer.split()) <= 80, question


@pytest.mark.parametrize("exercise", EXERCISES)
def test_production_code_is_named_with_file_and_version(exercise: str) -> None:
    _, _, production = part(exercise, "Read.**", "").partition("\nIn production:")
    assert production
    assert FILE.search(production)
    assert PINNED.search(production)


@pytest.mark.parametrize("exercise", EXERCISES)
def test_what_you_can_do_now_is_one_sentence(exercise: str) -> None:
    text = part(exercise, "Now you can**", "On your machine").strip()
    assert text.endswith(".")
    assert "\n\n" not in text
    assert len(re.findall(r"[.?!](?:\s|$)", text)) == 1
