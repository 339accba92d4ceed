# Exercises 4.11: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.11
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""All ranks' metrics side by side, and the rank that holds the others up.

    loss         Σ_r n_r·loss_r / Σ_r n_r        of n_r samples each: not rank 0's own
    throughput   Σ_r n_r / max_r seconds_r       not one rank's, and not W times one rank's
    own time     seconds_r - exposed_r           what rank r spends, not waiting for others

In synchronous training every step ends when the slowest rank is done. So *all step times are equal*
and say nothing. The slow rank does not wait: its own time is long, and the others' exposed
communication is long. Rank r is slow if its own time stands out from the other ranks':

    own_r > tolerance · m   and   own_r - m > noise · 1.4826 · MAD      (m, MAD: of the others)

for ``patience`` windows in a row. MAD is the median distance from the median; 1.4826 times that is
the σ of a normal distribution. A few slow ranks do not move median and MAD. They move mean and σ,
which then hide the very rank to be found.

Per window of k steps and rank: one all-gather of 13 numbers, (W-1)·104 bytes. Invariant: every rank
has the same numbers and draws the same conclusion.
Sources: Jiang et al. 2024 (MegaScale, arXiv 2402.15627), section 5; Leys et al. 2013, "Detecting
outliers", on the MAD.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from given.agreement import Group
from given.step_metrics import RankMetrics, StepMetrics

from .template_monitoring import PHASES

NAN = float("nan")


def summarise(window: Sequence[StepMetrics]) -> RankMetrics:
    """This rank's part of a report on the steps of ``window``.

    One slow step (a checkpoint, garbage collection) must not make a rank suspicious. So own time is
    the median over the steps (of an even number the mean of the two in the middle). Samples,
    tokens, FLOPs and seconds are sums over the steps, the other times are means, the share of the
    memory is the largest. A phase that a step doesn't have took 0 s. The loss is weighted by
    samples. The loss of a step without samples does not count; NaN if no step has any.
    """
    # Step 1: sums, means over steps, the median of `own_seconds`. A loss without samples (NaN, most
    #         likely) must not touch the mean
    raise NotImplementedError("exercise 4.11")


def metrics_of_all(
    mine: RankMetrics, group: Group = None, device: torch.device | str = "cpu"
) -> list[RankMetrics]:
    """Every rank's metrics, to the last bit, by rank of the group, on every rank.

    One all-gather of 104 bytes. ``device``: where the group communicates (the GPU for NCCL).
    """
    # Step 2: float64 numbers of all ranks, one rank's after the other's, and back into RankMetrics
    raise NotImplementedError("exercise 4.11")


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """``rank`` takes ``factor`` times as long as the others since step ``since``. In each step they
    wait ``seconds`` for it, mostly because of ``phase`` (or "other")."""

    rank: int
    factor: float
    seconds: float
    since: int
    phase: str

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.factor:.2f} times as long as the others since step "
            f"{self.since}: {self.seconds * 1e3:.1f} ms per step, most of it in {self.phase}"
        )


@dataclass(frozen=True, kw_only=True)
class ClusterMetrics:
    """A window of steps, over all ranks. ``step`` is its last one."""

    step: int
    steps: int
    ranks: list[RankMetrics]
    peak_flops: float | None
    gpu_utilisation: float | None  # of the rank that asks
    stragglers: Sequence[Straggler] = ()

    @property
    def loss(self) -> float:
        """The mean over the samples of all ranks and steps; NaN if there were none.

        Ranks without samples don't count, whatever their loss is.
        """
        # Step 3: weighted by samples; ranks without samples don't count
        raise NotImplementedError("exercise 4.11")

    def per_second(self, amounts: Callable[[RankMetrics], float]) -> float:
        """The amount that all ranks together get done per second of the slowest rank."""
        # Step 4: the sum over the ranks by the longest time
        raise NotImplementedError("exercise 4.11")

    def as_dict(self) -> dict[str, float | None]:
        """Flat, for sinks: totals over the ranks, mean times of a step, own times by rank."""

        def mean(of: Callable[[RankMetrics], float]) -> float:
            return statistics.fmean(map(of, self.ranks))

        peak = self.peak_flops and self.peak_flops * len(self.ranks)
        return {
            "loss": self.loss,
            "ranks": len(self.ranks),
            "samples_per_second": self.per_second(lambda r: r.samples),
            "tokens_per_second": self.per_second(lambda r: r.tokens),
            "mfu": self.per_second(lambda r: r.flops) / peak if peak else None,
            "gpu_utilisation": self.gpu_utilisation,
            "step_seconds": max(r.seconds for r in self.ranks) / self.steps,
            **{
                f"{phase}_seconds": statistics.fmean(r.phases[k] for r in self.ranks)
                for k, phase in enumerate(PHASES)
            },
            "exposed_communication_seconds": mean(lambda r: r.exposed),
            "least_exposed_communication_seconds": min(r.exposed for r in self.ranks),
            "hidden_communication_seconds": mean(lambda r: r.hidden),
            "memory_share": max(r.memory_share for r in self.ranks),
            **{f"own_seconds_rank{n}": r.own for n, r in enumerate(self.ranks)},
            "stragglers": len(self.stragglers),
            **{f"slow_rank{s.rank}": s.factor for s in self.stragglers},
            **{f"slow_rank{s.rank}_since": s.since for s in self.stragglers},
        }


