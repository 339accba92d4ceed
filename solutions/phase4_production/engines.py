"""The engines of the course: strategies behind one interface (``engine``).

=========  ======================================  =======================================
strategy   of the course (``parallel: course``)    of PyTorch (``parallel: torch``)
=========  ======================================  =======================================
ddp        DDP with a hook (3.11, 3.12)            DistributedDataParallel
zero1      the same and ZeroOptimizer (3.13)       … and ZeroRedundancyOptimizer
zero2      Zero2Optimizer (3.14)                   fully_shard, parameters stay gathered
fsdp       PrefetchFSDP (3.15, 3.16, 3.18)         fully_shard
hybrid     HybridFlat in nodes (3.19)              fully_shard on a 2-dimensional mesh
mesh       MeshGPT on named axes (3.33)            none
=========  ======================================  =======================================

All of them leave the mean over the ranks in the gradients that the optimizer uses. With n samples
in the global batch, a rank's loss is W/n times the sum over its own samples. Then the mean of the
ranks' gradients is the gradient of the mean over all samples, however many each rank has.

Weights and optimizer go into a checkpoint whole, written once (ddp, zero1, zero2, torch), or in the
parts that each rank has (fsdp, hybrid, mesh). Any number of ranks can go on from these parts.
``mesh_engine`` has the engine of a mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.bucket_hooks import Hook
from solutions.phase3_multi_node import fsdp
from solutions.phase3_multi_node.buckets import broadcast_tensors
from solutions.phase3_multi_node.ddp import DDP
from solutions.phase3_multi_node.fsdp_hybrid import HybridFlat, node_groups
from solutions.phase3_multi_node.fsdp_offload import OffloadFlat
from solutions.phase3_multi_node.fsdp_prefetch import PrefetchFSDP
from solutions.phase3_multi_node.fsdp_sharded_state import (
    load_sharded_state_dict,
    sharded_state_dict,
)
from solutions.phase3_multi_node.overlap import MIB
from solutions.phase3_multi_node.zero import ZeroOptimizer
from solutions.phase3_multi_node.zero_gradients import Zero2Optimizer

from .engine import Engine, OptimizerClass, State
from .model_parts import blocks


class Replicated(Engine):
    """ddp and zero1: every rank has the whole model."""

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: OptimizerClass,
        options: dict[str, Any],
        *,
        sharded_optimizer: bool,
        hook: Hook,
        compressor: Any,
    ) -> None:
        self.module = module
        self.net = self.ddp = DDP(module)
        self.ddp.register_comm_hook(hook)
        self.compressor = compressor if hasattr(compressor, "state_dict") else None
        if sharded_optimizer:
            self.optimizer = ZeroOptimizer(module.parameters(), optimizer_class, **options)
        else:
            self.optimizer = optimizer_class(module.parameters(), **options)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.ddp.no_sync()

    @property
    def averaged(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def state(self) -> tuple[State, State]:
        if isinstance(self.optimizer, ZeroOptimizer):
            shared = {**self.weights()[0], "optimizer": self.optimizer.state_dict(to=0)}
        else:
            shared, _ = super().state()
        return {**shared, "bucket_order": self.ddp.bucket_order()}, {}

    def load(self, shared: State, owns: Iterable[State]) -> None:
        super().load(shared, owns)
        self.ddp.set_bucket_order(shared.get("bucket_order"))  # PyTorch's engines have none


class Zero2(Engine):
    """zero2: backward leaves each rank its part of the gradient."""

    def __init__(
        self, module: nn.Module, optimizer_class: OptimizerClass, options: dict[str, Any]
    ) -> None:
        self.net = self.module = module
        broadcast_tensors([*module.parameters(), *module.buffers()], 25 * MIB)
        self.optimizer: Zero2Optimizer = Zero2Optimizer(
            module.parameters(), optimizer_class, **options
        )

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [piece.part for piece in self.optimizer.pieces]

    def clip(self, max_norm: float) -> float:
        return float(self.optimizer.clip_by_global_norm(max_norm))

    @property
    def averaged(self) -> list[Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]

    def state(self) -> tuple[State, State]:
        return {**self.weights()[0], "optimizer": self.optimizer.state_dict(to=0)}, {}


class HybridOffloadFlat(HybridFlat, OffloadFlat):
    """Sharded in the node, replicated across nodes, kept in the CPU's memory."""


class Sharded(Engine):
    """fsdp and hybrid: every rank has shards, which ``own`` holds in a checkpoint."""

    layout = "shards"

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: OptimizerClass,
        options: dict[str, Any],
        *,
        node_size: int | None,
        offload: bool,
    ) -> None:
        broadcast_tensors([*module.parameters(), *module.buffers()], 25 * MIB)
        group, self.replicas = None, None
        flat_type: Callable[..., fsdp.FlatParameter]
        flat_type = OffloadFlat if offload else fsdp.FlatParameter
        if node_size is not None:
            group, self.replicas = node_groups(node_size)
            hybrid = HybridOffloadFlat if offload else HybridFlat
            flat_type = functools.partial(hybrid, replicas=self.replicas)
        self.module = module
        self.net = self.fsdp = PrefetchFSDP(
            module, blocks(module), group=group, flat_type=flat_type
        )
        self.optimizer = optimizer_class(self.fsdp.parameters(), **options)

    def clip(self, max_norm: float) -> float:
        return fsdp.clip_by_global_norm(self.fsdp, max_norm)

    def weights(self) -> tuple[State, State]:
        return {}, self._pieces(None)

    def load_weights(self, shared: State, owns: Iterable[State]) -> None:
        load_sharded_state_dict(self.fsdp, filter(None, owns))

    def state(self) -> tuple[State, State]:
        return {}, self._pieces(self.optimizer)

    def load(self, shared: State, owns: Iterable[State]) -> None:
        load_sharded_state_dict(self.fsdp, filter(None, owns), self.optimizer)

    def _pieces(self, optimizer: torch.optim.Optimizer | None) -> State:
        """This rank's shards; nothing on nodes that hold copies of the first node's shards."""
        if self.replicas is not None and dist.get_rank(self.replicas):
            return {}
        return sharded_state_dict(self.fsdp, optimizer)


def make_engine(
    module: nn.Module,
    strategy: str,
    optimizer_class: OptimizerClass,
    options: dict[str, Any],
    *,
    hook: Hook,
    compressor: Any = None,
    node_size: int = 1,
    offload: bool = False,
) -> Engine:
    """The course's engine for ``strategy``; a collective call.

    ``hook`` is how ddp and zero1 reduce a bucket. ``compressor`` is the same hook, if it has a
    state to be saved. ``node_size``: ranks that share a copy under hybrid.
    """
    if strategy in ("ddp", "zero1"):
        return Replicated(
            module,
            optimizer_class,
            options,
            sharded_optimizer=strategy == "zero1",
            hook=hook,
            compressor=compressor,
        )
    if strategy == "zero2":
        return Zero2(module, optimizer_class, options)
    size = node_size if strategy == "hybrid" else None
    return Sharded(module, optimizer_class, options, node_size=size, offload=offload)
