"""PyTorch's scenarios of distributed checkpoints, beside ``torch.distributed.checkpoint``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # torch.distributed.checkpoint imports it: once here, not per rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distlab.ranks import RankContext
from solutions.phase3_multi_node.fsdp import FSDP
from solutions.phase3_multi_node.fsdp_sharded_state import (
    load_sharded_state_dict,
    merge,
    sharded_state_dict,
)
from solutions.phase4_production.async_checkpoint import AsyncCheckpointer
from solutions.phase4_production.elastic import chunk_of, cut, recut
from solutions.phase4_production.fault_tolerance import CheckpointStore
from tests.pytorch_scenarios.beside import Pair, Ran, Scenarios, inputs, mlp, refused, twins

SCENARIOS = Scenarios()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("checkpoints")))
        return SCENARIOS.run(3)


def folder() -> Path:
    """A new folder that all ranks agree on."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(str(name[0]))


def tree() -> dict[str, Any]:
    """What is alike on all ranks: tensors of several dtypes, numbers and text, nested."""
    return {
        "model": {"weight": torch.arange(12.0).view(3, 4), "ids": torch.arange(5)},
        "rates": [0.1, 0.2],
        "epoch": 3,
        "name": "run",
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def zeros(value: Any) -> Any:
    """A tree like ``value`` with other contents."""
    if isinstance(value, dict):
        return {key: zeros(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def torch_loaded(path: Path, like: dict[str, Any]) -> dict[str, Any]:
    into = zeros(like)
    dcp.load(into, checkpoint_id=path)
    return into


@SCENARIOS.ported
def test_what_is_saved_comes_back(ctx: RankContext) -> Pair:
    """Tensors, numbers, text and lists in one tree."""
    where = folder()
    store = CheckpointStore(where / "ours")
    store.save(1, tree())
    dcp.save(tree(), checkpoint_id=where / "torchs")
    found = store.load()
    assert found is not None
    return found.shared, torch_loaded(where / "torchs", tree())


@SCENARIOS.ported
def test_saving_again(ctx: RankContext) -> Pair:
    """The newest values count; ours keeps the older checkpoint beside them."""
    where = folder()
    store = CheckpointStore(where / "ours")
    for step in (1, 2):
        state = {"step": torch.full((3,), float(step))}
        store.save(step, state)
        dcp.save(state, checkpoint_id=where / "torchs", storage_writer=overwriting(where))
    found = store.load()
    assert found is not None
    return found.shared, torch_loaded(where / "torchs", {"step": torch.zeros(3)})


def overwriting(where: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(where / "torchs", overwrite=True)


@SCENARIOS.ported
def test_a_rank_that_cannot_write(ctx: RankContext) -> Pair:
    """One rank has something that can't be saved: the save fails on all ranks."""
    where = folder()
    bad = {"x": (lambda: None) if ctx.rank == 1 else torch.ones(2)}
    store = CheckpointStore(where / "ours")
    ours = refused(lambda: store.save(1, {"y": torch.ones(2)}, bad))
    theirs = refused_or_checkpoint(
        lambda: dcp.save({f"x{ctx.rank}": bad["x"]}, checkpoint_id=where / "torchs")
    )
    return [ours, store.steps()], [theirs, []]


def refused_or_checkpoint(call: Callable[[], object]) -> bool:
    """As ``refused``; torch's own error is not even an Exception."""
    try:
        call()
    except (CheckpointException, Exception):
        return True
    return False


@SCENARIOS.ported
def test_values_change_while_they_are_written(ctx: RankContext) -> Pair:
    """Saved in the background; the tensor changes at once; what was there at the call is saved."""
    where = folder()
    background = dist.new_group(backend="gloo")
    found: list[Any] = []
    x = torch.full((1000,), 1.0)
    with AsyncCheckpointer(CheckpointStore(where / "ours")) as saver:
        saver.save(1, {"x": x})
        x.fill_(2.0)
    loaded = CheckpointStore(where / "ours").load()
    assert loaded is not None
    found.append(loaded.shared["x"])
    x.fill_(1.0)
    pending = dcp.async_save({"x": x}, checkpoint_id=where / "torchs", process_group=background)
    x.fill_(2.0)
    pending.result()
    return found[0], torch_loaded(where / "torchs", {"x": x})["x"]


class Parts:
    """A checkpoint of so many ranks, in memory."""

    def __init__(self, parts: list[Any]) -> None:
        self.world_size, self.parts = len(parts), parts

    def own(self, rank: int) -> Any:
        return self.parts[rank]


@SCENARIOS.ported
def test_a_vector_for_another_number_of_ranks(ctx: RankContext) -> Pair:
    """Saved by 3 ranks, cut for 2, uneven and with an empty shard: torch's rows of the same."""
    found: list[list[Any]] = [[], []]
    three = init_device_mesh("cpu", (3,))
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    where = folder()
    for numel in (10, 7, 4, 2):
        whole = torch.arange(float(numel))
        chunks = [chunk_of(numel, 3, rank) for rank in range(3)]
        saved = Parts([{"x": cut(whole[c], numel, 3, r)} for r, c in enumerate(chunks)])
        theirs = {"x": distribute_tensor(whole, three, [Shard(0)])}
        dcp.save(theirs, checkpoint_id=where / str(numel))
        if ctx.rank == 2:
            continue
        found[0].append(recut(saved, 2, ctx.rank)["x"]["chunk"])
        two = DeviceMesh.from_group(groups[0], "cpu")
        empty = torch.zeros(len(found[0][-1]))
        place = {"shape": torch.Size([numel]), "stride": (1,), "run_check": False}
        into = {"x": DTensor.from_local(empty, two, [Shard(0)], **place)}
        dcp.load(into, checkpoint_id=where / str(numel), process_group=groups[0])
        found[1].append(into["x"].to_local())
    return found[0], found[1]


def trained(ctx: RankContext, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(ctx, 4, 5, salt=step)).square().mean().backward()
        optimizer.step()
    return optimizer


@SCENARIOS.newer
def test_shards_with_their_optimizer_go_to_fewer_ranks(ctx: RankContext) -> Pair:
    """Saved by 3 ranks, loaded by one, with other units: the next step is the same."""
    groups = [dist.new_group([rank]) for rank in range(3)]
    ours, theirs = twins(mlp)
    model = FSDP(ours, [ours[0], ours[2]])
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, sharded_state_dict(model, trained(ctx, model)))
    fresh = FSDP(twins(mlp)[0], group=groups[ctx.rank])
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
    load_sharded_state_dict(fresh, states, optimizer)
    fully_shard(theirs, mesh=init_device_mesh("cpu", (3,)))
    where = folder()
    weights, moments = get_state_dict(theirs, trained(ctx, theirs))
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=where)
    alone = twins(mlp)[1]
    second = torch.optim.AdamW(alone.parameters(), lr=0.1)
    into = dict(zip(("model", "optimizer"), get_state_dict(alone, second), strict=True))
    dcp.load(into, checkpoint_id=where, no_dist=True)
    alone.load_state_dict(into["model"])
    names = [name for name, _ in alone.named_parameters()]
    state = into["optimizer"]["state"]
    for p, name in zip(alone.parameters(), names, strict=True):
        second.state[p] = dict(state[name])
    for net, step in ((fresh, optimizer), (alone, second)):
        net(torch.ones(2, 5)).square().mean().backward()
        step.step()
    whole = torch.cat([p.detach().flatten() for p in alone.parameters()])
    return torch.cat([p.detach().flatten() for p in fresh.parameters()]), whole


@SCENARIOS.ported
def test_whole_values_from_shards_without_ranks(ctx: RankContext) -> Pair:
    """The sharded states are merged, as torch makes one file of its folder."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ours, theirs = twins(mlp)
    model = FSDP(ours, [ours[0]])
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, sharded_state_dict(model))
    fully_shard(theirs, mesh=init_device_mesh("cpu", (3,)))
    where = folder()
    dcp.save(dict(theirs.state_dict()), checkpoint_id=where / "torchs")
    dcp_to_torch_save(where / "torchs", where / f"whole of {ctx.rank}")
    whole = torch.load(where / f"whole of {ctx.rank}", weights_only=False)
    merged = merge(states)
    return [merged[name] for name in sorted(merged)], [whole[name] for name in sorted(whole)]


@SCENARIOS.ported
def test_states_of_another_model_are_refused(ctx: RankContext) -> Pair:
    """Another shape, and a part of the elements only."""
    model = FSDP(twins(mlp)[0])
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, sharded_state_dict(model))
    other = FSDP(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))
    others = [state for rank, state in enumerate(states) if rank != ctx.rank]
    where = folder()
    dcp.save({"x": torch.ones(4)}, checkpoint_id=where)
    strange = [{"x": torch.zeros(5)}, {"x": torch.zeros(4), "y": torch.zeros(1)}]
    return [
        refused(lambda: load_sharded_state_dict(other, states)),
        refused(lambda: load_sharded_state_dict(model, others)),
    ], [refused_or_checkpoint(lambda s=s: dcp.load(s, checkpoint_id=where)) for s in strange]
