"""The report on a class: its numbers, its words, and that nobody can be recognised in it."""

from __future__ import annotations

import ast
import datetime
import html
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from distlab import cli
from distlab.classes.anonymous import Mask, vocabulary
from distlab.classes.config import ClassConfig
from distlab.classes.handed_in import lay_out, rules_of
from distlab.classes.misconceptions import misconceptions, recurring
from distlab.classes.outcomes import load_results
from distlab.classes.report import write_report
from distlab.classes.repository import Commits, commits
from distlab.classes.submissions import find_entries, unpack
from distlab.course.catalogue import load_course, root
from distlab.explain import mistakes
from distlab.explain.causes import OF_RULES, OF_RUNS, what_they_do
from distlab.grading.wrong import Mutant
from tests.distlab.made_results import entry, failed, made_results, passed, write_result

FROZEN = ("frozen-moved", "test_frozen", "Parameters without a gradient are left alone")
MINIMAL = "def average_gradients(model, n, group=None):\n    pass\n"


def told(
    folder: Path,
    folders: Mapping[str, Path] | None = None,
    histories: Mapping[str, Commits] | None = None,
    mutants: tuple[Mutant, ...] = (),
) -> str:
    """The page that is written."""
    found = load_results(folder)
    path = write_report(folder, found, folders or {}, histories or {}, mutants)
    return path.read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """What a reader reads, spaces folded."""
    visible = re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return " ".join(html.unescape(visible).split())


def a_class() -> dict[str, list[dict[str, object]]]:
    """Ten students: in 1.3 all pass; in 1.4 four take the plain mean, two move frozen ones, one
    hangs, one is blank, two pass."""
    weights = [failed("1.4", "unweighted-mean", f"test_{i}", f"Mean {i}") for i in (1, 2, 1, 1)]
    rest = [failed("1.4", *FROZEN), failed("1.4", *FROZEN)]
    rest += [failed("1.4", "hang", verdict="hang"), entry("1.4", "blank"), *[passed("1.4")] * 2]
    return {f"student-{i:02}": [passed("1.3"), e] for i, e in enumerate([*weights, *rest])}


def test_numbers_of_a_class_of_ten(tmp_path: Path) -> None:
    page = told(made_results(tmp_path / "r", a_class(), name="Autumn"))
    text = text_of(page)
    assert "Class report: Autumn" in text
    assert (
        "10 submissions 10 graded 13 mean, of 25 points 10 median 10 to 10 the middle half" in text
    )
    assert "2 with all points 0 with no point 0 late" in text
    row = re.search(r"<tr><td>1\.4 Gradient averaging.*?</tr>", page, re.S)
    assert row is not None
    cells = re.findall(r'<td class="n[^"]*">([^<]*)</td>', row[0])
    assert cells == ["15", "2", "6", "1", "1"]  # points; pass, fail, blank, hang
    assert 'aria-label="2 pass, 6 fail, 1 blank, 1 hang"' in row[0]
    assert 'aria-label="students: 40–50: 8, 90–100: 2"' in page
    assert "virtual 30 10 0" in text


