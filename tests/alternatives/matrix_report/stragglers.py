# for: 4.11
"""Written differently: a matrix of numbers by rank, vectorised statistics, a count per rank, and
all-reduce of a matrix that is zero but for the own row in place of the gather."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from given.step_metrics import RankMetrics

PHASES = ("data", "forward", "backward", "optimizer")
COLUMNS = ("samples", "tokens", "flops", "seconds", "weighted", "own", "exposed", "hidden", "share")


def median_low(values):
    return values.sort(dim=-1).values[..., (values.shape[-1] - 1) // 2]


class Report:
    def __init__(self, matrix, last, steps):
        self.matrix, self.last, self.steps, self.step = matrix, last, steps, last.step
        self.stragglers = []
        self.columns = dict(zip((*COLUMNS, *PHASES), matrix.T, strict=True))

    @property
    def ranks(self):
        return [SimpleNamespace(own=own) for own in self.columns["own"].tolist()]

    @property
    def loss(self):
        return (self.columns["weighted"].sum() / self.columns["samples"].sum()).item()

    def rate(self, name):
        return (self.columns[name].sum() / self.columns["seconds"].max()).item()

    def as_dict(self):
        count, columns = len(self.matrix), self.columns
        peak = self.last.peak_flops
        found = {
            "loss": self.loss,
            "ranks": count,
            "samples_per_second": self.rate("samples"),
            "tokens_per_second": self.rate("tokens"),
            "mfu": self.rate("flops") / count / peak if peak else None,
            "gpu_utilisation": self.last.gpu_utilisation,
            "step_seconds": columns["seconds"].max().item() / self.steps,
            "least_exposed_communication_seconds": columns["exposed"].min().item(),
            "memory_share": columns["share"].max().item(),
            "stragglers": len(self.stragglers),
        }
        for name in ("exposed", "hidden"):
            found[f"{name}_communication_seconds"] = columns[name].mean().item()
        for name in PHASES:
            found[f"{name}_seconds"] = columns[name].mean().item()
        for rank, own in enumerate(columns["own"].tolist()):
            found[f"own_seconds_rank{rank}"] = own
        for s in self.stragglers:
            found |= {f"slow_rank{s.rank}": s.factor, f"slow_rank{s.rank}_since": s.since}
        return found


def summarise(window):
    size = torch.tensor([float(m.samples) for m in window], dtype=torch.float64)
    losses = torch.tensor([float(m.loss) for m in window], dtype=torch.float64)[size > 0]
    phases = [[m.phases.get(name, 0.0) for name in PHASES] for m in window]
    mean = lambda values: torch.tensor(values, dtype=torch.float64).mean(0).tolist()
    return RankMetrics(
        samples=size.sum().item(),
        tokens=float(sum(m.tokens for m in window)),
        flops=float(sum(m.flops for m in window)),
        seconds=float(sum(m.seconds for m in window)),
        loss=((losses * size[size > 0]).sum() / size.sum()).item(),
        own=torch.tensor([m.own_seconds for m in window], dtype=torch.float64).quantile(0.5).item(),
        exposed=mean([m.exposed for m in window]),
        hidden=mean([m.hidden for m in window]),
        memory_share=max(m.memory / m.memory_capacity for m in window),
        phases=tuple(mean(phases)),
    )


def metrics_of_all(mine, group=None, device="cpu"):
    matrix = torch.zeros(dist.get_world_size(group), 13, dtype=torch.float64, device=device)
    matrix[dist.get_rank(group)] = torch.tensor(mine.numbers(), dtype=torch.float64, device=device)
    dist.all_reduce(matrix, group=group)
    return [RankMetrics.of(numbers) for numbers in matrix.tolist()]


def aggregate(window, group=None, device="cpu"):
    if len(window) == 0:
        raise ValueError("0 steps are too few for a report")
    table = torch.tensor(
        [
            [
                *(m.samples, m.tokens, m.flops, m.seconds, m.loss * m.samples if m.samples else 0),
                *(m.own_seconds, m.exposed, m.hidden, m.memory / m.memory_capacity),
                *(m.phases.get(name, 0.0) for name in PHASES),
            ]
            for m in window
        ],
        dtype=torch.float64,
    )
    row = torch.cat([table[:, :5].sum(0), table[:, 5:].mean(0)])
    row[5] = table[:, 5].quantile(0.5)
    row[8] = table[:, 8].max()
    matrix = torch.zeros(dist.get_world_size(group), len(row), dtype=torch.float64, device=device)
    matrix[dist.get_rank(group)] = row.to(device)
    dist.all_reduce(matrix, group=group)
    return Report(matrix.cpu(), window[-1], len(window))


class StragglerDetector:
    def __init__(self, *, tolerance=1.2, noise=5.0, patience=2):
        for name, value, least in (
            ("tolerance", tolerance, 1),
            ("noise", noise, 0),
            ("patience", patience, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.tolerance, self.noise, self.patience = tolerance, noise, patience
        self.history = []

    def update(self, report):
        """All ranks at once: row r of the matrix of others has everybody's values but r's."""
        values = torch.column_stack([report.columns[p] for p in ("own", *PHASES)])
        count = len(values)
        if count == 1:
            return []
        keep = ~torch.eye(count, dtype=torch.bool)
        others = values.expand(count, count, -1)[keep].view(count, count - 1, -1)
        usual = median_low(others.transpose(1, 2))
        own, middle = values[:, 0], usual[:, 0]
        spread = 1.4826 * median_low((others[:, :, 0] - middle[:, None]).abs())
        slow = (own > self.tolerance * middle) & (own - middle > self.noise * spread)
        self.history.append((report.step - report.steps + 1, slow.tolist()))
        found = []
        for rank in range(count):
            since, in_a_row = None, 0
            for first, flags in reversed(self.history):
                if not flags[rank]:
                    break
                since, in_a_row = first, in_a_row + 1
            if in_a_row >= self.patience:
                excess = (values - usual)[rank, 1:]
                found.append(
                    SimpleNamespace(
                        rank=rank,
                        factor=(own[rank] / middle[rank]).item(),
                        seconds=(own[rank] - middle[rank]).item(),
                        since=since,
                        phase=PHASES[int(excess.argmax())],
                    )
                )
        return sorted(found, key=lambda s: s.factor, reverse=True)


class ClusterMonitor:
    def __init__(self, every=10, *, group=None, device="cpu", detector=None):
        if every < 1:
            raise ValueError(f"every {every} steps: must be at least 1")
        self.every, self.where = every, (group, device)
        self.detector = detector or StragglerDetector()
        self.steps = []

    def add(self, metrics):
        self.steps.append(metrics)
        if len(self.steps) % self.every:
            return None
        report = aggregate(self.steps[-self.every :], *self.where)
        report.stragglers = self.detector.update(report)
        return report
