"""From a configuration to a data set, a model in the hands of its strategy, and their monitor."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from .engines import Engine, make_engine
from .flops import count_flops, matmul_peak
from .image_folder import Decoded, ImageFolder, SyntheticImages, check_classes, scan
from .image_models import build_model, checkpoint_activations
from .monitoring import StepMonitor
from .recipe import make_optimizer_class
from .trainer_config import Config, ConfigError
from .trainer_hooks import make_hook
from .training_plan import DTYPES, Plan, World, make_plan, search_micro_batch


def open_data(config: Config) -> tuple[Dataset[Decoded], ImageFolder | None]:
    """The data to train on, and the data to evaluate on (None for noise)."""
    if config.data == "synthetic":
        return SyntheticImages(config.image_size), None
    files, tests = scan(config.data, "train"), scan(config.data, "val")
    check_classes(tests.classes, files.classes, f"{config.data}/val")
    kind: dict[str, Any] = {"augment": config.augment, "seed": config.seed}
    return (
        ImageFolder(files, config.image_size, **kind),
        ImageFolder(tests, config.image_size, **kind),
    )


def set_up_model(
    config: Config, device: torch.device, images: int, classes: int
) -> tuple[Plan, Engine, StepMonitor]:
    """The plan for this group of ranks, the wrapped model and its monitor; collective.

    Raises ConfigError on every rank if ranks, batch and memory can't go together.
    """
    if config.compile:
        check_compiler(device)
    world_size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    world = World(nodes=world_size // local, ranks_per_node=local, device=device)
    model = build_model(config.model, classes, config.image_size, config.seed)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model.to(device, memory_format=layout)
    pair = torch.empty(2, 3, config.image_size, config.image_size)  # batch norm refuses one pixel
    flops = count_flops(model, pair) / 2
    if config.activation_checkpointing:
        checkpoint_activations(model)
    plan = make_plan(config, model, images, classes, world)
    if device.type == "cuda" and config.micro_batch == "auto":
        plan = replace(plan, micro_batch=search_micro_batch(plan, model))
    peak = matmul_peak(device, DTYPES[config.precision], 8192 if device.type == "cuda" else 512)
    monitor = StepMonitor(device, flops_per_sample=flops, peak_flops=peak)
    if config.compile:
        model.compile()
    return plan, wrap(config, plan, model, monitor), monitor


def check_compiler(device: torch.device) -> None:
    """ConfigError if ``torch.compile`` lacks a compiler for the code that it writes for ``device``.

    Otherwise the error would come in the first step, with pages of torch's own frames.
    """
    if device.type == "cuda":
        name, choices = "CC", ["gcc", "clang", "cc"]  # Triton's
    else:
        name, choices = "CXX", ["clang++" if sys.platform == "darwin" else "g++"]
    wanted = [os.environ[name]] if os.environ.get(name) else choices
    if not any(map(shutil.which, wanted)):
        raise ConfigError(
            f"compile: torch.compile needs a compiler, and there is no {' or '.join(wanted)} here: "
            f"install one (Debian: apt install g++), name one in {name}, or use --compile false"
        )


def wrap(config: Config, plan: Plan, model: nn.Module, monitor: StepMonitor) -> Engine:
    """The course's engine or PyTorch's for ``model``."""
    optimizer_class, options = make_optimizer_class(config)
    common: dict[str, Any] = {"node_size": plan.world.ranks_per_node, "offload": plan.offload}
    if config.parallel == "torch":
        from .torch_engines import make_torch_engine  # a second, for users who compare

        return make_torch_engine(
            model,
            plan.strategy,
            optimizer_class,
            options,
            compression=config.compression,
            compression_rank=config.compression_rank,
            **common,
        )
    hook = make_hook(config, model.parameters())
    return make_engine(
        model,
        plan.strategy,
        optimizer_class,
        options,
        hook=monitor.watch(hook),
        compressor=hook,
        **common,
    )
