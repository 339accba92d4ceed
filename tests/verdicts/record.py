"""The committed record: which verdicts passed, with the hash of what they rest on.

A verdict with the same hash, torch, Python and system is not taken again in `make test`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

Key = tuple[str, str]  # a test file, and an exercise or a notebook


def environment() -> dict[str, str]:
    """What all verdicts rest on, beside the course's files."""
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "system": f"{sys.platform} {platform.machine()}",
        "torch": torch.__version__,
    }


def read(path: Path) -> tuple[dict[str, str], dict[Key, str]]:
    """The environment and the hashes; nothing if there is no record yet."""
    if not path.is_file():
        return {}, {}
    data = json.loads(path.read_text(encoding="utf-8"))
    found = data["verdicts"].items()
    return data["environment"], {(f, s): h for f, entries in found for s, h in entries.items()}


def valid(path: Path) -> dict[Key, str]:
    """The hashes, if they are of this environment."""
    made_in, found = read(path)
    return found if made_in == environment() else {}


def write(path: Path, hashes: Mapping[Key, str]) -> None:
    """Write the whole record; an interrupted write leaves the old one."""
    files: dict[str, dict[str, str]] = {}
    for file, subject in sorted(hashes, key=_place):
        files.setdefault(file, {})[subject] = hashes[file, subject]
    data = {"environment": environment(), "verdicts": files}
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def _place(key: Key) -> tuple[str, list[int], str]:
    """Exercises in the order of their numbers."""
    file, subject = key
    return file, [int(number) for number in re.findall(r"\d+", subject)], subject
