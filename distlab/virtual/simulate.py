"""Predict how a training step scales: the program runs, its transport and clock are virtual.

For each number of GPUs every virtual rank runs one step of the chosen implementation on meta
tensors. Compute takes what the roofline says, communication what the links say; an asynchronous
collective goes on beside compute, and what is not hidden is *exposed*:

    step = compute + exposed communication        efficiency(W) = rate(W) / (W · rate(1))

MFU (model FLOPs utilisation) is the FLOPs of the step over the peak that the GPU's data sheet
states for that time. Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it, and can't inside a dispatch mode
import torch.nn.functional as F
from torch import Tensor, nn

from ..course import load_course
from ..grading.implementation import Implementation, find_source
from ..ranks import RankContext
from ..timeline import Span, covered, spans_of
from .cluster import Cluster, load_cluster
from .isolation import entered
from .models import ModelSpec, model_spec
from .run import VirtualResults, run_virtual

TrainStep = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], object]
IMPLS = ("solutions", "mine", "torch")
COLLECTIVES = ("backend", "ring", "tree", "hierarchical")
SHOWN_RANKS = 8  # in the timeline


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to simulate; ``batch`` per GPU and ``dtype`` are the model's usual ones if 0 and "".

    ``every``: steps in a round of local SGD.
    """

    cluster: str = "dgx-h100"
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16)
    model: str = "resnet50"
    strategy: str = "ddp"
    impl: str = "solutions"
    collective: str = "backend"
    batch: int = 0
    dtype: str = ""
    bucket_mb: float = 25.0
    every: int = 8
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        load_cluster(self.cluster)
        model_spec(self.model)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"no strategy {self.strategy!r}: there is {', '.join(STRATEGIES)}")
        for name, value, known in (
            ("impl", self.impl, IMPLS),
            ("collective", self.collective, COLLECTIVES),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if not self.gpus or min(self.gpus) < 1:
            raise ValueError(f"numbers of GPUs must be positive, got {list(self.gpus)}")
        if self.batch < 0 or self.bucket_mb <= 0 or self.every < 1:
            raise ValueError("batch, bucket size and steps in a round must be positive")
        if self.strategy == "local-sgd" and self.impl != "solutions":
            raise ValueError(f"local-sgd is simulated with --impl solutions, not {self.impl}")
        if self.dtype and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be one of torch's, for example bfloat16: {self.dtype!r}")

    @property
    def steps(self) -> int:
        """Steps that are timed: a whole round."""
        return self.every if self.strategy == "local-sgd" else 1

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return model_spec(self.model)


@dataclass(kw_only=True)
class Answer:
    """One row: seconds, bytes and rates of a step with ``gpus`` GPUs."""

    gpus: int
    step: float
    compute: float
    exposed: float
    hidden: float
    rate: float
    unit: str
    efficiency: float
    memory: int
    fits: bool
    mfu: float
    bytes_per_link: dict[str, int]
    unmodelled: dict[str, int]
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def communication_share(self) -> float:
        """Share of the step in which the GPU waits for communication."""
        return self.exposed / self.step

    def row(self) -> dict[str, Any]:
        """Plain data, without the timeline."""
        data = asdict(self)
        del data["spans"]
        return data | {"communication_share": self.communication_share}


# -- strategies: how a step is trained; each yields the step to run -------------------------------
@contextlib.contextmanager
def data_parallel(plan: Plan, model: nn.Module) -> Iterator[TrainStep]:
    """Phase 1's trainer, or torch's DistributedDataParallel unchanged."""
    if plan.impl == "torch":
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=plan.bucket_mb)

        def step(_: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(inputs), targets).backward()
            optimizer.step()

        yield step
        return
    if plan.impl == "solutions":
        trainer = importlib.import_module("solutions.phase1_data_parallel.trainer")
    else:
        source = find_source("templates", load_course().phase(1))
        trainer = Implementation(source, "trainer").module("trainer")
    yield trainer.train_step


