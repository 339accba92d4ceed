"""The learner's progress, in one file that git ignores; its loss loses no work."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .catalogue import Exercise, Phase, functions_of, load_course, root

UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)


def progress_file() -> Path:
    """The file of the progress."""
    return root() / ".distlab" / "progress.json"


def load() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(entry per exercise, warnings): a missing or damaged file counts as a fresh start."""
    path = progress_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = {str(k): dict(v) for k, v in data["exercises"].items()}
    except FileNotFoundError:
        return {}, []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, [f"{path.name} can't be read, progress starts afresh (no work is lost)"]
    return entries, []


def save(entries: dict[str, dict[str, Any]]) -> list[str]:
    """Write atomically; warnings if it could not be written."""
    path = progress_file()
    try:
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix="progress-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"exercises": entries}, file, indent=1)
        os.replace(name, path)
    except OSError as error:
        return [f"progress could not be saved in {path.parent}: {error.strerror}"]
    return []


def update(exercise_id: str, **fields: Any) -> list[str]:
    """Set fields of one exercise's entry; warnings if it could not be saved."""
    entries, warnings = load()
    entries.setdefault(exercise_id, {}).update(fields)
    return warnings + save(entries)


def blanked(exercise_ids: Iterable[str]) -> list[str]:
    """The exercises' file is blank again: their verdicts no longer hold. The
    number of hints is kept."""
    entries, _ = load()
    known = [entries[i] for i in exercise_ids if "verdict" in entries.get(i, {})]
    for mine in known:
        mine |= {"verdict": "blank", "points": 0}
        mine.pop("fingerprint", None)
    return save(entries) if known else []


def entry(exercise_id: str) -> dict[str, Any]:
    """The entry of an exercise."""
    return load()[0].get(exercise_id, {})


def hints_used(exercise_id: str) -> int:
    """How many hints of the exercise were asked for."""
    return int(entry(exercise_id).get("hints", 0))


def fingerprint(exercise: Exercise) -> str:
    """Changes when the learner's code of this exercise, or its checks, may behave differently.

    The bodies of functions of other exercises in the same file are left out. So work on one
    exercise does not put the others in doubt.
    """
    digest = hashlib.sha256()
    checks = sorted(root().glob(exercise.checks_glob))
    shared = {p for c in checks for p in c.parent.glob("*.py") if not p.stem.startswith("test_")}
    for path in (*checks, *sorted(shared)):
        digest.update(path.read_bytes())
    text = exercise.template_path.read_text(encoding="utf-8")
    others = {
        name
        for other in exercise.phase.exercises
        if other.file == exercise.file and other.id != exercise.id
        for name in functions_of(other)
    } - set(functions_of(exercise))
    digest.update(ast.dump(_without(ast.parse(text), others)).encode())
    return digest.hexdigest()


def _without(tree: ast.Module, names: set[str]) -> ast.Module:
    """The module with the bodies of the named functions emptied."""
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef) and prefix + member.name in names:
                member.body = [ast.Pass()]
    return tree


def record(results: Iterable[tuple[str, str, int]]) -> list[str]:
    """Remember (exercise, verdict, points) of the learner's files; warnings if that failed."""
    entries, warnings = load()
    course = load_course()
    for exercise, verdict, points in results:
        mine = entries.setdefault(exercise, {})
        mine["verdict"] = verdict
        mine["points"] = points
        mine.pop("fingerprint", None)
        with contextlib.suppress(*UNREADABLE):
            mine["fingerprint"] = fingerprint(course.exercise(exercise))
        if verdict == "pass":
            mine["passed_once"] = True
    return warnings + save(entries)


def known_passes(phase: Phase) -> list[str]:
    """Exercises that passed and whose code and checks have not changed since."""
    entries, _ = load()
    known = []
    for exercise in phase.exercises:
        mine = entries.get(exercise.id, {})
        if mine.get("verdict") != "pass":
            continue
        with contextlib.suppress(*UNREADABLE):
            if mine.get("fingerprint") == fingerprint(exercise):
                known.append(exercise.id)
    return known
