"""From a configuration to a task, a model in the hands of its strategy, and their monitor."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .engine import Engine
from .engines import make_engine
from .flops import count_flops, matmul_peak
from .image_task import ImageTask
from .mesh_engine import MeshEngine
from .model_parts import checkpoint_activations
from .monitoring import StepMonitor
from .recipe import make_optimizer_class
from .run_plan import DTYPES, Plan, World
from .task import Task
from .text_task import TextTask
from .trainer_config import TEXT_MODELS, Config, ConfigError
from .trainer_hooks import make_hook
from .training_plan import make_plan, search_micro_batch


def open_task(config: Config, rank: int = 0) -> Task:
    """The task of the model, with its data open; DataError if they are missing."""
    return TextTask(config) if config.model in TEXT_MODELS else ImageTask(config, rank)


def set_up_model(task: Task, device: torch.device) -> tuple[Plan, Engine, StepMonitor]:
    """The plan for this group of ranks, the wrapped model and its monitor; collective.

    Raises ConfigError on every rank if ranks, batch and memory can't go together.
    """
    config = task.config
    if config.compile:
        check_compiler(device)
    world_size = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    world = World(nodes=world_size // local, ranks_per_node=local, device=device)
    model = task.build_model()
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model.to(device, memory_format=layout)
    pair, _ = task.example(2, device)  # batch norm refuses one pixel
    flops = count_flops(model, pair) / 2
    if config.activation_checkpointing:
        checkpoint_activations(model)
    plan = make_plan(task, model, world)
    if device.type == "cuda" and config.micro_batch == "auto" and plan.choice:
        plan = replace(plan, micro_batch=search_micro_batch(plan, task, model))
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
    if plan.layout is not None:
        return MeshEngine(
            model,
            plan.layout,
            optimizer_class,
            options,
            rows=plan.own_batch,
            length=config.length,
            node_size=plan.world.ranks_per_node,
            monitor=monitor,
        )
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
