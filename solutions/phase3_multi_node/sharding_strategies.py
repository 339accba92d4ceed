"""Which strategy? Estimate the memory and the bytes of each, and take the cheapest that fits.

Sharding saves bytes of memory and sends more bytes. ``strategy_memory`` says how much memory a
strategy needs per rank. The table says what a rank sends for T bytes of parameters, of which the
root has T_0 and the last unit T_last. W ranks are on M nodes of L ranks, and a step has k backward
passes:

========  ====================================  ==============================
strategy  sent per rank and step                over
========  ====================================  ==============================
ddp       2(W-1)/W·T                            the slower of the two links
zero1     3(W-1)/W·T                            the same
zero2     (k+1)(W-1)/W·T                        the same
fsdp      k(W-1)/W·(3T - T_0 - T_last)          the same
hybrid    that with L for W; 2k(M-1)/M·T/L      inside a node; across nodes
offload   fsdp's; k(3T - T_0 - T_last)/W        the same; the bus to the host
========  ====================================  ==============================

Invariant: every rank comes to the same choice, because all use the same numbers. Free memory may
differ, so the ranks agree on it first.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), section 7. Zhao et al. 2023 (PyTorch
FSDP, arXiv 2304.11277), section 3.2. Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from given.agreement import Group, rank_in
from given.step_profile import Profile

from .strategy_memory import STRATEGIES, memory_of


@dataclass(frozen=True)
class Links:
    """Bytes per second: of a rank inside its node, of a node to others, of a rank to its host.

    The defaults are of the size of 8 GPUs with NVLink, a 400 Gb/s card each and PCIe 5.
    """

    inside: float = 370e9
    between: float = 388e9
    host: float = 50e9


@dataclass(frozen=True)
class Estimate:
    """The memory that ``strategy`` needs per rank, in bytes, and the cost of its communication.

    ``parameters``, ``gradients``, ``optimizer``: kept on the device between backward and step.
    ``activations``: left by forward. ``peak``: the most on the device at any moment of a step.
    ``host``: in the CPU's memory. ``sent``: per rank and step, over any link. ``across``: the part
    of it that leaves a node, by all its ranks. ``seconds``: all of it on the wire, nothing hidden.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    peak: int
    host: int
    sent: int
    across: int
    seconds: float


