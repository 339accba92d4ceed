"""All records: of one process, of trainings on several ranks, and of a machine's GPUs.

``references/<device>/`` holds ``<workload>.json`` (one process, float64: the yardstick),
``<workload>-<precision>-x<ranks>.json`` (the solutions on so many ranks) and ``nccl-<GPUs>.json``
(the findings of ``distlab doctor --cuda``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from . import sealed

AGAIN = "distlab record --all"


@dataclass(frozen=True)
class Kept:
    """One record; ``problem``: one line, if its hash does not match or it can't be read."""

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def name(self) -> str:
        """The device's folder and the file, as commands take it."""
        return f"{self.path.parent.name}/{self.path.stem}"

    @property
    def is_training(self) -> bool:
        """Whether there are losses to compare."""
        return "losses" in self.data

    @property
    def ranks(self) -> int:
        """How many ranks trained; one process is one."""
        return int(self.data.get("ranks", 1))


def training_path(device: str, workload: str, precision: str, ranks: int, folder: Path) -> Path:
    """The path of the record of a training on several ranks."""
    return folder / device / f"{workload}-{precision}-x{ranks}.json"


def kept(path: Path) -> Kept:
    """The record in this file."""
    try:
        return Kept(path, sealed.read(path, f"reference {path.parent.name}/{path.name}", AGAIN))
    except ValueError as error:
        return Kept(path, problem=str(error))


def every(folder: Path | None = None) -> list[Kept]:
    """All records, by device and name; those of interrupted runs are left out."""
    files = sorted((folder or root() / "references").glob("*/*.json"))
    return [kept(path) for path in files if not path.stem.endswith("-partial")]


def find(name: str, records: Sequence[Kept]) -> Kept:
    """The sound record called ``name`` (``cuda/tiny_gpt``), or in the file ``name``."""
    if name.endswith(".json"):
        found = kept(Path(name))
    else:
        known = {record.name: record for record in records}
        if name not in known:
            raise ValueError(f"no reference {name!r}: there are {', '.join(known) or 'none'}")
        found = known[name]
    if found.problem:
        raise ValueError(found.problem)
    if not found.is_training:
        raise ValueError(f"{found.name} is no training: read the page beside it")
    return found
