"""How long a learner waits: for a phase, for a verdict under ``watch``, for commands; and memory.

``python -m benchmarks.grading`` measures this checkout. ``--before COMMIT`` measures an older
commit, too, on the same machine. Both are kept in ``feedback.json``, from which the table is made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distlab.course.catalogue import Course, Exercise, load_course, root
from distlab.host.processes import descendants

from .common import Table, seconds
from .machine import described, fingerprint

RECORD = Path(__file__).with_name("feedback.json")
LEFT_OUT = (".git", ".venv", ".distlab", "__pycache__", "*.egg-info", "notebooks", "pictures")
GOALS = {1: 12, 2: 25, 3: 50, 4: 50}  # seconds for a whole phase
COMMANDS = {
    "a blank exercise": ("test_phase1.py", "1.4"),
    "`distlab`": ("-m", "distlab"),
    "`distlab hint`": ("-m", "distlab", "hint", "1.4"),
}
STARTS, SAVES = 5, 2
LOOK = 2.0  # seconds between two looks at memory: each takes tens of ms of a processor
QUIET: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
SIBLING = re.compile(r"^( *from )\.(\w+)( import)", re.M)
Found = dict[str, Any]


def run_watched(command: Sequence[str], folder: Path) -> float:
    """Run a command that must pass; the most memory, in GB, that it and its processes had. A page
    that several of them share counts once."""
    most = 0.0
    process = subprocess.Popen(command, cwd=folder, **QUIET)
    while process.poll() is None:
        most = max(most, sum(map(_memory, (process.pid, *descendants(process.pid)))))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LOOK)
    assert process.returncode == 0, f"{command} ended with status {process.returncode}"
    return most


def _memory(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0.0
    return int(text.partition("\nPss:")[2].split()[0] if "\nPss:" in text else 0) * 1024 / 1e9


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit."""
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        tree = Path(folder) / "course"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(tree), commit],
            cwd=root(),
            check=True,
        )
        try:
            yield tree
        finally:
            remove = ["git", "worktree", "remove", "--force", str(tree)]
            subprocess.run(remove, cwd=root(), check=True)


@contextlib.contextmanager
def solved_copy(source: Path, course: Course) -> Iterator[Path]:
    """A copy in which the learner has written the solutions into the templates."""
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        copy = Path(folder) / "course"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for phase in course.phases:
            names = {e.file for e in phase.exercises}
            for name in names:
                text = (copy / "solutions" / phase.folder / f"{name}.py").read_text("utf-8")
                target = copy / phase.folder / f"template_{name}.py"
                target.write_text(_as_template(text, names, phase.folder), encoding="utf-8")
        yield copy


def _as_template(text: str, names: set[str], folder: str) -> str:
    def moved(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        where = f".template_{name}" if name in names else f"solutions.{folder}.{name}"
        return f"{begin}{where}{end}"

    return SIBLING.sub(moved, text)


def graded(folder: Path, phase: int) -> Found:
    """A phase's solutions, graded by a new process."""
    command = [sys.executable, f"test_phase{phase}.py", "--impl", "solutions"]
    begun = time.perf_counter()
    most = run_watched(command, folder)
    return {"seconds": round(time.perf_counter() - begun, 1), "GB": round(most, 2)}


def watched(course: Path, exercise: Exercise) -> Found:
    """Seconds from a save to the first line, and to the end of the report; medians."""
    file = course / exercise.phase.folder / f"template_{exercise.file}.py"
    command = [sys.executable, "-m", "distlab", "watch", exercise.id]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=course, stderr=subprocess.STDOUT, **pipes)
    times = []
    try:
        _read_verdict(process)  # the first one, when watching begins
        for _ in range(SAVES):
            time.sleep(0.25)
            begun = time.perf_counter()
            file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
            times.append([moment - begun for moment in _read_verdict(process)])
    finally:
        process.terminate()
        process.wait()
    first, verdict = (round(statistics.median(column), 2) for column in zip(*times, strict=True))
    return {"first": first, "verdict": verdict}


