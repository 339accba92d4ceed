"""Make the learners' templates from the solutions, and prove that both agree.

A region ``# --- exercise 1.4: start`` … ``end`` becomes its ``# Step`` comments (with the indented
comment lines that continue them) and ``raise NotImplementedError("exercise 1.4")``. Everything else
stays as it is.
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import textwrap
from collections.abc import Collection
from pathlib import Path

from .catalogue import Course, Exercise, features_for, functions_of, load_course
from .regions import Region, regions_of

BLANK = "blank"  # folder of a hand-out
SIBLING = re.compile(r"^(\s*from )(\.)(\w+) import ")
SOLUTIONS = re.compile(r"^\s*(from|import) solutions\b")


def generate(
    solution: str, phase: int, name: str = "solution", solved: Collection[str] = ()
) -> str:
    """The template of a solution's text; ValueError names the line of a broken region.

    The regions of exercises in ``solved`` stay as they are.
    """
    lines = solution.splitlines()
    every = regions_of(solution, name)
    regions = {r.start: r for r in every if r.exercise not in solved}
    ids = sorted({r.exercise for r in every}, key=lambda i: int(i.split(".")[1]))
    out = [
        f"# Exercises {', '.join(ids)}: replace every `raise NotImplementedError` by your code.",
        f"# The docstrings say what is asked for. Test with: python test_phase{phase}.py {ids[0]}",
        *_not_allowed(ids),
    ]
    number = 1
    while number <= len(lines):
        if number in regions:
            out += _blank(lines, regions[number])
            number = regions[number].end
        else:
            out.append(sibling_import(lines[number - 1], phase))
        number += 1
    text = "\n".join(out) + "\n"
    ast.parse(text)
    return text


def _not_allowed(ids: list[str]) -> list[str]:
    """A comment that names PyTorch's own features that these exercises' code may not call."""
    exercises = [e for e in load_course().exercises if e.id in ids]
    names = dict.fromkeys(f.name for e in exercises for f in features_for(e))
    text = f"It counts as a shortcut to call PyTorch's own {', '.join(names)}."
    return textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ") if names else []


def sibling_import(line: str, phase: int) -> str:
    """A line that imports from the file beside: from its template.

    Raises ValueError for a file that learners lack: it has no template, or is a solution.
    """
    found = SIBLING.match(line)
    if found is None:
        if SOLUTIONS.match(line):
            raise ValueError(f"learners lack solutions, a template can't have: {line.strip()}")
        return line
    if not any((e.phase.number, e.file) == (phase, found[3]) for e in load_course().exercises):
        raise ValueError(f"{found[3]}.py has no exercise, so learners lack it: move it to given/")
    return f"{found[1]}.template_{line[found.start(3) :]}"


def _blank(lines: list[str], region: Region) -> list[str]:
    """The region's steps and the raise, at its indentation."""
    body = lines[region.start : region.end - 1]
    steps = [line for line in body if line.lstrip().startswith(("# Step", "#    "))]
    indent = re.match(r"\s*", lines[region.start - 1])
    assert indent is not None
    return [*steps, f'{indent[0]}raise NotImplementedError("exercise {region.exercise}")']


def files_of(course: Course) -> list[Exercise]:
    """One exercise of each solution file of the phases that are ready."""
    first: dict[Path, Exercise] = {}
    for exercise in course.exercises:
        if exercise.phase.ready:
            first.setdefault(exercise.solution_path, exercise)
    return list(first.values())


def handed_out(exercise: Exercise) -> Path:
    """The path at which a hand-out keeps the blank template."""
    return exercise.folder / BLANK / exercise.phase.folder / exercise.template_path.name


def documented(exercise: Exercise) -> str:
    """The text whose docstrings the learner reads: the solution, or the blank template."""
    path = exercise.solution_path
    return (path if path.is_file() else handed_out(exercise)).read_text(encoding="utf-8")


def template_of(exercise: Exercise) -> str:
    """The template's text of the exercise's file."""
    path = exercise.solution_path
    if not path.is_file():
        return handed_out(exercise).read_text(encoding="utf-8")
    return generate(path.read_text(encoding="utf-8"), exercise.phase.number, path.name)


def committed(path: Path, folder: Path) -> str | None:
    """The committed text of a file; None where there is no repository or no commit of it."""
    command = ["git", "-C", str(folder), "show", f"HEAD:{path.relative_to(folder).as_posix()}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout if found.returncode == 0 else None


def check(course: Course) -> list[str]:
    """The differences between templates and solutions; empty if there is none.

    The committed templates are compared, so a learner's own edits do no harm.
    """
    problems = []
    for exercise in files_of(course):
        try:
            want = template_of(exercise)
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
            continue
        path, name = exercise.template_path, exercise.template_path.name
        working = path.read_text(encoding="utf-8") if path.is_file() else None
        if want not in (working, committed(path, exercise.folder)):
            problems.append(f"{name} is not what its solution gives: distlab templates --write")
        problems += _leaks(exercise, want)
        problems += _not_additive(exercise, want)
    for exercise in course.exercises:
        if exercise.phase.ready and not functions_of(exercise):
            problems.append(f"exercise {exercise.id} has no region inside a function")
    return problems


def _leaks(exercise: Exercise, template: str) -> list[str]:
    """Solution lines (long enough to be telling) that the template still shows."""
    text = exercise.solution_path.read_text(encoding="utf-8")
    lines = text.splitlines()
    inside: set[int] = set()
    for region in regions_of(text):
        inside.update(range(region.start - 1, region.end))
    outside = {line.strip() for i, line in enumerate(lines) if i not in inside}
    shown = {line.strip() for line in template.splitlines()}
    return [
        f"{exercise.template_path.name} leaks line {i + 1} of the solution: {lines[i].strip()}"
        for i in sorted(inside)
        if len(lines[i].strip()) > 20
        and not lines[i].lstrip().startswith("#")
        and lines[i].strip() in shown - outside
    ]


def _not_additive(exercise: Exercise, template: str) -> list[str]:
    """Solving must only ever add lines (and remove the raises): the rest appears in order."""
    solution = iter(
        sibling_import(line, exercise.phase.number)
        for line in exercise.solution_path.read_text(encoding="utf-8").splitlines()
    )
    lines = itertools.dropwhile(lambda line: line.startswith("#"), template.splitlines())
    kept = [line for line in lines if "raise NotImplementedError(" not in line]
    missing = next((line for line in kept if line not in solution), None)
    if missing is None:
        return []
    return [f"{exercise.template_path.name} has a line that the solution lacks: {missing.strip()}"]


def write(course: Course, force: bool = False) -> list[Path]:
    """Write the templates; ValueError, with nothing written, if one holds a learner's work."""
    todo = []
    for exercise in files_of(course):
        path, text = exercise.template_path, template_of(exercise)
        working = path.read_text(encoding="utf-8") if path.is_file() else None
        if working == text:
            continue
        if working not in (None, committed(path, exercise.folder)) and not force:
            raise ValueError(f"{path.name} was edited; --force overwrites it")
        todo.append((path, text))
    for path, text in todo:
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in todo]
