"""Read a submission: a folder, a zip, a tar or a git repository, none of them trusted.

Each reader gives the Python files with their names and times, and writes nothing. It raises
``Refused``, with one line, for an unsafe file: a link or a name that leads out of the folder, or a
bomb.
"""

from __future__ import annotations

import bz2
import datetime
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..course.handout import MANIFEST
from .config import Caps
from .repository import Refused, is_repository, repository_files

LARGEST_FILE = 4 << 20  # bytes of one Python file
LABS = "my_labs"  # a learner's folder of labs
LAB_FILE = re.compile(  # the answer to a lab; a file of tests may lie anywhere
    rf"(?:.*/)?(?:{LABS}/(?P<own>[DR]\d\.\d+/(?:answer\.toml|lab\.json|\w+\.py)|P[\dM.]+\.toml)"
    r"|(?P<tests>tests_for_\d_\d+\.py))"
)
SKIPPED = {
    *(".git", ".venv", "venv", ".distlab", "__MACOSX", "__pycache__", ".ipynb_checkpoints"),
    *("node_modules", "site-packages"),
    *("solutions", "tests", "distlab", "given", "benchmarks", "notebooks", "scripts", "docs"),
}
ZIP = (".zip",)
TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
OTHER = (".rar", ".7z", ".gz", ".py", ".ipynb", ".pdf", ".docx")


@dataclass(frozen=True)
class File:
    """A Python file that was handed in; ``path`` has its folders in front, with slashes."""

    path: str
    data: bytes
    when: datetime.datetime | None


def kind_of(path: Path) -> str:
    """``folder``, ``git``, ``zip``, ``tar``, ``other`` for a file that can't be read,
    or "" for no submission."""
    name = path.name.lower()
    if path.is_dir():
        return "git" if is_repository(path) else "folder"
    kinds = (("zip", ZIP), ("tar", TAR), ("other", OTHER))
    return next((kind for kind, ends in kinds if name.endswith(ends)), "")


def files_in(path: Path, caps: Caps, zone: datetime.tzinfo) -> list[File]:
    """The Python files of a submission. ``zone``: that of the times in a
    zip, which name no zone."""
    if not path.exists():
        raise Refused(f"{path.name} is not there")
    kind = kind_of(path)
    if kind == "zip":
        return list(_in_zip(path, caps, zone))
    if kind == "tar":
        return list(_in_tar(path, caps))
    if kind == "folder":
        return list(_in_folder(path, caps))
    if kind == "git":
        return [
            File(name, data, when)
            for name, data, when in repository_files(path, wanted, LARGEST_FILE)
        ]
    raise Refused(f"{path.name} can't be read here: a folder, .zip, .tar.gz or git repository can")


def wanted(name: str) -> bool:
    """Whether it is a Python file that may be a learner's own, a hand-out's manifest, or the answer
    to a lab."""
    *folders, last = name.split("/")
    kind = last == MANIFEST or (last.endswith(".py") and not last.startswith("._"))
    return (kind or bool(LAB_FILE.fullmatch(name))) and not SKIPPED.intersection(folders)


def _plain(name: str) -> str:
    """The name with slashes; Refused if it leads out of its folder."""
    parts = name.replace("\\", "/").split("/")
    if name.startswith(("/", "\\")) or ".." in parts or parts[0][1:2] == ":":
        raise Refused(f"it holds a name that leaves its folder: {shown(name)}")
    return "/".join(part for part in parts if part not in ("", "."))


def shown(name: str) -> str:
    """A name for one line of a message, whatever bytes it was made of."""
    text = name.encode("utf-8", "replace").decode()
    return ascii(text)[1:-1][:100] if not text.isprintable() else text[:100]


class _Budget:
    """Counts files and bytes; Refused when they are too many."""

    def __init__(self, caps: Caps) -> None:
        self.caps, self.files, self.bytes = caps, 0, 0

    def file(self) -> None:
        self.files += 1
        if self.files > self.caps.files:
            raise Refused(f"it holds more than {self.caps.files:,} files")

    def take(self, count: int) -> None:
        self.bytes += count
        if self.bytes > self.caps.unpacked_mb * 1e6:
            raise Refused(f"it unpacks to more than {self.caps.unpacked_mb:g} MB")


