"""``distlab certificate``: only of a phase that is done, in one file, and changes are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console

from distlab import cli
from distlab.commands import certificate
from distlab.course import progress
from distlab.course.catalogue import load_course

PHASE = load_course().phase(1)
NAME = 'Ana "O’Brien" </script><b>Müller'


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which everything of phase 1 passes; one with hints, one after giving up."""
    monkeypatch.setattr(progress, "progress_file", lambda: tmp_path / ".distlab" / "progress.json")
    monkeypatch.setattr(cli, "console", lambda: Console(width=200, color_system=None))
    monkeypatch.chdir(tmp_path)
    progress.record((e.id, "pass", e.points) for e in PHASE.exercises)
    progress.update("1.2", hints=2)
    progress.update("1.4", gave_up=True)
    return tmp_path


@pytest.fixture
def page(done: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A certificate."""
    assert cli.main(["certificate", "1", "--name", NAME]) == 0
    said = capsys.readouterr().out
    assert "distlab certificate --verify certificate-phase1.html" in said
    return done / "certificate-phase1.html"


def test_it_shows_points_hints_and_dates(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "100 of 100" in text
    assert "Ana &#34;O’Brien&#34; &lt;/script&gt;&lt;b&gt;Müller" in text
    assert "<b>" not in text
    assert "the 9 exercises below of phase 1" in text
    rows = re.findall(r"<tr><td>(1\.\d) .*?</td>(.*)</tr>", text)
    assert [number for number, _ in rows] == [e.id for e in PHASE.exercises]
    assert '<td class="n">2</td>' in dict(rows)["1.2"]
    assert text.count("(solution seen before)") == 1
    assert len(re.findall(r'class="d">\d{4}-\d\d-\d\d<', text)) == 9
    assert not re.search(r"(?:src|href)=|https?:", text), "one file that needs no network"


def test_an_untouched_page_verifies(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["certificate", "--verify", str(page)]) == 0
    said = capsys.readouterr().out
    assert "as it was written (Ana" in said
    assert "It is no signature" in said


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ('"points": 100', '"points": 99'),  # in the records
        ("100 of 100", "110 of 100"),  # around them
        ("<h1>", "<h1>Dr. "),
        (r'<code id="hash">', '<code id="hash">0'),
        ('"exercises": [', '"exercises": ['[:-1]),
    ],
)
def test_a_change_is_found(
    page: Path, text: str, becomes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = page.read_text(encoding="utf-8")
    assert text in whole
    page.write_text(whole.replace(text, becomes, 1), encoding="utf-8")
    assert cli.main(["certificate", "--verify", str(page)]) in (1, 2)
    assert "as it was written" not in capsys.readouterr().out


def test_an_older_course_is_verified_by_its_records(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "course_version", lambda: "99.0")
    assert cli.main(["certificate", "--verify", str(page)]) == 0


def test_a_phase_that_is_not_done_has_none(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress.record([("1.3", "fail", 0)])
    progress.update("1.8", fingerprint="of other code")
    assert cli.main(["certificate", "1", "--name", "Ana"]) == 2
    said = capsys.readouterr().err
    assert re.search(
        r"phase 1 is not done: 1\.3, 1\.8 must pass, .*: python test_phase1\.py$", said
    )
    assert not list(done.glob("*.html"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1"], "say whose certificate it is: --name"),
        (["1", "--name", "x" * 101], "at most 100 characters"),
        (["7", "--name", "Ana"], "no phase 7"),
        (["--verify", "other.html"], "other.html is no certificate"),
        (["--verify", "none.html"], "none.html"),
        (["1", "--name", "Ana", "--out", "other.html"], "other.html is there already"),
    ],
)
def test_a_wrong_call_is_one_line(
    done: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (done / "other.html").write_text("a page of mine")
    assert cli.main(["certificate", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert (done / "other.html").read_text() == "a page of mine"
