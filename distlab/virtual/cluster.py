"""Clusters as data, and the network model: α + n·β on links that transfers occupy one at a time.

A cluster has nodes of ``gpus_per_node`` GPUs; rank r is GPU r mod G of node r div G. A message of n
bytes from one rank to another passes every link on its path; it begins when both ends are ready and
all these links are free, occupies each for n/bandwidth, and is complete α + n/(slowest bandwidth)
after it began:

- inside a node: the sender's GPU port out, the receiver's GPU port in (NVLink, PCIe, memory);
- between nodes: also the network card of either node (shared by the GPUs that have no card of their
  own) and the core of the network, if it is oversubscribed.

A ring all-reduce of N bytes over W ranks, written with messages, thus takes 2(W-1)(α + N/W·β).
A collective of the backend is timed by the closed form of its algorithm (``collectives.py``) and
occupies the ports of its ranks, between nodes their network cards as well. Model: Hockney 1994;
LogGP (Alexandrov et al. 1995) has the same large-message limit.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .collectives import collective_time

if TYPE_CHECKING:
    from .transport import Part

MAY_BE_ZERO = ("launch", "crowded_launch", "overhead", "processors")
FOLDER = Path(__file__).resolve().parents[2] / "clusters"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # twenty times as fast where it was built


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A compute device: FLOP/s by dtype, bytes/s and bytes of its memory, seconds per kernel.

    ``flops`` and ``bandwidth`` are what real kernels reach (``peak_flops`` is the data sheet's, for
    MFU); ``kernel`` is the least time between two kernels.
    """

    name: str
    flops: dict[str, float]
    peak_flops: dict[str, float]
    bandwidth: float
    memory: float
    kernel: float


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
    """What a run is simulated on; see the YAML files in ``clusters/``.

    ``inside``: a GPU's port to the others of its node. ``between``: one network card; a node has
    ``nics_per_node``. ``oversubscription``: bandwidth of all cards over that of the network's core.
    ``processors``: cores of a node that compute for its ranks and move their bytes, two of them
    busy with each message (0: GPUs compute, links move). ``launch``: seconds that a collective of
    the backend needs before its first byte moves. ``crowded_launch``: the same where a
    node's ranks outnumber its processors (0: no difference). ``overhead``: seconds of a rank's own
    time to issue an operator (LogP's o). ``in_network``: the switch in a node can sum,
    with this latency for the whole all-reduce and this bandwidth per GPU.
    """

    name: str
    gpus_per_node: int
    nics_per_node: int
    gpu: Gpu
    inside: Link
    between: Link
    oversubscription: float = 1.0
    processors: int = 0
    launch: float = 0.0
    crowded_launch: float = 0.0
    overhead: float = 0.0
    in_network: Link | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def node(self, rank: int) -> int:
        """The node that ``rank`` is on."""
        return rank // self.gpus_per_node

    def crowding(self, ranks: int) -> float:
        """How much slower each rank computes because ``ranks`` of a node share its processors."""
        on_node = min(ranks, self.gpus_per_node)
        return max(1.0, on_node / self.processors) if self.processors else 1.0

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
        return _cluster({"name": path.stem, **data})
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a cluster description: {error}") from None


def _cluster(data: dict[str, Any]) -> Cluster:
    """Build a cluster; every number must say where it comes from."""
    known = {f.name for f in dataclasses.fields(Cluster)}
    unknown = set(data) - known
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    data = {k: _number(v) for k, v in data.items()}
    for name in ("gpus_per_node", "nics_per_node", "processors"):
        data[name] = int(data.get(name, 0))
    gpu = Gpu(**{k: _number(v) for k, v in data["gpu"].items()})
    links = {k: Link(**data[k]) for k in ("inside", "between", "in_network") if k in data}
    cluster = Cluster(**{**data, "gpu": gpu, **links})
    for name, value in numbers(cluster):
        if not value > 0 and name not in MAY_BE_ZERO:
            raise ValueError(f"{name} must be positive, got {value}")
        if not value:
            continue
        if name not in cluster.sources and name.split(".")[0] not in cluster.sources:
            raise ValueError(f"sources says nothing about {name}")
    return cluster


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


