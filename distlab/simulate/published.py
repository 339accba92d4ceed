"""Published measurements beside predictions, and what they say of a prediction's error.

``published/measured.csv`` has the measurements. ``run`` is how a row is simulated: the fields of a
``Plan``, or a collective. ``reads``: the memory that the row tells, the state before a step or the
activations that are kept for backward. ``line_rate``: bytes/s of a card, of which the row is a
share. ``rests_on`` says what of the data files comes from the row itself.
``published/predicted.json`` has the predictions (``python -m benchmarks.predictions``), each with a
digest of what it was made from.

Rows are of one *kind* if they have the same GPU, the same family of models, and share the model in
the same way; collectives, if they stay inside a node or not.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..course.catalogue import root
from ..hardware.clusters import Cluster, Gpu, load_cluster
from ..hardware.collectives import collective_time
from ..hardware.curves import Curve
from ..hardware.kernels import load_kernels
from .eight_bits import EIGHT
from .models import model_spec

FOLDER = root() / "published"
FILE, RECORD = FOLDER / "measured.csv", FOLDER / "predicted.json"
ROUNDS = {"all_reduce": 2}  # bus bandwidth counts the bytes of an all-reduce twice
SHARDED = ("fsdp", "hybrid", "zero1", "zero2")
# what descriptions got later: with these values it changes no prediction
LATER: dict[str, Any] = {
    "company": 0.0, "nodes": 0, "collective_overhead": 0.0, "handling": 0.0,
    "alone": 0.0, "phases": {}, "cached": {},
}  # fmt: skip
NO_SOURCES = ("name", "sources", "kinds")


@dataclass(frozen=True)
class Kind:
    """What rows of one kind have in common; ``way``: alone, replicated, sharded or split."""

    gpu: str
    family: str
    way: str

    def __str__(self) -> str:
        return f"{self.gpu}, {self.family}, {self.way}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One published measurement; ``run`` is empty if it can't be simulated: ``why_not``."""

    id: str
    system: str
    what: str
    config: str
    value: float
    unit: str
    source: str
    run: dict[str, Any]
    rests_on: str
    why_not: str

    @property
    def is_collective(self) -> bool:
        return "collective" in self.run

    @property
    def is_training(self) -> bool:
        """Whether the row tells the time of a training step, or its rate."""
        return not self.is_collective and not self.is_memory

    @property
    def is_memory(self) -> bool:
        return "reads" in self.run

    @property
    def kind(self) -> Kind:
        """The kind of the row, which can be simulated."""
        gpus = self.run["gpus"]
        if self.is_memory:
            return Kind("any", "memory", "of a GPU")
        if self.is_collective:
            inside = gpus <= load_cluster(self.run["cluster"]).gpus_per_node
            return Kind("any", "collective", "inside a node" if inside else "between nodes")
        strategy = self.run.get("strategy", "ddp")
        ranks = self.run.get("tensor", 1) * self.run.get("pipeline", 1)
        return kind_of(self.run["cluster"], self.run["model"], strategy, gpus, ranks)

    @property
    def project(self) -> str:
        """The project or paper that the row is from."""
        words = self.source.removeprefix("github ").removeprefix("huggingface.co/spaces/").split()
        return "arXiv " + words[1] if words[0] == "arXiv" else words[0].partition("#")[0]


def kind_of(
    cluster: str, model: str, strategy: str, gpus: int, model_ranks: int = 1, roofline: bool = False
) -> Kind:
    """The kind of a training run; GPUs with the same measured kernels are one GPU."""
    gpu = load_cluster(cluster).gpu
    if gpus == 1:
        way = "alone"
    elif model_ranks > 1:
        way = "split"
    else:
        way = "sharded" if strategy in SHARDED else "replicated"
    shared = not roofline and not gpu.kernels.endswith((".yaml", ".yml"))
    name = (gpu.kernels.upper() if shared else "") or gpu.name
    return Kind(name, model_spec(model).family, way)


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(map(_row, csv.DictReader(file)))


def _row(entry: dict[str, str]) -> Row:
    read = {"value": float(entry["value"]), "run": json.loads(entry["run"] or "{}")}
    fields: dict[str, Any] = {**entry, **read}
    return Row(**fields)