def _read(file: IO[bytes] | None, name: str, budget: _Budget) -> bytes:
    if file is None:
        raise Refused(f"{shown(name)} can't be read")
    with file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise Refused(f"{shown(name)} has more than {LARGEST_FILE >> 20} MB: that is no program")
    budget.take(len(data))
    return data


def _in_zip(path: Path, caps: Caps, zone: datetime.tzinfo) -> Iterator[File]:
    if path.stat().st_size > caps.unpacked_mb * 1e6:
        raise Refused(f"{path.name} has more than {caps.unpacked_mb:g} MB")
    budget = _Budget(caps)
    declared = _Budget(caps)
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            budget.file()
            declared.take(info.file_size)
            name = _plain(info.filename)
            link = stat.S_ISLNK(info.external_attr >> 16)
            if link and _may_matter(name):
                raise Refused(f"{shown(name)} is a link: hand in the file itself")
            if info.is_dir() or link or not wanted(name):
                continue
            if info.flag_bits & 1:
                raise Refused(f"{path.name} is encrypted")
            data = _read(archive.open(info), name, budget)
            yield File(name, data, _zip_time(info, zone))


def _may_matter(name: str) -> bool:
    """Whether a link of this name could stand for learner's files, or for a folder of them."""
    return not SKIPPED.intersection(name.split("/")) and (
        name.endswith(".py") or "." not in name.rpartition("/")[2]
    )


def _zip_time(info: zipfile.ZipInfo, zone: datetime.tzinfo) -> datetime.datetime | None:
    try:
        when = datetime.datetime(*info.date_time, tzinfo=zone)
    except ValueError:
        return None
    return when if when.year > 1980 else None  # 1980 stands for no time


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends a bomb while it is read."""

    def __init__(self, stream: IO[bytes], budget: _Budget) -> None:
        self.stream, self.budget = stream, budget

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size if size >= 0 else 1 << 20)
        self.budget.take(len(data))
        return data


def _unpacked(path: Path) -> IO[bytes]:
    """The tar in a file, recognised by its first bytes and not by its name."""
    with path.open("rb") as file:
        head = file.read(2)
    openers: dict[bytes, Callable[[Path], Any]] = {
        b"\x1f\x8b": gzip.open,
        b"BZ": bz2.open,
        b"\xfd7": lzma.open,
    }
    return cast("IO[bytes]", openers[head](path) if head in openers else path.open("rb"))


def _in_tar(path: Path, caps: Caps) -> Iterator[File]:
    stream_budget, budget = _Budget(caps), _Budget(caps)
    with (
        _unpacked(path) as stream,
        tarfile.open(fileobj=_Bounded(stream, stream_budget), mode="r|") as archive,
    ):
        for member in archive:
            budget.file()
            name = _plain(member.name)
            if (member.issym() or member.islnk()) and _may_matter(name):
                raise Refused(f"{shown(name)} is a link: hand in the file itself")
            if not member.isfile() or not wanted(name):
                continue
            data = _read(archive.extractfile(member), name, budget)
            yield File(name, data, _moment(member.mtime))


def _moment(seconds: float) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromtimestamp(int(seconds), datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None


def _in_folder(path: Path, caps: Caps) -> Iterator[File]:
    """Links to files inside the folder are followed. A link that leads out of it is refused."""
    base, budget = path.resolve(), _Budget(caps)

    def unreadable(error: OSError) -> None:
        name = Path(error.filename).relative_to(path) if error.filename else path.name
        raise Refused(f"{shown(str(name))} can't be read: {error.strerror}")

    for folder, folders, names in os.walk(path, onerror=unreadable):
        for each in [*folders, *names]:
            budget.file()
            full = Path(folder, each)
            name = full.relative_to(path).as_posix()
            if full.is_symlink() and _may_matter(name):
                if not full.resolve().is_relative_to(base):
                    raise Refused(f"{shown(name)} is a link that leaves the folder")
                if full.is_dir():
                    raise Refused(f"{shown(name)} is a link to a folder: hand in the folder itself")
        folders[:] = sorted(f for f in folders if f not in SKIPPED)
        for each in sorted(names):
            full = Path(folder, each)
            name = full.relative_to(path).as_posix()
            if not wanted(name):
                continue
            try:
                state = full.stat()
                if not stat.S_ISREG(state.st_mode):
                    raise Refused(f"{shown(name)} is no file")
                data = _read(full.open("rb"), name, budget)
            except OSError as error:
                unreadable(error)
            yield File(name, data, _moment(state.st_mtime))
