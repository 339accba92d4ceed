"""Runs of the trainer in forked ranks, on a few of the digits as PNG files."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it
import torch._subclasses.fake_tensor  # the plan of a run profiles a step with it
import torch.utils.tensorboard  # a sink imports it

from distlab.ranks import RankContext, run_ranks
from given.step_profile import Profile
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase4_production import engines, trainer_loop, trainer_setup, training_plan
from solutions.phase4_production.config_sources import make_config
from solutions.phase4_production.digits_folder import write_digits
from solutions.phase4_production.flops import matmul_peak
from solutions.phase4_production.recipe import make_optimizer_class
from solutions.phase4_production.task import Task
from solutions.phase4_production.trainer_config import Config
from solutions.phase4_production.trainer_loop import Trainer
from solutions.phase4_production.training_plan import profile_of

FEW = {"train": 9, "val": 3}  # images of each class
BUCKET = 1 << 14  # bytes
STEPS = 6  # of one epoch of 90 images: five batches of 16 and one of 10
PROFILES: dict[str, Profile] = {}  # of the runs so far


def few_digits(folder: Path) -> Path:
    """A folder of 90 digits to train on and 30 to evaluate."""
    whole = write_digits(folder / "whole")
    for split, count in FEW.items():
        for label in range(10):
            place = folder / "few" / split / str(label)
            place.mkdir(parents=True)
            for image in sorted((whole / split / str(label)).iterdir())[:count]:
                shutil.copy(image, place)
    return folder / "few"


def config_of(data: Path, out: Path, *arguments: str) -> Config:
    """One epoch of small batches, every step recorded."""
    common = {"data": data, "checkpoints": out / "checkpoints", "logs": out / "logs"}
    fixed = [f"--{name}={value}" for name, value in common.items()]
    small = ["--epochs=1", "--global-batch=16", "--warmup-epochs=0", "--log-every=1"]
    recipe = ["--base-lr=0.02", "--base-batch=16", "--workers=0", "--save-every=0"]
    return make_config(None, [*fixed, *small, *recipe, "--device=cpu", *arguments])


def fields_of(config: Config) -> list[str]:
    """The whole configuration as a command line."""
    return [f"--{name}={'null' if v is None else v}" for name, v in vars(config).items()]


def train(
    config: Config,
    world_size: int = 2,
    *,
    report: bool = False,
    timeout: float = 120.0,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What a run comes to on rank 0, what all could not read, and what they printed.

    Without ``report`` no pictures are drawn, which takes longer than such a run; so does the peak
    of the processor, which is that of small products here. A step that an earlier run has profiled
    is not profiled again, which takes longer than to train. ``environ``: what the ranks find in
    their environment beside the rest. DDP makes several buckets, as of a larger model.
    """
    if config.model not in ("small_cnn", "gpt"):
        importlib.import_module("torchvision")  # here once, not in every rank
    if config.parallel == "torch":
        importlib.import_module("solutions.phase4_production.torch_engines")

    def body(ctx: RankContext) -> dict[str, Any]:
        engines.DDP = functools.partial(DDP, bucket_bytes=BUCKET, first_bucket_bytes=BUCKET // 4)
        trainer_setup.matmul_peak = lambda device, dtype, n: matmul_peak(device, dtype, 64)
        training_plan.profile_of = profile_once
        os.environ.update(environ or {})
        if not report:
            trainer_loop.write_report = lambda logs: None
        trainer = Trainer(config, torch.device("cpu"))
        complete = trainer.run()
        return {
            "complete": complete,
            "summary": trainer.summary(),
            "unreadable": sorted(trainer.unreadable),
            "plan": str(trainer.plan),
            "profiles": pickle.dumps(PROFILES).hex(),
        }

    found = run_ranks(body, world_size, ledger=False, timeout=timeout)
    PROFILES.update(pickle.loads(bytes.fromhex(found[0].pop("profiles"))))
    return {
        **found[0],
        "unreadable": sorted({path for each in found for path in each["unreadable"]}),
        "output": "".join(found.output),
    }


def profile_once(
    task: Task, model: torch.nn.Module, micro_batch: int, device: torch.device
) -> Profile:
    """``profile_of``, which depends on these alone."""
    config = task.config
    strides = [tensor.stride() for tensor in model.state_dict().values()]
    sizes = config.image_size, config.length, micro_batch
    steps = config.precision, config.activation_checkpointing
    key = str((model, strides, make_optimizer_class(config), *sizes, *steps, device))
    if key not in PROFILES:
        PROFILES[key] = profile_of(task, model, micro_batch, device)
    return PROFILES[key]


def records(config: Config) -> list[dict[str, Any]]:
    """What was recorded, one a step."""
    lines = (Path(config.logs) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(config: Config, world_size: int = 2) -> list[float]:
    """The loss of every step of a run."""
    assert train(config, world_size)["complete"]
    return loss_curve(config)


def loss_curve(config: Config) -> list[float]:
    """The loss of every step that was recorded."""
    return [record["loss"] for record in records(config)]
