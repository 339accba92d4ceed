"""distlab templates: compare the templates with the solutions, or write them anew."""

from __future__ import annotations

import sys

from rich.console import Console

from ..course import templates
from ..course.catalogue import Course, need_solutions
from ..host.terminal import short


def make_templates(course: Course, write: bool, force: bool, out: Console) -> int:
    """Check that the templates are in step with the solutions, or write them."""
    need_solutions("distlab templates")
    if write:
        for path in templates.write(course, force):
            out.print(f"wrote {short(path)}", highlight=False)
    problems = templates.check(course)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0
