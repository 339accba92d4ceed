"""When a learner committed: the dates in the history of a submission that is a git repository.

A stranger's repository can make git run commands, by its configuration and its hooks. So git looks
at its objects alone, through an empty repository that is ours.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SECONDS = 20
MOST_COMMITS = 5000
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Commits:
    """When, and by whom: names and addresses are there to be taken out of what is shown."""

    times: tuple[datetime.datetime, ...]
    people: frozenset[str]


NONE = Commits((), frozenset())


def commits(folder: Path) -> Commits:
    """The commits that lead to the checked-out one; none if there is no history that git reads."""
    found = folder / ".git" if (folder / ".git").is_dir() else folder
    start = _head(found)
    if not start:
        return NONE
    with tempfile.TemporaryDirectory() as empty:
        try:
            kind = "sha256" if len(start) == 64 else "sha1"
            _git(empty, "init", "--quiet", "--bare", f"--object-format={kind}", empty)
            text = _git(
                empty,
                *("--git-dir", empty, "log", f"--max-count={MOST_COMMITS}"),
                *("--format=%cI%x00%an%x00%ae%x00%cn%x00%ce", start),
                GIT_OBJECT_DIRECTORY=str((found / "objects").resolve()),
            )
        except (OSError, subprocess.SubprocessError):
            return NONE
    rows = [line.split("\0") for line in text.splitlines() if line.count("\0") == 4]
    people = {part for row in rows for each in row[1:] for part in (each, each.split("@")[0])}
    return Commits(tuple(datetime.datetime.fromisoformat(r[0]) for r in rows), frozenset(people))


def _git(folder: str, *arguments: str, **more: str) -> str:
    """git in ``folder``, without anybody's settings, and without asking another machine."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    own = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=clean | own | more,
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    return done.stdout.decode("utf-8", "replace")


def _head(repository: Path) -> str:
    """The hash that HEAD means, read without git; empty if there is none."""
    if not (repository / "objects").is_dir():
        return ""
    text = _read(repository / "HEAD")
    if HASH.fullmatch(text):
        return text
    name = text.removeprefix("ref: ").strip()
    if not re.fullmatch(r"refs(/[\w.+@-]+)+", name) or ".." in name:
        return ""
    direct = _read(repository / name)
    if HASH.fullmatch(direct):
        return direct
    for line in _read(repository / "packed-refs").splitlines():
        value, _, ref = line.partition(" ")
        if ref == name and HASH.fullmatch(value):
            return value
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() if path.stat().st_size < 2**20 else ""
    except (OSError, UnicodeDecodeError):
        return ""
