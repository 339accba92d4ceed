"""Predict how a training step scales: the program runs, and its transport and clock are virtual.

For each number of GPUs every virtual rank runs one step of the chosen implementation on meta
tensors. Measured kernels or a roofline give the time of compute, and the links give the time of
communication. An asynchronous collective goes on beside compute; its part that is not hidden is
*exposed*. A GPU with small kernels also waits for its *host*, which launches them:

    step = compute + exposed communication + waiting for the host
    efficiency(W) = rate(W) / (W · rate(1))

MFU (model FLOPs utilisation) is the FLOPs of the step over the peak that the GPU's data sheet
states for that time. Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it, and can't inside a dispatch mode
from torch import nn

from ..hardware.clusters import Cluster, load_cluster
from ..picture import Span, covered
from ..ranks.context import RankContext
from ..ranks.results import RankFailure
from ..virtual.fusion import Fusion
from ..virtual.isolation import entered
from ..virtual.reports import VirtualResults
from ..virtual.run import run_virtual
from .eight_bits import in_eight_bits
from .masters import can_be, optimizer_of
from .models import blocks_of
from .over_ranks import bubble, sent, shown_spans
from .plan import Plan
from .published import Likely, kind_of, likely
from .recompute import compute_again
from .repeat import NOT_REPEATABLE
from .roles import roles
from .split import whole_model
from .strategies import casts, learners, trainer_of
from .transformer import drop_out, written_attention


@dataclass(kw_only=True)
class Answer:
    """One row: seconds, bytes and rates of a step with ``gpus`` GPUs.

    ``states``, ``kept`` and ``peaks``: of each rank that ran, its bytes before the step (weights,
    optimizer, and gradients that stay), its most after a forward, with tensor or pipeline
    parallelism, and its most at all.
    ``parts``: the compute by kind of kernel. ``host``: the time in which a GPU waits for its host.
    ``likely``: how far off predictions of such a step were.
    """

    gpus: int
    step: float
    compute: float
    exposed: float
    hidden: float
    host: float
    rate: float
    unit: str
    efficiency: float
    memory: int
    states: list[int]
    kept: list[int]
    peaks: list[int]
    fits: bool
    mfu: float
    bubble: float
    parts: dict[str, float]
    bytes_per_link: dict[str, int]
    unmodelled: dict[str, int]
    likely: Likely
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def communication_share(self) -> float:
        """Share of the step in which the GPU waits for communication."""
        return self.exposed / self.step

    def row(self) -> dict[str, Any]:
        """Plain data, without the timeline."""
        data = asdict(self)
        for name in ("spans", "states", "kept", "peaks"):
            del data[name]
        return data | {
            "communication_share": self.communication_share,
            "error": self.likely.share,
        }


def _model(plan: Plan) -> nn.Module:
    """The plan's model on the meta device, which recomputes and drops out as the plan says."""
    spec = plan.spec
    with torch.device("meta"):
        model = whole_model(plan).to(plan.weights)
    if plan.attention == "written":  # in this child process
        again = plan.recompute == "selective"
        torch.nn.functional.scaled_dot_product_attention = written_attention(plan.dropout, again)
    if plan.model_ranks == 1:  # else each rank's share does these
        if plan.dropout:
            drop_out(model, plan.dropout)
        if plan.fp8:
            in_eight_bits(blocks_of(model), getattr(torch, plan.arithmetic))
        if plan.recompute != "none":
            compute_again(blocks_of(model), plan.recompute, partial(casts, plan))
    if plan.precision == "autocast" and spec.unit == "images":  # the layout of tensor cores
        model = model.to(memory_format=torch.channels_last)
    return model