def aggregate(
    window: Sequence[StepMetrics], group: Group = None, device: torch.device | str = "cpu"
) -> ClusterMetrics:
    """The report of all ranks on ``window``, the same on each of them. Collective: all ranks call
    it after the same steps. One all-gather.

    Raises ValueError for an empty window, before any communication.
    """
    if not window:
        raise ValueError("a report needs at least 1 step, got a window of 0")
    last = window[-1]
    return ClusterMetrics(
        step=last.step,
        steps=len(window),
        ranks=metrics_of_all(summarise(window), group, device),
        peak_flops=last.peak_flops,
        gpu_utilisation=last.gpu_utilisation,
    )


class StragglerDetector:
    """Finds slow ranks in a series of reports. Pure: equal reports give equal answers everywhere.

    A rank is slow in a report if its own time is more than ``tolerance`` times the median of the
    other ranks', and further above it than ``noise`` standard deviations, estimated by their MAD.
    It is a straggler once it has been slow in ``patience`` reports in a row, until a report in
    which it is not. Medians of an even number are the lower of the two in the middle: slow ranks
    lie above. One rank alone is never slow.

    Raises ValueError for a tolerance below 1, negative noise, a patience below 1.
    """

    def __init__(self, *, tolerance: float = 1.2, noise: float = 5.0, patience: int = 2) -> None:
        if tolerance < 1 or noise < 0 or patience < 1:
            raise ValueError(
                f"tolerance and patience are at least 1 and noise at least 0: got {tolerance}, "
                f"{patience} and {noise}"
            )
        self.tolerance, self.noise, self.patience = tolerance, noise, patience
        self.slow_since: dict[int, tuple[int, int]] = {}  # rank: first slow step, reports since

    def update(self, report: ClusterMetrics) -> list[Straggler]:
        """The stragglers as of this report, the slowest first.

        ``factor`` and ``seconds`` compare with the median of the other ranks, ``since`` is the
        first step of the first report of the row, ``phase`` that of ``largest_excess``.
        """
        # Step 5: for each rank the median of the *others'* own times. (With two ranks, the median
        #         of both would be as far from one as from the other.)
        # Step 6: slow ranks count up, and keep their first slow step: the report's window began
        #         `steps - 1` before its last step; the others are forgotten
        # Step 7: take the ranks that were slow long enough. The phase with the largest excess over
        #         the others' median tells why
        raise NotImplementedError("exercise 4.11")

    def _stands_out(self, own: float, others: Sequence[float]) -> bool:
        """Whether a rank's own time is far above the ``others'``."""
        # Step 8: both conditions: a ratio that matters, and a distance that noise does not explain
        raise NotImplementedError("exercise 4.11")


def largest_excess(mine: RankMetrics, others: Sequence[RankMetrics]) -> str:
    """The phase in which a rank loses most against the others' median; "other": outside of all."""

    def parts(r: RankMetrics) -> dict[str, float]:
        inside = dict(zip(PHASES, r.phases, strict=True))
        return inside | {"other": r.own - sum(r.phases)}

    theirs = [parts(r) for r in others]
    usual = {phase: statistics.median_low(t[phase] for t in theirs) for phase in theirs[0]}
    return max(usual, key=lambda phase: parts(mine)[phase] - usual[phase])


class ClusterMonitor:
    """Aggregates every ``every`` steps, and looks for stragglers.

    Raises ValueError for ``every`` below 1.
    """

    def __init__(
        self,
        every: int = 10,
        *,
        group: Group = None,
        device: torch.device | str = "cpu",
        detector: StragglerDetector | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"a report covers at least 1 step, got {every}")
        self.every, self.group, self.device = every, group, device
        self.detector = detector or StragglerDetector()
        self.window: list[StepMetrics] = []

    def add(self, metrics: StepMetrics) -> ClusterMetrics | None:
        """Take a step's metrics; every ``every`` steps the report, on all ranks, else None.

        The report is on the steps since the last one, with its stragglers. The call is collective
        in these steps, so all ranks add equally many. In all others it sends nothing. Inside of the
        step monitor's ``communication()`` it counts as exposed, like any other message.
        """
        # Step 9: collect; when the window is full: aggregate, detect, begin a new one
        raise NotImplementedError("exercise 4.11")
