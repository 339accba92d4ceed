"""class.toml: every rule has a default, every mistake is one line, and lateness is arithmetic."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from distlab.classes import scoring
from distlab.classes.config import ClassConfig, load_class
from distlab.cli import main
from distlab.course.catalogue import load_course

UTC = datetime.timezone.utc
DUE = datetime.datetime(2026, 3, 16, 20, tzinfo=UTC)

EVERYTHING = """
[class]
name = "Spring"
time_zone = "Europe/Berlin"
[dates]
release = 2026-03-02
due = 2026-03-16 20:00:00
[late]
grace_minutes = 15
percent_per_day = 10
cut_off_days = 3
[extensions]
ada = 2026-03-18 20:00:00
blue = 2026-03-17T20:00:00Z
[exercises]
phases = [1]
only = ["1.4", "1.7"]
points = { "1.4" = 20 }
[grading]
partial = true
seed = 7
counts = "best"
[students]
ids = ["ada", "grace", "barbara"]
pattern = "(?P<student>[a-z]+)_.*"
[teams]
blue = ["grace", "barbara"]
[limits]
seconds = 600
memory_gb = 4
unpacked_mb = 20
files = 500
"""


def rules(folder: Path, text: str) -> ClassConfig:
    path = folder / "class.toml"
    path.write_text(text, encoding="utf-8")
    return load_class(path)


def test_every_rule_has_a_default(tmp_path: Path) -> None:
    assert rules(tmp_path, "") == load_class(None) == ClassConfig()
    assert ClassConfig().due_for("ada") is None


def test_all_rules_are_read(tmp_path: Path) -> None:
    found = rules(tmp_path, EVERYTHING)
    assert found.due is not None
    assert found.due.utcoffset() == datetime.timedelta(hours=1), "in the class's time zone"
    assert found.release is not None
    assert (found.release.hour, found.release.second) == (23, 59), "a day ends at midnight"
    assert [e.id for e in found.exercises()] == ["1.4", "1.7"]
    assert [found.worth(e) for e in found.exercises()] == [20, 10]
    assert (found.partial, found.seed, found.counts) == (True, 7, "best")
    assert [found.team_of(s) for s in ("ada", "grace", "nobody")] == ["ada", "blue", "nobody"]
    assert found.due_for("ada") == found.due + datetime.timedelta(days=2)
    assert found.due_for("blue") == datetime.datetime(2026, 3, 17, 20, tzinfo=UTC)
    assert found.due_for("nobody") == found.due
    assert found.caps.files == 500


WRONG = {
    "[late]\npercent_per_dya = 10": r"\[late\] percent_per_dya: .*did you mean 'percent_per_day'",
    "[lates]\n": "lates: there is no such key.*did you mean 'late'",
    "late = 3\n": "late: expected a table, got 3",
    "[late]\npercent_per_day = 120": r"\[late\] percent_per_day: .*0 and at most 100, got 120",
    "[late]\ngrace_minutes = true": "grace_minutes: expected a number.*got True",
    "[late]\ncut_off_days = inf": "cut_off_days: expected a number.*got inf",
    '[class]\ntime_zone = "Europe/Berlim"': "time_zone: .*did you mean 'Europe/Berlin'",
    '[dates]\ndue = "2026-03-16"': r"due: a date stands without quotes: due = 2026-03-16",
    "[dates]\ndue = 2026-03-16\nrelease = 2026-03-20": "due: .* is not after the release",
    "[dates]\ndue = 20:00:00": "due: expected a date such as",
    "[exercises]\nphases = [9]": r"phases: there is no phase 9: there are \[1, 2, 3, 4\]",
    '[exercises]\nonly = ["1.44"]': "only: there is no exercise '1.44'; did you mean '1.4'",
    '[exercises]\nphases = [2]\nonly = ["1.4"]': "only: exercise 1.4 is in none of the phases",
    '[exercises]\nonly = ["1.4", "1.4"]': "only: '1.4' stands there twice",
    '[exercises.points]\n"1.44" = 3': r"\[exercises.points\] 1.44: there is no such exercise",
    '[exercises.points]\n"1.4" = -1': r"1.4: expected a number of at least 0, got -1",
    '[grading]\ncounts = "bets"': "counts: expected one of last, best.*did you mean 'best'",
    "[grading]\nseed = 1.5": "seed: expected a whole number",
    '[grading]\npartial = "yes"': "partial: expected true or false, got 'yes'",
    '[students]\npattern = "(a"': "pattern: .*no regular expression",
    '[students]\npattern = "(.*)"': "pattern: .*no group",
    '[teams]\na = ["x"]\nb = ["x"]': r"\[teams\] b: 'x' is in team 'a', too",
    "[teams]\na = []": "a team needs at least one student",
    "[extensions]\nada = 2026-03-20": "ada: an extension needs a due date",
    "[dates]\ndue = 2026-03-16\n[extensions]\nada = 2026-03-10": "is not after the due date",
    '[dates]\ndue = 2026-03-16\n[extensions]\nadaa = 2026-03-20\n[students]\nids = ["ada"]': (
        "adaa: no student or team has this id; did you mean 'ada'"
    ),
    "[late\n": "is no TOML",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=lambda v: v[:24])
def test_a_mistake_is_told_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        rules(tmp_path, text)
    assert "class.toml" in str(told.value)
    assert "\n" not in str(told.value)


def test_files_that_are_no_rules_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read: No such file"):
        load_class(tmp_path / "absent.toml")
    (tmp_path / "class.toml").write_bytes(b"name = '\xff'")
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_class(tmp_path / "class.toml")
    (tmp_path / "class.toml").write_bytes(b'\xef\xbb\xbf[class]\r\nname = "with a mark"\r\n')
    assert load_class(tmp_path / "class.toml").name == "with a mark"


LATE = (  # minutes after the due date: days, percent
    (-1, 0, 0),
    (0, 0, 0),
    (15, 0, 0),  # the grace
    (16, 1, 10),
    (24 * 60, 1, 10),
    (24 * 60 + 1, 2, 20),
    (72 * 60, 3, 30),
    (72 * 60 + 1, 4, 100),  # cut off
)


@pytest.mark.parametrize(("minutes", "days", "percent"), LATE)
def test_being_late_costs_by_the_day(
    tmp_path: Path, minutes: int, days: int, percent: float
) -> None:
    config = rules(tmp_path, EVERYTHING.replace('time_zone = "Europe/Berlin"', ""))
    when = DUE + datetime.timedelta(minutes=minutes)
    assert scoring.lateness(config, "nobody", when) == scoring.Lateness(days, percent)
    late = scoring.lateness(config, "ada", when + datetime.timedelta(days=2))
    assert late == scoring.Lateness(days, percent), "an extension moves everything"


def test_late_days_do_not_cost_more_than_all(tmp_path: Path) -> None:
    config = rules(tmp_path, "[dates]\ndue = 2026-03-16 20:00:00\n[late]\npercent_per_day = 40")
    assert scoring.lateness(config, "ada", DUE + datetime.timedelta(days=9)).penalty_percent == 100
    assert scoring.lateness(config, "ada", None) == scoring.Lateness()
    assert scoring.total({"1.1": 10, "1.2": 5.55}, scoring.Lateness(1, 40)) == 9.33


def test_the_command_says_what_the_rules_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules(tmp_path, EVERYTHING)
    assert main(["class", "check", str(tmp_path / "class.toml")]) == 0
    said = capsys.readouterr().out
    title = load_course().exercise("1.4").title
    for line in (
        "class: Spring; times are in Europe/Berlin",
        f"  1.4 {title}: 20 points instead of 15",
        "due: Monday 2026-03-16 20:00:00 +0100; up to 15 minutes later nobody is late yet",
        "  after 3 days there are no points",
        "of several submissions of a student the best submission counts",
        "team blue: grace, barbara hand in together, and get the same points",
    ):
        assert line in said.splitlines()
    (tmp_path / "class.toml").write_text("[late]\nhours = 3")
    assert main(["class", "check", str(tmp_path / "class.toml")]) == 2
    assert capsys.readouterr().err.startswith("distlab: class.toml: [late] hours: there is no such")
