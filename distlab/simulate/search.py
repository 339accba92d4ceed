"""The layouts worth a look: pruned by memory, ranked by a formula, the best ones simulated.

A formula's number is never taken for a simulated one. Rows whose layout the simulator can't run
keep the formula's, are marked, and hide no simulated row.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field

from ..hardware.failures import daly, goodput, observed
from ..host.processes import die_with_parent
from ..host.system import cores
from .estimate import Estimator
from .job import Job
from .layouts import Layout, layouts, plan_of
from .lines import few_batches, from_batches
from .prediction import Answer
from .published import kind_of, of_kind
from .stages import all_stages

USABLE = 0.92  # of a GPU's memory: the rest is the allocator's, NCCL's and CUDA's own
SLACK = 1.1  # the formula may say so much too much: the simulation decides
TOP, EACH = 8, 2  # layouts that are simulated: in all, and of one way
SPLIT = 1  # of them with tensor or pipeline ranks, which all run: that takes a minute
SAVED = 12  # bytes per parameter in a checkpoint: float32 weights and AdamW's two moments
# assumed: 20 GB/s for each 256 GPUs
STORAGE = 20e9 / 256
RESTART = 600.0  # assumed: to notice, to replace a node, to start and load


@dataclass(frozen=True, kw_only=True)
class Operation:
    """How a job is run: hours of a GPU between failures, seconds to write a checkpoint on so many
    GPUs, seconds of a restart."""

    hours: float
    storage: float
    restart: float

    def saving(self, job: Job) -> float:
        """Seconds of a checkpoint."""
        return SAVED * job.sizes.all / self.storage

    def interval(self, job: Job) -> float:
        """Seconds of work between two checkpoints: Daly's."""
        return daly(self.saving(job), self.between(job))

    def between(self, job: Job) -> float:
        """Seconds between two failures of the job."""
        return self.hours * 3600 / job.gpus

    def goodput(self, job: Job) -> float:
        """The share of time that makes progress."""
        return goodput(self.saving(job), self.between(job), self.restart, self.interval(job))


