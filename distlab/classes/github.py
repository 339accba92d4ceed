"""GitHub Classroom: a workflow for exercises, and their results as its reporter reads them.

    python -m distlab.classes.github phase1.json >> "$GITHUB_OUTPUT"

Each exercise is one runner of the reporter ``classroom-resources/autograding-grading-reporter``. A
runner is an output of the step, in base64, with its points.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import Phase

WORKFLOW = """\
# GitHub Classroom runs this at each push to a student's repository, a hand-out of the course.
# Made by: python -m distlab class github --phases {numbers}
#
# A student can edit this file, and the checks: grade again what counts (docs/class_places.md).
name: Autograding Tests

on: [push, repository_dispatch]

permissions:
  checks: write
  actions: read
  contents: read

jobs:
  autograding:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.13"
          cache: pip
          cache-dependency-path: pyproject.toml
      - run: make cpu
      # a grading that finds mistakes ends with 1; one that could not begin leaves no file
{gradings}
      - name: Points of each exercise
        id: grade
        run: .venv/bin/python -m distlab.classes.github {files} >> "$GITHUB_OUTPUT"
      - name: Autograding Reporter
        uses: classroom-resources/autograding-grading-reporter@v1
        env:
{results}
        with:
          runners: {runners}
"""
GRADING = """\
      - run: .venv/bin/python test_phase{n}.py --json phase{n}.json || test -s phase{n}.json"""


def workflow(phases: Sequence[Phase]) -> str:
    """The workflow for these phases."""
    numbers = [str(phase.number) for phase in phases]
    names = [_name(exercise.id) for phase in phases for exercise in phase.exercises]
    outputs = [f"{n.upper()}_RESULTS: ${{{{ steps.grade.outputs.{n} }}}}" for n in names]
    return WORKFLOW.format(
        numbers=" ".join(numbers),
        gradings="\n".join(GRADING.format(n=number) for number in numbers),
        files=" ".join(f"phase{number}.json" for number in numbers),
        results="\n".join(f"          {line}" for line in outputs),
        runners=",".join(names),
    )


def _name(exercise_id: str) -> str:
    """The exercise's name where neither points nor spaces are allowed."""
    return "exercise_" + exercise_id.replace(".", "_")


def outputs(run: dict[str, Any]) -> Iterator[str]:
    """A line for each exercise of a run (docs/schema/run.schema.json)."""
    for exercise in run["exercises"]:
        text = json.dumps(_result(exercise)).encode()
        yield f"{_name(exercise['id'])}={base64.b64encode(text).decode()}"


def _result(exercise: dict[str, Any]) -> dict[str, Any]:
    passed = exercise["verdict"] == "pass"
    failing = [c for c in exercise["checks"] if c["verdict"] not in ("pass", "needs", "blocked")]
    said = failing[0]["message"] if failing else "\n".join(exercise["needs"])
    test = {
        "name": f"{exercise['id']} {exercise['title']}",
        "status": "pass" if passed else "fail",
        "score": exercise["points"],
        "message": "" if passed else f"{exercise['verdict']}: {said}",
        "test_code": f"python test_phase{exercise['id'].split('.')[0]}.py {exercise['id']}",
        "filename": "",
        "line_no": 0,
        "duration": round(1000 * exercise["seconds"]),
    }
    status, most = test["status"], exercise["max_points"]
    return {"version": 1, "status": status, "max_score": most, "tests": [test]}


def main(arguments: Sequence[str]) -> int:
    """Print the outputs of the runs in these files."""
    for name in arguments:
        for line in outputs(json.loads(Path(name).read_text(encoding="utf-8"))):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
