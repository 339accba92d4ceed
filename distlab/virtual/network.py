"""The links of one run: when each is free again, and how many bytes passed it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..hardware.clusters import Cluster
from ..hardware.collectives import collective_time, message_factor
from .part import Part


@dataclass(eq=False)
class Route:
    """α, (link, seconds per byte) of every link on the way, and the bytes that went this way."""

    alpha: float
    links: list[tuple[Any, float]]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.beta = max(beta for _, beta in self.links)
        self.nodes = 2 if any(link[0] == "nic out" for link, _ in self.links) else 1


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
        self.messages_measured = any(curve.op == "send" for curve in cluster.curves)

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
        links: list[tuple[Any, float]] = [
            (("nic out", c.nic(source)), card),
            (("nic in", c.nic(target)), card),
        ]
        if c.oversubscription > 1:
            node = c.between.beta * c.oversubscription / c.nics_per_node
            links += [(("uplink", c.node(source)), node), (("downlink", c.node(target)), node)]
        return c.between.alpha * factor, ends + links

    def reserve(self, parts: list[Part], ready: float) -> None:
        """Give the transfer its time on the links and set when each part is complete."""
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
        slower = message_factor(nbytes, self.cluster, path.nodes) if self.messages_measured else 1.0
        for link, beta in path.links:
            free[link] = start + nbytes * beta * slower
        if self.cluster.handling:
            free["processors", self.cluster.node(send.rank.index)] += self.cluster.handling
        path.nbytes += nbytes
        send.finish = receive.finish = start + (path.alpha + nbytes * path.beta) * slower

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
