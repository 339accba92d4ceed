"""Grade a lab: the place, the cause, and the mended program."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ...grading.run import grade
from ...grading.session import Request
from ...grading.verdicts import Report
from ...grading.wrong import beside_solutions
from ..frame import Part
from .answer import Bug, read_answer
from .chosen import DebugLab, lab_called
from .folder import ANSWER, MARK
from .sources import Sources, Spot, changed_lines, sources_of

SHARES = {"place": 0.3, "cause": 0.3, "mended": 0.4}
LONGEST = 3  # times the lines of the true change
Grader = Callable[[int, Request], Report]


def read_mark(folder: Path) -> tuple[DebugLab, int]:
    """The lab that a folder was made for, and its seed; ValueError with one line if it can't be
    told."""
    try:
        data = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return lab_called(data["lab"]), int(data["seed"])
    except OSError:
        raise ValueError(f"{folder} is no folder of a lab: it has no {MARK}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{MARK} was changed: {error}; make the lab again") from None


def read_own(folder: Path, lab: DebugLab) -> str:
    """The learner's file; ValueError with one line if it can't be read."""
    try:
        return (folder / lab.file).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{folder / lab.file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{folder / lab.file} is no text in UTF-8") from None


def graded(folder: Path, grade: Grader = grade) -> tuple[DebugLab, int, list[Part]]:
    """The lab, its seed, and what its parts earn."""
    lab, seed = read_mark(folder)
    sources = sources_of(lab)
    bugs = read_answer(folder / ANSWER, lab, sources.wrong.count("\n"))
    mended = read_own(folder, lab)
    order = _in_order(bugs, lab, sources.spots)
    parts = [_place(order, lab, sources.spots), _cause(order, lab)]
    return lab, seed, [*parts, _mended(lab, sources, mended, grade)]


def _in_order(
    bugs: Sequence[Bug], lab: DebugLab, spots: Sequence[Sequence[Spot]]
) -> tuple[Bug, ...]:
    """The answers in the order of the lab's bugs in which most is right."""

    def right(order: Sequence[Bug]) -> int:
        causes = sum(bug.cause == cause for bug, cause in zip(order, lab.causes, strict=True))
        return causes + sum(_found(bug, own) for bug, own in zip(order, spots, strict=True))

    return max(itertools.permutations(bugs), key=right)


def _found(bug: Bug, spots: Sequence[Spot]) -> bool:
    return any(spot.near(bug.line) for spot in spots)


def _most(name: str, lab: DebugLab) -> float:
    return round(SHARES[name] * lab.points, 1)


def _place(bugs: Sequence[Bug], lab: DebugLab, spots: Sequence[Sequence[Spot]]) -> Part:
    """Two thirds for the lines, the rest for the ranks."""
    lines = sum(_found(bug, own) for bug, own in zip(bugs, spots, strict=True))
    ranks = sum(bug.ranks == lab.ranks for bug in bugs)
    most = _most("place", lab)
    points = round(most * (2 * lines + ranks) / (3 * len(bugs)), 1)
    text = f"right lines: {lines} of {len(bugs)}; right ranks: {ranks} of {len(bugs)}"
    return Part("place", points, most, text)


def _cause(bugs: Sequence[Bug], lab: DebugLab) -> Part:
    right = sum(bug.cause == cause for bug, cause in zip(bugs, lab.causes, strict=True))
    most = _most("cause", lab)
    text = f"right causes: {right} of {len(bugs)}"
    return Part("cause", round(most * right / len(bugs), 1), most, text)


def _mended(lab: DebugLab, sources: Sources, mended: str, grade: Grader) -> Part:
    """The exercise's checks on the mended file; half if more was changed than the bug asks for."""
    most = _most("mended", lab)
    own = changed_lines(sources.wrong, mended)
    if not own:
        return Part("mended", 0, most, f"{lab.file} is as it was handed out")
    for trouble in failures(lab, mended, grade):
        return Part("mended", 0, most, trouble)
    limit = LONGEST * changed_lines(sources.wrong, sources.right)
    if own > limit:
        text = f"it passes; {own} lines were changed, and {limit} are enough: half of the points"
        return Part("mended", round(most / 2, 1), most, text)
    return Part("mended", most, most, f"it passes all checks; lines changed: {own}")


def failures(lab: DebugLab, mended: str, grade: Grader) -> list[str]:
    """What the checks of the lab's exercises say against the mended file."""
    found = []
    for exercise in lab.exercises:
        with tempfile.TemporaryDirectory(prefix="distlab-lab-") as name:
            own, folder = Path(name, "own"), Path(name, "all")
            own.mkdir()
            folder.mkdir()
            (own / f"{exercise.file}.py").write_text(mended, encoding="utf-8")
            request = beside_solutions(own, exercise, folder, brief=True, once=True)
            report = grade(exercise.phase.number, request)
        result = report.exercises[0] if report.exercises else None
        if result is None or result.verdict != "pass":
            check = result.decisive if result else None
            said = check.message if check else "; ".join([*report.notes, "no check could run"])
            title = f" ({check.title})" if check and check.title else ""
            text = said.replace(f"{exercise.file}.py", lab.file)
            found.append(f"a check still fails{title}: {text}")
    return found
