"""The grader as a learner meets it: verdicts, reports, bad input, exit statuses."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import forked_commands
import pytest
import torch
import torch._dynamo  # once here instead of in every forked grader
import torch.distributed as dist
from rich.console import Console

from distlab.course import templates
from distlab.course.catalogue import load_course, root
from distlab.grading import CheckFailed, expect_close, expect_refused, grade, plugin, refusal
from distlab.grading.definitions import definition
from distlab.grading.report import print_report
from distlab.grading.runners import VirtualRunner
from distlab.grading.session import Request
from distlab.grading.untouched import blank_report
from distlab.grading.verdicts import CheckResult, ExerciseResult, Report
from distlab.host.terminal import console
from distlab.observe.log import Event, Log
from distlab.ranks import RankContext, RankResults
from distlab.virtual import load_cluster

COURSE = load_course()
AVERAGE = 'raise NotImplementedError("exercise 1.4")'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A learner's folder: all templates, untouched."""
    for exercise in templates.files_of(COURSE):
        path = tmp_path / exercise.template_path.name
        path.write_text(templates.template_of(exercise))
    return tmp_path


def graded(folder: Path, *exercises: str, **options) -> Report:
    return grade(1, Request(impl=str(folder), device="cpu", exercises=exercises, **options))


def write_average(folder: Path, code: str) -> None:
    file = folder / "template_trainer.py"
    file.write_text(file.read_text().replace(AVERAGE, code))


def printed(report: Report, capsys: pytest.CaptureFixture[str]) -> str:
    print_report(report, COURSE.phase(1), console())
    return capsys.readouterr().out