def _read_verdict(process: subprocess.Popen[str]) -> tuple[float, float]:
    """When the first line of one report came, and its last; the exercise must have passed."""
    assert process.stdout is not None
    report, first = [], 0.0
    for line in process.stdout:
        first = first or time.perf_counter()
        report.append(line)
        if line.startswith("watching "):
            break
    assert any("everything asked for passed" in line for line in report), "".join(report)
    return first, time.perf_counter()


def started(folder: Path, *command: str) -> float:
    """Seconds of a command; median of fresh starts, after one that reads the files."""
    run = [sys.executable, *command]
    times = [
        seconds(lambda: subprocess.run(run, cwd=folder, stdin=subprocess.DEVNULL, **QUIET))
        for _ in range(STARTS + 1)
    ]
    return round(statistics.median(times[1:]), 2)


def measured_in(folder: Path) -> Found:
    """All waits in one checkout."""
    course = load_course(folder)
    found: Found = {"phases": {}, "watch": {}, "commands": {}}
    for name, command in COMMANDS.items():
        found["commands"][name] = started(folder, *command)
    for phase in course.phases:
        found["phases"][str(phase.number)] = graded(folder, phase.number)
        print(phase.number, found["phases"][str(phase.number)], flush=True)
    with solved_copy(folder, course) as copy:
        for exercise in course.exercises:
            found["watch"][exercise.id] = watched(copy, exercise)
            print(exercise.id, found["watch"][exercise.id], flush=True)
    return found


def record(before: str = "") -> Found:
    """Measure, and keep what was measured. An older commit's numbers on the same machine stay,
    unless they are measured anew."""
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    known: Found = {"machine": described(fingerprint()), "now": measured_in(root())}
    known["date"] = time.strftime("%Y-%m-%d")
    if "before" in old and old["machine"] == known["machine"]:
        known["before"] = old["before"]
    _keep(known)  # an hour's work, should the rest be interrupted
    if before:
        with checkout(before) as folder:
            known["before"] = {"commit": before, **measured_in(folder)}
        _keep(known)
    return known


def _keep(known: Found) -> None:
    RECORD.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def rows_of(found: Found) -> dict[str, str]:
    """What the table says of one checkout, by row."""
    rows = {
        f"phase {number}, cold, s (goal {GOALS[int(number)]})": f"{phase['seconds']:.0f}"
        for number, phase in found["phases"].items()
    }
    most = max(phase["GB"] for phase in found["phases"].values())
    rows["memory of a phase's grading, GB (goal 1.5)"] = f"{most:.1f}"
    for kind, words in (("first", "first line"), ("verdict", "verdict")):
        times = {each: saved[kind] for each, saved in found["watch"].items()}
        worst = max(times, key=lambda each: times[each])
        middle = statistics.median(times.values())
        goal = {"first": "0.2", "verdict": "1.0, worst 2.5"}[kind]
        rows[f"`watch`, save to {words}, s (goal {goal})"] = (
            f"{middle:.2f}, worst {times[worst]:.2f} ({worst})"
        )
    for name, took in found["commands"].items():
        goal = "0.5" if "blank" in name else "0.3"
        rows[f"{name}, s (goal {goal})"] = f"{took:.2f}"
    return rows


def table(known: Found) -> Table:
    """The waits now, and before if that was measured."""
    now, before = rows_of(known["now"]), rows_of(known["before"]) if "before" in known else {}
    header = ["what", *(["before"] if before else []), "now"]
    rows = [[what, *([before.get(what, "")] if before else []), said] for what, said in now.items()]
    counts = [len(known[side]["watch"]) for side in ("before", "now") if side in known]
    note = (
        f"One run. `watch`: medians of {SAVES} saves, then the median over the exercises that were "
        f"measured ({' and '.join(map(str, counts))}). "
    )
    if before:
        note += (
            f"Before: commit {known['before']['commit']}, which has fewer exercises and checks. "
        )
    return Table("Feedback", header, rows, note.strip())


def measure() -> Table:
    """What ``make bench`` prints."""
    return table(record())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", default="", metavar="COMMIT")
    print(table(record(parser.parse_args().before)).markdown())
