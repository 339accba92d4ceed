"""The engines of PyTorch's own parallelism, behind the same interface: to compare with.

DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard (FSDP2). PyTorch has no optimizer
for ZeRO-2. The nearest is fully_shard that keeps parameters gathered after forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from given.agreement import device_in

from .engine import Engine, OptimizerClass, State
from .model_parts import blocks


class TorchReplicated(Engine):
    """ddp and zero1."""

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: OptimizerClass,
        options: dict[str, float],
        *,
        sharded_optimizer: bool,
        compression: str,
        compression_rank: int,
    ) -> None:
        self.module = module
        self.net = self.ddp = DistributedDataParallel(module)
        register_hook(self.ddp, compression, compression_rank)
        if sharded_optimizer:
            self.optimizer = ZeroRedundancyOptimizer(
                module.parameters(), optimizer_class, **options
            )
        else:
            self.optimizer = optimizer_class(module.parameters(), **options)

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.ddp.no_sync()

    def state(self) -> tuple[State, State]:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
            if dist.get_rank():
                return {}, {}
        return super().state()


def register_hook(ddp: DistributedDataParallel, compression: str, rank: int) -> None:
    """One of torch's own hooks, or none."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if compression == "bf16":
        ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2, warm_start=True
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class TorchSharded(Engine):
    """zero2, fsdp and hybrid."""

    layout = "named"

    def __init__(
        self,
        module: nn.Module,
        optimizer_class: OptimizerClass,
        options: dict[str, float],
        *,
        free_after_forward: bool,
        node_size: int | None,
        offload: bool,
    ) -> None:
        device = next(module.parameters()).device
        world_size = dist.get_world_size()
        node_size = world_size if node_size is None else node_size
        shape, names = (world_size // node_size, node_size), ("replicate", "shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        common = {
            "mesh": mesh if shape[0] > 1 else mesh["shard"],
            "reshard_after_forward": free_after_forward,
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        units = [fully_shard(part, **common) for part in (*blocks(module), module)]
        for unit in units:  # gloo has no mean; torch 2.8 would take the sum for it
            unit.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
        self.shards = mesh["shard"].get_group()
        self.module = self.net = module
        self.optimizer = optimizer_class(module.parameters(), **options)

    @property
    def averaged(self) -> list[Tensor]:
        return [*(p.to_local() for p in self.parameters), *self.module.buffers()]

    def clip(self, max_norm: float) -> float:
        """``clip_grad_norm_`` would add up offloaded parts on the CPU, where NCCL can't."""
        parts = [p.grad.to_local() for p in self.parameters if p.grad is not None]
        squares = sum(torch.linalg.vector_norm(part, dtype=torch.float64) ** 2 for part in parts)
        whole = torch.as_tensor(squares, dtype=torch.float64, device=device_in(self.shards))
        dist.all_reduce(whole, group=self.shards)
        norm = float(whole.sqrt())
        if max_norm < norm < float("inf"):
            for part in parts:
                part.mul_(max_norm / norm)
        return norm

    def weights(self) -> tuple[State, State]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {"model": get_model_state_dict(self.module, options=options)}, {}

    def load_weights(self, shared: State, owns: Iterable[State]) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.module, shared["model"], options=options)

    def state(self) -> tuple[State, State]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.module, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}, {}

    def load(self, shared: State, owns: Iterable[State]) -> None:
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=shared["model"],
            optim_state_dict=shared["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )


def make_torch_engine(
    module: nn.Module,
    strategy: str,
    optimizer_class: OptimizerClass,
    options: dict[str, float],
    *,
    compression: str = "none",
    compression_rank: int = 2,
    node_size: int = 1,
    offload: bool = False,
) -> Engine:
    """PyTorch's engine for ``strategy``; a collective call."""
    if strategy in ("ddp", "zero1"):
        return TorchReplicated(
            module,
            optimizer_class,
            options,
            sharded_optimizer=strategy == "zero1",
            compression=compression,
            compression_rank=compression_rank,
        )
    return TorchSharded(
        module,
        optimizer_class,
        options,
        free_after_forward=strategy != "zero2",
        node_size=node_size if strategy == "hybrid" else None,
        offload=offload,
    )
