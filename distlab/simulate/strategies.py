"""The strategies that ``distlab simulate`` knows: each does one training step in its way.

Each is a context manager ``strategy(plan, model)`` inside a virtual rank; it yields the module
whose parameters the optimizer gets, and ``step(module, optimizer, inputs, targets)``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from ..course.catalogue import load_course
from ..grading.implementation import Implementation, solution
from ..grading.sources import Source, find_source
from ..hardware.clusters import load_cluster
from ..virtual.shadows import HostOnMeta
from .autocast import Autocast
from .llama import Llama
from .llama_share import share_of
from .models import blocks_of
from .plan import Plan
from .repeat import repeat
from .split import as_planned, follow

TrainStep = Callable[[nn.Module, torch.optim.Optimizer, Tensor, Tensor], object]
Trained = tuple[nn.Module, TrainStep]
Trainer = Callable[[Plan, nn.Module], AbstractContextManager[Trained]]


def learners(phase: int) -> Source:
    """The learner's files of a phase."""
    return find_source("templates", load_course().phase(phase))


def module_of(plan: Plan, phase: int, name: str) -> Any:
    """A module of the chosen implementation."""
    if plan.impl == "solutions":
        return solution(load_course().phase(phase), name)
    return Implementation(learners(phase), name).module(name)


def casts(plan: Plan) -> AbstractContextManager[object]:
    """The context of a forward: autocast, if the plan has it."""
    if plan.precision != "autocast":
        return contextlib.nullcontext()
    return Autocast(getattr(torch, plan.arithmetic))


