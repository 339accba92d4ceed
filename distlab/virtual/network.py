"""The links of one run: when each is free again, and how many bytes passed it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..hardware.clusters import Cluster
from ..hardware.collectives import collective_time, message_factor
from .fold import Fold
from .part import Part


@dataclass(eq=False, slots=True)
class Ports:
    """Ports that were always occupied together: one time at which all of them are free.

    ``users``: the lists of classes that have this one.
    """

    ports: set[Any]
    free: float = 0.0
    users: list[list[Ports]] = field(default_factory=list)


class PortClasses:
    """The ports of one run, in as few classes as the groups and messages so far allow."""

    def __init__(self) -> None:
        self._of: dict[Any, Ports] = {}

    def of(self, ports: Iterable[Any]) -> list[Ports]:
        """The classes that make up ``ports``; they are kept up to date. Costs O(ports)."""
        parts: dict[Ports | None, set[Any]] = defaultdict(set)
        for port in ports:
            parts[self._of.get(port)].add(port)
        found = [self._part(known, wanted) for known, wanted in parts.items()]
        for each in found:
            each.users.append(found)
        return found

    def _part(self, known: Ports | None, wanted: set[Any]) -> Ports:
        """The class of ``wanted``, which may be a part of a class: then that is divided."""
        if known is not None and len(known.ports) == len(wanted):
            return known
        part = Ports(wanted) if known is None else Ports(wanted, known.free, [*known.users])
        if known is not None:
            known.ports -= wanted
            for user in known.users:
                user.append(part)
        self._of |= dict.fromkeys(wanted, part)
        return part


@dataclass(eq=False)
class Route:
    """α, (kind of link, its port, seconds per byte) of every link on the way, and the bytes that
    went this way."""

    alpha: float
    links: list[tuple[str, Ports, float]]
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.beta = max(beta for _, _, beta in self.links)
        self.nodes = 2 if any(kind == "nic out" for kind, _, _ in self.links) else 1


@dataclass(eq=False)
class Members:
    """A group: its ports, whether it is on one node, and the seconds of each operator and size."""

    group: tuple[int, ...]
    ports: list[Ports]
    inside: bool
    seconds: dict[tuple[str, int], float] = field(default_factory=dict)


class Network:
    """The links of one run: when each is free again, and how many bytes passed it.

    ``fold``: ranks of one role share the state of their ports, for it is the same.
    """

    def __init__(
        self,
        cluster: Cluster,
        fold: Fold,
        algorithm: str = "backend",
        slow: dict[int, float] | None = None,
    ) -> None:
        self.cluster, self.fold, self.algorithm = cluster, fold, algorithm
        self.slow = slow or {}  # rank: factor by which its links are slower
        self.classes = PortClasses()
        self.bytes: Counter[str] = Counter()
        self._paths: dict[tuple[int, int], Route] = {}
        self.messages_measured = any(curve.op == "send" for curve in cluster.curves)
        self._groups: dict[int, Members] = {}  # by the identity of the group's tuple
        self._cards: dict[tuple[int, int], tuple[int, ...]] = {}

    def path(self, source: int, target: int) -> Route:
        """The way of a message from ``source`` to ``target``."""
        found = self._paths.get((source, target))
        if found is None:
            alpha, links = self._path(source, target)
            ways = [(link[0], self.classes.of([link])[0], beta) for link, beta in links]
            found = self._paths[source, target] = Route(alpha, ways)
        return found

    def _path(self, source: int, target: int) -> tuple[float, list[tuple[Any, float]]]:
        c = self.cluster
        factor = max(self.slow.get(source, 1.0), self.slow.get(target, 1.0))
        port = c.inside.beta * factor
        ends: list[tuple[Any, float]] = [(("out", source), port), (("in", target), port)]
        if c.processors:
            ends.append((("processors", self._node(source)), port * 2 / c.processors))
        if c.node(source) == c.node(target):
            return c.inside.alpha * factor, ends
        card = c.between.beta * factor
        links: list[tuple[Any, float]] = [
            (("nic out", self._card(source)), card),
            (("nic in", self._card(target)), card),
        ]
        if c.oversubscription > 1:
            node = c.between.beta * c.oversubscription / c.nics_per_node
            links.append((("uplink", self._node(source)), node))
            links.append((("downlink", self._node(target)), node))
        return c.between.alpha * factor, ends + links

    def _card(self, rank: int) -> tuple[int, ...]:
        """The roles of the ranks that share the card of ``rank``: it is as busy as the cards of the
        same roles."""
        card = self.cluster.nic(rank)
        found = self._cards.get(card)
        if found is None:
            local = [r for r in self._local(rank) if self.cluster.nic(r) == card]
            found = self._cards[card] = self.fold.roles(local)
        return found

    def _node(self, rank: int) -> tuple[int, ...]:
        """The roles of the ranks on the node of ``rank``."""
        return self.fold.roles(self._local(rank))

    def _local(self, rank: int) -> range:
        local = self.cluster.gpus_per_node
        begin = self.cluster.node(rank) * local
        return range(begin, min(begin + local, len(self.fold.of)))

    def reserve(self, parts: list[Part], ready: float) -> None:
        """Give the transfer its time on the links and set when each part is complete."""
        if parts[0].op in ("send", "recv"):
            self._message(parts, ready)
        else:
            self._collective(parts, ready)

    def _message(self, parts: list[Part], ready: float) -> None:
        send, receive = parts
        nbytes = send.nbytes or receive.nbytes
        path, start = self.path(send.rank.index, receive.rank.index), ready
        if send.op != "send":
            path = self.path(receive.rank.index, send.rank.index)
        slower = message_factor(nbytes, self.cluster, path.nodes) if self.messages_measured else 1.0
        for _, port, _ in path.links:
            if port.free > start:
                start = port.free
        for kind, port, beta in path.links:
            port.free = start + nbytes * beta * slower
            if kind == "processors":
                port.free += self.cluster.handling
        path.nbytes += nbytes
        send.finish = receive.finish = start + (path.alpha + nbytes * path.beta) * slower

    def traffic(self) -> dict[str, int]:
        """Bytes by kind of link."""
        total = Counter(self.bytes)
        for (source, _), path in self._paths.items():
            for kind, _, _ in path.links:
                total[kind] += path.nbytes * self.fold.times[source]
        return dict(total)

    def _collective(self, parts: list[Part], ready: float) -> None:
        group = parts[0].group
        members = self._groups.get(id(group))
        if members is None:
            members = self._groups[id(group)] = self._members(group)
        start = max(ready, *(port.free for port in members.ports))
        took = self._seconds(members, parts[0].op, max(part.nbytes for part in parts))
        for port in members.ports:
            port.free = start + took
        kind = "out" if members.inside else "nic out"
        for part in parts:
            part.finish = start + took
            self.bytes[kind] += part.describe().sent * self.fold.times[part.rank.index]

    def _members(self, group: tuple[int, ...]) -> Members:
        inside = len({self.cluster.node(rank) for rank in group}) == 1
        roles = self.fold.roles(group)
        ports: set[Any] = {(way, role) for role in roles for way in ("out", "in")}
        if not inside:
            cards = {self._card(rank) for rank in group}
            ports |= {(f"nic {way}", card) for card in cards for way in ("out", "in")}
        return Members(group, self.classes.of(ports), inside)

    def _seconds(self, members: Members, op: str, nbytes: int) -> float:
        took = members.seconds.get((op, nbytes))
        if took is None:
            took = collective_time(op, nbytes, members.group, self.cluster, self.algorithm)
            took *= max((self.slow.get(rank, 1.0) for rank in members.group), default=1.0)
            members.seconds[op, nbytes] = took
        return took
