"""Estimate the work in exercises: minutes and difficulty in course.toml, and tables in pages.

``python -m scripts.workload`` prints the tables, ``--write`` puts all of it where it belongs.

Minutes = 10 to begin, the words of the exercise's section of the guidelines (without folded
answers) at 130 a minute, 2 for each line to write, and 2 for each promise that a check asserts.
Each promise can take a try of its own. Lines are those of the solution's regions, without comments
and blank ones. Difficulty follows from the geometric mean of lines to write and ways to err: wrong
implementations that are known. Nobody has measured this with a class: it is a rule to plan with.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from functools import cache

from distlab.course.ahead import where_to_ask
from distlab.course.catalogue import Course, Exercise, Phase, load_course, root
from distlab.course.regions import regions_of
from distlab.grading.contract import contract
from distlab.grading.wrong import mutants_per_exercise

BEGIN, WORDS, LINE, PROMISE = 10, 130, 2, 2
HARDER = (15, 22, 30, 40)  # means from which the difficulty is 2, 3, 4, 5
FOLDED = re.compile(r"<details>.*?</details>", re.S)
ASK = "<!-- where to ask -->\n"  # before the line that says it
# what is done in which week, if a term has 14; the last item is shown in class
TERM = (
    "1.1 1.2",
    "1.3 1.4",
    "1.5 1.6",
    "1.7 1.8",
    "2.1 2.2 2.3 2.5",
    "2.7 2.8",
    "2.9 2.10 2.11",
    "2.14 2.15 2.16 2.17",
    "3.1 3.2 3.3 3.7 3.8",
    "3.9 3.10 3.12",
    "3.13 3.14",
    "3.15 3.16 3.25",
    "4.1 4.15 4.16 4.2",
    "4.6 4.8 4.10",
)
SHOWN = {7: "`make gpt`", 12: "`make nodes`", 14: "`make train`"}


def lines(exercise: Exercise) -> int:
    """Lines of code in the exercise's regions."""
    text = exercise.solution_path.read_text(encoding="utf-8")
    inside = [
        line.strip()
        for region in regions_of(text)
        if region.exercise == exercise.id
        for line in text.split("\n")[region.start : region.end - 1]
    ]
    return sum(bool(line) and not line.startswith("#") for line in inside)


def promises(exercise: Exercise) -> int:
    """Promises of the exercise that checks assert."""
    return len({key for promise in contract(exercise).promises for key in promise.keys})


