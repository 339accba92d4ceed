"""How virtual ranks are run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from ..hardware.clusters import Cluster, load_cluster
from ..hardware.kernels import Kernels, load_kernels
from ..ranks.options import RunOptions
from .rules import GLOO, rules_named


@dataclass(frozen=True, kw_only=True)
class VirtualOptions(RunOptions):
    """How virtual ranks are run.

    ``cluster``: a description or the name of one; its α and β make the virtual time. ``seed``: None
    simulates in the order of virtual time; a number explores one adversarial interleaving, and
    ``seeds`` as many from there on. The first that fails is raised, and names its seed. Otherwise
    the results are those of an interleaving that differs from the first, if there is any; the
    caller judges them. ``each``: seconds for one interleaving of one world; ``timeout`` is for all.
    ``compute``: how a rank's clock moves between communications: ``"none"``, ``"roofline"``
    (counted FLOPs and bytes on the cluster's GPU), ``"kernels"`` (the same, but the times of
    measured kernels for a GPU that has them) or ``"measured"`` (this machine's CPU time).
    ``algorithm``: how the backend's all-reduce is timed. ``lose``: (rank, n). That rank disappears
    at its n-th communication, and messages between it and other ranks raise RuntimeError there,
    like gloo's. ``survivable``: the run does not fail of it, and the lost rank's result is None.
    ``slow_ranks``, ``slow_links``: factors by rank. ``base_seed`` seeds the ranks' random state.
    ``patience``: the virtual time beyond which a rank's sleep ends the run as a hang. ``roles``:
    for each rank the one that runs in its place (none: each rank runs itself). Ranks of one role do
    the same: their parts of a collective come with the one that runs, and their results are None.
    ``rules``: the rules of issue, ``"gloo"``, the name of one of ``rules.NCCL``, or ``"nccl"`` for
    each of these in turn, like interleavings.
    """

    cluster: Cluster | str | Path = "laptop"
    seed: int | None = None
    seeds: int = 1
    base_seed: int = 0
    each: float = math.inf
    compute: str = "none"
    algorithm: str = "backend"
    lose: tuple[int, int] | None = None
    survivable: bool = False
    slow_ranks: dict[int, float] = field(default_factory=dict)
    slow_links: dict[int, float] = field(default_factory=dict)
    patience: float = math.inf
    roles: tuple[int, ...] = ()
    rules: str = GLOO.name

    @property
    def modelled(self) -> bool:
        """Whether a model of the GPU gives the time of compute."""
        return self.compute in ("roofline", "kernels")

    def __post_init__(self) -> None:
        if self.seeds < 1 or (self.seeds > 1 and self.seed is None):
            raise ValueError("seeds counts the interleavings from a seed on: give a seed as well")
        special = self.roles or self.lose or self.modelled
        if rules_named(self.rules)[0].nccl and special:
            raise ValueError("NCCL's rules are for runs of all ranks, of which none is lost")

    def kernels(self) -> Kernels | None:
        """The measured kernels that give the time of compute, if any do."""
        name = self.machine().gpu.kernels
        return load_kernels(name) if name and self.compute == "kernels" else None

    def machine(self) -> Cluster:
        """The cluster's description."""
        return self.cluster if isinstance(self.cluster, Cluster) else load_cluster(self.cluster)
