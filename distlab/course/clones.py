"""Upgrade a clone: ``git merge`` for the course, region by region for the learner's templates."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

from .upgrade import Upgrade, keep, worked_out, write


def git(folder: Path, *arguments: str) -> str:
    """The output of git; ValueError with its error message, in one line, if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        raise ValueError("distlab upgrade needs git: install it; nothing was changed") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout or "no reason given").split())
        raise ValueError(f"git {arguments[0]}: {said}")
    return done.stdout.strip()


def merge_clone(mine: Path, new: str, temporary: Path) -> tuple[Upgrade, Path]:
    """Merge the course at ``new`` (a repository; empty: where the clone is from) into ``mine``."""
    git(mine, "fetch", "--quiet", *([new, "HEAD"] if new else []))
    target = git(mine, "rev-parse", "FETCH_HEAD" if new else "@{upstream}")
    common = git(mine, "merge-base", "HEAD", target)
    if common == target:
        raise ValueError("there is nothing newer: nothing was changed")
    base = _extracted(mine, common, temporary / "base")
    found = worked_out(mine, base, _extracted(mine, target, temporary / "new"))
    edited = git(mine, "diff", "--name-only", "HEAD", "--").splitlines()
    copy = keep(mine, base, found, edited)
    known = set(git(mine, "ls-tree", "-r", "--name-only", "HEAD").splitlines())
    ours = [name for name in known if _is_template(name)]
    try:
        git(mine, "checkout", "--quiet", "HEAD", "--", *ours)
        git(mine, "merge", "--quiet", "--no-edit", "-X", "theirs", target)
    except ValueError as error:
        _undo(mine, copy, ours)
        raise ValueError(f"{error} (your files are as they were)") from None
    write(mine, found)
    return found, copy


def _extracted(repository: Path, commit: str, folder: Path) -> Path:
    """The files of a commit, in a folder of their own."""
    packed = folder.with_suffix(".zip")
    git(repository, "archive", "--format=zip", f"--output={packed}", commit)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder)
    return folder


def _is_template(name: str) -> bool:
    return name.startswith("phase") and Path(name).match("phase*/template_*.py")


def _undo(mine: Path, copy: Path, ours: list[str]) -> None:
    """Undo a merge that failed: everything is as it was."""
    done = subprocess.run(["git", "-C", str(mine), "merge", "--abort"], capture_output=True)
    assert done.returncode in (0, 128)  # 128: git had not begun
    for name in ours:
        if (copy / name).is_file():
            shutil.copy2(copy / name, mine / name)
