"""Find the submissions in a folder, and lay out the files of each as the course has them."""

from __future__ import annotations

import csv
import datetime
import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..course.catalogue import load_course
from ..course.handout import MANIFEST
from .archives import LAB_FILE, LABS, File, files_in, kind_of, shown
from .config import Caps, ClassConfig, clean_id
from .repository import Refused

TABLE = "submissions.csv"
DEEPEST = 4  # folders, of which the last is the phase's
MODULE = re.compile(r"[A-Za-z_]\w{0,99}\.py", re.ASCII)
ATTEMPT = re.compile(r"(?P<student>.+?)--(?P<attempt>\d+)$")


@dataclass(frozen=True)
class Entry:
    """One submission as it was handed in, and its owner. ``submitted``: the
    time from submissions.csv."""

    student: str
    path: Path
    submitted: datetime.datetime | None = None
    label: str = ""  # its name among the entries, for messages


@dataclass(frozen=True)
class Submission:
    """An unpacked entry. ``problem``: one line if there is nothing to grade. ``digest``: the hash
    of the files. ``version``: the version of the course that it was made from, if it tells."""

    student: str
    folder: Path
    digest: str
    version: str | None = None
    problem: str = ""
    submitted: datetime.datetime | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    phases: tuple[int, ...] = ()


def find_entries(folder: Path, config: ClassConfig) -> list[Entry]:
    """All entries, in the order of their names; ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder of submissions")
    told = _table(folder / TABLE, config) if (folder / TABLE).is_file() else {}
    found: list[Entry] = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in told or not kind_of(path):
            continue
        attempts = _archives_of(path, config.caps) or [path]
        for each in attempts:
            name = each.relative_to(folder).as_posix()
            if name in told:
                continue
            found.append(Entry(student_of(path.name, config), each, None, shown(name)))
    for name, (student, submitted) in told.items():
        path = Path(name.removeprefix("file://"))
        student = clean_id(student) if student else student_of(path.name, config)
        found.append(Entry(student, folder / path, submitted, shown(name)))
    if not found:
        raise ValueError(
            f"{folder}: there is no submission in it (a folder, .zip, .tar.gz or git repository "
            "for each student)"
        )
    return found


def _archives_of(path: Path, caps: Caps) -> list[Path]:
    """The archives in a folder that holds nothing else to grade. Each of them is an attempt."""
    if kind_of(path) != "folder":
        return []
    found: list[Path] = []
    seen = 0
    for folder, _, names in os.walk(path):
        for name in names:
            seen += 1
            each = Path(folder, name)
            if name.endswith(".py") or seen > caps.files:
                return []
            if kind_of(each) in ("zip", "tar") and not each.is_symlink():
                found.append(each)
    return sorted(found)


def student_of(name: str, config: ClassConfig) -> str:
    """The owner of an entry: its name without the ending, and without ``--2`` for an attempt."""
    stem = re.sub(
        r"(?i)\.(zip|git|tgz|tbz2|txz|rar|7z|(tar(\.\w+)?)|gz|py|ipynb|pdf|docx)$", "", name
    )
    pattern = re.compile(config.pattern) if config.pattern else ATTEMPT
    found = pattern.match(stem)
    return clean_id(found["student"] if found and found["student"] else stem)


def _table(path: Path, config: ClassConfig) -> dict[str, tuple[str, datetime.datetime | None]]:
    """The rows of submissions.csv: whose each entry is, and when it was handed in."""
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name} can't be read: {error}") from None
    head = [name.strip().lower() for name in rows[0]] if rows else []
    if "entry" not in head:
        near = difflib.get_close_matches("entry", head, n=1)
        guess = f"; did you mean entry by {near[0]!r}?" if near else ""
        raise ValueError(
            f"{path.name}: the first line needs a column entry (the name of a file or folder, or "
            f"the path of a repository); there are {head}{guess}"
        )
    found = {}
    for number, row in enumerate(rows[1:], 2):
        values = dict(zip(head, map(str.strip, row), strict=False))
        if values.get("entry"):
            when = _when(values.get("submitted", ""), f"{path.name} line {number}", config)
            found[values["entry"]] = (values.get("student", ""), when)
    return found


def _when(text: str, where: str, config: ClassConfig) -> datetime.datetime | None:
    if not text:
        return None
    try:
        when = datetime.datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    except ValueError:
        raise ValueError(
            f"{where}: submitted is {text!r}; write it as 2026-03-16 20:00:00 or 2026-03-16T20:00Z"
        ) from None
    return when if when.tzinfo else when.replace(tzinfo=config.zone)


def unpack(entry: Entry, to: Path, config: ClassConfig) -> Submission:
    """Lay out the entry's files in ``to`` (emptied before). No submission makes it raise."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    try:
        files = files_in(entry.path, config.caps, config.zone)
        chosen, notes = _chosen(files)
        for name, file in chosen.items():
            path = to / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
    except Refused as refused:
        return _nothing(entry, to, str(refused))
    except Exception as error:  # a library may find anything wrong with a file that nobody trusts
        return _nothing(entry, to, f"{shown(entry.path.name)} can't be read: {_one_line(error)}")
    dates = [file.when for file in chosen.values() if file.when is not None]
    folders = {name.split("/")[0] for name in chosen}
    return Submission(
        student=entry.student,
        folder=to,
        digest=_digest((name, file.data) for name, file in chosen.items()),
        version=_made_from(files),
        submitted=entry.submitted or max(dates, default=None),
        label=entry.label,
        notes=tuple(notes),
        phases=tuple(p.number for p in load_course().phases if p.folder in folders),
    )


