"""The submissions once more, after grading: their files, and when their students committed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import ClassConfig
from .repository import Commits, commits
from .submissions import find_entries, unpack


def lay_out(
    submissions: Path, config: ClassConfig, to: Path, digests: Mapping[str, str] | None = None
) -> tuple[dict[str, Path], dict[str, Commits]]:
    """A folder in ``to`` and the history for each student, of the last submission that can be read.

    ``digests``: of the submission that counts for each student; no other one is taken then.
    """
    folders: dict[str, Path] = {}
    histories: dict[str, Commits] = {}
    for number, entry in enumerate(find_entries(submissions, config)):
        found = unpack(entry, to / str(number), config)
        if found.problem:
            continue
        if digests is not None and digests.get(entry.student) != found.digest:
            continue
        folders[entry.student] = found.folder
        histories[entry.student] = commits(entry.path)
    return folders, histories
