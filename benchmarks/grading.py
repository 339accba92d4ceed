"""The time that a learner waits for a verdict: of a whole phase, of one exercise, and
after a save under watch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distlab.course.catalogue import Exercise, load_course, root

from .common import Table, seconds, spread

PHASE = 1  # each exercise of this phase is graded alone
TARGETS = {1: 30, 2: 60, 3: 120}  # seconds for a whole phase
LEFT_OUT = (".git", ".venv", ".distlab", "__pycache__", "*.egg-info", "notebooks", "pictures")


def grade_cold(phase: int, *exercises: str) -> float:
    """Seconds of ``python test_phaseN.py … --impl solutions`` in a new process; it must pass."""
    command = [sys.executable, f"test_phase{phase}.py", *exercises, "--impl", "solutions"]
    return seconds(lambda: subprocess.run(command, cwd=root(), check=True, capture_output=True))


@contextmanager
def solved_course() -> Iterator[Path]:
    """A copy of the course in which the learner has written the solutions into the templates."""
    phase = load_course().phase(PHASE)
    names = {e.file for e in phase.exercises}
    with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
        course = Path(folder) / "course"
        shutil.copytree(root(), course, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for name in names:
            text = (course / "solutions" / phase.folder / f"{name}.py").read_text(encoding="utf-8")
            for sibling in names:
                text = text.replace(f"from .{sibling} ", f"from .template_{sibling} ")
            (course / phase.folder / f"template_{name}.py").write_text(text, encoding="utf-8")
        yield course


def watch(course: Path, exercise: Exercise, repeats: int) -> list[float]:
    """Seconds from saving the learner's file to the end of the verdict's report."""
    file = course / exercise.phase.folder / f"template_{exercise.file}.py"
    command = [sys.executable, "-m", "distlab", "watch", exercise.id]
    process = subprocess.Popen(
        command,
        cwd=course,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    times = []
    try:
        _read_verdict(process)  # the first one, when watching begins
        for _ in range(repeats):
            time.sleep(0.25)
            begun = time.perf_counter()
            file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
            _read_verdict(process)
            times.append(time.perf_counter() - begun)
    finally:
        process.terminate()
        process.wait()
    return times


def _read_verdict(process: subprocess.Popen[str]) -> None:
    """Read one report to its end; the exercise must have passed."""
    assert process.stdout is not None
    report = []
    for line in process.stdout:
        report.append(line)
        if line.startswith("watching "):
            break
    assert any("everything asked for passed" in line for line in report), "".join(report)


def measure(repeats: int = 3) -> Table:
    """A row for each phase, and one for each exercise of the first."""
    exercises = load_course().phase(PHASE).exercises
    rows = []
    for phase, target in TARGETS.items():
        whole = [grade_cold(phase) for _ in range(repeats)]
        rows.append([f"all of phase {phase} (target {target})", spread(whole, 1), ""])
    with solved_course() as course:
        for exercise in exercises:
            cold = [grade_cold(PHASE, exercise.id) for _ in range(repeats)]
            saved = watch(course, exercise, repeats)
            rows.append([f"{exercise.id} {exercise.title}", spread(cold, 1), spread(saved)])
    return Table(
        "Grading the solutions, seconds",
        ["what", "cold start of `test_phaseN.py`", "`distlab watch`, save to verdict"],
        rows,
        f"Median (least … most) of {repeats} runs. Targets: 5 s for one exercise, and 1.5 s from "
        "save to verdict for a typical one.",
    )


if __name__ == "__main__":
    print(measure().markdown())
