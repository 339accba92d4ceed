"""The sizes of one prediction, drawn from a seed, and the machine that it is about."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...hardware.clusters import Cluster, Link, load_cluster

NAMED = ("dgx-h100", "p4d-a100", "ethernet-v100")
QUICK = 1e15  # bytes per second: a link that takes no time for a byte
SHORT = 1e-15  # seconds: a link without latency


@dataclass(frozen=True)
class Case:
    """Sizes by name (``W`` ranks among them) on a named cluster.

    ``spread``: every rank has a node for itself, so that all messages take the network; else all
    ranks are on one node. ``nodes`` > 1: the ranks are divided over so many nodes. ``quick``: a
    byte takes no time.
    """

    exercise: str
    cluster: str
    sizes: dict[str, int]
    spread: bool = False
    nodes: int = 1
    quick: bool = False

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    @property
    def machine(self) -> Cluster:
        """The cluster as it is used here; its switches do not sum."""
        named = dataclasses.replace(load_cluster(self.cluster), in_network=None)
        if self.quick:
            links = {
                "inside": _without_bytes(named.inside),
                "between": _without_bytes(named.between),
            }
            named = dataclasses.replace(named, **links)  # type: ignore[arg-type]
        if self.spread:
            return dataclasses.replace(named, gpus_per_node=1, nics_per_node=1)
        each = -(-self["W"] // self.nodes)
        return dataclasses.replace(named, gpus_per_node=each, nics_per_node=each)

    def doubled(self, quick: bool = False) -> Case:
        """The same with twice as many ranks."""
        sizes = self.sizes | {"W": 2 * self["W"]}
        return dataclasses.replace(self, sizes=sizes, quick=quick)

    @property
    def link(self) -> Link:
        """The link between two ranks; of several nodes the one between them."""
        return self.machine.between if self.spread or self.nodes > 1 else self.machine.inside

    @property
    def alpha(self) -> float:
        """Seconds per message."""
        return self.link.alpha

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return self.link.beta

    @property
    def described(self) -> str:
        """The machine in words, with the numbers that a prediction needs."""
        c, w = self.machine, self["W"]
        named = load_cluster(self.cluster).gpu.name
        if w == 1:
            return f"one {named} of {self.cluster}"
        if self.nodes > 1:
            return (
                f"{self.nodes} nodes of {self.cluster} ({named}), {w // self.nodes} GPUs each with "
                f"a network card of its own: inside a node {link_in_words(c.inside)}, "
                f"between nodes {link_in_words(c.between)}; {_launch(c)}"
            )
        where = (
            f"{w} nodes of {self.cluster}, one {named} each"
            if self.spread
            else (f"one node of {self.cluster} with {w} {named}")
        )
        return f"{where}: {link_in_words(self.link)}; {_launch(c)}"

    def counting(self) -> Cluster:
        """A machine on which each message takes one second and a byte nothing."""
        return self._probe(Link(alpha=1.0, bandwidth=QUICK))

    def weighing(self) -> Cluster:
        """A machine on which each byte takes one second and a message nothing."""
        return self._probe(Link(alpha=SHORT, bandwidth=1.0))

    def crossing(self) -> Cluster:
        """A machine on which only a byte between nodes takes time: one second."""
        return self._probe(Link(alpha=SHORT, bandwidth=QUICK), Link(alpha=SHORT, bandwidth=1.0))

    def sharing(self) -> Cluster:
        """A machine whose ranks share one wire, on which each byte takes one second."""
        ranks = self["W"]
        shared = self._probe(Link(alpha=SHORT, bandwidth=1.0))
        return dataclasses.replace(shared, gpus_per_node=ranks, nics_per_node=ranks, processors=2)

    def launching(self) -> Cluster:
        """A machine on which each collective takes one second to begin, and nothing else."""
        free = self._probe(Link(alpha=SHORT, bandwidth=QUICK))
        return dataclasses.replace(free, launch=1.0)

    def _probe(self, inside: Link, between: Link | None = None) -> Cluster:
        return dataclasses.replace(
            self.machine,
            inside=inside,
            between=between or inside,
            launch=0.0,
            oversubscription=1.0,
        )


def _without_bytes(link: Link) -> Link:
    return dataclasses.replace(link, bandwidth=QUICK)


def link_in_words(link: Link) -> str:
    """Latency and bandwidth of a link."""
    return f"α = {link.alpha * 1e6:g} µs, 1/β = {link.bandwidth / 1e9:g} GB/s"


def _launch(c: Cluster) -> str:
    return f"a collective of the backend begins {c.launch * 1e6:g} µs after its call"


def machine_of(draw: random.Random) -> tuple[str, bool]:
    """(a named cluster, whether each rank has a node for itself)."""
    return draw.choice(NAMED), draw.random() < 0.5


def draws(
    exercise: str, worlds: Sequence[int] = (2, 3, 4, 6, 8), **choices: Sequence[int]
) -> Callable[[random.Random], Case]:
    """Draws of W ranks, and of one of the ``choices`` for each other size."""

    def draw(random_: random.Random) -> Case:
        cluster, spread = machine_of(random_)
        sizes = {"W": random_.choice(worlds)}
        sizes |= {name: random_.choice(values) for name, values in choices.items()}
        return Case(exercise, cluster, sizes, spread)

    return draw
