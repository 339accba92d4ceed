"""What a run will do, before it does it: batch, steps, memory and messages; and whether it fits.

Memory per rank for Ψ trainable parameters in fp32, with k numbers of optimizer state each, on W
ranks (hybrid: on the L of a node instead of W), in bytes:

    ddp      4Ψ·(2 + k)                    zero1    4Ψ·(2 + k/W)
    zero2    4Ψ + 4Ψ·(1 + k)/W             fsdp     4Ψ·(2 + k)/W + 8·(largest block + the rest)

and 4Ψ more for an average of the weights (÷ W where they are sharded). Activations come on top:
what autograd keeps for one image, measured, times the micro-batch. Bytes sent per rank and step for
P bytes of gradients: ddp and zero2 2(W-1)/W·P, zero1 3(W-1)/W·P, fsdp 3(W-1)/W·P (each further
micro-batch as much again).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solutions.phase2_advanced.batch_size import cuda_peak, largest_micro_batch, make_trial

from .image_folder import normalised, steps_per_epoch
from .image_models import KeptForBackward, blocks
from .recipe import learning_rate
from .trainer_config import Config, ConfigError

GB = 1e9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The context in which the model runs."""
    dtype = DTYPES[config.precision]
    return torch.autocast(device.type, dtype=dtype, enabled=config.precision != "fp32")


def state_bytes(
    strategy: str, config: Config, model: nn.Module, world_size: int, node_size: int
) -> float:
    """Bytes per rank of parameters, gradients, optimizer state and what is gathered of them."""
    numbers = [p.numel() for p in model.parameters() if p.requires_grad]
    psi = 4.0 * sum(numbers)
    extra = {"adamw": 2, "sgd": 1 if config.momentum else 0}[config.optimizer]
    average = 1 if config.ema_decay else 0
    if strategy in ("fsdp", "hybrid"):
        parts = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
        gathered = 8.0 * (max(parts) + sum(numbers) - sum(parts))
        ranks = node_size if strategy == "hybrid" else world_size
        shards = psi * (2 + extra + average) / ranks
        return shards * (0 if config.offload else 1) + gathered
    kept = {
        "ddp": 2 + extra,
        "zero1": 2 + extra / world_size,
        "zero2": 1 + (1 + extra) / world_size,
    }
    return psi * (kept[strategy] + average)


def sent_bytes(
    strategy: str, config: Config, model: nn.Module, world_size: int, accumulation: int
) -> float:
    """Bytes that a rank sends per optimizer step for weights and gradients, uncompressed."""
    nbytes = 4.0 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = (world_size - 1) / world_size
    times = {"ddp": 2, "zero1": 3, "zero2": 1 + accumulation}
    return share * nbytes * times.get(strategy, 3 * accumulation)


