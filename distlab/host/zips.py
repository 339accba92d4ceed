"""Zip files: the same content gives the same bytes, and a written file is whole or not there."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

EPOCH = (1980, 1, 1, 0, 0, 0)  # of every file inside: the earliest that zip knows


def write(path: Path, files: Mapping[str, bytes], programs: Collection[str] = ()) -> None:
    """Write ``files`` by their names inside; ``programs`` can be executed after unpacking."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: the folder {folder} does not exist")
    handle, name = tempfile.mkstemp(dir=folder, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as archive:
            for inside, content in sorted(files.items()):
                info = zipfile.ZipInfo(inside, EPOCH)
                info.compress_type = zipfile.ZIP_DEFLATED
                info.create_system = 3  # Unix: else modes are not read
                info.external_attr = (0o755 if inside in programs else 0o644) << 16
                archive.writestr(info, content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path, most: int) -> dict[str, bytes]:
    """All files inside by their names; ValueError if it is no zip, or has more than ``most`` bytes.

    The size that the archive states for a file is not trusted.
    """
    found: dict[str, bytes] = {}
    left = most
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    found[info.filename] = content = file.read(left + 1)
                left -= len(content)
                if left < 0:
                    raise ValueError(f"{path}: more than {most:,} bytes are packed in it")
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError):
        raise ValueError(f"{path} is no whole zip file") from None
    return found
