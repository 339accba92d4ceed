"""The report on a class shows code and dates, and nobody can be recognised in it."""

from __future__ import annotations

import datetime
import re
import subprocess
from pathlib import Path

import pytest

from distlab import cli
from distlab.classes.anonymous import Mask, vocabulary
from distlab.classes.config import ClassConfig
from distlab.classes.handed_in import lay_out, rules_of
from distlab.classes.outcomes import load_results
from distlab.classes.repository import Commits, commits
from distlab.classes.submissions import find_entries, unpack
from distlab.course.catalogue import load_course, root
from tests.distlab.made_results import failed, made_results, passed, text_of, told, write_result

MINIMAL = "def average_gradients(model, n, group=None):\n    pass\n"


def test_what_students_wrote_is_text(tmp_path: Path) -> None:
    """Messages, titles, names and code are escaped; nothing is fetched from elsewhere."""
    evil = "<script>alert(1)</script>\ud800"
    class_ = {
        f"s{i}{i}{i}": [failed("1.4", "wrong", title=evil, message=evil, line="trainer.py:2")]
        for i in range(2)
    }
    work = tmp_path / "work" / "phase1_data_parallel"
    work.mkdir(parents=True)
    code = "def average_gradients(a):\n    return a < 3 > 1 & '</pre><script>'\n"
    (work / "template_trainer.py").write_text(code)
    folder = made_results(tmp_path / "r", class_, name=f"{evil} & more")
    page = told(folder, dict.fromkeys(class_, work.parent))
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "a &lt; 3 &gt; 1 &amp; &#34;…&#34;" in page
    assert not re.search(r"\ssrc=|<link|<script|@import|url\((?!#p-)", page)
    for name in re.findall(r"url\(#([\w-]+)\)", page):
        assert f'id="{name}"' in page


SECRETS = ["anna.mueller", "kim-2", "Li", "Zoë Brandt", "zoe@uni.example", "team-quokka"]
PERSONAL = '''
def average_gradients(model, n, group=None):
    """By anna.mueller, number 4711471."""
    # kim-2 helped
    mueller_total = 4711471  # anna
    quokkas = "team-quokka"
    for tensor in model.parameters():
        tensor.grad /= mueller_total + 3
    return f"done by {quokkas} of anna.mueller"
'''


def test_nobody_can_be_recognised(tmp_path: Path) -> None:
    """Neither by ids and names in messages, paths and code, nor by comments and texts."""
    said = "kim-2/x.py: Zoë Brandt at /home/anna.mueller/mine/trainer.py: KIM-2_total, zoe"
    line = "template_trainer.py:8: tensor.grad"
    class_ = {s: [failed("1.4", "wrong", message=said, line=line)] for s in SECRETS[:3]}
    work = tmp_path / "work" / "phase1_data_parallel"
    work.mkdir(parents=True)
    (work / "template_trainer.py").write_text(PERSONAL, encoding="utf-8")
    folder = made_results(tmp_path / "r", class_, teams={"team-quokka": ["anna.mueller"]})
    write_result(folder, "broken", [], problem="anna.mueller.zip is no archive")
    history = {"kim-2": Commits((), frozenset({"Zoë Brandt", "zoe@uni.example"}))}
    page = told(folder, dict.fromkeys(class_, work.parent), history)
    for secret in ("anna", "mueller", "kim-2", "zoë", "zoe", "brandt", "quokka", "4711471"):
        assert secret not in page.lower(), secret
    assert "name_1 = …" in page
    assert '<span class="mark">        tensor.grad /= name_1 + 3</span>' in page
    assert "trainer.py: …_total" in text_of(page)
    assert "1 submission: ….zip is no archive" in text_of(page)


def test_names_of_the_course_stay() -> None:
    mask = Mask(["max-power", "rank"], vocabulary(load_course()))
    assert mask.keeps("world_size")
    assert mask.keeps("all_reduce")
    assert mask.keeps("DataLoader")
    assert not mask.keeps("xylophone_sum")
    assert not mask.keeps("rank")  # a team of this name
    assert mask.text("max of 3 ranks, 1/2/3, /tmp/a/b.py") == "max of 3 ranks, 1/2/3, b.py"


def test_code_is_shown_for_two_students_or_more(tmp_path: Path) -> None:
    work = tmp_path / "work" / "phase1_data_parallel"
    work.mkdir(parents=True)
    long = "".join(f"    n = {i}\n" for i in range(40))
    text = f"def average_gradients(model):\n{long}    return n\n"
    (work / "template_trainer.py").write_text(text)
    alone = {"one": [failed("1.4", "wrong", line="trainer.py:30: n = 28")]}
    page = told(made_results(tmp_path / "r1", alone), {"one": work.parent})
    assert "<pre>" not in page
    two = alone | {"two": alone["one"]}
    page = told(made_results(tmp_path / "r2", two), dict.fromkeys(two, work.parent))
    shown = page.split("<pre>")[1].split("</pre>")[0]
    assert '<span class="mark">n = 28</span>' in shown
    assert shown.count("<span") == 24 + 2  # a mark for the lines that are left out on each side
    assert shown.startswith("<span>…</span>")
    assert shown.endswith("<span>…</span>")


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\0'\n", "", "def other():\n    pass\n"])
def test_code_that_can_not_be_shown_is_left_out(tmp_path: Path, text: str) -> None:
    work = tmp_path / "work" / "phase1_data_parallel"
    work.mkdir(parents=True)
    (work / "template_trainer.py").write_text(text)
    line = "template_trainer.py:99999: x"
    two = {name: [failed("1.4", "wrong", line=line)] for name in ("one", "two")}
    page = told(made_results(tmp_path / "r", two), dict.fromkeys(two, work.parent))
    assert "<pre>" not in page
    assert "2 of 2 break this promise" in page


