"""The submissions once more, after grading: their files, and when their students committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import ClassConfig
from .outcomes import ClassResults
from .repository import Commits, commits
from .submissions import find_entries, unpack


def lay_out(
    submissions: Path, config: ClassConfig, to: Path, digests: Mapping[str, str] | None = None
) -> tuple[dict[str, Path], dict[str, Commits]]:
    """For each student a folder in ``to`` and the history of the last submission that can be read.

    ``digests``: the hash of the submission that counts for each student; then no other one is
    taken. Members of a team have the submission of their team.
    """
    folders: dict[str, Path] = {}
    histories: dict[str, Commits] = {}
    for number, entry in enumerate(find_entries(submissions, config)):
        found = unpack(entry, to / str(number), config)
        if found.problem:
            continue
        owners: tuple[str, ...] = (entry.student,)
        if digests is not None:
            team = config.teams.get(config.team_of(entry.student), ())
            owners = tuple(s for s in {*owners, *team} if digests.get(s) == found.digest)
        for student in owners:
            folders[student] = found.folder
            histories[student] = commits(entry.path)
    return folders, histories


def rules_of(results: ClassResults) -> ClassConfig:
    """Of the rules by which the class was graded, those that say whose a submission is."""
    rules = results.about.get("config") or {}
    teams = {name: tuple(members) for name, members in dict(rules.get("teams") or {}).items()}
    return ClassConfig(pattern=str(rules.get("pattern") or ""), teams=teams)
