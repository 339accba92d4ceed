"""Train the tiny GPT on real text with tensor, pipeline and data parallelism, under torchrun.

    torchrun --nproc-per-node 4 -m solutions.phase2_advanced.train_gpt --tensor 2 --pipeline 2

Every rank makes the whole (tiny) model from the same seed and keeps its share. So the run equals
that of one process but for rounding. ``--compare`` also trains in one process and shows the
difference.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

from distlab.reference.workloads import CONTEXT, build_model, text
from given.devices import CHOICES
from given.launched import launched
from given.parent import end_with_parent
from solutions.phase1_data_parallel.evaluation import print_once

from .batch_size import scaled_learning_rate
from .gradient_accumulation import clip_by_global_norm
from .parallel_gpt import SCHEDULES, Layout, ParallelGPT, make_groups, train_step

MAX_NORM = 1.0
WARMUP_STEPS = 20
ROUNDING = 4 * torch.finfo(torch.float32).eps  # of a loss between 4 and 8, where training begins
OnStep = Callable[[int, float], None]


def batch_of(step: int, size: int) -> tuple[Tensor, Tensor]:
    """The ``size`` sequences of a step: tokens and next tokens, both (size, CONTEXT) int64.

    Each step has a seed of its own, so that every rank draws the same batch without any message.
    """
    tokens, targets = text().tensors
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(tokens), (size,), generator=generator)
    return tokens[chosen], targets[chosen]


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Warm-up to the rate of the options, then a cosine down to a tenth of it."""
    if step < WARMUP_STEPS:
        return scaled_learning_rate(
            step,
            base_lr=options.lr / 10,
            base_batch=1,
            global_batch=10,
            warmup_steps=WARMUP_STEPS,
        )
    done = (step - WARMUP_STEPS) / max(1, options.steps - WARMUP_STEPS)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def train_alone(
    options: argparse.Namespace,
    device: torch.device,
    build: Callable[[], nn.Module],
    after_step: Callable[[nn.Module], None] = lambda model: None,
) -> list[float]:
    """The losses of one process with the whole model and the whole batch."""
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        tokens_BT, targets_BT = (t.to(device) for t in batch_of(step, options.batch))
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(tokens_BT), targets_BT.flatten())
        loss.backward()
        clip_by_global_norm(model.parameters(), MAX_NORM)
        optimizer.step()
        after_step(model)
        losses.append(loss.item())
    return losses


