"""Records of ``distlab doctor --cuda``: the results of the solutions on NCCL, and the machine.

A record lies in ``references/cuda/`` as ``nccl-<GPUs>.json``, beside a page of the same name for
human readers. It carries a hash over all of it, as the recorded trainings do. A group of one rank
sends nothing. So without a record of a machine with two GPUs or more, README and reports say that
the solutions were never run on NCCL between GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..course.catalogue import root
from . import sealed

NEVER = "never run on NCCL"
DEVICE = "cuda"
STATUSES = ("passed", "failed", "needs")


def record_path(gpus: Sequence[str], folder: Path | None = None) -> Path:
    """The path of the record of a machine with these GPUs, by their names and number."""
    kinds = [f"{count}x-{name}" for name, count in Counter(gpus).items()]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(kinds).lower()).strip("-")
    return (folder or root() / "references") / DEVICE / f"nccl-{name}.json"


def read(path: Path) -> dict[str, Any]:
    """A record whose hash matches; otherwise ValueError says in one line what is wrong with it."""
    return sealed.read(path, f"GPU record {path.name}", "distlab doctor --cuda")


def records(folder: Path | None = None) -> list[dict[str, Any]]:
    """The sound records of complete runs, those with most GPUs first."""
    found = []
    for path in sorted(((folder or root() / "references") / DEVICE).glob("nccl-*.json")):
        try:
            found.append(read(path))
        except ValueError:
            continue
    complete = (data for data in found if data["complete"])
    return sorted(complete, key=lambda data: -len(data["gpus"]))


def words(folder: Path | None = None) -> str:
    """The sentence of README and reports about the solutions on NCCL, from the records."""
    found = records(folder)
    if not found:
        return NEVER
    best = found[0]
    where = f"{len(best['gpus'])} x {best['gpus'][0]}"
    if len(best["gpus"]) < 2:
        return f"run on NCCL with one rank ({where}); between GPUs {NEVER}"
    counts = Counter(part["status"] for part in best["parts"])
    told = ", ".join(f"{counts[each]} {each}" for each in STATUSES if counts[each])
    return f"run on NCCL ({where}, {best['date']}: parts {told})"
