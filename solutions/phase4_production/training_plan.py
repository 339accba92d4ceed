"""How a run is planned before it begins: strategy, micro-batch, and whether they fit.

Memory is that of exercise 3.27, messages are those of 3.21. Both come from one step of the model on
fake tensors, for the micro-batch that a rank takes at a time. ``strategy: auto`` takes the cheapest
strategy that fits. ``micro_batch: auto`` takes the largest that fits, by the same estimate, or on a
GPU by a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from given.step_profile import Profile, profile
from solutions.phase2_advanced.batch_size import cuda_peak, largest_micro_batch, make_trial
from solutions.phase3_multi_node.mesh_traffic import expected
from solutions.phase3_multi_node.sharding_strategies import (
    Choice,
    Estimate,
    choose_strategy,
    readable,
)

from .mesh_engine import layout_of
from .model_parts import blocks
from .recipe import make_optimizer_class
from .run_plan import DTYPES, NO_LIMIT, Plan, World
from .task import Task
from .trainer_config import Config, ConfigError


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the model runs; may be entered again and again."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[config.precision])


def budget_of(config: Config, device: torch.device) -> int:
    """Bytes that a rank may use: the configured number, or nearly all of a GPU."""
    if config.memory_gb is not None:
        return int(config.memory_gb * 1e9)
    if device.type == "cuda":
        return int(0.92 * torch.cuda.get_device_properties(device).total_memory)
    return NO_LIMIT


def profile_of(task: Task, model: nn.Module, micro_batch: int, device: torch.device) -> Profile:
    """One step of so many samples on fake tensors."""
    optimizer_class, options = make_optimizer_class(task.config)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_class(parameters, **options)

    with autocast(task.config, device):
        return profile(
            model,
            task.example(micro_batch, device),
            make_optimizer,
            loss=lambda logits, wanted: F.cross_entropy(logits.float(), wanted.flatten()),
            units=blocks(model),
        )


def halves_of(own_batch: int) -> Iterator[int]:
    """Micro-batches for so many samples, the largest first: all, a half, a quarter … rounded up."""
    while own_batch > 1:
        yield own_batch
        own_batch = -(-own_batch // 2)
    yield 1


def compressed_share(config: Config, parameters: Iterable[nn.Parameter], world_size: int) -> float:
    """The bytes of a compressor over those of the ring all-reduce that it replaces."""
    gathered = world_size / 2  # an all-gather of each rank's choice, not a sum
    if config.compression == "powersgd":
        shapes = [p.shape for p in parameters]
        rank = config.compression_rank
        thin = [
            min(s.numel(), rank * (s[0] + s.numel() // s[0]) if len(s) > 1 else s.numel())
            for s in shapes
        ]
        return sum(thin) / sum(s.numel() for s in shapes)
    shares = {
        "topk": 2 * config.compression_ratio * gathered,  # values and indices
        "randomk": config.compression_ratio,
        "int8": gathered / 4,
        "onebit": gathered / 32,
        "bf16": 1 / 2,
    }
    return shares.get(config.compression, 1.0)


def choose(
    task: Task, model: nn.Module, micro_batch: int, world: World, node_size: int, budget: int
) -> Choice:
    """The strategy for so many samples at a time; ConfigError if none fits."""
    config = task.config
    own_batch = math.ceil(config.global_batch / world.size)
    wanted = "offload" if config.offload and config.strategy == "fsdp" else config.strategy
    if config.strategy == "auto" and (config.pattern, config.compression) != ("auto", "none"):
        wanted = "ddp"  # hooks need buckets
    profiled = profile_of(task, model, micro_batch, world.device)
    try:
        return choose_strategy(
            profiled,
            budget if budget == NO_LIMIT else budget - average_bytes(config, model),
            world.size // node_size,
            node_size,
            strategy=wanted,
            backwards=math.ceil(own_batch / micro_batch),
        )
    except ValueError as error:
        raise ConfigError(f"{config.model}: {error}") from None


def average_bytes(config: Config, model: nn.Module) -> int:
    """Bytes of the average of the weights, taken as if it were whole on every rank."""
    return sum(p.nbytes for p in model.parameters()) if config.ema_decay else 0


def on_mesh(plan: Plan, model: nn.Module) -> Plan:
    """The plan with the layout of a mesh; ConfigError if ranks or batch don't divide."""
    config, ranks = plan.config, plan.world.size
    layout = layout_of(config, ranks)
    sent = sum(expected(model, layout, config.global_batch, config.length).values())
    plan = replace(plan, layout=layout, sent=sent / ranks)
    return replace(plan, micro_batch=plan.own_batch // layout.micro_batches)


def make_plan(task: Task, model: nn.Module, world: World) -> Plan:
    """The plan of a run. Raises ConfigError if ranks, batch and memory can't go together.

    ``model`` is the plain one, before it is wrapped; it is not changed. No communication.
    """
    config = task.config
    plan = Plan(
        config=config,
        world=world,
        samples=len(task.train_set),
        described=task.described,
        parameters=sum(p.numel() for p in model.parameters()),
    )
    if config.strategy == "mesh":
        return on_mesh(plan, model)
    node_size = world.ranks_per_node if config.node_size == "auto" else config.node_size
    if config.global_batch < world.size:
        raise ConfigError(
            f"a global batch of {config.global_batch} is too small for {world.size} ranks: each "
            "needs one sample"
        )
    if world.size % node_size:
        raise ConfigError(f"{world.size} ranks don't divide into nodes of {node_size}")
    own_batch, budget = math.ceil(config.global_batch / world.size), budget_of(config, world.device)
    wanted = halves_of(own_batch) if config.micro_batch == "auto" else [config.micro_batch]
    tried: list[tuple[int, Choice]] = []
    for micro_batch in (min(size, own_batch) for size in wanted):
        try:
            choice = choose(task, model, micro_batch, world, node_size, budget)
        except ConfigError:
            if (micro_batch == 1 and not tried) or config.micro_batch != "auto":
                raise
            continue
        tried.append((micro_batch, choice))
        if choice.fits and (config.strategy != "auto" or choice.strategy == "ddp"):
            break
    fitting = [each for each in tried if each[1].fits]
    if not fitting:
        raise does_not_fit(config, choice, world, micro_batch)
    micro_batch, choice = min(fitting, key=lambda each: each[1].chosen.seconds)
    trainable = [p for p in model.parameters() if p.requires_grad]
    plan = replace(
        plan,
        world=World(nodes=world.size // node_size, ranks_per_node=node_size, device=world.device),
        micro_batch=micro_batch,
        choice=choice,
        sent=choice.chosen.sent * compressed_share(config, trainable, world.size),
    )
    config.check_compile(plan.strategy)
    return plan


def does_not_fit(config: Config, choice: Choice, world: World, micro_batch: int) -> ConfigError:
    """The missing memory, and what would help."""
    least = min(choice.estimates, key=lambda e: e.peak)

    def told(estimate: Estimate) -> str:
        return f"{estimate.strategy} {readable(estimate.peak)}"

    return ConfigError(
        f"{config.model} does not fit into {readable(choice.budget)} on {world.size} ranks with "
        f"micro-batches of {micro_batch}: {told(choice.chosen)}, and {told(least)} at least"
    )


def search_micro_batch(plan: Plan, task: Task, model: nn.Module) -> int:
    """The largest micro-batch that fits on every rank's GPU, by trying it out; collective.

    The optimizer's state and the gathered gradients, which a trial lacks, come off the budget.
    Divided so that the micro-batches of a step are equally large, to within one sample.
    """
    assert plan.choice is not None  # a mesh has divided its batch already
    config, device, chosen = plan.config, plan.world.device, plan.choice.chosen
    missing = chosen.gradients + chosen.optimizer + average_bytes(config, model)

    def loss_of(size: int) -> Tensor:
        inputs, targets = task.example(size, device)
        with autocast(config, device):
            logits = model(inputs)
        return F.cross_entropy(logits.float(), targets.flatten())

    fits = largest_micro_batch(
        make_trial(model, loss_of, cuda_peak),
        plan.own_batch,
        budget_bytes=plan.choice.budget - missing,
        device=device,
    )
    return math.ceil(plan.own_batch / math.ceil(plan.own_batch / fits))
