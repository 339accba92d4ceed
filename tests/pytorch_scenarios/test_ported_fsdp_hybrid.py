"""PyTorch's scenarios of hybrid sharding: two nodes of two ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo  # torch.distributed.fsdp imports it: once here, not per rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distlab.ranks import RankContext
from solutions.phase3_multi_node.fsdp import FSDP
from solutions.phase3_multi_node.fsdp_hybrid import HybridFlat, node_groups
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, inputs, mlp, twins

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(4)


@SCENARIOS.newer
def test_sharded_inside_replicated_across(ctx: RankContext) -> Pair:
    """Three steps of SGD: the outputs on every rank after each."""
    inside, across = node_groups(2)
    one, other = twins(mlp)
    flat = partial(HybridFlat, replicas=across)
    ours = FSDP(one, [one[0], one[2]], group=inside, flat_type=flat)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
    for layer in (other[0], other[2], other):
        fully_shard(layer, mesh=mesh)

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                seen.append(model(torch.ones(2, 5)))
        return seen

    return train(ours), train(other)
