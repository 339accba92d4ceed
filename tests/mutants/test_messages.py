"""No check looks at the words of an error: with "bad input" as every message all points stay."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from distlab.course.catalogue import Exercise, load_course
from distlab.course.regions import regions_of
from distlab.grading.contract import contract
from distlab.grading.session import Request
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import fill


def without_words(exercise: Exercise) -> str:
    """The solution's text with "bad input" as every message that the exercise's regions raise."""
    text = exercise.solution_path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    spans = [(r.start, r.end) for r in regions_of(text) if r.exercise == exercise.id]
    raised = [
        node.exc
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and node.exc.args
        and _is_message(node.exc)
        and any(start < node.lineno < end for start, end in spans)
    ]
    for call in sorted(raised, key=lambda call: -call.lineno):
        begin, end = call.lineno - 1, call.end_lineno or call.lineno
        first, last = lines[begin].encode(), lines[end - 1].encode()
        new = f'{ast.unparse(call.func)}("bad input")'.encode()
        lines[begin:end] = [(first[: call.col_offset] + new + last[call.end_col_offset :]).decode()]
    return "".join(lines)


def _is_message(call: ast.Call) -> bool:
    """An exception of the exercise's own may take a number: that is no message."""
    text = isinstance(call.args[0], ast.JoinedStr) or (
        isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    )
    return text or hasattr(builtins, ast.unparse(call.func))


def refusing(exercise: Exercise) -> tuple[str, ...]:
    """The checks of what the exercise refuses, if its regions raise anything."""
    text = exercise.solution_path.read_text(encoding="utf-8")
    changed = without_words(exercise) != text
    return tuple(contract(exercise).asserted.get("refusals", ())) if changed else ()


REFUSING = [e for e in load_course().exercises if e.phase.ready and refusing(e)]


@pytest.fixture(scope="module")
def grader() -> Iterator[WarmGrader]:
    with WarmGrader() as warm:
        yield warm


@pytest.mark.verdict
@pytest.mark.parametrize("exercise", REFUSING, ids=lambda e: e.id)
def test_words_earn_nothing(exercise: Exercise, tmp_path: Path, grader: WarmGrader) -> None:
    text = without_words(exercise)
    assert text.count("bad input") >= 1
    (tmp_path / exercise.solution_path.name).write_text(text, encoding="utf-8")
    fill(tmp_path, exercise.solution_path.parent)
    request = Request(
        impl=str(tmp_path),
        device="cpu",
        exercises=(exercise.id,),
        checks=refusing(exercise),
        trusted=True,
    )
    result = grader.grade(exercise.phase.number, request).exercises[0]
    assert result.verdict == "pass", result.decisive