def _made_from(files: list[File]) -> str | None:
    """The version of the course in the outermost hand-out's manifest, if one was handed in."""
    found = [f for f in files if f.path.rpartition("/")[2] == MANIFEST]
    try:
        nearest = min(found, key=lambda file: file.path.count("/"))
        return shown(str(json.loads(nearest.data)["course_version"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _nothing(entry: Entry, to: Path, problem: str) -> Submission:
    whole = [(entry.label, problem.encode())]
    if entry.path.is_file():
        whole.append(("", str(entry.path.stat().st_size).encode()))
    return Submission(
        student=entry.student,
        folder=to,
        digest=_digest(whole),
        problem=problem,
        submitted=entry.submitted,
        label=entry.label,
    )


def absent(student: str, folder: Path) -> Submission:
    """The submission of a student who handed in nothing."""
    return Submission(student, folder, _digest([]), problem="nothing was handed in")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return shown(text or type(error).__name__)


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    found = hashlib.sha256()
    for name, data in sorted(parts):
        head = f"{name} {len(data)}\n".encode("utf-8", "surrogateescape")
        found.update(head + data)
    return f"sha256:{found.hexdigest()}"


def _chosen(files: list[File]) -> tuple[dict[str, File], list[str]]:
    """The files by their path in the course, and notes; Refused if it is not clear which file
    counts.

    A file in a phase's folder belongs there, however deep that folder lies. A file elsewhere
    belongs to the phase that has a file of its name.
    """
    folders = {p.folder.lower(): p.folder for p in load_course().phases}
    homes: dict[str, dict[str, list[File]]] = {}
    loose: list[File] = []
    labs = _labs(files)
    for file in files:
        parts = file.path.split("/")
        if LABS in parts or LAB_FILE.fullmatch(file.path):
            continue
        if not MODULE.fullmatch(parts[-1]):
            continue  # nothing can import it
        if len(parts) > 1 and parts[-2].lower() in folders:
            above = "/".join(parts[:-1])
            homes.setdefault(folders[parts[-2].lower()], {}).setdefault(above, []).append(file)
        else:
            loose.append(file)
    chosen: dict[str, File] = {}
    notes: list[str] = []
    for folder, copies in homes.items():
        nearest = min(copy.count("/") for copy in copies)
        found = [copy for copy in copies if copy.count("/") == nearest]
        if nearest >= DEEPEST:
            raise Refused(f"{folder} lies more than {DEEPEST} folders deep")
        if len(found) > 1:
            raise Refused(f"there are several {folder}: {', '.join(map(shown, found[:3]))}")
        chosen.update({f"{folder}/{f.path.rpartition('/')[2]}": f for f in copies[found[0]]})
    for name, file in _by_name(loose, {*homes}).items():
        chosen[name] = file
        notes.append(f"{shown(file.path)} lies in no phase's folder: taken as {name}")
    if not chosen and not labs:
        names = ", ".join(folders.values())
        raise Refused(f"there is no Python file of the course in it (expected folders: {names})")
    return chosen | labs, notes


def _labs(files: list[File]) -> dict[str, File]:
    """Answers to labs, by their path in the course; Refused if there are two to one lab."""
    matched = ((LAB_FILE.fullmatch(file.path), file) for file in files)
    named = ((f"{LABS}/{m['own'] or m['tests']}", file) for m, file in matched if m is not None)
    return _one_each(named, "answer")


def _one_each(named: Iterable[tuple[str, File]], what: str) -> dict[str, File]:
    """The files by these names; Refused if there are two of one name."""
    found: dict[str, File] = {}
    for name, file in named:
        if name in found:
            both = f"{shown(found[name].path)} and {shown(file.path)}"
            raise Refused(f"it is not clear which {what} counts: {both}")
        found[name] = file
    return found


def _by_name(loose: list[File], there: set[str]) -> dict[str, File]:
    """Files outside of any phase's folder, for those phases whose folder is missing."""
    known = {}
    for exercise in load_course().exercises:
        if exercise.phase.folder not in there:
            for prefix in ("template_", ""):
                known[f"{prefix}{exercise.file}.py"] = exercise.phase.folder
    ends = ((file.path.rpartition("/")[2], file) for file in loose)
    named = ((f"{known[name]}/{name}", file) for name, file in ends if name in known)
    return _one_each(named, "file")
