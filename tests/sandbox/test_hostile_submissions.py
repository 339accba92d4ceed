"""Files of a submission that the grader itself looks at, and texts that reach its reports."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

import pytest
from court import RIGHT
from rich.console import Console

from distlab.classes import feedback
from distlab.classes.config import ClassConfig
from distlab.classes.results import Attempt, StudentReports, grades_csv
from distlab.classes.scoring import Lateness
from distlab.classes.submissions import Submission, clean_id
from distlab.course.catalogue import load_course, root
from distlab.grading import implementation
from distlab.grading.report import print_report
from distlab.grading.session import Request
from distlab.grading.sources import Source, in_the_file
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.grading.warm import WarmGrader
from distlab.sandbox import Limits, Sandbox, obstacle

EXERCISE = load_course().exercise("1.4")


def bomb(levels: int) -> str:
    """Text whose code doubles with each level: what stands in ``finally`` is compiled twice."""
    lines = ["def average_gradients():"]
    for level in range(1, levels):
        lines += ["    " * level + "try: pass", "    " * level + "finally:"]
    return "\n".join([*lines, "    " * levels + "pass"])


def test_a_file_that_compiles_to_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grader's process reads the text of a submission, and makes no code of it."""

    def refuse(*_: object) -> None:
        raise AssertionError("code is made in the grader's process")

    monkeypatch.setattr(implementation, "compile", refuse, raising=False)
    (tmp_path / "trainer.py").write_text(bomb(18))
    assert in_the_file(Source("impl", tmp_path), EXERCISE) is None
    (tmp_path / "trainer.py").write_text("def average_gradients(:")
    found = in_the_file(Source("impl", tmp_path), EXERCISE)
    assert found is not None
    assert (found.result.verdict, found.result.line) == (
        "error",
        "trainer.py:1: def average_gradients(:",
    )


def hostile_file(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "giant":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to({"device": "/dev/zero", "answer": EXERCISE.solution_path}[kind])


@pytest.mark.parametrize("kind", ["pipe", "folder", "giant", "device", "answer"])
def test_files_that_are_no_text(kind: str, tmp_path: Path) -> None:
    """One line says which file is not accepted; nothing waits, and nothing is read."""
    hostile_file(kind, tmp_path / "trainer.py")
    with pytest.raises(ValueError, match=r"trainer\.py") as refused, Sandbox(root(), tmp_path):
        pass
    assert "\n" not in str(refused.value)


STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
TEXTS = {
    "terminal": "\x1b[2J\x1b]0;title\x07\x9b31m\x08\r",
    "rich": "[bold red]x[/bold red] [link=file:///etc/passwd]y[/link] [/]",
    "HTML": "</pre><script>alert(1)</script><img src=x onerror=alert(1)>&quot;",
    "Markdown": "\n```\n# heading\n<script>alert(1)</script>\n[x](javascript:alert(1))\n````\n",
    "formula": '=HYPERLINK("http://192.0.2.1","x")\n+1\n-1\n@SUM(1)',
    "surrogates": "\udcff\ud800",
    "direction": "\u202egnp.exe\u2066",
}


def reported(text: str) -> Report:
    """A report in which all that comes from a submission is the text."""
    check = CheckResult(
        "test_x", "fail", text, "x", 0, f"{text}.py:1: {text}", printed={0: text, 1: text}
    )
    exercise = ExerciseResult("1.4", "Averaging", 10, file=text, checks=[check])
    return Report(1, text, 1, "cpu", [exercise], notes=[text])


@pytest.mark.parametrize("name", TEXTS)
def test_reports_show_texts_as_text(name: str) -> None:
    """Whatever a message, a line or a file's name holds, it is shown and not obeyed."""
    text = TEXTS[name]
    page = feedback.as_html(text, [text], [reported(text)])
    assert re.findall(r"<(?!/?(?:span|pre|li|ul|h1|html|meta|title|style|!DOCTYPE)\b)", page) == []
    markdown = feedback.as_markdown(text, [text], [reported(text)])
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", markdown)
    assert "<script" not in outside.replace("\\<", "")
    assert STEERING.findall(page + markdown) == []


def test_a_terminal_obeys_nothing_that_ranks_print() -> None:
    report = reported("x")
    report.exercises[0].checks[0].printed = {0: TEXTS["terminal"]}
    shown = io.StringIO()
    print_report(report, load_course().phase(1), Console(file=shown, width=99))
    assert "printed: \\x1b[2J" in shown.getvalue()
    assert STEERING.findall(shown.getvalue()) == []


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", '"=1', "a\n=1"])
def test_no_cell_of_a_table_is_a_formula(text: str) -> None:
    """A student's name is a file's name: spreadsheets take some of them for formulas."""
    config = ClassConfig()
    points = {e.id: 0.0 for e in config.exercises()}
    student = clean_id(text)
    row = Attempt(1, Submission(student, Path(), ""), StudentReports(), Lateness(), points)
    table = list(csv.reader(io.StringIO(grades_csv(config, [(student, row)]), newline="")))
    assert len(table) == 2
    assert not table[1][0].startswith(("=", "+", "-", "@", "\t", "\r"))


ATTACK = """
import json, os, sys
sys.stderr.write("attacked")
def average_gradients(parameters, num_samples, group=None):
    for folder in (".", "/tmp", os.environ.get("TMPDIR", "/tmp")):
        with open(os.path.join(folder, "trainer.py"), "w") as file:
            file.write("raise SystemExit")
    os.kill(-1, 9)
"""
MODULES = ("torch", "json", "distlab", "sitecustomize", "usercustomize", "conftest", "cloudpickle")


def test_the_grader_goes_on(tmp_path: Path) -> None:
    """A whole grading of a submission that attacks, and one of a right one after it; modules in a
    submission that are named like others take nobody's place."""
    if obstacle():
        pytest.skip(f"no sandbox can be made here: {obstacle()}")
    folders = tmp_path / "attacks", tmp_path / "right"
    for folder, text in zip(folders, (ATTACK, RIGHT), strict=True):
        folder.mkdir(mode=0o755)
        (folder / "trainer.py").write_text(text)
        for name in MODULES:
            (folder / f"{name}.py").write_text("raise SystemExit('taken for another module')")
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    tmp_path.chmod(0o755)
    checks = "test_mean_over_the_ranks", "test_average_equals_global_batch"
    with WarmGrader() as grader:
        reports = [
            grader.grade(
                1,
                Request(
                    impl=str(folder),
                    device="cpu",
                    exercises=("1.4",),
                    checks=checks,
                    known=frozenset({"1.1", "1.2", "1.3"}),
                    tier="virtual",
                    partial=True,
                    sandbox=Limits(),
                ),
            )
            for folder in folders
        ]
    assert [report.score for report in reports] == [0, EXERCISE.points]
    assert reports[1].exercises[0].verdict == "pass"