def test_untouched_templates_are_blank(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = graded(folder)
    exercises = COURSE.phase(1).exercises
    assert [e.verdict for e in report.exercises] == ["blank"] * len(exercises)
    assert not report.passed
    text = printed(report, capsys)
    assert f"score: 0 of {sum(e.points for e in exercises)} points" in text
    assert "next: write exercise 1.1" in text


def test_a_blank_exercise_gets_its_verdict_without_torch(folder: Path) -> None:
    program = (
        "import sys\n"
        "from distlab.grading.command import main\n"
        f"status = main(1, ['1.4', '--impl', {str(folder)!r}])\n"
        "print('loaded:', *({'torch', 'pytest', 'numpy'} & set(sys.modules)))\n"
        "sys.exit(status)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1, ran.stderr
    assert re.search(r"1\.4 .* blank +0/15", ran.stdout), ran.stdout
    assert "next: write exercise 1.4" in ran.stdout
    assert ran.stdout.endswith("loaded:\n"), ran.stdout


def test_the_quick_verdict_is_the_graders(folder: Path) -> None:
    slow = {e.id: e for e in graded(folder).exercises}
    quick = blank_report(COURSE.phase(1), str(folder), [], 7)
    assert quick is not None
    for result in quick.exercises:
        other = slow[result.id]
        assert (result.verdict, result.points, result.file) == ("blank", 0, other.file)
        assert result.decisive
        assert other.decisive
        assert result.decisive.message == other.decisive.message
    write_average(folder, "pass")
    assert blank_report(COURSE.phase(1), str(folder), ["1.4"], 7) is None
    assert blank_report(COURSE.phase(1), str(folder), [], 7) is None
    assert blank_report(COURSE.phase(1), str(folder), ["1.1"], 7) is not None


@pytest.mark.parametrize(
    ("code", "verdict", "expected"),
    [
        ("import time; time.sleep(1000)", "hang", ["is still running", "template_trainer.py"]),
        ("import os; os.kill(os.getpid(), 9)", "crash", ["SIGKILL"]),
        ("import sys; sys.exit(0)", "crash", ["sys.exit(0)", "template_trainer.py"]),
        ("raise ValueError('odd')", "fail", ["raised ValueError: odd", "template_trainer.py"]),
        (
            "dist.all_reduce(torch.ones(1 + dist.get_rank()))",
            "fail",
            ["different collectives", "float32 element", "dist.all_reduce(torch.ones"],
        ),
        (
            "if dist.get_rank() == 0: dist.barrier()",
            "hang",
            ["waits in barrier", "never came to this barrier", "has already returned"],
        ),
        ("pass", "fail", ["unchanged"]),
        ("for _ in range(99999): print('x' * 99)", "fail", ["printed:"]),
        (
            "import os\n    if os.fork() == 0:\n        import time; time.sleep(1000)\n",
            "fail",
            ["unchanged"],
        ),
    ],
)
def test_misbehaviour_gets_a_verdict(
    folder: Path, code: str, verdict: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_average(folder, code)
    check = "test_called_again" if "sleep(1000)" in code and "fork" not in code else ""
    report = graded(folder, "1.4", "1.1", checks=(check,) if check else ())
    by_id = {e.id: e for e in report.exercises}
    assert by_id["1.4"].verdict == verdict
    text = printed(report, capsys)
    assert "Traceback" not in text
    if "printed" not in expected[0]:
        assert all(part in text for part in expected), text
    if not check:
        assert by_id["1.1"].verdict == "blank"  # one failing exercise hides no other


def test_syntax_and_import_errors_leave_the_rest_graded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = folder / "template_trainer.py"
    broken.write_text(broken.read_text() + "\n\ndef f(:\n")
    other = folder / "template_collectives.py"
    text = other.read_text().replace("import argparse", "import surely_not_installed")
    other.write_text(text.replace("raise NotImpl", "pass  # NotImpl"))
    report = graded(folder)
    verdicts = {e.id: e.verdict for e in report.exercises}
    assert {verdicts[i] for i in ("1.1", "1.6", "1.7", "1.8")} == {"blank"}
    assert {verdicts[i] for i in ("1.3", "1.4", "1.5", "1.9")} == {"error"}
    text = printed(report, capsys)
    assert "not valid Python" in text
    assert "def f(:" in text
    assert "No module named 'surely_not_installed'" in text


def test_a_graded_file_that_only_the_compiler_refuses_is_not_replaced(folder: Path) -> None:
    """Also where the solution stands for another exercise of the same file."""
    file = folder / "template_trainer.py"
    text = file.read_text().replace('raise NotImplementedError("exercise 1.5")', "pass")
    file.write_text(text + "\nreturn\n")
    (result,) = graded(folder, "1.5").exercises
    assert result.verdict == "error"
    assert "'return' outside function" in result.checks[0].message


def test_blocked_and_substituted(folder: Path) -> None:
    solution = root() / "solutions" / "phase1_data_parallel"
    (folder / "template_data_loader.py").unlink()
    (folder / "data_loader.py").write_text("raise RuntimeError('broken at import')\n")
    for name in ("trainer", "evaluation"):
        text = (solution / f"{name}.py").read_text().replace("from .", "from .template_")
        (folder / f"template_{name}.py").write_text(text)
    report = graded(folder, "1.5", "1.6", "1.8")
    by_id = {e.id: e for e in report.exercises}
    assert by_id["1.5"].verdict == "pass"
    assert by_id["1.5"].used_solution_of == ["1.1", "1.2"]
    assert by_id["1.6"].verdict == "pass"
    assert by_id["1.8"].verdict == "blank"
    assert report.along == ["1.3", "1.4"], "1.1 and 1.2 are broken"
    allreduce = (solution / "simple_allreduce.py").read_text()
    wrong = allreduce.replace("    check_op(tensor, op)\n", "    return\n", 1)
    (folder / "template_simple_allreduce.py").write_text(wrong)
    report = graded(folder, "1.8")
    assert report.exercises[0].verdict == "blocked"
    assert not report.passed


def test_needs_is_never_a_pass(folder: Path) -> None:
    report = grade(1, Request(impl="solutions", device="auto", exercises=("1.3",)))
    result = report.exercises[0]
    by_tier = {c.name: c.verdict for c in result.checks}
    assert by_tier["test_state_equals_the_source[virtual]"] == "pass"
    assert by_tier["test_state_equals_the_source[gloo]"] == "pass"
    assert by_tier["test_state_equals_the_source[cuda]"] in ("needs", "pass")
    only = grade(
        1, Request(impl="solutions", exercises=("1.3",), checks=("test_state_equals_the_source",))
    )
    cuda = [c for c in only.exercises[0].checks if c.name.endswith("[cuda]")]
    only.exercises[0].checks = cuda
    if cuda[0].verdict == "needs":
        assert only.exercises[0].verdict == "needs"
        assert (only.score, only.passed) == (0, False)


SCRIPT = [sys.executable, str(root() / "test_phase1.py")]


def test_command_line_of_a_passing_exercise(tmp_path: Path) -> None:
    """In an interpreter of its own, as a learner starts it."""
    out = tmp_path / "r.json"
    xml = tmp_path / "r.xml"
    options = ("--json", str(out), "--junitxml", str(xml))
    command = [*SCRIPT, "1.1", "--impl", "solutions", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads(out.read_text())
    assert {"phase", "impl", "score", "max_score", "seed", "device", "exercises"} <= set(data)
    assert (data["score"], data["max_score"]) == (10, 10)
    first = data["exercises"][0]
    assert (first["id"], first["verdict"], first["used_solution_of"]) == ("1.1", "pass", [])
    assert {"name", "verdict", "message", "cause", "rank"} <= set(first["checks"][0])
    assert "<testsuite" in xml.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1.44"], "did you mean 1.4?"),
        (["--impl", "nowhere"], "'solutions', 'templates' or a folder"),
        (["--json", "/no/such/folder/r.json"], "does not exist"),
        (["1.1", "--impl", "solutions", "-k", "zzz"], "no check matches"),
    ],
)
def test_bad_calls_get_one_line(arguments: list[str], message: str) -> None:
    done = forked_commands.run([*SCRIPT, *arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr + done.stdout


def test_python_without_the_dependencies_is_told_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(root() / "test_phase1.py")],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode != 0
    assert "make env" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("verdicts", "partial", "points"),
    [
        (["pass", "pass"], False, 10),
        (["pass", "fail"], False, 0),
        (["pass", "fail"], True, 5),
        (["pass", "pass", "fail", "needs"], True, 6),  # 2 of 3, rounded down
        (["blank", "blank"], True, 0),
        (["needs"], True, 0),
        (["hang", "blocked", "pass"], True, 3),
    ],
)
def test_partial_credit(verdicts: list[str], partial: bool, points: int) -> None:
    checks = [CheckResult(f"test_{n}", verdict) for n, verdict in enumerate(verdicts)]
    result = ExerciseResult("1.4", "Averaging", 10, checks=checks, partial=partial)
    assert result.points == points


def test_every_failing_check_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        CheckResult("a", "fail", "3 is not 4", "wrong", title="The first", tier="virtual"),
        CheckResult("b", "pass", title="The second"),
        CheckResult("c", "hang", "no result", "hang", title="The third"),
    ]
    result = ExerciseResult("1.4", "Averaging", 10, checks=checks)
    report = Report(1, "templates", 1, "cpu", [result])
    print_report(report, load_course().phase(1), Console(file=sys.stdout, width=100))
    printed = capsys.readouterr().out
    assert "check: The first (virtual ranks)" in printed
    assert "also fails: The third" in printed
    assert "The second" not in printed


def refuse(size: int) -> None:
    raise ValueError(f"{size} elements over 3 ranks")


@pytest.mark.parametrize(
    ("said", "sends", "cause"),
    [
        (refusal(refuse, 7), False, ""),
        (refusal(print), False, "accepted"),
        (refusal(int, []), False, "accepted"),
        (refusal(refuse, 7), True, "late-check"),
    ],
)
def test_expect_refused(said: str, sends: bool, cause: str) -> None:
    event = Event("all_reduce", (0, 1), None, 1, "float32", 4, 4, 4, 0.0)
    logs = [Log(rank, [event] if sends else [], []) for rank in range(2)]
    results = RankResults([["7 over 3"], [said]], logs, ["", ""])
    if not cause:
        expect_refused(results, ["7 over 3 ranks"])
        return
    with pytest.raises(CheckFailed) as caught:
        expect_refused(results, ["7 over 3 ranks"])
    assert caught.value.cause == cause
    assert caught.value.rank == (0 if sends else 1)


@pytest.mark.parametrize(
    ("place", "value", "shown"),
    [
        (2, 5.0, "[0, 0, 5, 0, 0, 0, …]"),
        (40, 5.0, "[…, 0, 5, 0, 0, 0, 0, …]  (float64, shape (100,), from element 39 on)"),
        (99, 5.0, "[…, 0, 5]  (float64"),
        (0, float("nan"), "[nan, 0, 0, 0, 0, 0, …]"),
    ],
)
def test_message_shows_where_tensors_differ(place: int, value: float, shown: str) -> None:
    want = torch.zeros(100, dtype=torch.float64)
    got = want.clone()
    got[place] = value
    with pytest.raises(CheckFailed) as caught:
        expect_close(got, want, what="x")
    assert shown in caught.value.message


def test_message_shows_digits_that_differ() -> None:
    want, got = torch.tensor([[0.6, 1.0], [0.6 + 1e-8, 1.0]], dtype=torch.float64)
    with pytest.raises(CheckFailed) as caught:
        expect_close(got, want, what="x", rtol=0.0, atol=0.0)
    assert "0.60000001" in caught.value.message


def test_without_nodes_a_check_is_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that wants nodes on this machine, where there can be none: shown, not passed."""
    monkeypatch.setattr(plugin, "cluster_obstacle", lambda: "no permission")
    check = "test_on_nodes_with_host_names"
    request = Request(impl="solutions", exercises=("3.7",), checks=(check,), trusted=True)
    result = grade(3, request).exercises[0]
    assert [c.verdict for c in result.checks] == ["needs"]
    assert result.needs == ["a cluster on this machine (no permission)"]
    assert (result.verdict, result.points) == ("needs", 0)


@pytest.mark.parametrize(
    ("check", "file", "place"),
    [
        ("layer = impl.split_to_ranks(x, 1)", "impl.cut", "def split_to_ranks"),
        ("helper()", "impl.cut(1)", "def cut"),
        ("impl.RowParallelLinear(x), backward", "", ""),  # __init__ or forward
        ("impl.cut(impl.split_to_ranks(x, 1))", "", ""),
        ("nothing that is known", "", ""),
    ],
)
def test_a_wrong_value_points_to_the_function_that_it_must_come_from(
    check: str, file: str, place: str
) -> None:
    """It points nowhere if several functions could be at fault."""
    exercise = load_course().exercise("2.15")
    line = definition(exercise.solution_path, exercise, check, file)
    if not place:
        assert line == ""
        return
    lines = exercise.solution_path.read_text().splitlines()
    assert lines[int(line.split(":")[1]) - 1].startswith(place)


def test_simulated_runs_go_in_the_order_of_virtual_time() -> None:
    def body(ctx: RankContext) -> None:  # two senders share a card, one comes later than the other
        x = torch.ones(250_000)
        if ctx.rank < 2:
            time.sleep(0.01 * ctx.rank)
            dist.send(x, ctx.rank + 2)
        else:
            dist.recv(x, ctx.rank - 2)

    cluster = dataclasses.replace(load_cluster("ethernet-v100"), gpus_per_node=2)
    runs = [VirtualRunner((), seed, "cpu") for seed in range(1, 7)]
    timed = {tuple(run.simulate(body, 4, cluster=cluster).clocks) for run in runs}
    untimed = {tuple(run(body, 4, cluster=cluster).clocks) for run in runs}
    assert len(timed) == 1
    assert untimed - timed