def git(folder: Path, *arguments: str, date: str = "") -> None:
    who = ("-c", "user.name=Zoë Brandt", "-c", "user.email=zoe@uni.example")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "GIT_AUTHOR_DATE": date}
    env |= {"GIT_COMMITTER_DATE": date} if date else {}
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, env=env)


@pytest.fixture(scope="module")
def submissions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two: a repository with three commits whose settings name a program, and a plain folder."""
    folder = tmp_path_factory.mktemp("submissions")
    for name in ("kim-2", "plain"):
        work = folder / name / "phase1_data_parallel"
        work.mkdir(parents=True)
        (work / "template_trainer.py").write_text(MINIMAL)
    home = folder / "kim-2"
    git(home, "init", "-q")
    git(home, "add", "-A")
    for day, count in (("2026-03-10", 1), ("2026-03-15", 2)):
        for _ in range(count):
            git(home, "commit", "-q", "--allow-empty", "-m", "x", date=f"{day}T12:00:00+00:00")
    program = folder.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch {folder.parent}/ran\n")
    program.chmod(0o755)
    for key, value in (
        ("log.showSignature", "true"),
        ("gpg.program", str(program)),
        ("core.fsmonitor", str(program)),
        ("core.pager", str(program)),
    ):
        git(home, "config", key, value)
    return folder


def test_the_time_line_has_the_commits(tmp_path: Path, submissions: Path) -> None:
    """Per day, relative to the due date; the repository's settings run no program."""
    folders, histories = lay_out(submissions, ClassConfig(), tmp_path / "to")
    assert {*folders} == {"kim-2", "plain"}
    assert len(histories["kim-2"].times) == 3
    assert histories["plain"].times == ()
    assert not (submissions.parent / "ran").exists()
    class_ = {name: [passed("1.4")] for name in folders}
    due = "2026-03-16T20:00:00+00:00"
    page = told(made_results(tmp_path / "r", class_, due=due), folders, histories)
    assert "3 commits. 1 of 2 submissions have a history" in text_of(page)
    assert 'aria-label="commits: -6: 1, -1: 2"' in page
    assert ">due</text>" in page
    assert "Zoë" not in page


def test_members_of_a_team_have_its_submission(tmp_path: Path, submissions: Path) -> None:
    folder = made_results(tmp_path / "r", {}, teams={"kim-2": ["ada", "grace"]})
    entries = {e.student: e for e in find_entries(submissions, ClassConfig())}
    digest = unpack(entries["kim-2"], tmp_path / "kim", ClassConfig()).digest
    for name in ("ada", "grace"):
        write_result(folder, name, [passed("1.4")], submission_hash=digest)
    results = load_results(folder)
    digests = {s.id: s.digest for s in results.students}
    folders, histories = lay_out(submissions, rules_of(results), tmp_path / "to", digests)
    assert {*folders} == {"ada", "grace"}
    assert [len(h.times) for h in histories.values()] == [3, 3]


def test_without_history_there_is_no_time_line(tmp_path: Path, submissions: Path) -> None:
    assert commits(submissions / "plain") == Commits()
    assert commits(submissions / "no such") == Commits()
    page = told(made_results(tmp_path / "r", {"plain": [passed("1.4")]}))
    assert "When the class worked" not in page


def test_commits_long_before_are_counted(tmp_path: Path) -> None:
    day = datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone.utc)
    times = tuple(day - datetime.timedelta(days=n) for n in (0, 1, 300, 400))
    page = told(
        made_results(tmp_path / "r", {"kim": [passed("1.4")]}),
        histories={"kim": Commits(times)},
    )
    assert "4 commits. 1 of 1 submissions" in text_of(page)
    assert "2 commits are earlier than the days shown" in text_of(page)


def test_the_command_takes_the_submission_that_counts(
    tmp_path: Path, submissions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_results(tmp_path / "r", {})
    entries = {e.student: e for e in find_entries(submissions, ClassConfig())}
    for name in ("kim-2", "plain"):
        digest = unpack(entries[name], tmp_path / name, ClassConfig()).digest
        told_so = failed("1.4", "wrong", line="template_trainer.py:1: def")
        digest = digest if name == "kim-2" else "sha256:another attempt"
        write_result(folder, name, [told_so], submission_hash=digest)
    assert cli.main(["class", "report", str(folder), "--submissions", str(submissions)]) == 0
    assert f"graded, but not in {submissions}: 1" in capsys.readouterr().out.replace("\n", " ")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "def average_gradients(model, n, group=None):" in page
    assert cli.main(["class", "report", str(root() / "docs")]) == 2
    assert "has no folder students/" in capsys.readouterr().err
