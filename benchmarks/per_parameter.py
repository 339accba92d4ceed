"""Per-parameter sharding of phase 3 against torch's ``fully_shard``: time and peak memory, in turn.

Both cut each parameter along its rows, and free each unit but the root after its forward. They
train on the same batches with AdamW in the same ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from solutions.phase3_multi_node.per_parameter_sharding import PerParameterFSDP

from .fsdp import PEAKS, STEPS, Make, Step, cases, made, train_step
from .pairs import Paired


def ours(name: str, device: torch.device) -> Step:
    """The solution of exercise 3.32."""
    model, units, *batch = made(name, device)
    return train_step(PerParameterFSDP(model, units), *batch)


def torchs(name: str, device: torch.device) -> Step:
    """torch's FSDP2, as it is without settings."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, units, *batch = made(name, device)
    for unit in units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train_step(model, *batch)


CONTESTANTS: dict[str, Make] = {"solution": ours, "fully_shard": torchs}


PAIRED = Paired(
    title="Per-parameter sharding: a training step, and peak memory",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "fully_shard")],
    facts=PEAKS,
    cases=lambda: cases(CONTESTANTS),
    rounds=3,
    note=f"AdamW, a unit per hidden layer or block; rounds of {STEPS} steps. Both copy into and "
    "out of their messages. torch's shards are DTensors.",
)
