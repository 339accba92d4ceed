"""Recorded profiles of real runs on a CPU, and what is true of them: read operator by operator.

``torchrun -m given.slow_run 7 --reason REASON --steps 3`` wrote them: communication on two ranks,
the others on one. Rank 0's file is here.
"""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np

from distlab.course.catalogue import root
from tests.phase4.planted_profiles import Truth

MARKS = {
    "ProfilerStep": "step",
    "enumerate(DataLoader)": "data",
    "Optimizer.step": "optimizer",
    "gloo:all_gather": "communication",
}


def recorded() -> dict[str, Path]:
    """The files by the reason that was planted."""
    folder = root() / "given/profiles"
    return {path.name.partition(".")[0]: path for path in sorted(folder.glob("*.json.gz"))}


def recorded_truth(path: Path) -> tuple[list[Truth], list[tuple[int, int, int, str]]]:
    """The spans of a recorded trace, and its changes of memory."""
    file = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)
    base, found, rows, changes = int(file["baseTimeNanoseconds"]), [], [], []
    for event in file["traceEvents"]:
        low = base + int(event["ts"] * 1000)
        high = low + int(event.get("dur", 0) * 1000)
        name, lane, cat = event["name"], (event["pid"], event["tid"]), event.get("cat", "")
        kind = MARKS.get(name.partition("#")[0]) if cat == "user_annotation" else None
        if kind:
            found.append((kind, name, lane, low, high, low))
        if kind == "data" or (cat == "cpu_op" and name[:6] == "aten::"):
            rows.append(("compute" if kind is None else "", name, lane, low, high, low))
        if name == "[memory]":
            changes.append((low, event["args"]["Bytes"], event["args"]["Addr"], ""))
    threads = sorted({row[2] for row in rows})
    # the latest of equal ones is inside the others
    table = np.array([[threads.index(r[2]), r[3] - base, r[4] - base] for r in rows])
    number = np.arange(len(rows))
    for k, row in enumerate(rows):
        around = (table[:, 0] == table[k, 0]) & (table[:, 1] <= table[k, 1])
        around &= table[:, 2] >= table[k, 2]
        same = (table == table[k]).all(1)
        if row[0] and not (around & ~(same & (number >= k))).any():
            found.append(row)
    return found, sorted(changes, key=lambda change: change[0])