@functools.cache
def kinds() -> dict[Row, Kind]:
    """The training runs whose time is recorded, each with its kind."""
    trained = (row for row in rows() if row.id in recorded() and row.is_training)
    return {row: row.kind for row in trained}


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """The predictions by row, as they were recorded."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def digest(row: Row) -> str:
    """A digest of what a prediction is made from: the run, the cluster and its kernels."""
    cluster = load_cluster(row.run["cluster"])
    if not row.run.get("fp8"):
        cluster = dataclasses.replace(cluster, gpu=_without_eight_bits(cluster.gpu))
    made_from = [row.run, _numbers(cluster)]
    if cluster.gpu.kernels:
        made_from.append(_numbers(load_kernels(cluster.gpu.kernels)))
    text = json.dumps(made_from, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_eight_bits(gpu: Gpu) -> Gpu:
    """The GPU as a run without fp8 sees it."""
    flops, peaks = dict(gpu.flops), dict(gpu.peak_flops)
    for rates in (flops, peaks):
        rates.pop(EIGHT, None)
    return dataclasses.replace(gpu, flops=flops, peak_flops=peaks)


def _numbers(data: Any) -> dict[str, Any]:
    kept = {k: v for k, v in dataclasses.asdict(data).items() if k not in NO_SOURCES}
    return {k: v for k, v in kept.items() if k not in LATER or v != LATER[k]}


def predict_collective(row: Row) -> float:
    """The prediction in the row's unit; a point of a curve is left out of the curve."""
    run = row.run
    cluster, ranks, op = load_cluster(run["cluster"]), run["gpus"], run["collective"]
    nbytes = run["nbytes"]
    cluster = without(cluster, op, ranks, nbytes)
    # nccl-tests counts all bytes, and each rank passes in its shard
    given = nbytes / ranks if op == "all_gather" else nbytes
    seconds = collective_time(op, given, tuple(range(ranks)), cluster, run["algorithm"])
    bus = ROUNDS.get(op, 1) * (ranks - 1) / ranks * nbytes / seconds
    if row.unit == "ratio":
        return bus / (cluster.nics_per_node * run["line_rate"])
    return bus / 1e9


def without(cluster: Cluster, op: str, ranks: int, nbytes: int) -> Cluster:
    """The cluster, whose curve of the operator on so many ranks does not have this size."""

    def shorter(curve: Curve) -> Curve:
        if (curve.op, curve.ranks) != (op, ranks):
            return curve
        rest = {size: speed for size, speed in curve.bandwidth.items() if size != nbytes}
        return dataclasses.replace(curve, bandwidth=rest)

    curves = tuple(c for c in map(shorter, cluster.curves) if c.bandwidth)
    return dataclasses.replace(cluster, curves=curves)


# -- what the errors say ---------------------------------------------------------------------------
SMALL = 5  # fewer runs than these have no 9 in 10


@dataclass(frozen=True)
class Likely:
    """How far off predictions like one were: ``share`` in 9 of 10 of ``runs`` published runs, or
    in the worst of a few. None if there is no such run."""

    share: float | None
    runs: int
    words: str


def error_of(row: Row) -> float:
    """Predicted over published, less 1. A row that constants were fitted to counts with the
    constants that come out without its model."""
    entry = recorded()[row.id]
    return float(entry.get("held_out", entry["predicted"])) / row.value - 1


def likely(kind: Kind) -> Likely:
    """The error to expect of a prediction of this kind."""
    known = kinds()
    if kind in known.values():
        return of_kind(kind)
    near = [r for r, k in known.items() if (k.gpu, k.family) == (kind.gpu, kind.family)]
    if near:
        ways = ", ".join(sorted({known[row].way for row in near}))
        words = f"of {kind.family}s on {kind.gpu}, {ways}; none is {kind.way}"
        return _likely(near, words)
    return of_kind(kind)


def of_kind(kind: Kind) -> Likely:
    """The same, from published runs of exactly this kind."""
    alike = [row for row, other in kinds().items() if other == kind]
    if alike:
        return _likely(alike, f"like this one ({kind})")
    return Likely(None, 0, f"no published run is like this one ({kind}): the error is unknown")


def _likely(alike: Sequence[Row], words: str) -> Likely:
    errors = [abs(error_of(row)) for row in alike]
    runs = "1 published run" if len(errors) == 1 else f"{len(errors)} published runs"
    if len(errors) < SMALL:
        return Likely(max(errors), len(errors), f"the worst of {runs} {words}")
    return Likely(nine_in_ten(errors), len(errors), f"9 in 10 of {runs} {words}")


def nine_in_ten(errors: Sequence[float]) -> float:
    """The least of these that at least nine in ten of them do not exceed."""
    return sorted(errors)[math.ceil(0.9 * len(errors)) - 1]
