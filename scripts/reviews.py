"""Grade every change of the review labs: harmless ones pass all checks, the others fail theirs.

``python -m scripts.reviews [R3.02 …]`` says for each whether it is what it claims to be.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from distlab.grading.session import Request
from distlab.grading.verdicts import Report
from distlab.grading.warm import WarmGrader
from distlab.grading.wrong import beside_solutions, patched, run_mutant
from distlab.labs.review.chosen import Review, all_reviews

Grader = Callable[[int, Request], Report]


def problem(review: Review, grade: Grader, once: bool = False) -> str:
    """Why the change is not what it claims to be; empty if it is.

    ``once``: run each check of a harmless one on its first tier only.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if review.mutant is not None:
            result = run_mutant(review.program, folder, grade=grade)
            if result is None or result.verdict == "pass":
                return f"it passes {review.mutant.caught_by}"
            told = f"{result.cause!r} is told, not one of {review.mutant.causes}"
            return "" if result.cause in review.mutant.causes else told
        own, here = folder / "own", folder / "here"
        for each in (own, here):
            each.mkdir()
        path = own / review.about.solution_path.name
        path.write_text(patched(review.program), encoding="utf-8")
        request = beside_solutions(own, review.about, here, guarded=False, once=once)
        (graded,) = grade(review.about.phase.number, request).exercises
        failed = [
            f"{check.name}: {check.message}"
            for check in graded.checks
            if check.verdict not in ("pass", "needs")
        ]
        return "; ".join(failed) or ("" if graded.verdict == "pass" else graded.verdict)


def main(ids: list[str]) -> int:
    """Grade the reviews with these ids, or all; 1 if one is not what it claims to be."""
    failed = 0
    with WarmGrader() as grader:
        for review in all_reviews():
            if ids and review.id not in ids:
                continue
            found = problem(review, grader.grade)
            failed |= bool(found)
            kind = "harmless" if review.mutant is None else "defect"
            print(f"{review.id} {kind}: {found or 'as it claims'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
