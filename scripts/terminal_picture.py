"""Make docs/report.svg, the README's terminal picture, from a real grading run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch._dynamo  # noqa: F401 (for the ranks that are forked from here)
from rich.console import Console

from distlab.course import Exercise, load_course, root
from distlab.grading import grade
from distlab.grading.report import print_report
from distlab.grading.session import Request
from distlab.templates import SIBLING, files_of

# a learner's state: 1.1 to 1.3 done, 1.4 forgets to divide, the rest is blank
WRONG = ("    share = num_samples / max(total, 1)\n", "    share = 1.0\n")
DONE = ("1.1", "1.2", "1.3", "1.4")


def learner_text(exercise: Exercise) -> str:
    """The file with the exercises in DONE as in the solution, the others blank."""
    inside, out = "", []
    for line in exercise.solution_path.read_text().splitlines():
        if "# --- exercise" in line and line.endswith(": start"):
            inside = line.split()[3].rstrip(":")
            if inside not in DONE:
                indent = line[: len(line) - len(line.lstrip())]
                out.append(f'{indent}raise NotImplementedError("exercise {inside}")')
        elif "# --- exercise" in line:
            inside = ""
        elif not inside or inside in DONE:
            out.append(SIBLING.sub(r"\1template_\2\3", line))
    return ("\n".join(out) + "\n").replace(*WRONG)


def main() -> None:
    """Grade such a file and export the report."""
    course = load_course()
    with tempfile.TemporaryDirectory() as folder:
        for exercise in files_of(course):
            (Path(folder) / exercise.template_path.name).write_text(learner_text(exercise))
        report = grade(1, Request(impl=folder, seed=4, device="cpu"))
    report.impl = "templates"
    for result in report.exercises:
        result.file = str(Path("phase1_data_parallel") / Path(result.file).name)
    with open("/dev/null", "w") as nowhere:
        out = Console(record=True, width=112, file=nowhere, force_terminal=True)
        out.print("$ python test_phase1.py", style="bold")
        print_report(report, course.phase(1), out)
        out.save_svg(str(root() / "docs" / "report.svg"), title="python test_phase1.py")


if __name__ == "__main__":
    sys.exit(main())
