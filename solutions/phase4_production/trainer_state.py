"""The contents of the trainer's checkpoints, and whether a checkpoint is one of this run.

- shared: the engine's weights and optimizer (or nothing, if every rank has shards), average of the
  weights, loss scale, position in the data, classes, and the kind of the run
- own: the rank's shards, its compressor's residual, its random stream

Weights, optimizer and position don't depend on the number of ranks. The residuals of compressors
are a sum over ranks. If there are fewer ranks, one of them takes over the residuals of several, so
the sum stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from solutions.phase1_data_parallel.data_loader import seed_everything
from solutions.phase2_advanced.loss_scaling import LossScaler

from .elastic_sampler import ElasticSampler
from .engine import Engine, State
from .fault_tolerance import Saved
from .image_folder import check_classes
from .recipe import AverageOfWeights
from .resume import check_model_state
from .sample_seeds import random_state, set_random_state
from .trainer_config import Config, ConfigError

OWED = ("residual", "velocity")  # of a compressor: lists of tensors that are summed over the ranks


@dataclass
class TrainerState:
    """The parts of a run that the next step depends on."""

    config: Config
    engine: Engine
    sampler: ElasticSampler
    classes: tuple[str, ...]
    device: torch.device
    average: AverageOfWeights | None
    scaler: LossScaler | None

    def capture(self, step: int) -> tuple[State, State]:
        """(shared, own) after ``step`` steps; tensors may be the live ones. Collective."""
        weights, own_weights = self.engine.state()
        epoch, batch = divmod(step, len(self.sampler))
        position = self.sampler.state_dict(batch * self.sampler.batch_size) | {"epoch": epoch}
        shared = {
            "engine": weights,
            "position": position,
            "model": self.config.model,
            "layout": self.engine.layout,
            "classes": list(self.classes),
        }
        own = {"engine": own_weights, "random": random_state(self.device)}
        if self.scaler is not None:
            shared["scaler"] = self.scaler.state_dict()
        if self.engine.compressor is not None:
            own["compressor"] = self.engine.compressor.state_dict()
        if self.average is not None:
            with self.average.applied():  # copies, because the live tensors change back
                copies = tree_map_only(Tensor, torch.clone, self.engine.weights())
            shared["average"], own["average"] = copies
        return shared, own

    def restore(self, saved: Saved) -> None:
        """Go on from a checkpoint of any number of ranks.

        Raises ConfigError or DataError, before anything changes, if it is not one of this run.
        """
        shared = saved.shared
        self.check(shared)
        owns = [saved.own(rank) for rank in range(saved.world_size)]
        if self.average is not None and "average" in shared:
            self.engine.load_weights(shared["average"], (own["average"] for own in owns))
            self.average.restart()
        self.engine.load(shared["engine"], (own["engine"] for own in owns))
        if self.average is not None and "average" not in shared:
            self.average.restart()
        if self.scaler is not None and "scaler" in shared:
            self.scaler.load_state_dict(shared["scaler"])
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if self.engine.compressor is not None:
            states = [own["compressor"] for own in owns if "compressor" in own]
            if states:
                state = dealt(states, rank, world_size)
                self.engine.compressor.load_state_dict(state)
        if rank < saved.world_size:
            set_random_state(owns[rank]["random"], self.device)
        else:  # a new rank: numbers that no rank has had
            seed_everything(self.config.seed, rank, saved.step)

    def check(self, shared: State) -> None:
        """Whether model, classes, data and strategy are those of the checkpoint."""
        config = self.config
        if shared["model"] != config.model:
            raise ConfigError(
                f"the checkpoint in {config.checkpoints} is of another model: {shared['model']}, "
                f"this run trains {config.model}"
            )
        check_classes(self.classes, shared["classes"], f"{config.data}, unlike the checkpoint,")
        if shared["layout"] != self.engine.layout:
            raise ConfigError(
                f"the checkpoint in {config.checkpoints} was saved by another kind of strategy "
                f"({shared['layout']}, not {self.engine.layout}): use the one it was saved by, or "
                "another folder"
            )
        try:
            if self.engine.layout == "whole":
                check_model_state(self.engine.module, shared["engine"]["model"])
            self.sampler.load_state_dict(shared["position"])
        except ValueError as error:
            raise ConfigError(f"the checkpoint in {config.checkpoints}: {error}") from None


def dealt(states: list[State], rank: int, world_size: int) -> State:
    """A compressor's state on ``rank`` of ``world_size``, from those of the ranks that saved.

    The residuals of the saved ranks rank, rank + W … are added up here. Everything else is alike on
    all.
    """
    if len(states) == world_size:
        return states[rank]
    mine = states[rank::world_size]
    state: dict[str, Any] = dict(states[0])
    for name in OWED:
        if name in state:
            lists = [each[name] for each in mine] or [[torch.zeros_like(t) for t in state[name]]]
            state[name] = [torch.stack(parts).sum(0) for parts in zip(*lists, strict=True)]
    return state
