"""How long a learner waits: for a phase, for a verdict under ``watch``, for commands; and memory.

``python -m benchmarks.grading`` measures this checkout. ``--before COMMIT`` measures an older
commit, too, on the same machine. Both are kept in ``feedback.json``, from which the table is made.
It takes an hour; a program that was interrupted goes on where it was.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from distlab.course import progress
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


def measure_missing(folder: Path, found: Found, keep: Callable[[], None]) -> None:
    """Add to ``found`` the waits in one checkout that it lacks; kept after each."""
    course = load_course(folder)
    with solved_copy(folder, course) as copy:
        waits: list[tuple[str, str, Callable[[], Any]]] = [
            *(("commands", name, partial(started, folder, *c)) for name, c in COMMANDS.items()),
            *(("phases", str(n), partial(graded, folder, n)) for n in GOALS),
            *(("watch", each.id, partial(watched, copy, each)) for each in course.exercises),
        ]
        for kind, name, wait in waits:
            if name not in found.setdefault(kind, {}):
                found[kind][name] = wait()
                print(kind, name, found[kind][name], flush=True)
                keep()


def record(before: str = "") -> Found:
    """Measure what was not yet measured on this machine, of this commit and of ``before``. Numbers
    of an older commit stay if none is named."""
    head = ["git", "rev-parse", "HEAD"]
    now = subprocess.run(head, cwd=root(), check=True, capture_output=True, text=True)
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    machine = described(fingerprint())
    if known.get("machine") != machine:
        known = {"machine": machine}
    known["date"] = time.strftime("%Y-%m-%d")
    with contextlib.ExitStack() as stack:
        sides = {"now": (now.stdout.strip(), root())}
        if before:
            sides["before"] = before, stack.enter_context(checkout(before))
        for side, (commit, folder) in sides.items():
            if known.get(side, {}).get("commit") != commit:
                known[side] = {"commit": commit}
            measure_missing(folder, known[side], partial(progress.write, RECORD, known))
    return known


def rows_of(found: Found, common: Collection[str] = ()) -> dict[str, str]:
    """What the table says of one checkout, by row; ``common``: exercises with rows of their own."""
    rows = {
        f"phase {number}, cold, s (goal {GOALS[int(number)]})": f"{phase['seconds']:.0f}"
        for number, phase in found["phases"].items()
    }
    most = max(phase["GB"] for phase in found["phases"].values())
    rows["memory of a phase's grading, GB (goal 1.5)"] = f"{most:.1f}"
    for kind, words, goal in (
        ("first", "first line", "goal 0.2"),
        ("verdict", "verdict", "goal 1.0, worst 2.5"),
    ):
        times = {each: saved[kind] for each, saved in found["watch"].items()}
        rows[f"`watch`, save to {words}, s ({goal})"] = _spread(times)
        if common:
            named = f"`watch`, save to {words}, s, the {len(common)} exercises that both have"
            rows[named] = _spread({each: times[each] for each in common})
    for name, took in found["commands"].items():
        goal = "0.5" if "blank" in name else "0.3"
        rows[f"{name}, s (goal {goal})"] = f"{took:.2f}"
    return rows


def _spread(times: Mapping[str, float]) -> str:
    """The median and the worst of the exercises' seconds."""
    worst = max(times, key=lambda each: times[each])
    return f"{statistics.median(times.values()):.2f}, worst {times[worst]:.2f} ({worst})"


def table(known: Found) -> Table:
    """The waits now, and before if that was measured."""
    older = known.get("before")
    common = sorted(known["now"]["watch"].keys() & older["watch"].keys()) if older else []
    now, before = rows_of(known["now"], common), rows_of(older, common) if older else {}
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