def words(exercise: Exercise) -> int:
    """Words of the exercise's section of the guidelines, heading included."""
    text = exercise.guidelines_path.read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(exercise.id)} .*?(?=^## |\Z)", text, re.M | re.S)
    return len(FOLDED.sub("", section[0]).split()) if section else 0


def minutes(exercise: Exercise) -> int:
    """The estimate, rounded up to 5 minutes."""
    work = LINE * lines(exercise) + PROMISE * promises(exercise)
    return 5 * math.ceil((BEGIN + words(exercise) / WORDS + work) / 5)


@cache
def ways_to_err() -> Mapping[str, int]:
    """Wrong implementations that are known, by exercise."""
    return mutants_per_exercise()


def difficulty(exercise: Exercise) -> int:
    """1 to 5."""
    mean = math.sqrt(lines(exercise) * ways_to_err().get(exercise.id, 0))
    return 1 + sum(mean >= bound for bound in HARDER)


def hours(exercises: list[Exercise]) -> str:
    """The sum of them, to half an hour."""
    return f"{round(sum(e.minutes for e in exercises) / 30) / 2:g}"


def phases(course: Course) -> list[str]:
    """A row per phase."""

    def row(phase: Phase) -> str:
        e = phase.exercises
        written, points = sum(map(lines, e)), sum(x.points for x in e)
        return f"| {phase.number} | {len(e)} | {points} | {written:,} | {hours(e)} |"

    head = ["| phase | exercises | points | lines to write | hours |", "|---|---|---|---|---|"]
    return [*head, *map(row, course.phases)]


def term(course: Course) -> list[str]:
    """A row per week of TERM."""
    rows = ["| week | exercises | points | hours | shown in class |", "|---|---|---|---|---|"]
    for week, ids in enumerate(TERM, 1):
        chosen = [course.exercise(each) for each in ids.split()]
        points = sum(e.points for e in chosen)
        shown = SHOWN.get(week, "the class report")
        listed = ", ".join(e.id for e in chosen)
        rows.append(f"| {week} | {listed} | {points} | {hours(chosen)} | {shown} |")
    return rows


def each(course: Course) -> list[str]:
    """Minutes of every exercise, in a row per phase."""
    rows = ["| phase | minutes for each exercise |", "|---|---|"]
    for phase in course.phases:
        listed = ", ".join(f"{e.id}: {e.minutes}" for e in phase.exercises)
        rows.append(f"| {phase.number} | {listed} |")
    return rows


def tracks(course: Course) -> list[str]:
    """A row per track."""
    rows = ["| track | exercises | hours | what for |", "|---|---|---|---|"]
    for track in course.tracks:
        chosen = [course.exercise(each) for each in track.exercises]
        rows.append(f"| `{track.name}` | {len(chosen)} | {hours(chosen)} | {track.about} |")
    return rows


def every(course: Course) -> list[str]:
    """A row per exercise, with the tracks that have it."""
    short = [t for t in course.tracks if len(t.exercises) < len(course.exercises)]
    head = ["exercise", "minutes", "difficulty", *(t.name for t in short)]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for e in course.exercises:
        marks = ["●" if e.id in t.exercises else "" for t in short]
        cells = [f"{e.id} {e.title}", str(e.minutes), str(e.difficulty), *marks]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


PAGES = {
    "README.md": (tracks,),
    "docs/instructors.md": (phases, term, each),
    "docs/start.md": (tracks, every),
}


def estimated(course: Course, text: str) -> str:
    """``course.toml`` with the estimates of all exercises, behind their points."""
    blocks = re.split(r"^(?=\[\[)", text, flags=re.M)
    for number, block in enumerate(blocks):
        found = re.match(r'\[\[exercise\]\]\nid = "([\d.]+)"', block)
        if found:
            e = course.exercise(found[1])
            bare = re.sub(r"^(minutes|difficulty) = \d+\n", "", block, flags=re.M)
            keys = f"\\g<0>minutes = {minutes(e)}\ndifficulty = {difficulty(e)}\n"
            blocks[number] = re.sub(r"^points = \d+\n", keys, bare, flags=re.M)
    return "".join(blocks)


def filled(course: Course, name: str, text: str) -> str:
    """The page with its tables, each in the place of the one with the same head."""
    for table in PAGES[name]:
        now = table(course)
        old = rf"^{re.escape(now[0])}\n(\|.*\n)+"
        new = "\n".join([*now, ""]).replace("\\", r"\\")
        text = re.sub(old, new, text, flags=re.M)
    return re.sub(rf"(?<={ASK}).*", lambda _: where_to_ask(course), text)


def write() -> None:
    """Write the estimates, then the tables that are made of them."""
    path = root() / "course.toml"
    path.write_text(estimated(load_course(), path.read_text(encoding="utf-8")), encoding="utf-8")
    load_course.cache_clear()
    for name in PAGES:
        page = root() / name
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(load_course(), name, text), encoding="utf-8")


def main() -> int:
    """Print the tables, or write all."""
    parser = argparse.ArgumentParser(description="Estimate the work in exercises.")
    parser.add_argument(
        "--write", action="store_true", help="course.toml and the tables in the pages"
    )
    if parser.parse_args().write:
        write()
        return 0
    course = load_course()
    tables = [table(course) for page in PAGES.values() for table in page]
    print("\n\n".join("\n".join(table) for table in tables))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
