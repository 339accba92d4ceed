"""Grade a class: several submissions at once, and none that was graded before.

The outcome of a grading is kept by the hash of the submission's files. Each run makes results,
feedback and tables from these outcomes again. So an interrupted run goes on, and a changed due date
or changed points need no new grading. Changed checks need one: then ``regrade`` shows first what
would change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import load_course
from ..host.processes import not_for_children
from . import results, scoring
from .config import ClassConfig
from .progress import Progress
from .results import Attempt, StudentReports, reports_of
from .submissions import Entry, Submission, absent, unpack
from .workers import work_off

Grader = Callable[[Submission, ClassConfig], StudentReports]
PRINTED = 20_000  # characters of it in a log
RULES = ("phases", "only", "partial", "seed", "released")  # the rules that a verdict depends on


@dataclasses.dataclass(frozen=True)
class Folder:
    """The folder of results, and the paths in it."""

    path: Path

    @property
    def unpacked(self) -> Path:
        """Where unpacked submissions lie until their grading is kept."""
        return self.path / ".unpacked"

    def student(self, name: str) -> Path:
        """A student's own part."""
        return self.path / "students" / name

    def files(self, submission: Submission) -> Path:
        """The outcome of a grading of these files."""
        number = submission.digest.removeprefix("sha256:")[:16]
        return self.student(submission.student) / "gradings" / f"{number}.json"

    def printed(self, name: str) -> Path:
        """The output of the grader's own process while it graded."""
        return self.student(name) / "printed.txt"


def grade_class(
    config: ClassConfig,
    submissions: Sequence[Entry],
    out: Path,
    *,
    jobs: int,
    grader: Grader,
    way: str = "",
    progress: Progress | None = None,
) -> dict[str, Attempt]:
    """Grade the submissions that are not graded yet, and write everything; gives the attempts that
    count.

    ``way`` names how ``grader`` runs the code: results of another way are not mixed in. Raises
    ValueError, with nothing changed, if ``out`` has results of other checks or rules.
    """
    folder = Folder(out.resolve())
    with _alone(folder.path):
        unpacked = _unpacked(config, submissions, folder)
        config = with_phases(config, [s for each in unpacked.values() for s in each])
        key = _begin(config, folder, way)
        attempts = _in_place(unpacked, folder)
        todo = [s for each in attempts.values() for s in _counting(config, each)]
        todo = [s for s in todo if not _is_done(folder, s, key)]
        todo = list({folder.files(s): s for s in todo}.values())  # attempts may be equal
        told = progress or Progress(None)
        done = len({*attempts} - {s.student for s in todo})
        with told.following(done + len(todo), done):
            _grade(config, todo, folder, jobs, grader, key, told)
        final = {student: _written(config, each, folder, key) for student, each in attempts.items()}
        rows = [(who, a) for name, a in final.items() for who in config.teams.get(name, (name,))]
        results.write(folder.path / "grades.csv", results.grades_csv(config, rows))
    return final


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep a second run from writing into the same folder."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path}: another grading is writing there") from None
        not_for_children.append(lock.fileno())  # else a child may keep it
        try:
            yield
        finally:
            not_for_children.remove(lock.fileno())


def _unpacked(
    config: ClassConfig, entries: Sequence[Entry], folder: Folder
) -> dict[str, list[Submission]]:
    """The attempts of each student or team, in the order in which they were handed in."""
    names = [*config.teams, *map(config.team_of, config.students)]
    owned: dict[str, list[Entry]] = {name: [] for name in names}
    for entry in entries:
        owned.setdefault(config.team_of(entry.student), []).append(entry)
    found: dict[str, list[Submission]] = {}
    shutil.rmtree(folder.unpacked, ignore_errors=True)
    for owner, mine in sorted(owned.items()):
        beside = folder.unpacked / owner
        beside.mkdir(parents=True)
        attempts = []
        for number, entry in enumerate(mine, 1):
            own = dataclasses.replace(entry, student=owner)
            attempts.append(unpack(own, beside / f"entry-{number}", config))
        attempts.sort(key=lambda s: (s.submitted.timestamp() if s.submitted else 0, s.label))
        found[owner] = attempts or [absent(owner, beside / "1")]
    return found


def _in_place(unpacked: dict[str, list[Submission]], folder: Folder) -> dict[str, list[Submission]]:
    """Put the files of this run in the place of the last run's. A student who
    is gone has no result."""
    for path in (folder.path / "students").glob("*/*"):
        if path.parent.name not in unpacked and path.is_file():
            path.unlink()
    found: dict[str, list[Submission]] = {}
    for owner, attempts in unpacked.items():
        beside = folder.student(owner) / "handed-in"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        for number, each in enumerate(attempts, 1):
            there = beside / str(number)
            if each.folder.is_dir():
                each.folder.rename(there)
            found.setdefault(owner, []).append(dataclasses.replace(each, folder=there))
    shutil.rmtree(folder.unpacked)
    return found


