"""``distlab handout``: a folder and a zip for learners, without solutions."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ..course.catalogue import load_course, need_solutions, root
from ..course.handout import chosen, hand_out
from ..course.version import course_version
from ..host.terminal import say, short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that does not exist yet")
    parser.add_argument(
        "--phases", type=int, nargs="+", default=[], metavar="N", help="whole phases"
    )
    parser.add_argument(
        "--exercises", nargs="+", default=[], metavar="ID", help="these, beside the phases"
    )


def main(options: argparse.Namespace, out: Console) -> int:
    """Write the hand-out, and list its contents."""
    need_solutions("distlab handout")
    course = load_course()
    part = chosen(course, options.phases, options.exercises)
    packed = hand_out(course, part, root(), options.out)
    points = sum(e.points for e in part.exercises)
    folder = f"{short(options.out)}  (folder: {len(part.exercises)} exercises, {points} points, "
    say(out, f"{folder}course version {course_version(root())})")
    say(out, f"{short(packed)}  (the same, to send)")
    return 0
