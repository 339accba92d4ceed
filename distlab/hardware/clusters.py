"""Clusters as data, and the network model: α + n·β on links that transfers occupy one at a time.

A cluster has nodes of G = ``gpus_per_node`` GPUs. Rank r is number r mod G on node r div G. A
message of n bytes from one rank to another passes every link on its path. It begins when both ends
are ready and all these links are free. It occupies each link for n/bandwidth seconds, and is
complete α + n/(slowest bandwidth) seconds after its begin:

- inside a node: the sender's GPU port out, the receiver's GPU port in (NVLink, PCIe, memory);
- between nodes: also the network card of either node and the core of the network, if it is
  oversubscribed. GPUs without a card of their own share one.

A ring all-reduce of N bytes over W ranks, written with messages, thus takes 2(W-1)(α + N/W·β). A
collective of the backend is timed by the closed form of its algorithm (``collectives.py``). It
occupies the ports of its ranks, and between nodes their network cards as well. Model: Hockney 1994;
LogGP (Alexandrov et al. 1995) has the same large-message limit.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .curves import Curve

KINDS = ("measured", "vendor", "assumed", "chosen", "fitted")
MAY_BE_ZERO = (
    "launch", "crowded_launch", "overhead", "collective_overhead", "handling", "processors",
    "nodes", "company", "alone",
)  # fmt: skip
FOLDER = Path(__file__).resolve().parents[2] / "clusters"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C is twenty times as fast


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A compute device: FLOP/s by dtype, bytes/s and bytes of its memory, seconds per kernel.

    Real kernels reach ``flops`` and ``bandwidth``. ``peak_flops`` is the data sheet's number, for
    MFU. ``kernel`` is the least time between two kernels. ``kernels`` names the file of measured
    constants in ``clusters/kernels/`` ("": the roofline of these numbers alone).
    """

    name: str
    flops: dict[str, float]
    peak_flops: dict[str, float]
    bandwidth: float
    memory: float
    kernel: float
    kernels: str = ""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Latency ``alpha`` in seconds per message and ``bandwidth`` in bytes/s, each direction."""

    alpha: float
    bandwidth: float

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 1 / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster on which a run is simulated; see the YAML files in ``clusters/``.

    ``inside``: a GPU's port to the others of its node. ``between``: one network card; a node has
    ``nics_per_node``. ``oversubscription``: bandwidth of all cards over that of the network's core.
    ``processors``: cores of a node that compute for its ranks and move their bytes. Two cores are
    busy with each message (0: GPUs compute, and links move bytes). ``company``: how many times
    longer a rank computes if all processors of its node do (0: as long as alone). ``nodes``: how
    many there are (0: any number). ``launch``: seconds that a collective of the backend needs
    before its first byte moves. ``crowded_launch``: the same where a node's ranks outnumber its
    processors (0: no difference). ``overhead``: seconds of a rank's own time to issue a message
    (LogP's o), and ``collective_overhead`` those for a collective (0: as for a message). ``alone``:
    seconds of a collective of one rank, beside these. ``handling``: seconds for which a message
    keeps the processors busy, beside those for its bytes. ``in_network``: the switch in a node can
    sum. The value has the latency of the whole all-reduce and the bandwidth per GPU. ``curves``:
    measured bandwidth of messages and of the backend's collectives over size. ``sources`` and
    ``kinds`` say where each number is from: ``KINDS``.
    """

    name: str
    gpus_per_node: int
    nics_per_node: int
    gpu: Gpu
    inside: Link
    between: Link
    oversubscription: float = 1.0
    processors: int = 0
    company: float = 0.0
    nodes: int = 0
    launch: float = 0.0
    crowded_launch: float = 0.0
    overhead: float = 0.0
    collective_overhead: float = 0.0
    alone: float = 0.0
    handling: float = 0.0
    in_network: Link | None = None
    curves: tuple[Curve, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def overheads(self) -> tuple[float, float]:
        """A rank's own seconds to issue a collective, and a message."""
        return self.collective_overhead or self.overhead, self.overhead

    def node(self, rank: int) -> int:
        """The node that ``rank`` is on."""
        return rank // self.gpus_per_node

    def crowding(self, ranks: int) -> float:
        """How much slower each rank computes because ``ranks`` of a node compute beside it."""
        on_node = min(ranks, self.gpus_per_node)
        if not self.processors:
            return 1.0
        others = min(on_node, self.processors) - 1
        beside = 1 + ((self.company or 1.0) - 1) * others / max(self.processors - 1, 1)
        return beside * max(1.0, on_node / self.processors)

    def crowded(self, ranks: int) -> bool:
        """Whether so many ranks have fewer processors on a node than ranks."""
        return min(ranks, self.gpus_per_node) > self.processors > 0

    def why_not(self, ranks: int) -> str:
        """Why nobody can predict a run on so many ranks; empty if it can be simulated."""
        most = self.nodes * self.gpus_per_node
        if not (most and ranks > most) and not self.crowded(ranks):
            return ""
        unit = "cores" if self.processors else "GPUs"
        has = self.processors or most
        waits = "; ranks that share a core wait for time slices, which nobody can predict"
        return (
            f"{self.name} has {has} {unit}, which is fewer than {ranks} ranks"
            f"{waits if self.processors else ''}: give --gpus {has} or less"
        )

    def nic(self, rank: int) -> tuple[int, int]:
        """The network card that ``rank`` uses: (node, number on the node)."""
        local = rank % self.gpus_per_node
        return self.node(rank), local * self.nics_per_node // self.gpus_per_node


def names() -> list[str]:
    """The clusters that come with the course."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_cluster(name: str | Path) -> Cluster:
    """Read ``clusters/<name>.yaml`` or a file of one's own.

    Raises ValueError with the nearest name, or with the field that is missing or wrong.
    """
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(str(name), names(), 1, 0.3)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no cluster {name!r}{guess} There are: {', '.join(names())}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), LOADER)
        return _beside(path, _cluster({"name": path.stem, **data}))
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a cluster description: {error}") from None


def _beside(path: Path, cluster: Cluster) -> Cluster:
    """A file of kernels that a cluster's file names lies in the same folder."""
    name = cluster.gpu.kernels
    if not name.endswith((".yaml", ".yml")):
        return cluster
    gpu = dataclasses.replace(cluster.gpu, kernels=str(path.parent / name))
    return dataclasses.replace(cluster, gpu=gpu)


def _cluster(data: dict[str, Any]) -> Cluster:
    """Build a cluster; every number must say where it comes from."""
    known = {f.name for f in dataclasses.fields(Cluster)}
    unknown = set(data) - known
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    curves = tuple(_curve(curve) for curve in data.pop("curves", ()))
    data = {k: _number(v) for k, v in data.items()} | {"curves": curves}
    for name in ("gpus_per_node", "nics_per_node", "processors", "nodes"):
        data[name] = int(data.get(name, 0))
    gpu = Gpu(**{k: _number(v) for k, v in data["gpu"].items()})
    links: dict[str, Link] = {
        k: Link(**data[k]) for k in ("inside", "between", "in_network") if k in data
    }
    fields: dict[str, Any] = {**data, "gpu": gpu, **links}
    cluster = Cluster(**fields)
    for name, value in numbers(cluster):
        if not value > 0 and name not in MAY_BE_ZERO:
            raise ValueError(f"{name} must be positive, got {value}")
        if not value:
            continue
        if name not in cluster.sources and name.split(".")[0] not in cluster.sources:
            raise ValueError(f"sources says nothing about {name}")
    return cluster


def _curve(data: dict[str, Any]) -> Curve:
    counts = {name: int(data[name]) for name in ("ranks", "nodes")}
    return Curve(**data | counts | {"bandwidth": _number(data["bandwidth"])})


def numbers(cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Every number of the description with its dotted name."""
    for f in dataclasses.fields(Cluster):
        value = getattr(cluster, f.name)
        if isinstance(value, (Gpu, Link)):
            for inner in dataclasses.fields(value):
                number = getattr(value, inner.name)
                if isinstance(number, dict):
                    yield from ((f"{f.name}.{inner.name}", n) for n in number.values())
                elif not isinstance(number, str):
                    yield f"{f.name}.{inner.name}", number
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f.name, value


def _number(value: Any) -> Any:
    """YAML reads ``1e12`` as a string."""
    if isinstance(value, dict):
        return {k: _number(v) for k, v in value.items()}
    try:
        return float(value)
    except ValueError:
        return value
