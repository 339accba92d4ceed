"""Per-parameter sharding of phase 3 against torch's ``fully_shard``: time and peak memory, in turn.

Both cut each parameter along its rows, and free each unit but the root after its forward. They
train on the same batches with AdamW in the same ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from solutions.phase3_multi_node.per_parameter_sharding import PerParameterFSDP

from .common import Table
from .fsdp import Make, Step, made, side_by_side, train_step


def ours(name: str, device: torch.device) -> Step:
    """The solution of exercise 3.32."""
    model, units, *batch = made(name, device)
    return train_step(PerParameterFSDP(model, units), *batch)


def torchs(name: str, device: torch.device) -> Step:
    """torch's FSDP2, as it is without settings."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, units, *batch = made(name, device)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_step(model, *batch)


CONTESTANTS: dict[str, Make] = {"solution": ours, "fully_shard": torchs}


def measure(repeats: int = 7) -> Table:
    """Both side by side."""
    return Table(
        "Per-parameter sharding: time of a step and peak memory",
        *side_by_side(repeats, CONTESTANTS),
        "AdamW, a unit per hidden layer or block. Median (least … most) of "
        f"{repeats} turns in the same ranks. Both copy into and out of their messages. The "
        "solution gathers one unit ahead in forward, too. torch's shards are DTensors.",
    )


if __name__ == "__main__":
    print(measure().markdown())
