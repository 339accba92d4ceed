"""``distlab lab review``: show a change, take the answer, grade it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...grading.contract import AXES
from ...host.terminal import command, say, short
from ..frame import (
    check_folder,
    dealt,
    fitting,
    may_see,
    need_release,
    need_solutions,
    results,
    seed_or_own,
    told,
)
from .answer import APPROVE, REFUSE, RULES, Answer, answer_of, asked, graded, number_in, read_answer
from .change import Line, hunks, numbered, unified
from .chosen import Review, all_reviews, review_called

ANSWER, PAGE, PATCH = "answer.toml", "review.md", "change.diff"
STYLES = {"+": "green", "-": "red", " ": ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = " ".join(RULES)
    parser.add_argument(
        "what",
        nargs="?",
        help="an exercise (3.9 deals one of its reviews) or a review (R3.09, about any exercise)",
    )
    parser.add_argument("--phase", type=int, help="a review of this phase")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), help="a review of this level")
    parser.add_argument("--seed", type=int, help="the same seed gives the same review")
    parser.add_argument("--spoil", action="store_true", help="also where the exercise is not done")
    parser.add_argument("--list", action="store_true", help="the reviews there are, your points")
    parser.add_argument("--out", type=Path, help="folder to make (default: my_labs/ID)")
    parser.add_argument("--verdict", choices=(APPROVE, REFUSE), help="your answer")
    parser.add_argument("--line", type=number_in, help="of the defect; minus: a line taken away")
    parser.add_argument("--axis", metavar="AXIS", help=f"one of {', '.join(AXES)}")
    parser.add_argument("--grade", type=Path, metavar="FOLDER", help=f"grade its {ANSWER}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the result, for programs")


def main(options: argparse.Namespace, out: Console) -> int:
    """Do what the options ask for; the exit status."""
    if options.list:
        return _list(out)
    if options.grade:
        review = _review_in(options.grade)
        return _grade(review, read_answer(options.grade / ANSWER), options, out)
    seed = seed_or_own(options.seed)
    review = _chosen(options, seed)
    need_release(review.exercise, review.id, options.spoil)
    given = {name: getattr(options, name) for name in ("verdict", "line", "axis")}
    if any(value is not None for value in given.values()):
        if (options.what or "").upper() != review.id:
            raise ValueError(
                f"an answer needs its review: distlab lab review {review.id} --verdict …"
            )
        return _grade(review, answer_of(given, "the answer"), options, out)
    found = hunks(*review.texts())
    _show(review, found, out)
    folder = options.out or Path("my_labs") / review.id
    secret = {each for each in review.spoils if not (options.spoil or may_see(each))}
    write_review(review, found, folder, secret)
    command(out, "  file   ", short(folder / review.about.solution_path.name))
    if review.id not in results() and out.is_terminal and sys.stdin.isatty():
        for axis, about in AXES.items():
            say(out, about, label=f"{axis}: ", indent="  ")
        say(out, " ".join(RULES))
        return _grade(review, asked(input), options, out)
    spoil = " --spoil" if options.spoil else ""
    answer = f"distlab lab review {review.id}{spoil} --verdict"
    command(out, "  answer ", f"{answer} {APPROVE}")
    command(out, "  or     ", f"{answer} {REFUSE} --line … --axis …")
    command(out, "  or     ", f"write {short(folder / ANSWER)}, then")
    command(out, "         ", f"distlab lab review --grade {short(folder)}")
    return 0


def _chosen(options: argparse.Namespace, seed: int) -> Review:
    """The review that is asked for, or dealt by the seed among those that fit and are open.

    Without a level it is of the lowest one that has any: seeds deal changes of equal difficulty.
    """
    if options.what and options.what[:1] in "Rr":
        return review_called(options.what.upper())
    found = fitting(all_reviews(), options.what, options.phase, options.level)
    names = {"exercise": options.what, "phase": options.phase, "level": options.level}
    given = ", ".join(f"{name} {value}" for name, value in names.items() if value is not None)
    which = f"reviews of {given}" if given else "reviews"
    if not found:
        raise ValueError(f"there are no {which}: distlab lab review --list shows all")
    known = results()
    seen = [each for each in found if options.spoil or may_see(each.exercise)]
    if not seen:
        need_release(found[0].exercise, found[0].id, False)
    open_ = [each for each in seen if each.id not in known]
    if not open_:
        raise ValueError(f"you have answered all {which} that you may see: --list shows points")
    lowest = min(each.level for each in open_)
    return dealt(seed, "review that fits", [each for each in open_ if each.level == lowest])


def _list(out: Console) -> int:
    known = results()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("review", "phase", "level", "points", "title"):
        table.add_column(name)
    for review in all_reviews():
        mine = known.get(review.id, {}).get("points")
        points = f"{'–' if mine is None else format(mine, 'g')}/{review.points}"
        cells = (review.id, str(review.about.phase.number), str(review.level), points)
        table.add_row(*cells, review.title)
    out.print(table)
    return 0


def _show(review: Review, found: list[list[Line]], out: Console) -> None:
    level = f"{review.id}, level {review.level}, {review.points} points"
    say(out, f"{review.title}  ({level})", "bold")
    say(out, review.description)
    out.print(f"\n{review.about.solution_path.name}: number before, number after", style="dim")
    for row, line in zip(numbered(found).splitlines(), _with_gaps(found), strict=True):
        out.print(Text(row, STYLES[line.sign if line else " "]), soft_wrap=True)
    out.print()


def _with_gaps(found: list[list[Line]]) -> list[Line | None]:
    """The lines of all hunks, and None for each gap between two."""
    return [line for hunk in found for line in (*hunk, None)][:-1]


def write_review(
    review: Review, found: list[list[Line]], folder: Path, secret: Collection[str]
) -> None:
    """The folder of a review; an answer that is there already stays.

    The whole file lies there, too, but for what exercises in ``secret`` ask for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = review.about.solution_path.name
    diff = f"```\n{numbered(found)}\n```\n\n"
    page = f"# {review.id}: {review.title}\n\n{review.description}\n\n## {name}\n\n{diff}"
    page += "\n".join(["## Points", "", *RULES, ""])
    (folder / PAGE).write_text(page, encoding="utf-8")
    (folder / PATCH).write_text(unified(found, name), encoding="utf-8")
    (folder / name).write_text(review.file(secret), encoding="utf-8")
    if not (folder / ANSWER).exists():
        axes = "\n".join(f"#   {axis}: {about}" for axis, about in AXES.items())
        rules = "\n".join(f"# {rule}" for rule in RULES)
        form = (
            f"# The review {review.id}. Write {APPROVE!r}, or {REFUSE!r} with a line and an axis.\n"
            f"{rules}\n"
            'verdict = ""\n\n'
            "# The number after the change (right column), or minus the number before it\n"
            "# (left column) for a line that is taken away.\n# line = 1\n\n"
            f"# What the defect is about, one of\n{axes}\n"
            '# axis = ""\n'
        )
        (folder / ANSWER).write_text(form, encoding="utf-8")


def _review_in(folder: Path) -> Review:
    """The review that a folder was made for; ValueError with one line if it was for none."""
    try:
        first = (folder / PAGE).read_text(encoding="utf-8").partition(":")[0]
    except OSError as error:
        raise ValueError(f"{folder / PAGE} can't be read: {error.strerror}") from None
    return review_called(first.removeprefix("# "))


def _grade(review: Review, answer: Answer, options: argparse.Namespace, out: Console) -> int:
    """Grade the first answer; a second one would know the verdict.

    Who answers has seen the change, so nothing is spoiled here.
    """
    need_solutions("labs")
    if review.id in results():
        raise ValueError(f"you have answered {review.id} before: the first answer counts")
    check_folder(options.json)
    more = {"kind": review.kind, "answer": vars(answer)}
    return told(review.id, graded(review, answer), out, options.json, more)
