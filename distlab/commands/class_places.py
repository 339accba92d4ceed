"""``distlab class gradescope`` and ``github``: files for the places where classes live."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..classes import autograder, github
from ..course.catalogue import load_course
from ..host.terminal import say


def gradescope(to: Path, rules: Path | None, out: Console) -> int:
    """Write the zip that is uploaded as an autograder."""
    config = autograder.pack(to, rules)
    graded = ", ".join(f"phase {n}" for n in config.phases)
    say(out, f"{to}: upload it under Configure Autograder (docs/class_places.md)")
    say(out, f"graded: {graded or 'each phase that a student hands in; class.toml can name them'}")
    return 0


def workflow(to: Path | None, phases: list[int], out: Console) -> int:
    """Write the workflow of GitHub Classroom, or print it."""
    text = github.workflow([load_course().phase(number) for number in phases])
    if to is None:
        print(text, end="")
        return 0
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text, encoding="utf-8")
    say(out, f"{to}: commit it to the repository that students get")
    return 0
