"""The plan of a run: ranks, batch, steps, memory and messages, and the text that shows them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from solutions.phase3_multi_node.mesh_specs import MeshLayout
from solutions.phase3_multi_node.sharding_strategies import Choice, readable

from .recipe import learning_rate
from .trainer_config import AXES, Config

NO_LIMIT = 1 << 62
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
    """The numbers of a run, the same on every rank.

    It has a ``choice`` with the estimates that it was chosen from, or the ``layout`` of a mesh,
    whose memory nobody estimates.
    """

    config: Config
    world: World
    samples: int
    described: str  # the data
    parameters: int
    micro_batch: int = 1
    choice: Choice | None = None
    sent: float = 0.0  # bytes per rank and step, the mean over the ranks of a mesh
    layout: MeshLayout | None = None

    @property
    def replicas(self) -> int:
        """Parts of the batch; only the ranks of a mesh may have the same part."""
        return self.layout.data * self.layout.shard if self.layout else self.world.size

    @property
    def own_batch(self) -> int:
        """Samples per replica and step, rounded up."""
        return math.ceil(self.config.global_batch / self.replicas)

    @property
    def evaluation_batch(self) -> int:
        """Samples at a time in an evaluation; a mesh has agreed on the shape of its messages."""
        return self.own_batch if self.layout else self.micro_batch

    @property
    def strategy(self) -> str:
        """The name of the engine."""
        if self.choice is None:
            return "mesh"
        return "fsdp" if self.choice.strategy == "offload" else self.choice.strategy

    @property
    def offload(self) -> bool:
        """Whether shards live on the CPU."""
        chosen = self.choice is not None and self.choice.strategy == "offload"
        return self.config.offload or chosen

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps; the last one may have fewer samples."""
        return math.ceil(self.samples / self.config.global_batch)

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def __str__(self) -> str:
        """The text that ``--dry-run`` prints."""
        config = self.config
        flags = ("compile", "channels_last", "activation_checkpointing")
        extras = [n for n in flags if getattr(config, n)] + ["offload"] * self.offload
        often = f"every {config.save_every} steps" if config.save_every else "at the end"
        limit = config.max_steps or self.steps
        stop = f", stops after {limit:,}" if limit < self.steps else ""
        peak = max(learning_rate(s, config, self.steps_per_epoch) for s in range(self.steps))
        rows = {
            "model": f"{config.model}, {self.parameters:,} parameters, "
            + ", ".join([config.precision, *extras]),
            "data": self.described,
            "world": f"{self.world.nodes} nodes x {self.world.ranks_per_node} ranks on "
            f"{self.world.device.type}",
            "strategy": self._strategy(),
            "batch": f"{config.global_batch} = {self.own_batch} per "
            f"{'replica' if self.layout else 'rank'}, in "
            f"{math.ceil(self.own_batch / self.micro_batch)} micro-batches of {self.micro_batch}",
            "steps": f"{self.steps:,} = {config.epochs} epochs of {self.steps_per_epoch:,}{stop}",
            "rate": f"{peak:.3g} at most, {config.warmup_epochs:g} epochs of warm-up",
            **self._needs(),
            "checkpoints": f"{often} to {config.checkpoints}",
        }
        facts = "\n".join(f"{name:13}{text}" for name, text in rows.items())
        if self.choice is None:
            return facts
        return f"{facts}\n\n{str(self.choice).replace(f'budget {readable(NO_LIMIT)}', '')}"

    def _strategy(self) -> str:
        config = self.config
        if self.layout is not None:
            sizes = {"data": self.layout.data, **{axis: getattr(config, axis) for axis in AXES}}
            told = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            return f"mesh of {told}; schedule {config.schedule}"
        kinds = {"course": "the course's", "torch": "PyTorch's"}
        return (
            f"{self.strategy}, {kinds[config.parallel]}; pattern {config.pattern}, "
            f"compression {config.compression}"
        )

    def _needs(self) -> dict[str, str]:
        """Memory, of which a mesh has no estimate, and messages."""
        messages = {"messages": f"{readable(self.sent)} sent per rank and step"}
        if self.choice is None:
            return messages
        chosen, budget = self.choice.chosen, self.choice.budget
        average = ", without the average of the weights" if self.config.ema_decay else ""
        return {
            "memory": f"{readable(chosen.peak)} per rank at the peak, of which activations "
            f"{readable(chosen.activations)}{average}; "
            + ("no limit" if budget == NO_LIMIT else f"limit {readable(budget)}"),
            **messages,
        }