def train(
    options: argparse.Namespace, layout: Layout, device: torch.device, on_step: OnStep
) -> list[float]:
    """The losses of all ranks together; ``on_step(step, loss)`` after each."""
    groups = make_groups(layout)
    model = ParallelGPT(build_model("tiny_gpt", options.seed), layout, groups).to(device)
    if options.batch % layout.data:
        raise ValueError(f"a batch of {options.batch} does not divide by {layout.data} replicas")
    share = options.batch // layout.data
    mine = slice(groups.data.rank() * share, (groups.data.rank() + 1) * share)
    pipeline = model.pipeline(share, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        tokens_BT, targets_BT = (t[mine].to(device) for t in batch_of(step, options.batch))
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        loss, _ = train_step(model, pipeline, optimizer, tokens_BT, targets_BT, max_norm=MAX_NORM)
        losses.append(loss)
        on_step(step, loss)
    return losses


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """The loss curves in one picture, and below it their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1 + (len(curves) > 1), 1, sharex=True, squeeze=False, figsize=(8, 5), layout="constrained"
    )
    (name, losses), *others = curves.items()
    axes[0, 0].plot(losses, lw=5, color="#A6D3EE", label=name)
    for other, values in others:
        axes[0, 0].plot(values, lw=1, color="#222222", label=other)
        between = [abs(a - b) for a, b in zip(losses, values, strict=True)]
        axes[1, 0].plot(between, ".", color="#D55E00")
        axes[1, 0].set_yscale("symlog", linthresh=ROUNDING)  # linear below it: zero is on the axis
        axes[1, 0].axhspan(0, ROUNDING, color="#EEEEEE", zorder=0)
        axes[1, 0].text(0, ROUNDING / 2, "below one rounding of the loss", va="center", size=8)
        axes[1, 0].set(ylabel="difference", ylim=(-ROUNDING / 8, None))
    axes[-1, 0].set(xlabel="optimizer step")
    axes[0, 0].set(ylabel="loss per character, nats", title="tiny GPT on Python's documentation")
    axes[0, 0].legend()
    for each in axes.flat:
        each.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT with 3D parallelism.")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that share the layers")
    return parsed(parser, arguments)


def parsed(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The command line of a ``parser`` that has the axes: the other options of a training."""
    parser.add_argument("--chunks", type=int, default=1, help="stages per rank (interleaved)")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b", choices=SCHEDULES)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all replicas together")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=CHOICES)
    parser.add_argument("--compare", action="store_true", help="with one process, step by step")
    parser.add_argument("--plot", type=Path, help="picture of the loss, written by rank 0")
    options = parser.parse_args(arguments)
    if min(options.steps, options.batch) < 1:
        parser.error("steps and batch must be at least 1")
    return options


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Train in the layout of the options, and report."""
    world_size = dist.get_world_size()
    if world_size % (options.tensor * options.pipeline):
        raise ValueError(
            f"{world_size} ranks are no multiple of tensor {options.tensor} x pipeline "
            f"{options.pipeline}"
        )
    layout = Layout(
        tensor=options.tensor,
        pipeline=options.pipeline,
        data=world_size // (options.tensor * options.pipeline),
        chunks=options.chunks,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        sequence_parallel=options.sequence_parallel,
    )
    name = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    together = functools.partial(train, options, layout, device)
    build = functools.partial(build_model, "tiny_gpt", options.seed)
    report(options, device, name, together, functools.partial(train_alone, options, device, build))


def report(
    options: argparse.Namespace,
    device: torch.device,
    name: str,
    together: Callable[[OnStep], list[float]],
    alone: Callable[[], list[float]],
) -> None:
    """Train, and on rank 0 show progress, the difference to one process and the picture.

    ``together`` and ``alone`` train on all ranks and on one; they return the losses.
    """
    rank = dist.get_rank()
    columns = [*Progress.get_default_columns(), TextColumn("{task.fields[state]}")]
    with Progress(*columns, disable=rank != 0) as progress:
        task = progress.add_task("training", total=options.steps, state="")
        begun = time.perf_counter()

        def show(step: int, loss: float) -> None:
            rate = (step + 1) * options.batch * CONTEXT / (time.perf_counter() - begun)
            state = f"loss {loss:.4f}  {rate:,.0f} tokens/s"
            progress.update(task, completed=step + 1, state=state)

        losses = together(show)
        seconds = time.perf_counter() - begun
    print_once(
        f"{name}, {options.schedule}, on {device.type}: loss {losses[0]:.4f} to {losses[-1]:.4f} "
        f"in {options.steps} steps, {options.steps * options.batch * CONTEXT / seconds:,.0f} "
        "tokens/s"
    )
    if rank:
        return
    curves = {name: losses}
    if options.compare:
        curves["one process"] = alone()
        pairs = zip(losses, curves["one process"], strict=True)
        worst = max(abs(a - b) / b for a, b in pairs)
        print(f"one process: loss {curves['one process'][-1]:.4f}; largest difference {worst:.1e}")
    if options.plot:
        plot(curves, options.plot)
        print(options.plot)


def main() -> None:
    """Entry point under torchrun."""
    end_with_parent()
    options = options_of()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 4 -m solutions.phase2_advanced.train_gpt "
            "--tensor 2 --pipeline 2"
        )
    with launched("train_gpt", options.device, point_to_point=options.pipeline > 1) as rank:
        run(options, rank.device)


if __name__ == "__main__":
    main()
