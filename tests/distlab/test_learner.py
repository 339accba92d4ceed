"""What a learner sees in a terminal: checks as they end, watching, reset, prints, whole words."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import forked_commands
import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)
from rich.console import Console

from distlab import cli
from distlab.commands import learn
from distlab.course import progress
from distlab.course.catalogue import Exercise, functions_of, load_course, root
from distlab.course.templates import template_of
from distlab.course.version import course_version
from distlab.grading import grade
from distlab.grading.command import main
from distlab.grading.report import LIKELY, print_report
from distlab.grading.session import Request
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.grading.wrong import all_mutants, patched
from distlab.host.processes import descendants

COURSE = load_course()
SOLUTIONS = root() / "solutions" / "phase1_data_parallel"
HANG_LIMIT = 120.0  # seconds after which a text that does not come is missing
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A program in a terminal of its own; ``wait`` for texts in the order in which they come."""

    def __init__(self, pid: int, fd: int, columns: int = 100) -> None:
        self.pid, self.fd, self.text, self.place = pid, fd, "", 0
        ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))

    def wait(self, wanted: str) -> str:
        """Read until ``wanted`` comes; what came before it since the last call."""
        while (found := self.text.find(wanted, self.place)) < 0:
            assert self._read(), f"it ended without {wanted!r}: {self.text[self.place :]!r}"
        before, self.place = self.text[self.place : found], found + len(wanted)
        return before

    def _read(self) -> bool:
        ready, _, _ = select.select([self.fd], [], [], HANG_LIMIT)
        assert ready, f"nothing more comes after {self.text[self.place :]!r}"
        try:
            data = os.read(self.fd, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.text += ANSI.sub("", data.decode()).replace("\r\n", "\n")
        return bool(data)

    def press(self, key: str) -> None:
        """Send a key."""
        os.write(self.fd, key.encode())

    def status(self) -> int:
        """Read to the end; the exit status."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A copy of the course in which a learner has solved phase 1."""
    folder = tmp_path / "course"
    parts = ("distlab", "solutions", "phase1_data_parallel", "tests/phase1")
    for part in parts:
        ignored = shutil.ignore_patterns("__pycache__", "phase[234]*")
        shutil.copytree(root() / part, folder / part, ignore=ignored)
    for name in ("course.toml", "pyproject.toml"):
        shutil.copy(root() / name, folder)
    checks = folder / "tests" / "phase1" / "test_data_loader.py"
    text = checks.read_text(encoding="utf-8")
    assert "LIMIT = 6 " in text  # no loop ends by itself while the tests watch it
    checks.write_text(text.replace("LIMIT = 6 ", "LIMIT = 600 "), encoding="utf-8")
    save(folder, "data_loader", (SOLUTIONS / "data_loader.py").read_text(encoding="utf-8"))
    (tmp_path / "tmp").mkdir()
    return folder


def save(course: Path, name: str, text: str) -> None:
    """Save the learner's file as editors do: at once, under its name."""
    path = course / "phase1_data_parallel" / f"template_{name}.py"
    new = path.with_suffix(".new")
    new.write_text(text.replace("from .", "from .template_"), encoding="utf-8")
    os.replace(new, path)


def solved(name: str, endless: bool = False) -> str:
    text = (SOLUTIONS / f"{name}.py").read_text(encoding="utf-8")
    if endless:
        head, step, tail = text.partition("        if self.shuffle:\n            generator")
        text = head + "        while True:\n            number = 1\n" + step + tail
    return text


def watch_command(course: Path, exercise: str) -> tuple[list[str], dict[str, str]]:
    own = {"PYTHONPATH": str(course), "TMPDIR": str(course.parent / "tmp"), "TERM": "xterm"}
    return [sys.executable, "-m", "distlab", "watch", exercise], os.environ | own


@pytest.fixture
def watching(course: Path) -> Iterator[Terminal]:
    """``distlab watch 1.1`` in a terminal, where 1.1 is in a loop that does not end."""
    save(course, "data_loader", solved("data_loader", endless=True))
    command, environment = watch_command(course, "1.1")
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(course)
        os.execve(command[0], command, environment)
    terminal = Terminal(pid, fd)
    yield terminal
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended, and its status was asked for
    os.close(fd)


def test_watching(watching: Terminal, course: Path) -> None:
    """A save and each key act while a grading runs, and nothing of it is left."""
    watching.wait("loading PyTorch")
    watching.wait("grading 1.1 Sharded sampler")
    watching.wait("1.1 check 1 of 5, gloo: Padded shards are disjoint")
    save(course, "data_loader", solved("data_loader"))
    between = watching.wait("grading 1.1 Sharded sampler …  (template_data_loader.py was saved)")
    assert "hang" not in between, "it is not waited for"
    watching.wait("pass  gloo    Padded shards are disjoint")
    checks = watching.wait("Phase 1: Data parallelism")
    assert checks.count("pass  gloo ") == 4
    watching.wait("everything asked for passed")
    watching.wait("distlab says what is next")
    watching.wait("1.1 passes: n for the next one")
    watching.wait("q quit")

    save(course, "data_loader", solved("data_loader", endless=True))
    watching.wait("was saved)")
    watching.wait("check 1 of")
    watching.press("h")
    watching.wait("hint 1 of 3")
    watching.wait("grading 1.1")
    watching.wait("check 1 of")
    watching.press("l")
    watching.wait("next:")
    watching.wait("grading 1.1")
    watching.wait("check 1 of")
    watching.press("g")
    watching.wait("grading 1.1")
    watching.wait("check 1 of")
    watching.press("\x1b[A")  # an arrow is no key of ours
    watching.press("r")
    said = watching.wait("(y/n)")
    said = " ".join(said.split())
    assert "1.1 (pass); with it, in the same file: 1.2 (not graded yet)" in said
    watching.press("n")
    watching.wait("nothing was changed")
    watching.wait("grading 1.1")
    watching.wait("check 1 of")
    watching.press("n")
    watching.wait("grading 1.2")
    watching.wait("1.1 (on which 1.2 builds) check 1 of")
    left = set(descendants(watching.pid)) if sys.platform == "linux" else set()
    assert left or sys.platform != "linux"
    watching.press("q")
    assert watching.status() == 0
    assert not [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert os.listdir(course.parent / "tmp") == []


def test_watching_without_a_terminal(course: Path) -> None:
    """Plain lines, also of a check that fails; a signal ends all of it."""
    wrong = solved("data_loader").replace("start, self.skip = self.skip, 0", "start = 0", 1)
    save(course, "data_loader", wrong)
    command, environment = watch_command(course, "1.1")
    process = forked_commands.Popen(
        command,
        cwd=course,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("watching "):
                break
        assert lines[:2] == [
            "loading PyTorch, once …",
            "grading 1.1 Sharded sampler …  (template_data_loader.py)",
        ]
        head = [line for line in lines if line.startswith("  ")][:5]
        assert [line.split()[:2] for line in head] == [
            [verdict, "gloo"] for verdict in ("pass", "pass", "pass", "fail", "pass")
        ]
        assert lines.index(head[-1]) < lines.index("Phase 1: Data parallelism on one node")
        save(course, "data_loader", solved("data_loader", endless=True))
        while "was saved" not in process.stdout.readline():
            pass
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert "Traceback" not in rest
        assert process.wait(timeout=HANG_LIMIT) == 128 + signal.SIGTERM
        assert os.listdir(course.parent / "tmp") == []
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def wrong_average(tmp_path: Path) -> Path:
    """A folder with an answer that is summed, not averaged, and prints."""
    folder = tmp_path / "a folder of mine"
    shutil.copytree(SOLUTIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (mutant,) = [m for m in all_mutants() if m.id == "average-summed"]
    text = patched(mutant)
    step = "    known = [num_samples]"
    assert step in text
    text = text.replace(step, f'    print("rank", dist.get_rank(), "has", num_samples)\n{step}', 1)
    (folder / "trainer.py").write_text(text, encoding="utf-8")
    return folder


def test_grading_in_a_terminal(wrong_average: Path) -> None:
    """A line for each exercise as it ends, and what runs now; the next command repeats --impl."""
    columns = 60
    pid, fd = pty.fork()
    if pid == 0:
        status = 1
        try:
            os.environ["TERM"] = "xterm"
            sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
            while os.get_terminal_size().columns != columns:
                time.sleep(0.001)  # until the other end has said how wide the terminal is
            status = main(1, ["1.1", "1.4", "--device", "cpu", "--impl", str(wrong_average)])
        finally:
            os._exit(status)
    terminal = Terminal(pid, fd, columns)
    terminal.wait(f"grading 2 exercises of phase 1 …  (course version {course_version()})")
    terminal.wait("1.1 check 1 of 5, gloo: ")
    terminal.wait("\r  1.1   pass     Sharded sampler")
    terminal.wait("1.4 check ")  # another one may have begun before the line of 1.1
    terminal.wait("\r  1.4   fail     Gradient averaging: ")
    terminal.wait("Phase 1:")
    begun = terminal.place
    assert terminal.status() == 1
    os.close(fd)
    report = terminal.text[begun:]
    assert f"then: python test_phase1.py 1.4 --impl '{wrong_average}'" in report
    progress_lines = re.split(r"[\r\n]", terminal.text[:begun])
    assert max(map(len, progress_lines)) <= columns


def test_without_a_terminal_the_report_stands_alone(
    wrong_average: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What ranks print is shown with a wrong value, and is no part of the JSON format."""
    report = grade(1, Request(impl=str(wrong_average), device="cpu", exercises=("1.4",)))
    assert capsys.readouterr() == ("", "")
    check = report.exercises[0].decisive
    assert check is not None
    assert (check.verdict, check.cause, check.tier) == ("fail", "summed", "virtual")
    assert check.rank is not None
    print_report(report, COURSE.phase(1), Console(width=100, color_system=None))
    text = capsys.readouterr().out
    assert re.search(rf"rank {check.rank} printed: .*rank {check.rank} has \d", text, re.DOTALL)
    assert not re.search(rf"rank {(check.rank + 1) % 3} has", text), "it is not the one at fault"
    data = json.dumps(report.as_json())
    assert "printed" not in data
    assert f"rank {check.rank} has " not in data


def test_what_real_ranks_print_is_shown_with_a_wrong_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where one process is asked for the shards of all ranks, and was of another rank."""
    text = solved("data_loader")
    old = "        start, self.skip = self.skip, 0\n"
    assert old in text
    say = '        print("-" * 500 if self.rank else "begin at", start)\n'
    shown = text.replace(old, f"        start = 1 if self.rank == 2 else 0\n{say}", 1)
    (tmp_path / "data_loader.py").write_text(shown, encoding="utf-8")
    request = Request(
        impl=str(tmp_path), exercises=("1.1",), checks=("test_padded_shards_cover_the_data",)
    )
    report = grade(1, request)
    check = report.exercises[0].decisive
    assert check is not None
    assert (check.verdict, check.tier, check.rank) == ("fail", "gloo", 2)
    print_report(report, COURSE.phase(1), Console(width=100, color_system=None))
    out = capsys.readouterr().out
    assert "rank 0 printed: …" in out, "the last lines of many"
    assert "begin at 0" in out
    assert max(map(len, re.findall(r"-+", out))) == 160


def example_report(impl: str) -> Report:
    """A report with all that it can say; nothing was run."""
    message = (
        "gradient of parameter 0, 3 ranks: 3 times the right value: not divided by the world size"
        "\n  expected [0.172534, -0.0435123, -0.402811, 0.314843, 0.526854]  (float32, shape (5,))"
    )
    failing = CheckResult(
        "test_x",
        "fail",
        message,
        "graph-cut",
        title="With equally many samples everywhere, the plain mean over the ranks",
        line="trainer.py:60: def average_gradients(parameters: Iterable[nn.Parameter]) -> None:",
        printed={0: "same\n", 1: "same\n", 2: "other\n"},
        tier="virtual",
    )
    blocked = CheckResult("test_y", "needs", "a CUDA GPU", tier="cuda")
    results = [
        ExerciseResult(e.id, e.title, e.points, "template_trainer.py", 1.0, [failing, blocked])
        for e in COURSE.phase(1).exercises
    ]
    results[4].used_solution_of = ["1.1", "1.2"]
    notes = ["progress could not be saved in the folder of the course: permission denied"]
    return Report(1, impl, 12345, "cpu", results, notes)


def test_the_map_tells_where_a_new_exercise_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    out = Console(width=120, file=io.StringIO(), color_system=None)
    learn.show_map(COURSE, out, whole=True)
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    assert [x.split()[0] for x in lines if "was part of 4.5" in x] == ["4.13", "4.14"]
    divided = {e.was_in for e in COURSE.exercises if e.was_in}
    assert divided <= {e.id for e in COURSE.exercises if not e.was_in}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_sentences_wrap_at_words_and_commands_stay_whole(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    out = Console(force_terminal=True, width=width, file=io.StringIO(), color_system=None)
    impl = "a/long/folder/in/which/the/work/of/this/learner/lies"
    print_report(example_report(impl), COURSE.phase(1), out)
    learn.show_map(COURSE, out, whole=True)
    learn.hint(COURSE.exercise("1.4"), out)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    lines = text.splitlines()
    flat = " ".join(text.split())
    commands = [
        f"      then: python test_phase1.py 1.1 --impl {impl}",
        "  grade  python test_phase1.py 1.1",
        "  hint: distlab hint 1.9",
    ]
    for whole in commands:
        assert whole in lines
    too_long = [line for line in lines if len(line.rstrip()) > width]
    assert not [line for line in too_long if impl not in line], "the terminal would cut it"
    words = [COURSE.exercise("1.4").hints[0], LIKELY["graph-cut"], "not divided by the world size"]
    for sentence in (*words, example_report(impl).notes[0]):
        assert sentence in flat
    for phase in COURSE.phases:
        for exercise in phase.exercises:
            for word in exercise.title.split():
                assert word in flat
    assert "ranks 0 and 1 printed: same" in flat
    assert "rank 2 printed: other" in flat
    assert ("virtual" in text) == (width >= 80 or "(virtual ranks)" in text)


@pytest.mark.parametrize(
    ("impl", "end"),
    [("templates", "1.1"), ("solutions", "1.1 --impl solutions"), ("a b", "1.1 --impl 'a b'")],
)
def test_the_next_command_repeats_what_is_graded(
    impl: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(example_report(impl), COURSE.phase(1), Console(width=100, color_system=None))
    assert f"then: python test_phase1.py {end}\n" in capsys.readouterr().out


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Exercise:
    """Exercise 1.4 of a learner who has written 1.3 and 1.4 and has passed both."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.setattr(learn, "root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    exercise = COURSE.exercise("1.4")
    moved = type(exercise)(**{**vars(exercise), "folder": tmp_path})
    text = template_of(exercise)
    for written in ("1.3", "1.4"):
        text = text.replace(f'raise NotImplementedError("exercise {written}")', "pass")
        progress.update(written, verdict="pass", points=10, hints=1, fingerprint="x")
    moved.template_path.parent.mkdir()
    moved.template_path.write_text(text, encoding="utf-8")
    moved.solution_path.parent.mkdir(parents=True)
    shutil.copy(exercise.solution_path, moved.solution_path)
    return moved


def test_reset_says_what_it_blanks_and_updates_the_map(
    begun: Exercise, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Console(width=200, color_system=None)
    text = begun.template_path.read_text(encoding="utf-8")
    asked = []

    def ask(answer: bool) -> bool:
        said = capsys.readouterr().out
        assert "template_trainer.py blank: 1.4 (pass)" in said
        assert "1.3 (pass), 1.5 (blank as it is)\n" in said
        assert begun.template_path.read_text(encoding="utf-8") == text, "it asks before"
        asked.append(answer)
        return answer

    assert learn.reset(begun, out, ask=lambda: ask(False)) == 0
    assert "nothing was changed" in capsys.readouterr().out
    assert begun.template_path.read_text(encoding="utf-8") == text
    assert progress.entry("1.4")["verdict"] == "pass"
    assert learn.reset(begun, out, ask=lambda: ask(True)) == 0
    assert asked == [False, True]
    for number in ("1.3", "1.4"):
        assert progress.entry(number) == {"verdict": "blank", "points": 0, "hints": 1}
    assert progress.entry("1.5") == {}, "it was never graded"
    (kept,) = (begun.folder / ".distlab" / "kept").iterdir()
    assert kept.read_text(encoding="utf-8") == text
    assert begun.template_path.read_text(encoding="utf-8") == template_of(begun)
    assert progress.known_passes(COURSE.phase(1).exercises) == []


def test_the_solution_is_shown_after_passing_or_giving_up(
    begun: Exercise, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whole functions, each under its place; no marker line; what it costs is said before."""
    out = Console(width=60, color_system=None)
    with pytest.raises(ValueError, match=r"distlab solution 1\.4 --give-up"):
        learn.solution(begun, False, out)
    assert capsys.readouterr().out == ""
    assert learn.solution(begun, True, out) == 0
    text = capsys.readouterr().out
    names = functions_of(begun)
    heads = [line for line in text.splitlines() if "trainer.py, line" in line]
    assert [line.rpartition(": ")[2] for line in heads] == names
    assert text.count("\ndef ") == len(names)
    assert "# Step 1" in text
    assert "# --- exercise" not in text
    assert learn.solution(begun, False, out) == 0, "given up once"
    assert capsys.readouterr().out == text


def test_reset_asks_in_a_terminal_only(
    begun: Exercise, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Elsewhere, and with --yes, it says the same and goes on; the end of input is a no."""
    monkeypatch.setattr(cli, "load_course", lambda: COURSE)
    monkeypatch.setattr(type(COURSE), "exercise", lambda self, name: begun)
    text = begun.template_path.read_text(encoding="utf-8")
    master, slave = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(slave, closefd=True))
    terminal = Console(force_terminal=True, width=200, color_system=None)
    monkeypatch.setattr(cli, "console", lambda: terminal)
    for typed, changed in (("n\n", False), ("\x04", False), ("y\n", True)):
        os.write(master, typed.encode())
        assert cli.main(["reset", "1.4"]) == 0
        assert "(y/n)" in capsys.readouterr().out
        assert (begun.template_path.read_text(encoding="utf-8") != text) == changed
    begun.template_path.write_text(text, encoding="utf-8")
    assert cli.main(["reset", "1.4", "--yes"]) == 0
    assert "with it, in the same file: 1.3" in capsys.readouterr().out
    begun.template_path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(cli, "console", lambda: Console(width=100, color_system=None))
    assert cli.main(["reset", "1.4"]) == 0
    said = capsys.readouterr().out
    assert said.index("with it, in the same file: 1.3") < said.index("is blank again")
    os.close(master)