def step_of(wrapped: nn.Module, plan: Plan) -> TrainStep:
    """A step of a model that reduces its gradients by itself, over ``plan.accumulate`` batches."""

    def step(_: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad()
        for number in range(plan.accumulate):
            last = number == plan.accumulate - 1
            alone = getattr(wrapped, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if last else alone():
                with casts(plan):
                    loss = F.cross_entropy(wrapped(inputs), targets)
                loss.backward()
        optimizer.step()

    return step


@contextlib.contextmanager
def data_parallel(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Phase 1's trainer, or torch's DistributedDataParallel unchanged."""
    if plan.impl == "torch":
        wrap = nn.parallel.DistributedDataParallel
        yield model, step_of(wrap(model, bucket_cap_mb=plan.bucket_mb), plan)
        return
    train = module_of(plan, 1, "trainer").train_step

    def step(*given: Any) -> None:
        with casts(plan):
            train(*given)

    yield model, step


@contextlib.contextmanager
def bucketed(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Phase 3's DDP, or torch's."""
    if plan.impl == "torch":
        with data_parallel(plan, model) as trained:
            yield trained
        return
    size = int(plan.bucket_mb * 2**20)
    wrap = module_of(plan, 3, "ddp").DDP
    yield model, step_of(wrap(model, bucket_bytes=size, first_bucket_bytes=min(size, 2**20)), plan)


REDUCERS = {  # module and function of phase 3
    "ring": ("ring_allreduce", "ring_all_reduce"),
    "tree": ("tree_allreduce", "tree_all_reduce"),
    "halving-doubling": ("halving_doubling", "halving_doubling_all_reduce"),
    "hierarchical": ("hierarchical_allreduce", "all_reduce_hierarchical"),
}


@contextlib.contextmanager
def reduced_by(plan: Plan, model: nn.Module, name: str) -> Iterator[Trained]:
    """Phase 3's DDP whose buckets are summed by an all-reduce written from messages."""
    file, function = REDUCERS[name]
    reduce = getattr(module_of(plan, 3, file), function)
    if name == "hierarchical":
        cluster, ranks = load_cluster(plan.cluster), range(dist.get_world_size())
        nodes = [tuple(r) for _, r in itertools.groupby(ranks, cluster.node)]
        topology = module_of(plan, 3, "topology")
        groups = topology.make_groups(topology.Topology(tuple(nodes)))
        reduce = partial(reduce, groups=groups)
    size = int(plan.bucket_mb * 2**20)
    wrapped = module_of(plan, 3, "ddp").DDP(
        model, bucket_bytes=size, first_bucket_bytes=min(size, 2**20)
    )
    train, warm = step_of(wrapped, plan), False

    def sum_up(bucket: Tensor) -> None:
        (reduce if warm else dist.all_reduce)(bucket)

    def step(*given: Any) -> None:
        nonlocal warm
        train(*given)
        warm = True  # the first step makes state and buckets: thousands of messages less

    wrapped.register_comm_hook(module_of(plan, 3, "comm_hooks").blocking(sum_up))
    yield model, step


@contextlib.contextmanager
def parameter_server(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Exercises 3.26 and 3.22 to 3.24 with the first ``plan.servers`` ranks as servers.

    One synchronous round is simulated. Without rounds it is ``plan.every`` steps of each worker, so
    that the workers, which begin at the same time, spread out.
    """
    fit = module_of(plan, 3, "parameter_server").fit
    options: dict[str, Any] = {"servers": plan.servers, "lr": 0.1, "staleness": plan.staleness}

    def step(_: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
        with HostOnMeta():
            fit(model, [(inputs, targets)] * (plan.steps // plan.calls), **options)
        if plan.staleness is not None:  # one that serves any rank must not meet the next fit
            dist.barrier()

    yield model, step


def narrow_sums(flat: Any, *where: Any) -> None:
    """``make_full`` of a flat parameter whose gradients are summed in 16 bits: the hybrid one does
    not pass this option on."""
    flat.reduce_dtype = torch.bfloat16
    super(type(flat), flat).make_full(*where)


@contextlib.contextmanager
def fully_sharded(plan: Plan, model: nn.Module, hybrid: bool = False) -> Iterator[Trained]:
    """Phase 3's FSDP with prefetching, a unit per block; ``hybrid``: sharded over ``plan.shards``
    GPUs, or inside the nodes."""
    options: dict[str, Any] = {}
    mixed = module_of(plan, 3, "fsdp_precision").MixedPrecisionFlat
    if plan.precision == "mixed":
        options["flat_type"] = partial(mixed, reduce_dtype=torch.bfloat16)
    if hybrid:
        module = module_of(plan, 3, "fsdp_hybrid")
        inside = min(load_cluster(plan.cluster).gpus_per_node, dist.get_world_size())
        options["group"], replicas = module.node_groups(plan.shards or inside)
        flat = module.HybridFlat
        if plan.precision == "mixed":
            flat = type("MixedHybridFlat", (flat, mixed), {"make_full": narrow_sums})
        options["flat_type"] = partial(flat, replicas=replicas)
    wrap = module_of(plan, 3, "fsdp_prefetch").PrefetchFSDP
    sharded = wrap(model, blocks_of(model), **options)
    yield sharded, step_of(sharded, plan)


@contextlib.contextmanager
def local_sgd(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Exercise 3.25: the parameters are averaged after ``plan.every`` steps."""
    rounds = module_of(plan, 3, "local_sgd").LocalSGD(model, every=plan.every)
    train = step_of(model, plan)

    def step(_: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor) -> None:
        train(model, optimizer, inputs, targets)
        rounds.step()

    yield model, step


@contextlib.contextmanager
def zero1(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """``bucketed``, with the optimizer's state sharded by phase 3's ZeRO-1, or by torch's."""
    sharded: list[torch.optim.Optimizer] = []

    def sharded_like(given: torch.optim.Optimizer) -> torch.optim.Optimizer:
        groups = [dict(group) for group in given.param_groups]
        if plan.impl == "torch":
            return ZeroRedundancyOptimizer(groups, type(given))
        make = module_of(plan, 3, "zero").ZeroOptimizer
        size = int(plan.bucket_mb * 2**20)
        return make(groups, type(given), bucket_bytes=size)

    with bucketed(plan, model) as (trained, train_step):

        def step(module: nn.Module, given: Any, inputs: Tensor, targets: Tensor) -> None:
            if not sharded:
                sharded.append(sharded_like(given))
            train_step(module, sharded[0], inputs, targets)

        yield trained, step


@contextlib.contextmanager
def zero2(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Phase 3's ZeRO-2, which reduces the gradients by itself."""
    make = module_of(plan, 3, "zero_gradients").Zero2Optimizer
    size = int(plan.bucket_mb * 2**20)
    sharded: list[torch.optim.Optimizer] = []

    def step(_: nn.Module, given: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> None:
        if not sharded:
            groups = [dict(group) for group in given.param_groups]
            sharded.append(make(groups, type(given), bucket_bytes=size))
        step_of(model, plan)(model, sharded[0], inputs, targets)

    yield model, step


@contextlib.contextmanager
def model_parallel(plan: Plan, model: nn.Module) -> Iterator[Trained]:
    """Phase 2's tensor, sequence and pipeline parallelism, with data parallelism over the rest."""
    parts = module_of(plan, 2, "parallel_gpt")
    most = 4 * plan.pipeline if plan.pipeline > 1 else plan.tensor
    divisors = [m for m in range(1, most + 1) if plan.samples % m == 0]
    layout = parts.Layout(
        tensor=plan.tensor,
        pipeline=plan.pipeline,
        data=dist.get_world_size() // plan.model_ranks,
        chunks=plan.chunks,
        micro_batches=plan.micro_batches or divisors[-1],
        schedule=plan.schedule,
        sequence_parallel=plan.sequence_parallel,
    )
    groups = parts.make_groups(layout)
    if isinstance(model, Llama):
        share = share_of(parts, model, layout, groups)
    else:
        share = parts.ParallelGPT(model, layout, groups)
    del model  # the whole one takes no memory of a rank
    as_planned(plan, share)
    length = plan.spec.per_sample
    pipeline = share.pipeline(plan.samples, length)
    share.kept = 0
    follow(pipeline, share, plan.free_outputs)
    if plan.repeats:
        repeat(pipeline)

    def step(_: nn.Module, optimizer: Any, tokens: Tensor, targets: Tensor) -> None:
        parts.train_step(share, pipeline, optimizer, tokens, targets.view(-1, length))

    yield share, step


TRAINERS: dict[str, Trainer] = {  # by the names in choices.STRATEGIES
    "ddp": data_parallel,
    "bucketed": bucketed,
    **{name: partial(reduced_by, name=name) for name in REDUCERS},
    "zero1": zero1,
    "zero2": zero2,
    "fsdp": fully_sharded,
    "hybrid": partial(fully_sharded, hybrid=True),
    "local-sgd": local_sgd,
    "parameter-server": parameter_server,
}


def trainer_of(plan: Plan) -> Trainer:
    """The plan's strategy."""
    return TRAINERS[plan.strategy] if plan.model_ranks == 1 else model_parallel
