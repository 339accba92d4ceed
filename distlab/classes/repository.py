"""Read the last commit of an untrusted git repository, and the times of the other commits.

A repository's own settings can name programs that git runs: filters, hooks, signature checkers,
transports. So only commands that read objects are used, no transport is allowed, and a repository
that leads to objects elsewhere is refused.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LISTING = 32 << 20  # bytes of the list of a commit's files
HISTORY = 8 << 20  # bytes of the list of commits
PATIENCE = 120  # seconds that git may take to read one object
CLEAN = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}


class Refused(Exception):
    """The submission can't be graded; the message is one line for its student."""


def is_repository(path: Path) -> bool:
    """Whether the folder is a git repository, with files beside it or bare."""
    bare = all((path / name).exists() for name in ("HEAD", "objects", "refs"))
    return bare or os.path.lexists(path / ".git")


def repository_files(
    path: Path, wanted: Callable[[str], bool], largest: int
) -> Iterator[tuple[str, bytes, datetime.datetime | None]]:
    """The wanted files of the last commit, with its date; raises Refused."""
    inside = path / ".git"
    git_folder = inside if os.path.lexists(inside) else path
    if git_folder.is_symlink() or not git_folder.is_dir():
        raise Refused(f"{git_folder.name} leads to a repository elsewhere: hand in a clone")
    elsewhere = (git_folder / "objects" / "info" / "alternates", git_folder / "commondir")
    if any(map(os.path.lexists, elsewhere)):
        raise Refused("the repository takes objects from elsewhere: hand in a full clone")
    if any(
        Path(folder, name).is_symlink()
        for folder, inner, names in os.walk(git_folder)
        for name in (*inner, *names)
    ):
        raise Refused("there is a link inside of the repository: hand in a clone")
    commit = _last_commit(git_folder)
    if commit is None:
        raise Refused("the repository has no commit")
    when = _date(_git(git_folder, "cat-file", "commit", commit, most=largest) or b"")
    listing = _git(git_folder, "ls-tree", "-r", "-l", "-z", commit, most=LISTING)
    if listing is None:
        raise Refused("the files of the last commit can't be listed")
    for line in listing.decode("utf-8", "surrogateescape").split("\0"):
        about, _, name = line.partition("\t")
        if not name or not wanted(name):
            continue
        mode, _, number, _ = about.split()
        if mode == "120000":
            raise Refused(f"{name!a} is a link: hand in the file itself")
        data = _git(git_folder, "cat-file", "blob", number, most=largest)
        if data is None:
            raise Refused(f"{name!a} can't be read, or has more than {largest >> 20} MB")
        yield name, data, when


@dataclass(frozen=True)
class Commits:
    """The times of commits, and the names and addresses of their authors."""

    times: tuple[datetime.datetime, ...] = ()
    people: frozenset[str] = frozenset()


def commits(path: Path) -> Commits:
    """The history of a repository whose files ``repository_files`` has read; none otherwise."""
    git_folder = path / ".git" if (path / ".git").is_dir() else path
    last = _last_commit(git_folder) if is_repository(path) else None
    if last is None:
        return Commits()
    form = "--format=%ct %an%x00%ae%x00%cn%x00%ce"
    listing = _git(git_folder, "rev-list", form, "--max-count=5000", last, most=HISTORY) or b""
    times: list[datetime.datetime] = []
    people: set[str] = set()
    for line in listing.decode("utf-8", "replace").split("\n"):
        found = re.fullmatch(r"(\d{1,11}) (.*\0.*\0.*\0.*)", line)
        if found:
            times.append(datetime.datetime.fromtimestamp(int(found[1]), datetime.timezone.utc))
            people.update(
                part for each in found[2].split("\0") for part in (each, each.split("@")[0])
            )
    return Commits(tuple(times), frozenset(people))


def _last_commit(git_folder: Path) -> str | None:
    """The commit of HEAD. If HEAD names no branch that is there, the newest
    commit of all branches."""
    found = _git(git_folder, "rev-parse", "-q", "--verify", "HEAD^{commit}", most=1000)
    if not found:
        order = ("--sort=-committerdate", "--count=1", "--format=%(objectname)")
        found = _git(git_folder, "for-each-ref", *order, "refs/heads", most=1000)
    text = (found or b"").decode("ascii", "replace").strip()
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else None


def _date(commit: bytes) -> datetime.datetime | None:
    found = re.search(rb"(?m)^committer .*> (\d+) ([+-]\d\d)(\d\d)$", commit)
    if not found:
        return None
    try:
        offset = datetime.timedelta(hours=int(found[2]), minutes=int(found[3]))
        zone = datetime.timezone(offset)
        return datetime.datetime.fromtimestamp(int(found[1]), zone)
    except (ValueError, OverflowError, OSError):
        return None


def _git(git_folder: Path, *arguments: str, most: int) -> bytes | None:
    """The output of git; None if git failed, or printed more than ``most`` bytes."""
    command = ["git", "-c", "safe.directory=*", f"--git-dir={git_folder.resolve()}", *arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=clean | CLEAN,
    ) as process:
        assert process.stdout is not None
        data = process.stdout.read(most + 1)
        if len(data) > most:
            process.kill()
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
    return data if status == 0 and len(data) <= most else None
