"""Tracks: ways through the course, as ``course.toml`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Track:
    """Some exercises, in the order of learning; ``all`` stands for every exercise there is."""

    name: str
    title: str
    about: str
    exercises: tuple[str, ...]


def tracks_of(entries: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> list[Track]:
    """The tracks of a course with the exercises ``ids``."""
    return [
        Track(
            entry["name"],
            entry["title"],
            entry["about"],
            tuple(ids if entry["exercises"] == "all" else entry["exercises"]),
        )
        for entry in entries
    ]


def problems(tracks: Sequence[Track], builds_on: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with the tracks (empty: nothing).

    ``builds_on``: for every exercise of the course, in order, what it uses and requires.
    """
    names = [track.name for track in tracks]
    found = [f"track {name} is there twice" for name in {*names} if names.count(name) > 1]
    for track in tracks:
        unknown = [each for each in track.exercises if each not in builds_on]
        found += [f"track {track.name}: there is no exercise {each}" for each in unknown]
        if unknown:
            continue
        if list(track.exercises) != [each for each in builds_on if each in track.exercises]:
            found.append(f"track {track.name}: its order is not that of the course")
        for each in track.exercises:
            lacking = sorted(builds_on[each] - {*track.exercises})
            found += [f"track {track.name}: {each} builds on {other}" for other in lacking]
    return found
