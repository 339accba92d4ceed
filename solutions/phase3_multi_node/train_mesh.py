"""Train a tiny GPT on real text on any mesh, under torchrun: phase 2's program in six dimensions.

    torchrun --nproc-per-node 8 -m solutions.phase3_multi_node.train_mesh --context 2 --experts 2

``--data`` takes the ranks that the other axes leave. The axes are put in the order for which the
fewest bytes leave a node. With ranks for experts, or ``--model tiny_moe``, every second block has
experts. Every rank makes the whole (tiny) model from the same seed and keeps its share. So the run
equals that of one process but for rounding, and ``--compare`` shows the difference.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys

import torch
import torch.distributed as dist

from distlab.reference.workloads import CONTEXT
from given.launched import launched
from given.parent import end_with_parent
from solutions.phase2_advanced.train_gpt import (
    MAX_NORM,
    OnStep,
    batch_of,
    learning_rate,
    parsed,
    report,
    train_alone,
)

from .mesh_gpt import MeshGPT, train_step
from .mesh_specs import MeshLayout
from .mesh_traffic import best_grid
from .mixture_gpt import MODELS, build_gpt, update_biases

OTHERS = {
    "shard": "ranks that share the rows of parameters, and the batch",
    "tensor": "ranks that share every layer",
    "pipeline": "ranks that share the layers",
    "context": "ranks that share each sequence",
    "experts": "ranks that share the experts, and the batch",
}


def train(
    options: argparse.Namespace, layout: MeshLayout, device: torch.device, on_step: OnStep
) -> list[float]:
    """The losses of all ranks together; ``on_step(step, loss)`` after each."""
    gpt = build_gpt(options.model, options.seed).to(device)
    node_size = int(os.environ.get("LOCAL_WORLD_SIZE", layout.ranks))
    grid = best_grid(gpt, layout, options.batch, CONTEXT, node_size)
    model = MeshGPT(gpt, layout, grid)
    pipeline = model.pipeline(options.batch, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses = []
    for step in range(options.steps):
        tokens_BT, targets_BT = (model.own(t).to(device) for t in batch_of(step, options.batch))
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        loss, _ = train_step(model, pipeline, optimizer, tokens_BT, targets_BT, max_norm=MAX_NORM)
        losses.append(loss)
        on_step(step, loss)
    return losses


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT on a mesh of ranks.")
    parser.add_argument("--data", type=int, help="replicas (default: the ranks that are left)")
    for axis, words in OTHERS.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=words)
    parser.add_argument("--model", choices=MODELS, help="default: tiny_moe if ranks share experts")
    options = parsed(parser, arguments)
    options.model = options.model or ("tiny_moe" if options.experts > 1 else "tiny_gpt")
    return options


def layout_of(options: argparse.Namespace, world_size: int) -> MeshLayout:
    """The layout of the options on ``world_size`` ranks.

    Raises ValueError if the axes take another number of ranks.
    """
    sizes = {axis: getattr(options, axis) for axis in OTHERS}
    others = math.prod(sizes.values())
    data = options.data or max(1, world_size // max(1, others))
    if data * others != world_size:
        told = " x ".join(f"{axis} {size}" for axis, size in ({"data": data} | sizes).items())
        raise ValueError(f"{told} takes {data * others} ranks, there are {world_size}")
    return MeshLayout(
        data=data,
        chunks=options.chunks,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        sequence_parallel=options.sequence_parallel,
        **sizes,
    )


def run(options: argparse.Namespace, device: torch.device) -> None:
    """Train in the layout of the options, and report."""
    layout = layout_of(options, dist.get_world_size())
    sizes = {axis: size for axis, size in layout.grid().sizes.items() if size > 1}
    name = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one rank"
    together = functools.partial(train, options, layout, device)
    build = functools.partial(build_gpt, options.model, options.seed)
    alone = functools.partial(train_alone, options, device, build, update_biases)
    report(options, device, name, together, alone)


def main() -> None:
    """Entry point under torchrun."""
    end_with_parent()
    options = options_of()
    if "RANK" not in os.environ:
        sys.exit(
            "start it with: torchrun --nproc-per-node 8 -m solutions.phase3_multi_node.train_mesh "
            "--context 2 --experts 2"
        )
    needed = options.pipeline > 1 or options.context > 1
    with launched("train_mesh", options.device, point_to_point=needed) as rank:
        run(options, rank.device)


if __name__ == "__main__":
    main()
