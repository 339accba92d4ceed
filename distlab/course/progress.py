"""The learner's progress, in one file that git ignores; its loss loses no work."""

from __future__ import annotations

import ast
import contextlib
import datetime
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from .catalogue import Exercise, functions_of, load_course, root

GAP = 15 * 60.0  # seconds: a longer time between two gradings is a break
Given = ParamSpec("Given")
Found = TypeVar("Found")
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)


def progress_file() -> Path:
    """The file of the progress."""
    return root() / ".distlab" / "progress.json"


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """Other processes wait here; where no lock can be had, nobody waits."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path = progress_file().with_suffix(".lock")
            path.parent.mkdir(exist_ok=True)
            fcntl.flock(held.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _alone(changes: Callable[Given, Found]) -> Callable[Given, Found]:
    """Between its reading and its writing of the file no other process writes."""

    @functools.wraps(changes)
    def locked(*given: Given.args, **more: Given.kwargs) -> Found:
        with _lock():
            return changes(*given, **more)

    return locked


def _read() -> tuple[dict[str, Any], list[str]]:
    """(all that is remembered, warnings)."""
    path = progress_file()
    try:
        data = dict(json.loads(path.read_text(encoding="utf-8")))
        data["exercises"] = {str(k): dict(v) for k, v in data["exercises"].items()}
    except FileNotFoundError:
        return {"exercises": {}}, []
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        text = f"{path.name} can't be read, progress starts afresh (no work is lost)"
        return {"exercises": {}}, [text]
    return data, []


def load() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(entry per exercise, warnings): a missing or damaged file counts as a fresh start."""
    data, warnings = _read()
    return data["exercises"], warnings


def write(path: Path, data: object) -> None:
    """Write JSON into a folder that is made if it is missing. After a crash the old file is still
    there, and nothing beside it."""
    path.parent.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def save(entries: dict[str, dict[str, Any]], **others: Any) -> list[str]:
    """Write atomically, with ``others`` changed; warnings if it could not be written."""
    path = progress_file()
    data = _read()[0] | others | {"exercises": entries}
    try:
        write(path, data)
    except OSError as error:
        return [f"progress could not be saved in {path.parent}: {error.strerror}"]
    return []


@_alone
def update(exercise_id: str, **fields: Any) -> list[str]:
    """Set fields of one exercise's entry; warnings if it could not be saved."""
    entries, warnings = load()
    entries.setdefault(exercise_id, {}).update(fields)
    return warnings + save(entries)


def track() -> str:
    """The name of the track that the learner has chosen; empty if none."""
    return str(_read()[0].get("track", ""))


@_alone
def _remember(**others: Any) -> list[str]:
    """Change what stands beside the exercises; warnings if it could not be saved."""
    entries, warnings = load()
    return warnings + save(entries, **others)


def _rows(data: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """A table that stands beside the exercises; empty if it is missing or damaged."""
    found = data.get(name, {})
    return {str(k): dict(v) for k, v in found.items()} if isinstance(found, dict) else {}


def choose_track(name: str) -> list[str]:
    """Remember the learner's track; warnings if it could not be saved."""
    return _remember(track=name)


def labs() -> dict[str, dict[str, Any]]:
    """What is remembered of labs, by their ids."""
    return _rows(_read()[0], "labs")


@_alone
def update_lab(lab_id: str, **fields: Any) -> list[str]:
    """Set fields of one lab's entry; warnings if it could not be saved."""
    data, warnings = _read()
    known = _rows(data, "labs")
    known.setdefault(lab_id, {}).update(fields)
    return warnings + save(data["exercises"], labs=known)


def predicts_first() -> bool:
    """Whether the learner wants to predict before a grading."""
    return _read()[0].get("predicts_first") is True


def choose_predicts_first(on: bool) -> list[str]:
    """Remember it; warnings if it could not be saved."""
    return _remember(predicts_first=on)


def waiting_predictions() -> dict[str, dict[str, Any]]:
    """Numbers that were predicted for exercises that don't pass yet, by exercise."""
    return _rows(_read()[0], "waiting_predictions")


def save_waiting_predictions(waiting: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Remember them; warnings if they could not be saved."""
    return _remember(waiting_predictions=waiting)


@_alone
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


Result = tuple[str, str, int]  # exercise, verdict, points


@_alone
def record(results: Iterable[Result], along: Iterable[Result] = ()) -> list[str]:
    """Remember results of the learner's files; warnings if that failed. ``along``: of exercises
    that were graded because ``results`` build on them, so no time was spent on these."""
    data, warnings = _read()
    entries = data["exercises"]
    for each in along:
        _note(entries, each)
    graded, changed = [], []
    for each in results:
        before = entries.get(each[0], {}).get("fingerprint")
        mine = _note(entries, each)
        graded.append(mine)
        if mine.get("fingerprint") != before:
            changed.append(mine)
    now = time.time()
    _share(now - data.get("last_run", now), changed or graded)
    return warnings + save(entries, last_run=now)


def _note(entries: dict[str, dict[str, Any]], result: Result) -> dict[str, Any]:
    """Put a result into its exercise's entry, which is returned."""
    exercise, verdict, points = result
    mine = entries.setdefault(exercise, {})
    mine.pop("fingerprint", None)
    with contextlib.suppress(*UNREADABLE):
        mine["fingerprint"] = fingerprint(load_course().exercise(exercise))
    if verdict == "pass" and (mine.get("verdict") != "pass" or not mine.get("passed_on")):
        mine["passed_on"] = datetime.date.today().isoformat()
    mine |= {"verdict": verdict, "points": points}
    if verdict == "pass":
        mine["passed_once"] = True
    return mine


def _share(seconds: float, worked_on: list[dict[str, Any]]) -> None:
    """Add the time since the last grading, unless it was a break, to what was worked on."""
    if 0 < seconds <= GAP:
        for mine in worked_on:
            mine["seconds"] = round(mine.get("seconds", 0) + seconds / len(worked_on), 1)


def spent(entries: Mapping[str, Mapping[str, Any]], ids: Iterable[str]) -> float:
    """Seconds that the learner has worked on these exercises, at least.

    Measured between gradings: reading before the first one, and breaks, are no part of it.
    """
    return float(sum(entries.get(each, {}).get("seconds", 0) for each in ids))


def known_passes(exercises: Iterable[Exercise]) -> list[str]:
    """Those that passed and whose code and checks have not changed since."""
    entries, _ = load()
    known = []
    for exercise in exercises:
        mine = entries.get(exercise.id, {})
        if mine.get("verdict") != "pass":
            continue
        with contextlib.suppress(*UNREADABLE):
            if mine.get("fingerprint") == fingerprint(exercise):
                known.append(exercise.id)
    return known