def _body(
    ctx: RankContext, plan: Plan
) -> tuple[float, float, float, dict[str, float], tuple[int, int]]:
    """One rank: build the model, train; begin, end, FLOPs, compute and memory of the step that
    counts."""
    import time

    spec = plan.spec
    torch.backends.cuda.matmul.allow_tf32 = plan.precision == "tf32"  # of this child process
    model = _model(plan)
    inputs, targets = spec.inputs(plan.samples, "meta", plan.weights)
    with trainer_of(plan)(plan, model) as (trained, train_step):
        del model
        fused = "optimizer" in plan.fused
        optimizer = optimizer_of(trained.parameters(), spec.optimizer, fused, plan.masters)
        if plan.model_ranks == 1:  # DDP makes its buckets after the first step
            for _ in range(plan.calls):
                train_step(trained, optimizer, inputs, targets)
        elif plan.masters:
            optimizer.step()
        else:  # one step is long, and it would only make the optimizer's state
            _make_state(optimizer)
        ctx.start_picture()
        model_of_rank = entered().mine.model
        model_of_rank.meet(plan.meeting(ctx.world_size))
        model_of_rank.fusion = Fusion(plan.fused_chains) if plan.fused_chains else None
        state = model_of_rank.memory.current
        model_of_rank.memory.peak = state  # building it may have taken more
        begin, flops = time.perf_counter(), model_of_rank.flops
        model_of_rank.spent.clear()
        for _ in range(plan.calls):
            train_step(trained, optimizer, inputs, targets)
        spent = dict(model_of_rank.spent)
        return (
            begin,
            time.perf_counter(),
            model_of_rank.flops - flops,
            spent,
            (state, getattr(trained, "kept", 0)),
        )


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state: memory that is there in every step but the first."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()


def simulate(plan: Plan) -> Iterator[Answer]:
    """A prediction for each number of GPUs in ``plan``, as each is done.

    Raises RankFailure with the rank and line if the implementation fails on the way, and
    ValueError if this torch is too old for the plan.
    """
    if plan.masters and not can_be():
        raise ValueError(
            "precision mixed with tensor or pipeline parallelism needs torch 2.10 or newer: "
            "leave out --precision, or call `pip install --upgrade torch`"
        )
    cluster, alone = load_cluster(plan.cluster), 0.0
    files = [file for phase in (1, 2, 3) for file in learners(phase).files()]
    options: dict[str, Any] = {
        "cluster": cluster,
        "compute": "roofline" if plan.roofline else "kernels",
        "algorithm": plan.collective,
        "timeout": plan.timeout,
        "learner_files": tuple(files),
    }
    for gpus in plan.gpus:
        run_by = roles(plan, gpus)
        try:
            results = run_virtual(_body, gpus, plan, roles=run_by, **options)
        except RankFailure as failure:
            if failure.cause != NOT_REPEATABLE:
                raise
            each = dataclasses.replace(plan, every_micro_batch=True)
            results = run_virtual(_body, gpus, each, roles=run_by, **options)
        answer = _answer(plan, cluster, run_by or tuple(range(gpus)), results)
        alone = alone or answer.rate / answer.gpus  # relative to the smallest number of GPUs
        answer.efficiency = answer.rate / (answer.gpus * alone)
        yield answer


def _answer(
    plan: Plan, cluster: Cluster, run_by: tuple[int, ...], results: VirtualResults
) -> Answer:
    gpus, times = len(run_by), Counter(run_by)
    workers = plan.workers(gpus)
    ran = [rank for rank in workers if results[rank] is not None]
    # of ranks that differ by rounding alone it is the first
    slowest = max(ran, key=lambda rank: float(f"{results[rank][1] - results[rank][0]:.9g}"))
    begin, end, flops, spent, _ = results[slowest]
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
    samples = len(workers) * plan.samples * plan.accumulate / plan.model_ranks
    peak = cluster.gpu.peak_flops.get(plan.arithmetic, cluster.gpu.peak_flops["float32"])
    return Answer(
        gpus=gpus,
        step=step,
        compute=compute,
        exposed=max(0.0, together - compute),
        hidden=max(0.0, apart - (together - compute)),
        host=max(0.0, step - together),
        rate=samples * plan.spec.per_sample / step,
        unit=plan.spec.unit,
        efficiency=1.0,
        memory=max(results.peaks),
        states=[results[rank][4][0] for rank in ran],
        kept=[results[rank][4][1] for rank in ran],
        peaks=results.peaks,
        fits=max(results.peaks) <= cluster.gpu.memory,
        mfu=flops / count / step / peak,
        bubble=bubble(results, times),
        parts={part: seconds / count for part, seconds in spent.items()},
        bytes_per_link={k: n // count for k, n in sent(cluster, results, times).items()},
        unmodelled=results.unmodelled,
        likely=likely(
            kind_of(plan.cluster, plan.model, plan.strategy, gpus, plan.model_ranks, plan.roofline)
        ),
        spans=shown_spans(plan, run_by, results),
    )
