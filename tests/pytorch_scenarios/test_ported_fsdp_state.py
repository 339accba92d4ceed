"""PyTorch's scenarios of fully sharded data parallelism: norms, dtypes and states."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._dynamo  # torch.distributed.fsdp imports it: once here, not per rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from distlab.ranks import RankContext
from solutions.phase3_multi_node.fsdp import FSDP, clip_by_global_norm
from solutions.phase3_multi_node.fsdp_checkpoint import (
    full_state_dict,
    load_full_state_dict,
    materialise,
)
from solutions.phase3_multi_node.fsdp_precision import MixedPrecisionFlat
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, inputs, mlp, refused, twins
from tests.pytorch_scenarios.fsdp_pairs import both, full, layers, mesh, plain_step, trained

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran() -> Ran:
    return SCENARIOS.run(3)


@SCENARIOS.newer
def test_the_norm_of_the_whole_gradient(ctx: RankContext) -> Pair:
    """Clipped to 0.1: the norm before and the step after."""

    def step(model: nn.Module, k: int) -> float:
        plain_step(ctx, model, k)
        if isinstance(model, FSDP):
            return clip_by_global_norm(model, 0.1)
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())

    return trained(both(mlp), step)


@SCENARIOS.newer
def test_evaluation_between_steps(ctx: RankContext) -> Pair:
    """A forward in eval mode without autograd sees the values after the last step."""

    def step(model: nn.Module, k: int) -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            before = model(inputs(ctx, 2, 5, salt=77))
        model.train()
        return [before, plain_step(ctx, model, k)]

    return trained(both(mlp), step)


@SCENARIOS.newer
def test_shards_that_are_changed_in_place(ctx: RankContext) -> Pair:
    """The next forward computes with what was written into the shards."""
    found = []
    for model in both(mlp):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.25)
        found.append(model(torch.ones(2, 5)))
    return found[0], found[1]


@SCENARIOS.newer
def test_one_rank_alone(ctx: RankContext) -> Pair:
    """Groups of one rank: nothing is sharded."""
    groups = [dist.new_group([rank]) for rank in range(3)]
    ours, theirs = twins(mlp)
    alone = DeviceMesh.from_group(groups[ctx.rank], "cpu")
    fully_shard(theirs, mesh=alone)
    found = []
    for model in (FSDP(ours, group=groups[ctx.rank]), theirs):
        plain_step(ctx, model, 0)
        shards = [p.grad for p in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in shards]
        found.append(torch.cat([g.flatten() for g in whole]))
    return found[0], found[1]


@partial(SCENARIOS.newer, rtol=2e-2)
def test_compute_in_bfloat16(ctx: RankContext) -> Pair:
    """Parameters in bfloat16 for forward and backward, gradients reduced in float32."""
    ours, theirs = twins(mlp)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in layers(theirs):
        fully_shard(unit, mesh=mesh(), mp_policy=policy)
    fully_shard(theirs, mesh=mesh(), mp_policy=policy)
    flat = partial(MixedPrecisionFlat, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dtypes = []

    def step(model: nn.Module, k: int) -> list[Tensor]:
        out = []
        for part in range(2):  # the second backward adds in the shards' own dtype
            y = model(inputs(ctx, 4, 5, salt=10 * k + part).to(torch.bfloat16))
            y.float().square().mean().backward()
            out.append(y.float())
        dtypes.append({str(p.grad.dtype) for p in model.parameters()})
        return out

    pair = trained((FSDP(ours, layers(ours), flat_type=flat), theirs), step)
    assert all(found == {"torch.float32"} for found in dtypes)
    return pair


@SCENARIOS.newer
def test_the_whole_state_on_the_first_rank_only(ctx: RankContext) -> Pair:
    """Names and values there, nothing elsewhere; and a new model takes it over."""
    ours, theirs = both(mlp)
    for model in (ours, theirs):
        plain_step(ctx, model, 0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    options = torch_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = full_state_dict(ours), torch_state.get_model_state_dict(theirs, options=options)
    found = []
    for state, model in zip(states, both(mlp), strict=True):
        sent = [dict(state)]  # torch puts its own tensors into what it is given
        dist.broadcast_object_list(sent)
        if isinstance(model, FSDP):
            load_full_state_dict(model, sent[0])
        else:
            torch_state.set_model_state_dict(model, sent[0], options=options)
        found.append([{name: state[name] for name in sorted(state)}, full(model)])
    return found[0], found[1]


@SCENARIOS.newer
def test_states_that_do_not_fit(ctx: RankContext) -> Pair:
    """A name is too many, a shape is another one: refused by both.

    A name that is missing is refused by ours only: torch keeps what the parameter has.
    """
    options = torch_state.StateDictOptions(full_state_dict=True, strict=True)
    good = {name: torch.zeros(t.shape) for name, t in mlp().state_dict().items()}
    odd = [
        {**good, "more": torch.zeros(2)},
        {**good, "0.bias": torch.zeros(3)},
    ]
    ours, theirs = both(mlp)
    return [refused(lambda s=s: load_full_state_dict(ours, s)) for s in odd], [
        refused(lambda s=s: torch_state.set_model_state_dict(theirs, s, options=options))
        for s in odd
    ]


@SCENARIOS.newer
def test_modules_on_meta(ctx: RankContext) -> Pair:
    """Sharded without values, then given some, layer by layer."""

    def ones(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))
                module.bias.fill_(0.5)

    with torch.device("meta"):
        mine, other = mlp(), mlp()
    ours = FSDP(mine, layers(mine), device="cpu")
    materialise(ours, ones)
    fully_shard(other, mesh=mesh())
    other.to_empty(device="cpu")
    plain = mlp()
    plain.apply(ones)
    options = torch_state.StateDictOptions(full_state_dict=True)
    torch_state.set_model_state_dict(other, plain.state_dict(), options=options)
    return full(ours), full(other)
