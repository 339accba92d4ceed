# for: 4.11
"""Written differently: sums in one loop over the window; all counts, then those who are slow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from given.agreement import Group
from given.step_metrics import RankMetrics, StepMetrics

from .monitoring import PHASES

NAN = float("nan")


def summarise(window: Sequence[StepMetrics]) -> RankMetrics:
    steps = len(window)
    totals = {"samples": 0.0, "tokens": 0.0, "flops": 0.0, "seconds": 0.0}
    exposed = hidden = share = loss = 0.0
    phases = [0.0] * len(PHASES)
    for m in window:
        for name in totals:
            totals[name] += getattr(m, name)
        exposed += m.exposed / steps
        hidden += m.hidden / steps
        share = max(share, m.memory / m.memory_capacity)
        if m.samples > 0:
            loss += m.loss * m.samples
        for k, name in enumerate(PHASES):
            if name in m.phases:
                phases[k] += m.phases[name] / steps
    own = sorted(m.own_seconds for m in window)
    middle = (own[(steps - 1) // 2] + own[steps // 2]) / 2
    return RankMetrics(
        **totals,
        loss=loss / totals["samples"] if totals["samples"] > 0 else NAN,
        own=middle,
        exposed=exposed,
        hidden=hidden,
        memory_share=share,
        phases=tuple(phases),
    )


def metrics_of_all(
    mine: RankMetrics, group: Group = None, device: torch.device | str = "cpu"
) -> list[RankMetrics]:
    mine_now = torch.tensor(mine.numbers(), dtype=torch.float64).to(device)
    rows = [torch.zeros_like(mine_now) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine_now, group=group)
    return [RankMetrics.of(tuple(row.cpu().tolist())) for row in rows]


@dataclass(frozen=True, kw_only=True)
class Straggler:
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
    step: int
    steps: int
    ranks: list[RankMetrics]
    peak_flops: float | None
    gpu_utilisation: float | None  # of the rank that asks
    stragglers: Sequence[Straggler] = ()

    @property
    def loss(self) -> float:
        counted = [r for r in self.ranks if r.samples > 0]
        total = sum(r.samples for r in counted)
        return sum(r.samples / total * r.loss for r in counted) if counted else NAN

    def per_second(self, amounts: Callable[[RankMetrics], float]) -> float:
        longest = max(r.seconds for r in self.ranks)
        return sum([amounts(r) for r in self.ranks]) / longest

    def as_dict(self) -> dict[str, float | None]:

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
    def __init__(self, *, tolerance: float = 1.2, noise: float = 5.0, patience: int = 2) -> None:
        if tolerance < 1 or noise < 0 or patience < 1:
            raise ValueError(
                f"tolerance and patience are at least 1 and noise at least 0: got {tolerance}, "
                f"{patience} and {noise}"
            )
        self.tolerance, self.noise, self.patience = tolerance, noise, patience
        self.slow_since: dict[int, tuple[int, int]] = {}  # rank: first slow step, reports since

    def update(self, report: ClusterMetrics) -> list[Straggler]:
        own = [r.own for r in report.ranks]
        first = report.step - (report.steps - 1)
        for rank in list(self.slow_since):
            if rank >= len(own):
                del self.slow_since[rank]
        for rank in range(len(own)):
            if self._stands_out(own[rank], own[:rank] + own[rank + 1 :]):
                since, count = self.slow_since.setdefault(rank, (first, 0))
                self.slow_since[rank] = (since, count + 1)
            elif rank in self.slow_since:
                del self.slow_since[rank]
        stragglers = []
        for rank in sorted(self.slow_since, key=lambda rank: (-own[rank], rank)):
            since, count = self.slow_since[rank]
            if count >= self.patience:
                rest = own[:rank] + own[rank + 1 :]
                usual = statistics.median_low(rest)
                stragglers.append(
                    Straggler(
                        rank=rank,
                        factor=own[rank] / usual if usual > 0 else float("inf"),
                        seconds=own[rank] - usual,
                        since=since,
                        phase=largest_excess(
                            report.ranks[rank], report.ranks[:rank] + report.ranks[rank + 1 :]
                        ),
                    )
                )
        return stragglers

    def _stands_out(self, own: float, others: Sequence[float]) -> bool:
        n = len(others)
        if n == 0:
            return False
        usual = sorted(others)[(n - 1) // 2]
        mad = sorted(abs(x - usual) for x in others)[(n - 1) // 2]
        ratio = own > usual * self.tolerance
        return ratio and (own - usual) > 1.4826 * mad * self.noise


def largest_excess(mine: RankMetrics, others: Sequence[RankMetrics]) -> str:

    def parts(r: RankMetrics) -> dict[str, float]:
        inside = dict(zip(PHASES, r.phases, strict=True))
        return inside | {"other": r.own - sum(r.phases)}

    theirs = [parts(r) for r in others]
    usual = {phase: statistics.median_low(t[phase] for t in theirs) for phase in theirs[0]}
    return max(usual, key=lambda phase: parts(mine)[phase] - usual[phase])


class ClusterMonitor:
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
        self.window = [*self.window, metrics]
        report = None
        if len(self.window) == self.every:
            report = aggregate(self.window, self.group, self.device)
            found = self.detector.update(report)
            report = ClusterMetrics(**{**vars(report), "stragglers": tuple(found)})
            self.window = []
        return report