def operation(
    job: Job, hours: float = 0.0, storage: float = 0.0, restart: float = RESTART
) -> Operation:
    """How the job is run, with the usual hours and storage for 0; ``storage``: bytes/s of all."""
    return Operation(
        hours=hours or observed(job.machine.gpu.name).hours,
        storage=storage or STORAGE * job.gpus,
        restart=restart,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout: seconds of a step, the most bytes of a GPU and the bytes left there, goodput,
    days and GPU hours for all tokens. ``error``: of such predictions, None if unknown."""

    job: Job
    layout: Layout
    simulated: bool
    step: float
    memory: float
    error: float | None
    told: str
    goodput: float

    @property
    def left(self) -> float:
        """Bytes that are left on a GPU."""
        return self.job.machine.gpu.memory - self.memory

    @property
    def rate(self) -> float:
        """Tokens per second, while it runs."""
        return self.job.sequences * self.job.each / self.step

    @property
    def days(self) -> float:
        """Days for all tokens, failures and checkpoints included."""
        return self.job.tokens / self.rate / self.goodput / 86_400

    @property
    def hours(self) -> float:
        """GPU hours for all tokens."""
        return self.days * 24 * self.job.gpus

    def aims(self) -> tuple[float, ...]:
        """What a row is better in if it is less, as exact as the table shows it."""
        error = float("inf") if self.error is None else round(self.error, 2)
        exact = [float(f"{value:.3g}") for value in (self.days, self.hours)]
        return (*exact, -round(self.left / 1e9), error, -round(self.goodput, 3), not self.simulated)


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows of which no other is as good in every aim and better in one; the fastest first. Of
    equal rows the first stays."""
    found: list[Row] = []
    for row in sorted(rows, key=Row.aims):  # what dominates a row comes before it
        aims = row.aims()
        if not any(all(a <= b for a, b in zip(o.aims(), aims, strict=True)) for o in found):
            found.append(row)
    return found


@dataclass(frozen=True, kw_only=True)
class Found:
    """All rows of a search, how many layouts there are, and how many of them memory prunes."""

    rows: list[Row]
    layouts: int
    too_large: int

    @property
    def best(self) -> Row:
        """The fastest simulated row."""
        return min((row for row in self.rows if row.simulated), key=lambda row: row.days)


def search(
    job: Job, run: Operation, top: int, tell: Callable[[str], None] = lambda _: None
) -> Found:
    """Rows for the ``top`` best layouts, simulated, and the formula's best that can't be.

    Raises ValueError if no layout divides the job, or if none fits.
    """
    known = list(layouts(job))
    if not known:
        raise ValueError(
            f"no layout divides {job.sequences} sequences of a step among {job.gpus} GPUs: choose "
            "a --batch or --gpus that divide each other"
        )
    formula = Estimator(job)
    limit = USABLE * job.machine.gpu.memory
    slack = {True: SLACK, False: 1.0}
    forking = multiprocessing.get_context("fork")  # nothing of this process is imported again
    with ProcessPoolExecutor(cores(), forking, _end_with, (os.getpid(),)) as pool:
        formula.find(known, pool)
        memory = {layout: formula.memory(layout) for layout in known}
        small = [each for each in known if memory[each] <= limit * slack[not each.not_simulated]]
        small.sort(key=formula.seconds)
        ranked = [each for each in small if not each.not_simulated]
        rows = [*_simulated(job, run, ranked, top, limit, tell, pool)]
    if not rows:
        least = min(known, key=lambda layout: memory[layout])
        raise ValueError(
            f"no layout fits {job.gpus} GPUs of {job.machine.gpu.memory / 1e9:.0f} GB: {least.how} "
            f"needs least, {memory[least] / 1e9:.0f} GB per GPU of which "
            f"{USABLE:.0%} may be used; take more GPUs"
        )
    seen: Counter[tuple[object, ...]] = Counter()
    for layout in small:
        kind = layout.strategy, layout.tensor > 1, layout.pipeline > 1, layout.context > 1
        seen[kind] += bool(layout.not_simulated)
        if layout.not_simulated and seen[kind] <= EACH:
            rows.append(_by_formula(job, run, layout, formula))
    return Found(rows=rows, layouts=len(known), too_large=len(known) - len(small))


def _by_formula(job: Job, run: Operation, layout: Layout, formula: Estimator) -> Row:
    return Row(
        job=job,
        layout=layout,
        simulated=False,
        step=formula.seconds(layout),
        memory=formula.memory(layout),
        error=None,
        told=f"a formula, for {layout.not_simulated} is not simulated: the error is unknown",
        goodput=run.goodput(job),
    )


@dataclass
class Taken:
    """The layouts that have a row so far: at most ``top``, ``EACH`` of a way, ``SPLIT`` with tensor
    or pipeline ranks."""

    top: int
    ways: Counter[tuple[int | str, ...]] = field(default_factory=Counter)
    split: int = 0

    def admits(self, layout: Layout) -> bool:
        """Whether the layout may get a row."""
        if self.ways.total() == self.top or self.ways[layout.way] == EACH:
            return False
        return layout.model_ranks == 1 or self.split < SPLIT

    def add(self, layout: Layout) -> None:
        """It has got one."""
        self.ways[layout.way] += 1
        self.split += layout.model_ranks > 1

    def following(self, ranked: Sequence[Layout]) -> list[Layout]:
        """As many as cores: first those that come next if each of them fits, then the others."""
        ahead = copy.deepcopy(self)
        found, others = [], []
        for layout in ranked:
            if ahead.admits(layout):
                ahead.add(layout)
                found.append(layout)
            elif self.admits(layout):
                others.append(layout)
        return [*found, *others][: cores()]


def _simulated(
    job: Job,
    run: Operation,
    ranked: Sequence[Layout],
    top: int,
    limit: float,
    tell: Callable[[str], None],
    pool: Executor,
) -> Iterator[Row]:
    """Rows of the best layouts that fit. The next ones are simulated at the same time; which of
    them get a row does not depend on how many cores there are."""
    taken, begun = Taken(top), dict[Layout, Future[tuple[float, float]]]()
    for index, layout in enumerate(ranked):
        if not taken.admits(layout):
            continue
        for each in taken.following(ranked[index:]):
            if each not in begun:
                begun[each] = pool.submit(_in_a_fork, job, each)
        tell(f"simulating {layout.how}, {layout.recompute} recomputation")
        step, memory = begun[layout].result()
        if memory > limit:
            continue
        taken.add(layout)
        yield _row(job, run, layout, step, memory)
    for one in begun.values():
        one.cancel()


def _end_with(parent: int) -> None:
    """This process ends with its parent, and says nothing at Ctrl-C: the parent does."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _in_a_fork(job: Job, layout: Layout) -> tuple[float, float]:
    return simulated(job, layout)


def _row(job: Job, run: Operation, layout: Layout, step: float, memory: float) -> Row:
    plan = plan_of(job, layout)
    told = of_kind(kind_of(plan.cluster, plan.model, plan.strategy, job.gpus, plan.model_ranks))
    return Row(
        job=job,
        layout=layout,
        simulated=True,
        step=step,
        memory=memory,
        error=told.share,
        told=told.words,
        goodput=run.goodput(job),
    )


def simulated(job: Job, layout: Layout) -> tuple[float, float]:
    """Seconds of a step and the most bytes of a GPU, by the simulator: few layers, and lines."""
    plan = plan_of(job, layout)
    if plan.model_ranks > 1:
        found = all_stages(plan)
        return found.step, found.memory

    def read(answer: Answer) -> dict[str, float]:
        return {"step": answer.step, "memory": answer.memory}

    ends = few_batches(plan, read)
    # a third batch needs no more memory than the second
    return from_batches(plan, ends)["step"], ends[-1]["memory"]