def compressed_share(config: Config, model: nn.Module, world_size: int) -> float:
    """The bytes of a compressor over those of the ring all-reduce that it replaces, about."""
    if config.compression == "powersgd":
        shapes = [p.shape for p in model.parameters() if p.requires_grad]
        whole = sum(s.numel() for s in shapes)
        rank = config.compression_rank
        thin = sum(
            min(s.numel(), rank * (s[0] + s.numel() // s[0]) if len(s) > 1 else s.numel())
            for s in shapes
        )
        return thin / whole
    gathered = world_size / 2  # an all-gather of what each rank has chosen, not a sum
    shares = {
        "topk": 2 * config.compression_ratio * gathered,  # values and indices
        "randomk": config.compression_ratio,
        "int8": gathered / 4,
        "onebit": gathered / 32,
        "bf16": 1 / 2,
    }
    return shares.get(config.compression, 1.0)


def sample_loss(model: nn.Module, config: Config, device: torch.device) -> Callable[[int], Tensor]:
    """The loss of so many images of noise, for trials."""

    def loss_of(size: int) -> Tensor:
        pixels = torch.randint(256, (size, 3, config.image_size, config.image_size))
        images = normalised(pixels.to(torch.uint8), device, config.channels_last)
        with autocast(config, device):
            logits = model(images)
        return F.cross_entropy(logits.float(), torch.zeros(size, dtype=torch.int64, device=device))

    return loss_of


def kept_per_image(model: nn.Module, config: Config, device: torch.device) -> float:
    """Bytes that autograd keeps per image: what a second and third image add to a first."""
    trial = make_trial(model, sample_loss(model, config, device), KeptForBackward().measure)
    return (trial(3) - trial(1)) / 2


def choose_micro_batch(
    model: nn.Module, config: Config, device: torch.device, own_batch: int, budget: float
) -> int:
    """The largest part of ``own_batch`` that fits into ``budget`` bytes on all ranks; collective.

    Cut so that the micro-batches of a step are equally large, to within one image.
    """
    measure = cuda_peak if device.type == "cuda" else KeptForBackward().measure
    trial = make_trial(model, sample_loss(model, config, device), measure)
    fits = largest_micro_batch(trial, own_batch, budget_bytes=budget, device=device)
    return math.ceil(own_batch / math.ceil(own_batch / fits))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The numbers of a run, the same on every rank."""

    world_size: int
    strategy: str
    node_size: int
    device: str
    images: int
    classes: int
    parameters: int
    own_batch: int  # images per rank and step, rounded up
    micro_batch: int | None  # None: searched when the run begins
    steps_per_epoch: int
    steps: int
    state: float  # bytes per rank
    kept: float  # bytes per image
    budget: float  # bytes per rank
    sent: float  # bytes per rank and step
    peak_lr: float
    reason: str = ""

    def lines(self, config: Config) -> list[str]:
        """What ``--dry-run`` prints."""
        micro = self.micro_batch or self.fitting
        accumulation = math.ceil(self.own_batch / micro)
        source = "" if self.micro_batch else " (estimated; tried out when the run begins)"
        memory = self.state + micro * self.kept
        limit = "no limit" if self.budget == math.inf else f"of {self.budget / GB:.3f} GB"
        kinds = {"course": "the course's", "torch": "PyTorch's"}
        extras = [n for n in ("offload", "compile", "channels_last") if getattr(config, n)]
        return [
            f"model        {config.model}, {self.parameters:,} parameters, {config.precision}",
            f"data         {self.images:,} images of {self.classes} classes in {config.data}",
            f"world        {self.world_size} ranks on {self.device}",
            f"strategy     {self.strategy}, {kinds[config.parallel]}{self.reason}",
            f"exchange     pattern {config.pattern}, compression {config.compression}"
            + "".join(f", {name}" for name in extras),
            f"batch        {config.global_batch} = up to {self.own_batch} per rank, in "
            f"{accumulation} micro-batches of {micro}{source}",
            f"steps        {self.steps:,} = {config.epochs} epochs of {self.steps_per_epoch:,}",
            f"rate         up to {self.peak_lr:.3g}, {config.warmup_epochs:g} epochs of warm-up",
            f"memory       {memory / GB:.3f} GB per rank, {limit}: state {self.state / GB:.3f}, "
            f"activations {micro * self.kept / GB:.3f}",
            f"messages     {self.sent / 1e6:.2f} MB sent per rank and step",
            f"checkpoints  every {config.save_every} steps to {config.checkpoints}"
            if config.save_every
            else f"checkpoints  at the end to {config.checkpoints}",
        ]

    @property
    def fitting(self) -> int:
        """The largest micro-batch that should fit."""
        if self.budget == math.inf:
            return self.own_batch
        fits = max(1, int((self.budget - self.state) / max(self.kept, 1.0)))
        return math.ceil(self.own_batch / math.ceil(self.own_batch / min(fits, self.own_batch)))


def budget_of(config: Config, device: torch.device) -> float:
    """Bytes that a rank may use."""
    if config.memory_gb is not None:
        return config.memory_gb * GB
    if device.type == "cuda":
        return 0.92 * torch.cuda.get_device_properties(device).total_memory
    return math.inf


def make_plan(
    config: Config,
    model: nn.Module,
    *,
    images: int,
    classes: int,
    world_size: int,
    local_world_size: int,
    device: torch.device,
) -> Plan:
    """The plan of a run. Raises ConfigError if ranks, batch and memory can't go together."""
    node_size = local_world_size if config.node_size == "auto" else config.node_size
    if config.global_batch < world_size:
        raise ConfigError(f"a global batch of {config.global_batch} for {world_size} ranks")
    if config.strategy == "hybrid" and world_size % node_size:
        raise ConfigError(f"{world_size} ranks don't divide into nodes of {node_size}")
    budget = budget_of(config, device)
    kept = kept_per_image(model, config, device)
    needs = {
        name: state_bytes(name, config, model, world_size, node_size)
        for name in (*STRATEGIES, "hybrid")
    }
    strategy, reason = config.strategy, ""
    if strategy == "auto":
        strategy = next((s for s in STRATEGIES if needs[s] + kept <= budget), STRATEGIES[-1])
        reason = " (chosen: the first that fits)"
    if needs[strategy] + kept > budget:
        least = min(needs, key=needs.__getitem__)
        raise ConfigError(
            f"{config.model} does not fit: {strategy} on {world_size} ranks needs "
            f"{(needs[strategy] + kept) / GB:.3f} GB per rank, there are {budget / GB:.3f}; "
            f"{least} would need {(needs[least] + kept) / GB:.3f}"
        )
    own_batch = math.ceil(config.global_batch / world_size)
    micro = config.micro_batch
    accumulation = 1 if micro == "auto" else math.ceil(own_batch / micro)
    per_epoch = steps_per_epoch(images, config.global_batch)
    sent = sent_bytes(strategy, config, model, world_size, accumulation)
    return Plan(
        world_size=world_size,
        strategy=strategy,
        node_size=node_size,
        device=device.type,
        images=images,
        classes=classes,
        parameters=sum(p.numel() for p in model.parameters()),
        own_batch=own_batch,
        micro_batch=None if micro == "auto" else min(micro, own_batch),
        steps_per_epoch=per_epoch,
        steps=config.epochs * per_epoch,
        state=needs[strategy],
        kept=kept,
        budget=budget,
        sent=sent * compressed_share(config, model, world_size),
        peak_lr=max(learning_rate(s, config, per_epoch) for s in range(config.epochs * per_epoch)),
        reason=reason,
    )
