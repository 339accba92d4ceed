"""The production trainer: image classifiers and a language model, on any number of ranks.

    ./launch_training.sh --config configs/digits.yaml --strategy fsdp --epochs 3
    ./launch_training.sh --config configs/gpt_text.yaml
    python -m solutions.phase4_production.imagenet_trainer --config FILE --dry-run

Everything that the course has built meets here. Of phases 1 and 2: samples dealt out over ranks
(1.1, 4.4), uneven batches weighed (1.4), the linear rule (2.4), a loss scale (2.6), recomputed
activations (2.7). Of phase 3: data parallelism with hooks (3.12), sharding (3.13 … 3.19), a
strategy that is chosen (3.21). Of phase 4: checkpoints that survive and a run that goes on by
itself (4.1 … 4.5), compression (4.6 … 4.9), metrics and a report (4.10 … 4.12). This module is the
command line; the loop is in ``trainer_loop``.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from given.launched import launched
from given.parent import end_with_parent

from .batches import end_decoders
from .config_sources import describe_fields, parse
from .exit_codes import CRASHED, DONE, PREEMPTED, REFUSED
from .fault_tolerance import CheckpointError
from .joining import meet
from .model_parts import checkpoint_activations
from .run_plan import World
from .trainer_config import Config, ConfigError
from .trainer_loop import Trainer
from .trainer_setup import open_task
from .training_plan import make_plan

NAME = "imagenet_trainer"
STATUSES = {  # an error of the system, or of a checkpoint, may not come again the next time
    ValueError: REFUSED,
    PermissionError: REFUSED,
    CheckpointError: CRASHED,
    OSError: CRASHED,
}
USAGE = """usage: imagenet_trainer [--config FILE] [--dry-run] [--field value …]

The configuration is the defaults, what FILE says instead, and what the command line says instead of
both. --dry-run prints the plan for WORLD_SIZE ranks and trains nothing. Fields and defaults:
"""


def dry_run(config: Config) -> str:
    """The plan for WORLD_SIZE ranks, LOCAL_WORLD_SIZE on each node; no other process is needed."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    task = open_task(config)
    model = task.build_model()
    if config.activation_checkpointing:
        checkpoint_activations(model)
    world = World(
        nodes=world_size // local, ranks_per_node=local, device=torch.device(device_type(config))
    )
    return str(make_plan(task, model, world))


def device_type(config: Config) -> str:
    """``cuda`` or ``cpu``; ConfigError if there is no GPU where one was asked for."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: this machine has no CUDA device; use device cpu")
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def run(config: Config) -> int:
    """The whole training under torchrun, or until it is told to leave; the exit status."""
    # the others are made of collectives
    messages = config.pattern not in ("auto", "hierarchical") or config.strategy == "mesh"
    how = launched(NAME, config.device, point_to_point=messages, meet=meet, statuses=STATUSES)
    try:
        with how as at:
            return train(config, at.device, at.attempt)
    finally:
        end_decoders()


def train(config: Config, device: torch.device, attempt: str) -> int:
    """The part of a rank that has joined; the exit status."""
    trainer = Trainer(config, device)
    if trainer.run(attempt):
        if dist.get_rank() == 0:
            print(trainer.summary(), flush=True)
        return DONE
    if os.environ["LOCAL_RANK"] == "0":
        say(f"told to leave: saved after step {trainer.monitor.steps}, start it again to go on")
    return PREEMPTED


def say(what: object) -> None:
    """A line about this run."""
    print(f"{NAME}: {what}", file=sys.stderr, flush=True)


def main() -> None:
    """Entry point, under torchrun or, with --dry-run, without."""
    end_with_parent()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE + describe_fields())
        return
    try:
        config, only_plan = parse(sys.argv[1:])
        if only_plan:
            print(dry_run(config))
            return
        if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
            raise ConfigError("start it with ./launch_training.sh, or add --dry-run")
    except (ValueError, PermissionError) as error:
        say(error)
        sys.exit(REFUSED)
    sys.exit(run(config))


if __name__ == "__main__":
    main()