def estimate(
    profile: Profile,
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    links: Links = Links(),
    backwards: int = 1,
    bucket_bytes: int = 25 * 2**20,
) -> Estimate:
    """The memory of one strategy per rank, and its cost per step. No communication.

    ``backwards``: passes per step. ddp and zero1 communicate after the last one only (``no_sync``).
    Padding, and the buffers that ddp sends, are left out. Raises ValueError for an unknown strategy
    and for numbers that are not positive.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {strategy!r}")
    if min(nodes, ranks_per_node, backwards, bucket_bytes) < 1:
        raise ValueError(
            f"nodes, ranks per node, backward passes and bucket bytes must be positive, got "
            f"{nodes}, {ranks_per_node}, {backwards} and {bucket_bytes}"
        )
    needed = memory_of(profile, strategy, nodes, ranks_per_node, bucket_bytes=bucket_bytes)
    sent, across, seconds = traffic(profile, strategy, nodes, ranks_per_node, links, backwards)
    return Estimate(
        strategy=strategy,
        parameters=needed.parameters,
        gradients=needed.gradients,
        optimizer=needed.optimizer,
        activations=profile.saved,
        peak=needed.peak,
        host=needed.host,
        sent=sent,
        across=across,
        seconds=seconds,
    )


def traffic(
    profile: Profile, strategy: str, nodes: int, ranks_per_node: int, links: Links, backwards: int
) -> tuple[int, int, float]:
    """(bytes sent per rank, bytes that leave a node, seconds) of one step's communication.

    Bytes sent are those of the table at the head of the file. G, the bytes of all gradients, stands
    for T where gradients are reduced: ddp 2(W-1)/W·G, zero1 3(W-1)/W·G, zero2 (k+1)(W-1)/W·G, fsdp
    and offload k(W-1)/W·(2T - T_0 - T_last + G). T_last is 0 if there is no unit but the root.
    Hybrid sends the same inside a node, with L for W. A node also sends 2k(M-1)/M·G to other nodes,
    each of its ranks 1/L of that. Bytes are rounded down.

    Collectives go around a ring of the ranks in order, on all cards of a node at once. So as many
    bytes leave the node as one rank sends, and on a single node none. The seconds are the bytes
    sent, divided by the pace of the slower link, on one node by that of the link inside. Hybrid
    does one after the other: it adds the bytes inside by that link and a node's bytes by the other.
    Offload adds its copies, the bytes k(2T - T_0 - T_last + G)/W over the bus to the host.
    """
    # --- exercise 3.21: start
    # Step 1: FSDP's root and last unit stay gathered for backward
    # Step 2: hybrid communicates inside the node first, then across: add the two times
    # Step 3: offloading copies a shard for each gather, and the gradients back
    def share(ranks: int) -> float:
        return (ranks - 1) / ranks

    world_size, whole = nodes * ranks_per_node, sum(profile.gradients)
    last = profile.parameters[-1] if len(profile.parameters) > 1 else 0
    gathered = 2 * sum(profile.parameters) - profile.parameters[0] - last
    passed = {
        "ddp": 2 * whole,
        "zero1": 3 * whole,
        "zero2": (backwards + 1) * whole,
    }.get(strategy, backwards * (gathered + whole))
    if strategy == "hybrid":
        inside = passed * share(ranks_per_node)
        across = 2 * backwards * whole * share(nodes)
        seconds = inside / links.inside + across / links.between
        return int(inside + across / ranks_per_node), int(across), seconds
    sent = passed * share(world_size)
    pace = links.inside if nodes == 1 else min(links.inside, links.between)
    bus = passed / world_size / links.host if strategy == "offload" else 0.0
    return int(sent), int(sent) if nodes > 1 else 0, sent / pace + bus
    # --- exercise 3.21: end


@dataclass(frozen=True)
class Choice:
    """The ``strategy`` to use, and the estimates it was chosen from; print it for a table."""

    strategy: str
    budget: int
    estimates: tuple[Estimate, ...]

    @property
    def chosen(self) -> Estimate:
        """The estimate of the choice."""
        return next(e for e in self.estimates if e.strategy == self.strategy)

    @property
    def fits(self) -> bool:
        """Whether the choice stays inside the budget; a manual one may not."""
        return self.chosen.peak <= self.budget

    def verdict(self, of: Estimate) -> str:
        """Why a strategy was chosen or not."""
        if of.peak > self.budget:
            short = f"needs {readable(of.peak - self.budget)} more"
            return f"chosen by hand, {short}" if of is self.chosen else short
        if of is self.chosen:
            return "chosen"
        slower = of.seconds - self.chosen.seconds
        return f"{1e3 * slower:+.1f} ms" if slower else "as fast, less simple"

    def __str__(self) -> str:
        """One row per strategy: bytes per rank, communication per step, and why (not)."""
        heads = ("strategy", "param.", "grad.", "optim.", "activ.", "peak", "host", "sent",
                 "leaves node", "comm.", f"budget {readable(self.budget)}")  # fmt: skip
        rows: list[tuple[str, ...]] = [heads]
        for e in self.estimates:
            sizes = (e.parameters, e.gradients, e.optimizer, e.activations, e.peak, e.host, e.sent,
                     e.across)  # fmt: skip
            spent = f"{1e3 * e.seconds:.1f} ms"
            rows.append((e.strategy, *map(readable, sizes), spent, self.verdict(e)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, *cells, why in rows:
            middle = [c.rjust(w) for c, w in zip(cells, widths[1:-1], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *middle, why]))
        return "\n".join(lines)


def readable(nbytes: float) -> str:
    """1.5 GB, 20 MB …"""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def choose_strategy(
    profile: Profile,
    budget_bytes: int,
    nodes: int,
    ranks_per_node: int,
    *,
    strategy: str = "auto",
    links: Links = Links(),
    backwards: int = 1,
    bucket_bytes: int = 25 * 2**20,
) -> Choice:
    """The strategy with the cheapest communication among those whose peak fits ``budget_bytes``.

    ``strategy``: ``"auto"``, or a name: then that one, whatever it needs. Of equally cheap ones the
    simpler is chosen, the earlier one in STRATEGIES. A peak of just ``budget_bytes`` fits. The
    choice has the estimates of all strategies, in that order. Hybrid is among them if several nodes
    have several ranks, or if it was asked for. No communication: equal arguments give equal choices
    (see ``smallest_budget``). Raises ValueError if nothing fits, and as ``estimate`` does.
    """
    # --- exercise 3.21: start
    # Step 4: estimate all strategies that make sense here, and the one asked for
    # Step 5: of those that fit take the least seconds; of equal ones the first in STRATEGIES
    several = min(nodes, ranks_per_node) > 1
    names = [n for n in STRATEGIES if n != "hybrid" or several or n == strategy]
    if strategy not in ("auto", *names):
        names.append(strategy)  # unknown: `estimate` says so
    estimates = tuple(
        estimate(
            profile,
            name,
            nodes,
            ranks_per_node,
            links=links,
            backwards=backwards,
            bucket_bytes=bucket_bytes,
        )
        for name in names
    )
    if strategy != "auto":
        return Choice(strategy, budget_bytes, estimates)
    fitting = [e for e in estimates if e.peak <= budget_bytes]
    if not fitting:
        least = min(estimates, key=lambda e: e.peak)
        raise ValueError(
            f"no strategy fits into {readable(budget_bytes)} per rank on {nodes} x "
            f"{ranks_per_node} ranks: {least.strategy} needs least, {readable(least.peak)}, of "
            f"which activations are {readable(least.activations)}"
        )
    best = min(fitting, key=lambda e: e.seconds)
    return Choice(best.strategy, budget_bytes, estimates)
    # --- exercise 3.21: end


def smallest_budget(own_bytes: int, device: torch.device | str = "cpu", group: Group = None) -> int:
    """The least of all ranks' bytes, an int, on every rank of ``group``: one all-reduce of 8 bytes.

    Exact for any number of bytes below 2^63. Raises ValueError on a rank that is no member of
    ``group``, before anything is sent.
    """
    # --- exercise 3.21: start
    # Step 6: ranks may have different memory free, but must not come to different choices. Refuse a
    #         rank that is no member (`rank_in`): it must not go on with its own budget
    rank_in(group)
    least = torch.tensor(own_bytes, dtype=torch.int64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return int(least)
    # --- exercise 3.21: end
