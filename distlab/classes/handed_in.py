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
    """A folder in ``to`` and the history for each student, of the last submission that can be read.

    ``digests``: of the submission that counts for each student; no other one is taken then, and
    members of a team have that of their team.
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
    """As far as they say whose a submission is: the rules by which the class was graded."""
    rules = results.about.get("config") or {}
    teams = {name: tuple(members) for name, members in dict(rules.get("teams") or {}).items()}
    return ClassConfig(pattern=str(rules.get("pattern") or ""), teams=teams)
