"""``distlab track``: choose a way through the course."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.text import Text

from ..course import ahead, progress
from ..course.catalogue import Course, load_course
from ..course.tracks import Track
from ..host.terminal import say
from .lab_map import labs_of, show_sum


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("name", nargs="?", help="the track to take; default: show all tracks")


def main(options: argparse.Namespace, out: Console) -> int:
    """Remember the track, or show which there are."""
    course = load_course()
    if options.name is None:
        current = ahead.chosen_track(course).name
        for track in course.tracks:
            _show(course, track, track.name == current, out)
        say(out, "choose with: distlab track NAME", "dim")
        return 0
    track = course.track(options.name)
    for warning in progress.choose_track(track.name):
        say(out, warning, "yellow")
    _show(course, track, True, out)
    return 0


def _show(course: Course, track: Track, current: bool, out: Console) -> None:
    entries, _ = progress.load()
    exercises = ahead.exercises_of(course.exercises, track)
    todo = ahead.left(exercises, entries)
    out.print(Text(track.name + (" (your track)" if current else ""), "bold"))
    say(out, track.about, indent="  ")
    hours = ahead.duration(sum(e.minutes for e in exercises))
    state = f"{len(exercises) - len(todo)} of {len(exercises)} exercises pass"
    say(out, f"{state}; all of them take about {hours}", indent="  ")
    show_sum(labs_of(exercises), out)