def test_misconceptions_are_sentences_by_number(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", a_class())))
    unequal = "4 of 10 take the plain mean over ranks that hold unequal numbers of samples"
    assert f"1. {unequal} 1.4 Gradient averaging, 15 points checks Mean 1; Mean 2" in text
    assert "2. 2 of 10 break this promise: Parameters without a gradient are left alone" in text
    assert "1 of 10 is among those who have ranks that wait for each other for ever" in text
    assert "phase1_data_parallel/guidelines.md, section 1.4" in text
    assert "Pitfalls. Frozen parameters communicated" in text


def test_weight_counts_students_points_and_what_builds_on_it(tmp_path: Path) -> None:
    """1.5 builds on 1.4 in this class, so the one who fails 1.4 comes before two who fail 1.5."""
    class_ = {f"s{i}": [passed("1.4"), failed("1.5", "only-own")] for i in range(3)}
    class_ |= {f"t{i}": [failed("1.4", "summed"), passed("1.5")] for i in range(2)}
    found = misconceptions(load_results(made_results(tmp_path / "r", class_)).graded, load_course())
    assert [(m.exercise, m.count, m.weight, m.builds_on_it) for m in found] == [
        ("1.4", 2, 2 * 15 * 2, ("1.5",)),
        ("1.5", 3, 3 * 15, ()),
    ]


def test_points_are_those_of_the_class(tmp_path: Path) -> None:
    class_ = {f"s{i}": [failed("1.4", "summed")] for i in range(2)}
    results = load_results(made_results(tmp_path / "r", class_, points={"1.4": 40}))
    assert [m.weight for m in misconceptions(results.graded, load_course())] == [2 * 40]


def test_a_student_counts_once_and_others_are_told_beside(tmp_path: Path) -> None:
    both = entry(
        "1.4",
        "fail",
        [
            {"name": "test_a[virtual]", "verdict": "fail", "title": "A", "cause": "summed"},
            {"name": "test_frozen", "verdict": "fail", "title": "F", "cause": "frozen-moved"},
        ],
    )
    class_ = {"s1": [both], "s2": [failed("1.4", *FROZEN)], "s3": [failed("1.4", *FROZEN)]}
    found = misconceptions(load_results(made_results(tmp_path / "r", class_)).graded, load_course())
    assert [(m.cause, m.count, m.beside) for m in found] == [
        ("frozen-moved", 2, 1),
        ("summed", 1, 0),
    ]


def test_a_cause_in_several_exercises_is_told_once_more(tmp_path: Path) -> None:
    class_ = {
        "s1": [failed("1.4", "summed"), failed("1.6", "summed")],
        "s2": [failed("1.6", "summed"), failed("1.3", "hang", verdict="hang")],
        "s3": [passed("1.6"), failed("1.4", "hang", verdict="hang")],
    }
    results = load_results(made_results(tmp_path / "r", class_))
    found = misconceptions(results.graded, load_course())
    assert recurring(found) == [("summed", 2, ["1.4", "1.6"])]


def test_known_mistakes_are_named(tmp_path: Path) -> None:
    fields = {"exercise": "1.4", "text": "a", "becomes": "b", "told_as": ("frozen-moved", "x")}
    known = Mutant(id="a", mistake="it moves them", caught_by="test_frozen", **fields)
    other = Mutant(id="b", mistake="another check sees it", caught_by="test_other", **fields)
    tier = Mutant(id="c", mistake="of NCCL", caught_by="test_frozen", tier="nccl", **fields)
    text = text_of(told(made_results(tmp_path / "r", a_class()), mutants=(known, other, tier)))
    assert "known mistake it moves them" in text
    assert "another check sees it" not in text
    assert "of NCCL" not in text


def test_every_cause_of_a_rule_has_a_sentence() -> None:
    tree = ast.parse(Path(mistakes.__file__).read_text(encoding="utf-8"))
    causes = {
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "Diagnosis"
        and isinstance(call.args[0], ast.Constant)
    }
    assert len(causes) > 10
    assert causes <= {*OF_RULES}
    assert not {*OF_RULES} & {*OF_RUNS}
    assert what_they_do("no such cause") == ""


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
    said = "kim-2/x.py: Zoë Brandt at /home/anna.mueller/work/trainer.py: KIM-2_total, zoe"
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


def test_an_empty_class(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", {})))
    assert "No submission could be graded" in text


def test_a_class_of_one(tmp_path: Path) -> None:
    text = text_of(told(made_results(tmp_path / "r", {"solo": [failed("1.4", "summed")]})))
    assert "1 submission 1 graded 0 mean, of 15 points" in text
    assert "No two students made the same mistake" in text
    assert "1 of 1 is among those who do not divide" in text


def test_all_pass(tmp_path: Path) -> None:
    text = text_of(
        told(made_results(tmp_path / "r", {"a1b": [passed("1.4")], "c2d": [passed("1.4")]}))
    )
    assert "2 with all points" in text
    assert text.count("no check failed") == 2


def test_exercises_that_the_course_does_not_have(tmp_path: Path) -> None:
    class_ = {f"s{i}": [failed("9.9", "summed"), passed("1.4")] for i in range(2)}
    text = text_of(told(made_results(tmp_path / "r", class_)))
    assert "Exercises that this course does not have" in text
    assert "9.9 Another exercise 7" in text
    assert "2 of 2 do not divide the sum" in text


def test_what_can_not_be_read_is_told(tmp_path: Path) -> None:
    folder = made_results(tmp_path / "r", {"fine": [passed("1.4")]})
    for name, text in {"a": "{", "b": "[]", "c": '{"student": "c"}', "d": "\xff"}.items():
        (folder / "students" / name).mkdir()
        (folder / "students" / name / "result.json").write_text(text, encoding="latin-1")
    (folder / "class.json").unlink()
    found = load_results(folder)
    assert len(found.unread) == 4
    assert any("'score' is missing" in line for line in found.unread)
    assert "1 submission 1 graded" in text_of(told(folder))
    with pytest.raises(ValueError, match="no folder students/"):
        load_results(folder / "students")


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