@contextlib.contextmanager
def local_sgd(plan: Plan, model: nn.Module) -> Iterator[TrainStep]:
    """Exercise 3.25: the parameters are averaged after ``plan.every`` steps."""
    solution = importlib.import_module("solutions.phase3_multi_node.local_sgd")
    rounds = solution.LocalSGD(model, every=plan.every)

    def step(_: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        rounds.step()

    yield step


STRATEGIES = {"ddp": data_parallel, "local-sgd": local_sgd}


def _body(ctx: RankContext, plan: Plan) -> tuple[float, float, float]:
    """One rank: build the model, train; begin, end and FLOPs of the second round of steps."""
    import time

    spec = plan.spec
    dtype = getattr(torch, plan.dtype or spec.dtype)
    with torch.device("meta"):
        model = spec.build().to(dtype)
    inputs, targets = spec.inputs(plan.batch or spec.batch, "meta", dtype)
    with STRATEGIES[plan.strategy](plan, model) as train_step:
        optimizer = spec.optimizer([p for p in model.parameters() if p.requires_grad])
        for _ in range(plan.steps):
            train_step(model, optimizer, inputs, targets)  # DDP makes its buckets after the first
        ctx.start_picture()
        model_of_rank = entered().mine.model
        begin, flops = time.perf_counter(), model_of_rank.flops
        for _ in range(plan.steps):
            train_step(model, optimizer, inputs, targets)
        return begin, time.perf_counter(), model_of_rank.flops - flops


def simulate(plan: Plan) -> Iterator[Answer]:
    """An answer for each number of GPUs in ``plan``, as they are done.

    Raises RankFailure with the rank and line if the implementation fails on the way.
    """
    cluster, alone = load_cluster(plan.cluster), 0.0
    source = find_source("templates", load_course().phase(1))
    for gpus in plan.gpus:
        results = run_virtual(
            _body,
            gpus,
            plan,
            cluster=cluster,
            compute="roofline",
            algorithm=plan.collective,
            timeout=plan.timeout,
            learner_files=source.files(),
        )
        answer = _answer(plan, cluster, gpus, results)
        alone = alone or answer.rate / answer.gpus  # relative to the smallest that was asked for
        answer.efficiency = answer.rate / (answer.gpus * alone)
        yield answer


def _answer(plan: Plan, cluster: Cluster, gpus: int, results: VirtualResults) -> Answer:
    slowest = max(range(gpus), key=lambda rank: results[rank][1] - results[rank][0])
    begin, end, flops = results[slowest]
    count = plan.steps
    step = (end - begin) / count
    log = results.logs[slowest]
    busy = [Span(slowest, "compute", n, a, b) for n, a, b in log.spans if a >= begin]
    compute = sum(span.seconds for span in busy) / count
    moving = [
        Span(slowest, "communication", e.op, e.start, e.end or end)
        for e in log.events
        if e.start >= begin
    ]
    together, apart = covered([*busy, *moving]) / count, covered(moving) / count
    spec = plan.spec
    dtype = plan.dtype or spec.dtype
    peak = cluster.gpu.peak_flops.get(dtype, cluster.gpu.peak_flops["float32"])
    return Answer(
        gpus=gpus,
        step=step,
        compute=compute,
        exposed=max(0.0, together - compute),
        hidden=max(0.0, apart - (together - compute)),
        rate=gpus * (plan.batch or spec.batch) * spec.per_sample / step,
        unit=spec.unit,
        efficiency=1.0,
        memory=max(results.peaks),
        fits=max(results.peaks) <= cluster.gpu.memory,
        mfu=flops / count / step / peak,
        bytes_per_link={k: n // count for k, n in _bytes_per_link(cluster, results).items()},
        unmodelled=results.unmodelled,
        spans=spans_of(results.logs[:SHOWN_RANKS]),
    )


def _bytes_per_link(cluster: Cluster, results: VirtualResults) -> dict[str, int]:
    """Bytes that all ranks together sent in the step: inside the nodes, and between them."""
    sent = {"inside": 0, "between": 0}
    for (begin, _, _), log in zip(results, results.logs, strict=True):
        for event in log.events:
            if event.start >= begin:
                members = event.group if event.peer is None else (log.rank, event.peer)
                near = len({cluster.node(rank) for rank in members}) == 1
                sent["inside" if near else "between"] += event.sent
    return sent
