"""A cluster's file and its kernels' file from what was measured on this machine.

Every number has its source (the machine and the day) and the kind "measured". Links between nodes,
which one machine does not have, are "assumed" to be as inside. α is the time of the least message,
and the bandwidth follows from the longest one; the curves have all sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..hardware.clusters import Cluster, load_cluster
from ..hardware.curves import AS_THEY_ARE
from ..hardware.kernels import Convolution, Kernels, load_kernels
from .calibrate_links import OPERATORS, Row

DIGITS = 4
MESSAGE, BOTH, ISSUE = "send", "exchange", "issue"
COLUMNS = [f.name for f in dataclasses.fields(Convolution)]
TOLD = ("sources", "kinds")
LEAST = 1e-9  # seconds and bytes/s that a file may hold


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the files say of the machine beside measurements. ``units``: cores, or GPUs."""

    processor: str
    units: int
    on_gpu: bool
    memory: float
    source: str


@dataclass(kw_only=True)
class Measured:
    """What was measured so far: the cluster's ``gpu`` numbers, kernels, host times, how much slower
    a rank is in company, the seconds of a collective of one rank, and links."""

    machine: Machine
    gpu: dict[str, Any]
    kernels: dict[str, Any]
    host: dict[str, float] = field(default_factory=dict)
    company: float = 1.0
    alone: float = 0.0
    links: list[Row] = field(default_factory=list)


def write(measured: Measured, path: Path) -> tuple[Cluster, Kernels]:
    """Write ``path`` and its kernels beside it, and read both again."""
    beside = path.with_suffix(".kernels.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    _dump(beside, f"How fast kernels run on {measured.machine.processor}.", _kernels(measured))
    _dump(path, f"This machine: {measured.machine.processor}.", _cluster(measured, beside.name))
    load_kernels.cache_clear()  # the file may have been there before
    cluster = load_cluster(path)
    return cluster, load_kernels(cluster.gpu.kernels)


def _dump(path: Path, about: str, data: dict[str, Any]) -> None:
    text = yaml.safe_dump(_short(data), sort_keys=False, default_flow_style=None, width=100)
    path.write_text(f"# {about}\n# Written by distlab calibrate.\n{text}", encoding="utf-8")


def _short(value: Any) -> Any:
    """Numbers with so many digits as a measurement has."""
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _kernels(measured: Measured) -> dict[str, Any]:
    data = {"convolution_columns": list(COLUMNS), **measured.kernels}
    if measured.host:
        phases = {phase: seconds for phase, seconds in measured.host.items() if phase}
        data |= {"host": measured.host[""], "phases": phases}
    names = [f.name for f in dataclasses.fields(Kernels) if f.name not in ("name", *TOLD)]
    said = [name for name in names if name in data]
    chosen = ("load", "growth")  # of a machine that runs nothing else
    own = {name: "chosen" if name in chosen else "measured" for name in said}
    none = "chosen; kernels are as fast as they were when they were measured"
    sources = {name: none if name in chosen else measured.machine.source for name in said}
    return {**data, "sources": sources, "kinds": own}


def _cluster(measured: Measured, kernels: str) -> dict[str, Any]:
    machine = measured.machine
    link, overhead, handling = _link(measured)
    issue = _of(measured.links, ISSUE, LEAST)
    gpu = {"name": machine.processor, **measured.gpu, "memory": machine.memory}
    gpu |= {"kernel": measured.kernels["kernel"], "kernels": kernels}
    data: dict[str, Any] = {
        "nodes": 1,
        "gpus_per_node": machine.units,
        "nics_per_node": 1,
        "processors": 0 if machine.on_gpu else machine.units,
        "gpu": gpu,
        "inside": link,
        "between": link,
        "company": measured.company,
        "launch": 0.0,
        "overhead": overhead,
        "collective_overhead": issue,
        "alone": max(measured.alone - issue, 0.0),
        "handling": 0.0 if machine.on_gpu else handling,
        "curves": _curves(measured),
    }
    kinds = {name: "measured" for name in data if name not in ("curves", "between")}
    kinds |= {"between": "assumed", "oversubscription": "assumed", "launch": "chosen"}
    sources = dict.fromkeys(kinds, machine.source)
    sources |= {
        "between": "as inside; no message leaves one machine",
        "oversubscription": "as inside; no message leaves one machine",
        "launch": "chosen; the curves have it",
    }
    return {**data, "sources": sources, "kinds": kinds}


def _of(links: Sequence[Row], kind: str, otherwise: float) -> float:
    found = [row["seconds"] for row in links if row["kind"] == kind]
    return float(min(found, default=otherwise))


def _messages(measured: Measured) -> tuple[dict[int, float], float]:
    """(seconds of one message by bytes, without issuing it; the seconds of issuing it)."""
    issue = _of(measured.links, "post", 0.0)
    taken = {r["bytes"]: r["seconds"] / 2 for r in measured.links if r["kind"] == MESSAGE}
    return {n: max(t - issue, LEAST) for n, t in sorted(taken.items())}, issue


def _link(measured: Measured) -> tuple[dict[str, float], float, float]:
    """(α and bandwidth, seconds to issue a message, seconds that handling one keeps busy)."""
    taken, issue = _messages(measured)
    if not taken:  # one core, or one GPU
        return {"alpha": LEAST, "bandwidth": measured.gpu["bandwidth"]}, 0.0, 0.0
    least, most = min(taken), max(taken)
    alpha = taken[least]
    bandwidth = (most - least) / max(taken[most] - alpha, LEAST)
    both = next(r["seconds"] for r in measured.links if r["kind"] == BOTH and r["bytes"] == least)
    handling = min(max(both - 2 * issue - alpha, 0.0), alpha)
    return {"alpha": alpha, "bandwidth": bandwidth}, issue, handling


def _curves(measured: Measured) -> list[dict[str, Any]]:
    """Bus bandwidth over size: of messages, and of each collective on each number of ranks."""
    taken, _ = _messages(measured)
    own = {"nodes": 1, "source": measured.machine.source}
    found = []
    if taken:
        speeds = {n: n / t for n, t in taken.items()}
        found.append({"op": MESSAGE, "ranks": 2, **own, "bandwidth": speeds})
    for op in OPERATORS:
        rows = [row for row in measured.links if row["kind"] == op]
        for ranks in sorted({row["ranks"] for row in rows}):
            issue = _of([r for r in measured.links if r["ranks"] == ranks], ISSUE, 0.0)
            speeds = {
                r["bytes"]: _counted(op, ranks) * r["bytes"] / max(r["seconds"] - issue, LEAST)
                for r in rows
                if r["ranks"] == ranks
            }
            found.append({"op": op, "ranks": ranks, **own, "bandwidth": speeds})
    return found


def _counted(op: str, ranks: int) -> float:
    """The share of the bytes that bus bandwidth counts (``hardware/curves.py``)."""
    if op in AS_THEY_ARE:
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks
