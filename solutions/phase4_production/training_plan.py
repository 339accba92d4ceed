"""The plan of a run, before it begins: batch, steps, memory and messages; and whether it fits.

Memory is that of exercise 3.27, messages are those of 3.21. Both come from one step of the model on
fake tensors, for the micro-batch that a rank takes at a time. ``strategy: auto`` takes the cheapest
strategy that fits. ``micro_batch: auto`` takes the largest that fits, by the same estimate, or on a
GPU by a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from given.step_profile import Profile, profile
from solutions.phase2_advanced.batch_size import cuda_peak, largest_micro_batch, make_trial
from solutions.phase3_multi_node.sharding_strategies import (
    Choice,
    Estimate,
    choose_strategy,
    readable,
)

from .image_batches import normalised
from .image_models import blocks
from .recipe import learning_rate, make_optimizer_class
from .trainer_config import Config, ConfigError

NO_LIMIT = 1 << 62
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def profile_of(config: Config, model: nn.Module, micro_batch: int, device: torch.device) -> Profile:
    """One step of so many images on fake tensors."""
    optimizer_class, options = make_optimizer_class(config)

    def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return optimizer_class(parameters, **options)

    images = torch.empty(micro_batch, 3, config.image_size, config.image_size, device=device)
    targets = torch.zeros(micro_batch, dtype=torch.int64, device=device)
    with autocast(config, device):
        return profile(
            model,
            (images, targets),
            make_optimizer,
            loss=lambda logits, wanted: F.cross_entropy(logits.float(), wanted),
            units=blocks(model),
        )


def halves_of(own_batch: int) -> Iterator[int]:
    """Micro-batches for so many images, the largest first: all, a half, a quarter … rounded up."""
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


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run: ``nodes`` of ``ranks_per_node``, which compute on ``device``."""

    nodes: int
    ranks_per_node: int
    device: torch.device

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run, the same on every rank."""

    config: Config
    world: World
    images: int
    classes: int
    parameters: int
    micro_batch: int
    choice: Choice
    sent: float  # bytes per rank and step

    @property
    def own_batch(self) -> int:
        """Images per rank and step, rounded up."""
        return math.ceil(self.config.global_batch / self.world.size)

    @property
    def strategy(self) -> str:
        """The name of the engine."""
        return "fsdp" if self.choice.strategy == "offload" else self.choice.strategy

    @property
    def offload(self) -> bool:
        """Whether shards live on the CPU."""
        return self.config.offload or self.choice.strategy == "offload"

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps; the last one may have fewer images."""
        return math.ceil(self.images / self.config.global_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def __str__(self) -> str:
        """The text that ``--dry-run`` prints."""
        config, chosen, budget = self.config, self.choice.chosen, self.choice.budget
        kinds = {"course": "the course's", "torch": "PyTorch's"}
        flags = ("compile", "channels_last", "activation_checkpointing")
        extras = [n for n in flags if getattr(config, n)] + ["offload"] * self.offload
        often = f"every {config.save_every} steps" if config.save_every else "at the end"
        limit = config.max_steps or self.steps
        stop = f", stops after {limit:,}" if limit < self.steps else ""
        peak = max(learning_rate(s, config, self.steps_per_epoch) for s in range(self.steps))
        average = ", without the average of the weights" if config.ema_decay else ""
        rows = {
            "model": f"{config.model}, {self.parameters:,} parameters, "
            + ", ".join([config.precision, *extras]),
            "data": f"{self.images:,} images of {self.classes} classes in {config.data}",
            "world": f"{self.world.nodes} nodes x {self.world.ranks_per_node} ranks on "
            f"{self.world.device.type}",
            "strategy": f"{self.strategy}, {kinds[config.parallel]}; pattern {config.pattern}, "
            f"compression {config.compression}",
            "batch": f"{config.global_batch} = {self.own_batch} per rank, in "
            f"{math.ceil(self.own_batch / self.micro_batch)} micro-batches of {self.micro_batch}",
            "steps": f"{self.steps:,} = {config.epochs} epochs of {self.steps_per_epoch:,}{stop}",
            "rate": f"{peak:.3g} at most, {config.warmup_epochs:g} epochs of warm-up",
            "memory": f"{readable(chosen.peak)} per rank at the peak, of which activations "
            f"{readable(chosen.activations)}{average}; "
            + ("no limit" if budget == NO_LIMIT else f"limit {readable(budget)}"),
            "messages": f"{readable(self.sent)} sent per rank and step",
            "checkpoints": f"{often} to {config.checkpoints}",
        }
        table = str(self.choice).replace(f"budget {readable(NO_LIMIT)}", "")
        return "\n".join([*(f"{name:13}{text}" for name, text in rows.items()), "", table])


def choose(
    config: Config, model: nn.Module, micro_batch: int, world: World, node_size: int, budget: int
) -> Choice:
    """The strategy for so many images at a time; ConfigError if none fits."""
    own_batch = math.ceil(config.global_batch / world.size)
    wanted = "offload" if config.offload and config.strategy == "fsdp" else config.strategy
    if config.strategy == "auto" and (config.pattern, config.compression) != ("auto", "none"):
        wanted = "ddp"  # hooks need buckets
    profiled = profile_of(config, model, micro_batch, world.device)
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


def make_plan(config: Config, model: nn.Module, images: int, classes: int, world: World) -> Plan:
    """The plan of a run. Raises ConfigError if ranks, batch and memory can't go together.

    ``model`` is the plain one, before it is wrapped; it is not changed. No communication.
    """
    node_size = world.ranks_per_node if config.node_size == "auto" else config.node_size
    if config.global_batch < world.size:
        raise ConfigError(
            f"a global batch of {config.global_batch} is too small for {world.size} ranks: each "
            "needs an image"
        )
    if world.size % node_size:
        raise ConfigError(f"{world.size} ranks don't divide into nodes of {node_size}")
    own_batch, budget = math.ceil(config.global_batch / world.size), budget_of(config, world.device)
    wanted = halves_of(own_batch) if config.micro_batch == "auto" else [config.micro_batch]
    tried: list[tuple[int, Choice]] = []
    for micro_batch in (min(size, own_batch) for size in wanted):
        try:
            choice = choose(config, model, micro_batch, world, node_size, budget)
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
    plan = Plan(
        config=config,
        world=World(nodes=world.size // node_size, ranks_per_node=node_size, device=world.device),
        images=images,
        classes=classes,
        parameters=sum(p.numel() for p in model.parameters()),
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


def search_micro_batch(plan: Plan, model: nn.Module) -> int:
    """The largest micro-batch that fits on every rank's GPU, by trying it out; collective.

    The optimizer's state and the gathered gradients, which a trial lacks, come off the budget.
    Divided so that the micro-batches of a step are equally large, to within one image.
    """
    config, device, chosen = plan.config, plan.world.device, plan.choice.chosen
    missing = chosen.gradients + chosen.optimizer + average_bytes(config, model)

    def loss_of(size: int) -> Tensor:
        pixels = torch.zeros(size, 3, config.image_size, config.image_size, dtype=torch.uint8)
        with autocast(config, device):
            logits = model(normalised(pixels, device, config.channels_last))
        return F.cross_entropy(logits.float(), torch.zeros(size, dtype=torch.int64, device=device))

    fits = largest_micro_batch(
        make_trial(model, loss_of, cuda_peak),
        plan.own_batch,
        budget_bytes=plan.choice.budget - missing,
        device=device,
    )
    return math.ceil(plan.own_batch / math.ceil(plan.own_batch / fits))
