"""A module sharded by the course's FSDP and by torch's ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo  # torch.distributed.fsdp imports it: once here, not per rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distlab.ranks import RankContext
from solutions.phase3_multi_node.fsdp import FSDP
from solutions.phase3_multi_node.fsdp_checkpoint import (
    full_state_dict,
)
from tests.pytorch_scenarios.beside import Pair, inputs, twins

Units = Callable[[nn.Module], Sequence[nn.Module]]


def none(module: nn.Module) -> Sequence[nn.Module]:
    return []


def layers(module: nn.Module) -> Sequence[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


def mesh(ranks: int = 3) -> DeviceMesh:
    return init_device_mesh("cpu", (ranks,))


def both(make: Callable[[], nn.Module], units: Units = layers, **options: Any) -> Any:
    """The same module, sharded by the course's FSDP and by torch's ``fully_shard``."""
    ours, theirs = twins(make)
    for unit in units(theirs):
        fully_shard(unit, mesh=mesh())
    fully_shard(theirs, mesh=mesh())
    return FSDP(ours, units(ours), **options), theirs


def full(model: nn.Module) -> list[Tensor]:
    """The whole values, on every rank."""
    if isinstance(model, FSDP):
        state = [full_state_dict(model)]
        dist.broadcast_object_list(state)
        return [state[0][name] for name in sorted(state[0])]
    found = dict(model.state_dict())
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    return [whole[name] for name in sorted(whole)]


def trained(
    models: tuple[nn.Module, nn.Module], step: Callable[[nn.Module, int], Any], steps: int = 3
) -> Pair:
    """Steps of SGD on both; what ``step`` returned and the whole values at the end."""
    found = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for k in range(steps):
            seen.append(step(model, k))
            optimizer.step()
            optimizer.zero_grad(set_to_none=k % 2 == 0)
        found.append([seen, full(model)])
    return found[0], found[1]


def plain_step(ctx: RankContext, model: nn.Module, k: int) -> Tensor:
    loss = model(inputs(ctx, 4, 5, salt=k)).square().mean()
    loss.backward()
    return loss