def with_phases(config: ClassConfig, submissions: Sequence[Submission]) -> ClassConfig:
    """The rules with their phases. If the rules name none, these are the phases handed in."""
    phases = {number for each in submissions for number in each.phases}
    phases = phases or {p.number for p in load_course().phases if p.exercises}
    return dataclasses.replace(config, phases=config.phases or tuple(sorted(phases)))


def _begin(config: ClassConfig, folder: Folder, way: str) -> str:
    """Note the versions and rules of this grading; returns a key of everything that a verdict
    depends on.

    Raises ValueError if there are gradings by something else.
    """
    course = results.fingerprint()
    path = folder.path / "class.json"
    text = results.class_json(config, course, way, results.now())
    if path.is_file() and any(folder.path.glob("students/*/gradings/*.json")):
        before, after = json.loads(path.read_text(encoding="utf-8")), json.loads(text)
        changed = [n for n in ("fingerprint", "way") if before[n] != after[n]]
        was, now = (_rules(found["config"]) for found in (before, after))
        changed += [name for name in now if was[name] != now[name]]
        if changed:
            what = ["the course's files" if n == "fingerprint" else n for n in changed]
            raise ValueError(
                f"{folder.path} was graded by something else ({', '.join(what)} changed since): "
                "`distlab class regrade` shows whose points would change; or choose another folder"
            )
        text = results.class_json(config, course, way, before["started"])
    results.write(path, text)
    rules = _rules(json.loads(text)["config"])
    return hashlib.sha256(json.dumps([course, way, rules]).encode()).hexdigest()[:16]


def _rules(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rules that a verdict depends on; of labs which of them count, and not their points."""
    return {name: config.get(name, []) for name in RULES} | {"labs": sorted(config.get("labs", {}))}


def _counting(config: ClassConfig, attempts: Sequence[Submission]) -> list[Submission]:
    """The attempts that may count: all where the best counts, else the last that was in time.

    If none was in time, it is the last one. An unreadable attempt counts only if none can be read.
    """
    possible = [s for s in attempts if not s.problem] or list(attempts)
    if config.counts == "best":
        return possible
    in_time = [s for s in possible if not scoring.lateness(config, s.student, s.submitted).days]
    return (in_time or possible)[-1:]


def _found(folder: Folder, submission: Submission, key: str) -> StudentReports | None:
    """The outcome of the same checks on the same files, now or in an earlier run."""
    try:
        data = json.loads(folder.files(submission).read_text(encoding="utf-8"))
        return reports_of(data["found"]) if data["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_done(folder: Folder, submission: Submission, key: str) -> bool:
    """Whether there is nothing to grade. A grading that did not finish is tried again."""
    found = _found(folder, submission, key)
    return bool(submission.problem) or (found is not None and not found.problem)


def _grade(
    config: ClassConfig,
    todo: Sequence[Submission],
    folder: Folder,
    jobs: int,
    grader: Grader,
    key: str,
    told: Progress,
) -> None:
    """Grade these submissions, and keep each outcome as soon as it is there."""
    for each in todo:
        folder.printed(each.student).unlink(missing_ok=True)
    work = work_off(
        range(len(todo)),
        jobs,
        lambda number: grader(todo[number], config).as_text(),
        lambda number: folder.printed(todo[number].student),
        config.caps.seconds,
        lambda number: told.begins(todo[number].student),
    )
    with contextlib.closing(work):
        for number, answer, problem in work:
            found = reports_of(answer) if answer else StudentReports(problem=problem)
            found = dataclasses.replace(found, graded=results.now())
            data = {"key": key, "found": found.as_text()}
            results.write(folder.files(todo[number]), json.dumps(data) + "\n")
            told.ends(todo[number].student, _line(config, todo[number], found))


def _line(config: ClassConfig, submission: Submission, found: StudentReports) -> str:
    if found.problem:
        return found.problem
    earned = sum(scoring.points(config, found.reports, found.labs).values())
    return f"{earned:g} of {scoring.highest(config):g} points"


def _written(
    config: ClassConfig, submissions: Sequence[Submission], folder: Folder, key: str
) -> Attempt:
    """Write the student's files; returns the attempt that counts."""
    attempts = []
    for number, each in enumerate(submissions, 1):
        kept = None if each.problem else _found(folder, each, key)
        found = kept or StudentReports(graded=results.now())
        late = scoring.lateness(config, each.student, each.submitted)
        earned = scoring.points(config, found.reports, found.labs)
        attempts.append(Attempt(number, each, found, late, earned))
    possible = {id(s) for s in _counting(config, submissions)}
    final = max((a for a in attempts if id(a.submission) in possible), key=lambda a: a.score)
    home = folder.student(final.submission.student)
    results.write_student(home, config, final)
    text = results.log_text(config, attempts, final)
    results.write(home / "log.txt", text + _said(folder.printed(home.name)))
    return final


def _said(path: Path) -> str:
    """The end of the output of the grader's process, if there is any."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="backslashreplace")[-PRINTED:]
    return f"\nwhat the grader's process printed:\n{text}" if text else ""
