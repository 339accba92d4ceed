"""Soaking: counts add up over calls, begin anew when the code changes, and tell a flake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_commands
import pytest
import torch._dynamo  # noqa: F401 (once here instead of in every forked grader)

from benchmarks import soak, soak_book, soak_page, soak_subjects
from benchmarks.soak_book import Book, Verdict, upper_bound
from distlab.course.catalogue import load_course, root
from distlab.host.processes import descendants, is_ending

KEY = ["check", "code", "toolkit"]


def verdicts(*words: str, key: list[str] = KEY) -> list[Verdict]:
    return [Verdict(f"1.1 test_{n}", word, "", key) for n, word in enumerate(words)]


def test_the_bound_is_exact() -> None:
    for runs in (1, 20, 59, 400):
        assert upper_bound(runs, 0) == pytest.approx(1 - 0.05 ** (1 / runs))
    assert upper_bound(59, 0) < 0.05 < upper_bound(58, 0)
    # the definition: with this probability, so few wrong ones or fewer come in 5 % of samples
    p = upper_bound(50, 1)
    assert (1 - p) ** 50 + 50 * p * (1 - p) ** 49 == pytest.approx(0.05)
    assert upper_bound(3, 3) == 1.0


def test_counts_add_up_over_calls(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    for condition in ("idle", "idle", "loaded"):
        book = Book.read(path)
        book.note("phase 1", verdicts("pass", "pass"), condition, seed=1, at="now")
        book.write()
    book = Book.read(path)
    keys = {f"1.1 test_{n}": KEY for n in range(2)}
    found = [book.gradings("phase 1", c, keys) for c in ("idle", "loaded", "disturbed")]
    assert found == [2, 1, 0]
    assert book.gradings("phase 1", "idle", keys | {"1.1 test_new": KEY}) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["soak.json"]


def test_a_change_begins_anew_and_says_why(tmp_path: Path) -> None:
    book = Book.read(tmp_path / "soak.json")
    for _ in range(3):
        book.note("phase 1", verdicts("pass", "hang"), "idle", seed=1, at="Monday")
    new = [*verdicts("pass"), *verdicts("pass", "pass", key=["check", "mended", "toolkit"])[1:]]
    book.note("phase 1", new, "idle", seed=2, at="Tuesday")
    counts = book.counts["phase 1"]
    assert counts["1.1 test_0"].all_runs == 4
    assert (counts["1.1 test_1"].all_runs, counts["1.1 test_1"].all_wrong) == (1, 0)
    [told] = book.anew
    assert (told["changed"], told["runs"], told["wrong"]) == ("implementation", 3, 3)
    page = soak_page.details(book, {"phase 1": {"1.1 test_1": ["check", "mended", "toolkit"]}})
    assert "1 checks (3 verdicts, 3 wrong before), because of a change in implementation" in page
    assert page.count("seed 1: hang") == 3


def test_keys_follow_the_files(tmp_path: Path) -> None:
    check, helper, code = (tmp_path / n for n in ("test_a.py", "helper.py", "code.py"))
    check.write_text("import helper\n")
    for path in (helper, code):
        path.write_text("x = 1\n")

    def key() -> list[str]:
        soak_book._helpers.cache_clear()
        soak_book._digest.cache_clear()
        return soak_book.key_of(check, [code])

    keys = [key()]
    for changed in (helper, code):
        changed.write_text("x = 2\n")
        keys.append(key())
    same = [[a == b for a, b in zip(k, keys[0], strict=True)] for k in keys]
    assert same == [[True, True, True], [False, True, True], [False, False, True]]


def test_the_toolkit_is_what_grading_imports() -> None:
    names = {str(p.relative_to(root())) for p in soak_book._toolkit()}
    deciding = {
        "ranks/run",
        "grading/checks",
        "explain/diagnosis",
        "reference/workloads",
        "ranks/proof",
        "observe/recorder",
        "grading/session",
        "virtual/scheduler",
    }
    assert {f"distlab/{name}.py" for name in deciding} < names
    assert not {"distlab/cli.py", "distlab/commands/watch.py"} & names


@pytest.fixture
def flaky(tmp_path: Path) -> soak_subjects.Subject:
    """The solution of 1.1, which fails while a certain file is there."""
    exercise = load_course().exercise("1.1")
    folder = tmp_path / "flaky"
    folder.mkdir()
    text = exercise.solution_path.read_text(encoding="utf-8")
    line = f"import os\nassert not os.path.exists({str(tmp_path / 'bad')!r}), 'flake'\n"
    future = "from __future__ import annotations\n"
    assert future in text
    (folder / f"{exercise.file}.py").write_text(text.replace(future, future + line))
    return soak_subjects.Subject("flaky 1.1", str(folder), 1, "1.1", goal=2)


def test_a_planted_flake_is_counted_as_wrong(flaky: soak_subjects.Subject, tmp_path: Path) -> None:
    book = Book.read(tmp_path / "soak.json")
    assert soak.open_goals(book, [flaky], ["loaded"]) == [(flaky, "loaded")]
    assert ": 0 wrong" not in soak.soak_once(book, flaky, loaded=True, seed=1, per_core=1)
    assert not book.wrong
    assert soak.done(book, flaky, "loaded") == 1
    (tmp_path / "bad").touch()
    line = soak.soak_once(Book.read(book.path), flaky, loaded=False, seed=2)
    assert "WRONG 1.1 test_" in line
    assert "flake" in line
    book = Book.read(book.path)
    assert {w["seed"] for w in book.wrong} == {2}
    count = next(iter(book.counts["flaky 1.1"].values()))
    assert (count.all_runs, count.all_wrong) == (2, 1)
    assert count.runs["loaded"] == 1
    assert count.runs["idle"] + count.runs["disturbed"] == 1
    current = {"phase 1": {}, "flaky 1.1": soak.keys_of(book, flaky)}
    table = soak_page.summary(book, current)
    checks = len(book.counts["flaky 1.1"])
    assert table.rows[-1][1:] == [
        *(str(checks), *(str(count.runs[c]) for c in ("idle", "loaded", "disturbed"))),
        *(str(2 * checks), str(checks)),
        *(soak_page._percent(upper_bound(2 * n, n)) for n in (checks, 1)),
    ]


def test_a_grader_that_dies_is_a_wrong_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_subjects.Subject, "grade", lambda self, seed: os.kill(os.getpid(), 9))
    [found] = soak.graded(soak_subjects.Subject("phase 1", "solutions", 1), 1)
    assert (found["verdict"], found["check"]) == ("crash", "(grading)")
    monkeypatch.setattr(soak_subjects.Subject, "grade", lambda self, seed: time.sleep(600))
    [found] = soak.graded(soak_subjects.Subject("phase 1", "solutions", 1), 1, limit=1)
    assert "-14" in found["message"]


def test_a_damaged_book_is_refused_and_kept(tmp_path: Path, capfd) -> None:
    path = tmp_path / "soak.json"
    path.write_text('{"counts": 3}')
    assert soak.main(["--book", str(path), "--report"]) == 2
    assert "move it away" in capfd.readouterr().err
    assert path.read_text() == '{"counts": 3}'


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent: Linux")
@pytest.mark.parametrize(
    ("number", "start"),
    [(signal.SIGINT, subprocess.Popen), (signal.SIGKILL, forked_commands.Popen)],
)
def test_what_is_interrupted_does_not_count_and_leaves_nothing(
    tmp_path: Path, number: int, start: type[subprocess.Popen], interruptible: None
) -> None:
    """Stopped in the first grading, beside busy processes."""
    book = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--book", str(book)]
    command += ["--loaded", "--busy", "1", "--phases", "1", "--solutions"]
    process = start(command, cwd=root(), stdout=subprocess.PIPE, text=True)

    end, wanted = time.monotonic() + 120, os.cpu_count() + 1
    while len(alive := descendants(process.pid)) < wanted:  # busy ones and the grader
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    if number == signal.SIGINT:
        assert "does not count" in out
    while time.monotonic() < end and not all(map(is_ending, alive)):
        time.sleep(0.05)
    assert all(map(is_ending, alive))
    assert not book.exists() or not json.loads(book.read_text())["counts"]
