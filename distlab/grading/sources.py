"""The files of an implementation, and which exercises are still blank in them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from ..course.catalogue import Exercise, Phase, load_course, need_solutions, places_of, root
from .verdicts import NotRun


@dataclass(frozen=True)
class Source:
    """The place of the files of one implementation of a phase."""

    name: str
    folder: Path
    prefix: str = ""

    def path(self, module: str) -> Path:
        """The file of ``module``, whether it exists or not."""
        named = [self.folder / f"{prefix}{module}.py" for prefix in (self.prefix, "", "template_")]
        return next((p for p in named if p.is_file()), named[0])

    def files(self) -> tuple[str, ...]:
        """All Python files of the implementation: frames in them are the learner's."""
        return tuple(str(p) for p in sorted(self.folder.glob("*.py")))


def find_source(impl: str, phase: Phase) -> Source:
    """The implementation called ``solutions`` or ``templates``, or the one in a folder.

    Raises ValueError with what to do if the folder holds none.
    """
    if impl == "solutions":
        need_solutions("--impl solutions")
        return Source(impl, root() / "solutions" / phase.folder)
    if impl == "templates":
        return Source(impl, root() / phase.folder, "template_")
    folder = Path(impl).resolve()
    if folder.is_dir() and (folder / phase.folder).is_dir():
        folder = folder / phase.folder
    if not folder.is_dir() or not any(folder.glob("*.py")):
        raise ValueError(
            f"--impl {impl}: expected 'solutions', 'templates' or a folder with "
            f"{phase.folder}'s files"
        )
    return Source(impl, folder)


def blank_lines(path: Path, exercise_id: str) -> list[int]:
    """Lines on which the exercise's ``raise NotImplementedError`` still stands.

    Raises SyntaxError if the file is not Python, OSError if it can't be read.
    """
    text = path.read_bytes()
    tree = ast.parse(text, str(path))  # not compiled: some text makes gigabytes
    if b"NotImplementedError" not in text:  # a walk over all nodes takes ten times as long
        return []
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and getattr(node.exc.func, "id", "") == "NotImplementedError"
        and any(
            isinstance(a, ast.Constant) and a.value == f"exercise {exercise_id}"
            for a in node.exc.args
        )
    ]


def in_the_file(source: Source, exercise: Exercise) -> NotRun | None:
    """Raise NotRun if the exercise's file can't be read, or if the
    exercise is still blank in it."""
    path = source.path(exercise.file)
    name = path.name
    if not path.is_file():
        return NotRun("error", f"{name} does not exist: `distlab reset {exercise.id}` makes it")
    try:
        left = blank_lines(path, exercise.id)
    except SyntaxError as error:
        text = (error.text or "").strip()
        line = f"{name}:{error.lineno}: {text}" if error.lineno else ""
        return NotRun("error", f"{name} is not valid Python: {error.msg}", line)
    except (OSError, ValueError) as error:
        return NotRun("error", f"{name} can't be read: {error}")
    except (RecursionError, MemoryError):
        return NotRun("error", f"{name} is nested too deeply for Python to read it")
    if source.name != "solutions" and path.resolve() == exercise.solution_path.resolve():
        message = f"{name} is a link to the solution: write it yourself"
        return NotRun("fail", message, cause="shortcut")
    if left and places_of(exercise) <= len(left):
        return NotRun("blank", f"still to be written, {name} line {left[0]}")
    return None


def phase_of(number: int) -> Phase:
    """The phase; ValueError if there is nothing in it to grade."""
    phase = load_course().phase(number)
    if not phase.exercises:
        raise ValueError(f"phase {number} has no exercises yet: there is nothing to grade")
    return phase
