"""Time and memory of a layout by a formula: to choose what is simulated, and where nothing can be.

The compute of a layer comes from the simulator: few layers with each recomputation, of FSDP, of
autocast, or on T tensor ranks. The rest is a formula. With b sequences in a micro-batch, m
micro-batches, P pipeline and C context ranks, S ranks that share a state, and t seconds per layer
and sequence on T ranks:

    layer       b/C·t
                ring: (C-1)·3 blocks of keys and values, less the attention that hides them
                fsdp: the longer of compute and gather, forward; and gather + reduce, backward
    stage       layers/P · layer + what embedding and head take, on the last
    step        m·stage + (P-1)/chunks · layers/P · layer, a third of it with zero bubbles
                + the optimizer's share + the sum of the gradients, where nothing hides it
    memory      state + activations of all micro-batches under way

    state       bytes per parameter: 18 with ddp, 6 + 12/S with zero1, (weights 2, gradients 4,
                master 4, moments 8), 16/S with fsdp and hybrid; without tensor and pipeline ranks
                autocast has a 16-bit copy more: 18, 10 + 8/S, and zero2 6 + 12/S

Sources: exercises 2.10, 2.17, 2.22, 3.21 and 3.27; Narayanan et al. 2021 (arXiv 2104.04473),
section 2.2; Korthikanti et al. 2022 (arXiv 2205.05198), section 4; Qi et al. 2023 (arXiv
2401.10241), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from ..hardware.collectives import collective_time
from .job import Job
from .layouts import SHARDED, Layout, plan_of
from .lines import run
from .prediction import Answer

Key = tuple[str, int, bool]  # recomputation, tensor ranks, sharded

LAYERS = 2, 4  # that are run
MANY = 64  # GPUs at least, so that shards are small, and activations decide the memory
TOKENS = 8192  # of a micro-batch, so that kernels are as long as those of a layout worth a look
FORWARD = {"none": 1 / 3, "selective": 0.3, "full": 1 / 4}  # of the compute of a layer


@dataclass(frozen=True)
class Costs:
    """The cost of a sequence on a GPU, with one kind of recomputation and so many tensor ranks.

    Seconds in a layer, of its attention, and of all that is in no layer; seconds of the optimizer
    for the GPU's share of all layers; bytes that a layer keeps for a sequence, that all else needs
    for one, and that are needed anyway.
    """

    layer: float
    attention: float
    rest: float
    optimizer: float
    kept: float
    more: float
    fixed: float


def costs(job: Job, recompute: str, tensor: int, sharded: bool) -> Costs:
    """The costs, from small runs: of FSDP or of autocast on many GPUs, or of tensor ranks alone."""
    gpus = tensor if tensor > 1 else max(MANY, job.gpus)
    many = max(1, TOKENS // job.each)
    base = Layout(
        gpus=gpus,
        strategy="fsdp" if sharded else "ddp",
        shards=gpus,
        tensor=tensor,
        recompute=recompute,
        micro_batches=2,
    )

    def of(layers: int, batch: int = many) -> Answer:
        return run(replace(plan_of(job, replace(base, batch=batch)), layers=layers))

    few, deep = (of(layers) for layers in LAYERS)
    more = LAYERS[1] - LAYERS[0]
    updates = [answer.parts.get("optimizer", 0.0) for answer in (few, deep)]
    alone = [a.compute + (a.exposed if tensor > 1 else 0) for a in (few, deep)]
    work = [(busy - u) / 2 / many for busy, u in zip(alone, updates, strict=True)]
    layer = (work[1] - work[0]) / more
    per_parameter = 16 / gpus if sharded else 18 / tensor
    kept = (deep.memory - few.memory) / more - per_parameter * job.sizes.layer
    left = few.memory - per_parameter * job.sizes.all_of(LAYERS[0]) - LAYERS[0] * kept
    ends = left
    if tensor == 1:
        ends = of(LAYERS[0], 2 * many).memory - few.memory - LAYERS[0] * kept
    update = updates[0] + (job.sizes.layers - LAYERS[0]) * (updates[1] - updates[0]) / more
    return Costs(
        layer=layer,
        attention=(deep.parts["attention"] - few.parts["attention"]) / more / 2 / many,
        rest=work[0] - LAYERS[0] * layer,
        optimizer=update * (gpus if sharded else 1),
        kept=kept / many,
        more=ends / many,
        fixed=left - ends,
    )


def _key(layout: Layout) -> Key:
    alone = layout.model_ranks == 1 and layout.strategy not in SHARDED
    return layout.recompute, layout.tensor, layout.tensor == 1 and not alone


def _asked(layout: Layout) -> list[Layout]:
    """The layouts whose costs the formula needs for this one."""
    return [layout, *[replace(layout, tensor=1)] * (layout.strategy in SHARDED)]


class Estimator:
    """The formula for all layouts of a job."""

    def __init__(self, job: Job) -> None:
        self.job, self.cluster, self.sizes = job, job.machine, job.sizes
        self.known: dict[Key, Costs] = {}

    def find(self, layouts: Iterable[Layout], pool: Executor) -> None:
        """Find the costs of all these layouts, several at a time."""
        keys = dict.fromkeys(_key(each) for layout in layouts for each in _asked(layout))
        runs = {key: pool.submit(costs, self.job, *key) for key in keys if key not in self.known}
        self.known |= {key: one.result() for key, one in runs.items()}

    def of(self, layout: Layout) -> Costs:
        """The costs with this recomputation, tensor ranks and precision, found when needed."""
        key = _key(layout)
        if key not in self.known:
            self.known[key] = costs(self.job, *key)
        return self.known[key]

    def collective(self, op: str, nbytes: float, ranks: int, stride: int = 1) -> float:
        """Seconds of a collective among so many ranks, each ``stride`` after the one before."""
        group = tuple(range(0, ranks * stride, stride))
        return collective_time(op, nbytes, group, self.cluster)

    def message(self, nbytes: float, stride: int) -> float:
        """Seconds of a message to the rank ``stride`` further."""
        link = self.cluster.inside if stride < self.cluster.gpus_per_node else self.cluster.between
        return link.alpha + nbytes / link.bandwidth

    # -- memory -----------------------------------------------------------------------------------
    def state(self, layout: Layout) -> float:
        """Bytes of weights, gradients and optimizer per GPU, of the stage with the embedding."""
        split, shards = layout.model_ranks > 1, layout.shards
        per_parameter = {
            "ddp": 18.0,
            "zero1": 6 + 12 / shards if split else 10 + 8 / shards,
            "zero2": 6 + 12 / shards,
            "fsdp": 16 / shards,
            "hybrid": 16 / shards,
        }[layout.strategy]
        own = self.sizes.layer * self.sizes.layers / layout.pipeline
        ends = self.sizes.rest / (2 if layout.pipeline > 1 else 1)
        return per_parameter * (own + ends) / layout.tensor

    def memory(self, layout: Layout) -> float:
        """The most bytes of a GPU."""
        cost = self.of(layout)
        share = layout.batch / layout.context
        alive = 1.0  # micro-batches of the whole model that one GPU's layers keep
        if layout.pipeline > 1:
            stages = layout.pipeline
            early = 1 + (stages - 1) / (stages * layout.chunks) if layout.chunks > 1 else 1
            alive = min(layout.micro_batches, early * stages) / stages
        kept = self.sizes.layers * cost.kept * alive
        # the last stage has the head, and one micro-batch
        first = kept + (cost.more if layout.pipeline == 1 else 0)
        last = kept / layout.pipeline + cost.more
        if layout.schedule == "zero-bubble":  # inputs wait for the weights' gradients on each stage
            last = kept + 1.5 * cost.more
        moved = cost.fixed if layout.model_ranks == 1 else 0.0
        if layout.strategy in SHARDED:
            moved = self.of(replace(layout, tensor=1)).fixed / layout.tensor
        return self.state(layout) + share * max(first, last) + moved

    # -- time -------------------------------------------------------------------------------------
    def seconds(self, layout: Layout) -> float:
        """Seconds of a step."""
        cost = self.of(layout)
        share = layout.batch / layout.context
        layers = self.sizes.layers / layout.pipeline
        layer = self.layer(layout)
        stage = layers * layer + share * cost.rest + self.ends(layout)
        fill = (layout.pipeline - 1) / layout.chunks * layers * layer
        if layout.schedule == "zero-bubble":
            fill /= 3
        if layout.pipeline > 1:
            stage += 2 * layout.chunks * self.boundary(layout)
        owners = layout.pipeline * (1 if layout.strategy == "ddp" else layout.shards)
        step = layout.micro_batches * stage + fill + cost.optimizer / owners
        return step + self.gradients(layout, layout.micro_batches * layers * layer)

    def layer(self, layout: Layout) -> float:
        """Seconds of one layer for one micro-batch, forward and backward."""
        cost, sizes = self.of(layout), self.sizes
        share = layout.batch / layout.context
        tokens = layout.batch * self.job.each / layout.context
        compute = share * cost.layer
        if layout.context > 1:
            block = 2 * 2 * tokens * sizes.narrow / layout.tensor
            ring = 3 * (layout.context - 1) * self.message(block, layout.tensor)
            compute += max(0.0, ring - share * cost.attention)
        if layout.strategy not in SHARDED:
            return compute
        gather, reduce = self.travel(layout, sizes.layer)
        forward = FORWARD[layout.recompute] * compute
        return max(forward, gather) + max(compute - forward, gather + reduce)

    def travel(self, layout: Layout, parameters: float) -> tuple[float, float]:
        """Seconds to gather parameters in 16 bits, and to reduce their gradients."""
        nbytes, shards = 2 * parameters / layout.tensor, layout.shards
        gather = self.collective("all_gather", nbytes / shards, shards, layout.tensor)
        reduce = self.collective("reduce_scatter", nbytes, shards, layout.tensor)
        replicas = layout.gpus // (layout.tensor * shards)
        if replicas > 1:
            stride = layout.tensor * shards
            reduce += self.collective("all_reduce", nbytes / shards, replicas, stride)
        return gather, reduce

    def ends(self, layout: Layout) -> float:
        """Seconds that embedding and head wait for their parameters: nothing hides them."""
        if layout.strategy not in SHARDED:
            return 0.0
        return sum(self.travel(layout, self.sizes.rest))

    def boundary(self, layout: Layout) -> float:
        """Seconds of an activation from one stage to the next."""
        nbytes = 2 * layout.batch * self.job.each * self.sizes.width / layout.tensor
        return self.message(nbytes, layout.tensor * layout.copies)

    def gradients(self, layout: Layout, compute: float) -> float:
        """Seconds of a step's sum of gradients that no backward hides."""
        if layout.strategy in SHARDED or layout.copies == 1:
            return 0.0
        parameters = self.sizes.all / layout.model_ranks
        copies, stride = layout.copies, layout.tensor
        reduce = self.collective("all_reduce", 4 * parameters, copies, stride)
        gather = self.collective("all_gather", 2 * parameters / copies, copies, stride)
        if layout.model_ranks > 1:  # phase 2's step sums after backward
            return reduce + (gather if layout.strategy == "zero1" else 0.0)
        backward = (1 - FORWARD[layout.recompute]) * compute / layout.micro_batches
        if layout.strategy == "zero2":
            each = self.collective("reduce_scatter", 4 * parameters, copies)
            hidden = max(0.0, each - backward)
            return layout.micro_batches * hidden + 2 * gather
        after = 2 * gather if layout.strategy == "zero1" else 0.0
        return max(0.0, reduce - backward) + after
