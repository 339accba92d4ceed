"""How a submission arrives: as a folder, a zip, a tar or a git repository, dated and repeatable."""

from __future__ import annotations

import datetime
import gzip
import io
import os
import random
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SHAPES = ("folder", "zip", "tar", "git", "bare")
DEPTHS = ("", "course/", "handin/course/")


@dataclass
class Version:
    """All files (by their path) as they were at one time."""

    when: datetime.datetime
    files: dict[str, str]


def write_entry(
    folder: Path, student: str, shape: str, versions: Sequence[Version], rng: random.Random
) -> str:
    """Write a student's work into ``folder`` in this shape; returns the entry's name."""
    last = versions[-1]
    depth = rng.choice(DEPTHS)
    if shape == "zip":
        path = folder / f"{student}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in last.files.items():
                archive.writestr(zipfile.ZipInfo(depth + name, last.when.timetuple()[:6]), text)
    elif shape == "tar":
        path = folder / f"{student}.tar.gz"
        with (
            gzip.GzipFile(path, "wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for name, text in last.files.items():
                info = tarfile.TarInfo(depth + name)
                info.size, info.mtime = len(text.encode()), int(last.when.timestamp())
                archive.addfile(info, io.BytesIO(text.encode()))
    elif shape == "folder":
        path = folder / student
        _write(path / depth, last)
    else:
        path = _repository(folder, student, versions, bare=shape == "bare")
    os.utime(path, (last.when.timestamp(),) * 2)
    return path.name


def _write(folder: Path, version: Version) -> None:
    for name, text in version.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (version.when.timestamp(),) * 2)


def _repository(folder: Path, student: str, versions: Sequence[Version], bare: bool) -> Path:
    work = folder / student
    work.mkdir()
    _git(work, "init", "-q", "-b", "main")
    for number, version in enumerate(versions, 1):
        _write(work, version)
        _git(work, "add", "-A")
        _git(work, "commit", "-q", "--allow-empty", "-m", f"step {number}", when=version.when)
    if not bare:
        return work
    path = folder / f"{student}.git"
    (work / ".git").rename(path)
    _git(path, "config", "core.bare", "true")
    for file in sorted(work.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    work.rmdir()
    return path


def _git(folder: Path, *arguments: str, when: datetime.datetime | None = None) -> None:
    """Run git without the caller's settings."""
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    who = {f"GIT_{w}_{k}": v for w in ("AUTHOR", "COMMITTER") for k, v in _WHO.items()}
    dates = (
        {"GIT_AUTHOR_DATE": when.isoformat(), "GIT_COMMITTER_DATE": when.isoformat()}
        if when
        else {}
    )
    subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, env=os.environ | clean | who | dates
    )


_WHO = {"NAME": "Student", "EMAIL": "student@example.org"}
