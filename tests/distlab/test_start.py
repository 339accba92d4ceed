"""The first page that a newcomer reads: what it says is so, and what it calls is there."""

from __future__ import annotations

import contextlib
import io
import re

from distlab import cli
from distlab.course.catalogue import load_course, root

PAGE = (root() / "docs" / "start.md").read_text(encoding="utf-8")
README = (root() / "README.md").read_text(encoding="utf-8")


def test_the_self_test_has_ten_lines_and_prints_its_answer() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    (answer,) = re.findall(r"^<details>.*?^```\n(.*?)^```$", PAGE, re.M | re.S)
    assert program.count("\n") == 10
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})
    assert printed.getvalue() == answer


def test_hours_in_the_text_are_those_of_the_tracks() -> None:
    course = load_course()

    def hours(ids: tuple[str, ...]) -> float:
        return sum(course.exercise(each).minutes for each in ids) / 60

    weekend, month = (course.track(name).exercises for name in ("weekend", "month"))
    text = " ".join(PAGE.split())
    (low, high) = re.findall(r"three days of (\d+) to (\d+) hours", text)[0]
    assert float(low) <= hours(weekend) / 3 <= float(high)
    (until, first) = re.findall(r"stop after ([\d.]+): .*?in about (\d+) hours", text)[0]
    assert abs(hours(weekend[: weekend.index(until) + 1]) - float(first)) <= 1
    (each,) = re.findall(r"`month` is about (\d+) hours a week for four weeks", text)
    assert abs(hours(month) / 4 - float(each)) <= 1
    (minutes,) = re.findall(r"plan the (\d+) minutes", text)
    assert int(minutes) == course.exercise("1.3").minutes


def test_the_first_exercise_builds_on_nothing() -> None:
    first = load_course().exercise("1.3")
    assert not first.builds_on
    assert first.template_path.relative_to(root()).as_posix() in PAGE
    assert first.minutes == min(e.minutes for e in first.phase.exercises)


def test_what_the_first_screens_call_is_there() -> None:
    targets = re.findall(r"^([a-z-]+):", (root() / "Makefile").read_text(encoding="utf-8"), re.M)
    commands = {*cli.COMMANDS, "hint", "watch", "reset", "solution", "trace", "templates"}
    for text in (PAGE, README):
        shell = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S))
        assert {*re.findall(r"\bmake (\w+)", shell)} <= {*targets}
    assert {*re.findall(r"`distlab (\w+)", PAGE)} <= commands
    for link in re.findall(r"\]\(([^)#]+)", PAGE):
        assert (root() / "docs" / link).exists(), link


def test_the_readme_leads_to_it_on_the_first_screen() -> None:
    screen = "\n".join(README.splitlines()[:30])
    for wanted in (
        "docs/start.md",
        "docs/glossary.md",
        "make cpu",
        "distlab track",
        "| `weekend` |",
    ):
        assert wanted in screen