@dataclass(eq=False)
class Route:
    """α, (link, seconds per byte) of every link on the way, and the bytes that went it."""

    alpha: float
    links: list[tuple[Any, float]]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.beta = max(beta for _, beta in self.links)


class Network:
    """The links of one run: when each is free again, and how many bytes passed it."""

    def __init__(
        self, cluster: Cluster, algorithm: str = "backend", slow: dict[int, float] | None = None
    ) -> None:
        self.cluster, self.algorithm = cluster, algorithm
        self.slow = slow or {}  # rank: factor by which its links are slower
        self.free: dict[Any, float] = {}
        self.bytes: Counter[str] = Counter()
        self._paths: dict[tuple[int, int], Route] = {}

    def path(self, source: int, target: int) -> Route:
        """The way of a message from ``source`` to ``target``."""
        found = self._paths.get((source, target))
        if found is None:
            found = self._paths[source, target] = Route(*self._path(source, target))
        return found

    def _path(self, source: int, target: int) -> tuple[float, list[tuple[Any, float]]]:
        c = self.cluster
        factor = max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        port = c.inside.beta * factor
        ends: list[tuple[Any, float]] = [(("out", source), port), (("in", target), port)]
        if c.processors:
            ends.append((("processors", c.node(source)), port * 2 / c.processors))
        if c.node(source) == c.node(target):
            return c.inside.alpha * factor, ends
        card = c.between.beta * factor
        links = [(("nic out", c.nic(source)), card), (("nic in", c.nic(target)), card)]
        if c.oversubscription > 1:
            node = c.between.beta * c.oversubscription / c.nics_per_node
            links += [(("uplink", c.node(source)), node), (("downlink", c.node(target)), node)]
        return c.between.alpha * factor, ends + links

    def reserve(self, parts: list[Part], ready: float) -> None:
        """Give the transfer its place on the links and set when each part is complete."""
        if parts[0].op in ("send", "recv"):
            self._message(parts, ready)
        else:
            self._collective(parts, ready)

    def _message(self, parts: list[Part], ready: float) -> None:
        send, receive = parts
        nbytes = send.nbytes or receive.nbytes
        path, free, start = self.path(send.rank.index, receive.rank.index), self.free, ready
        if send.op != "send":
            path = self.path(receive.rank.index, send.rank.index)
        for link, _ in path.links:
            since = free.get(link, 0.0)
            if since > start:
                start = since
        for link, beta in path.links:
            free[link] = start + nbytes * beta
        path.nbytes += nbytes
        send.finish = receive.finish = start + path.alpha + nbytes * path.beta

    def traffic(self) -> dict[str, int]:
        """Bytes by kind of link."""
        total = Counter(self.bytes)
        for path in self._paths.values():
            for link, _ in path.links:
                total[link[0]] += path.nbytes
        return dict(total)

    def _collective(self, parts: list[Part], ready: float) -> None:
        group = parts[0].group
        inside = len({self.cluster.node(rank) for rank in group}) == 1
        ports: set[Any] = {(way, rank) for rank in group for way in ("out", "in")}
        if not inside:
            ports |= {(f"nic {way}", self.cluster.nic(r)) for r in group for way in ("out", "in")}
        start = max(ready, *(self.free.get(port, 0.0) for port in ports))
        nbytes = max(part.nbytes for part in parts)
        took = collective_time(parts[0].op, nbytes, group, self.cluster, self.algorithm)
        took *= max((self.slow.get(rank, 1.0) for rank in group), default=1.0)
        for port in ports:
            self.free[port] = start + took
        for part in parts:
            part.finish = start + took
            self.bytes["out" if inside else "nic out"] += part.describe().sent
