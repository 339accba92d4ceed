"""Whole programs of the course by NCCL's rules: they find their GPUs, join, train and leave."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo  # once here instead of in every forked world
import torch.distributed as dist

from distlab.course.catalogue import root
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import VirtualResults, load_cluster, run_virtual
from given.process_group import process_group
from solutions.phase1_data_parallel import collectives, trainer
from solutions.phase2_advanced import train_gpt
from solutions.phase3_multi_node import (
    allreduce_choice,
    hierarchical_allreduce,
    train_mesh,
    train_two_nodes,
    two_node_measuring,
)
from solutions.phase3_multi_node.halving_doubling import halving_doubling_all_reduce
from solutions.phase3_multi_node.parameter_server import fit

pytestmark = pytest.mark.verdict

assert torch._dynamo
PROGRAMS = {
    "trainer": trainer,
    "collectives": collectives,
    "train_gpt": train_gpt,
    "train_mesh": train_mesh,
    "allreduce_choice": allreduce_choice,
    "hierarchical_allreduce": hierarchical_allreduce,
}
NODES = dataclasses.replace(load_cluster("laptop"), gpus_per_node=2)
FILES = tuple(map(str, (root() / "solutions").glob("*/*.py")))


def run(main: str, world_size: int, *arguments: str, **more: Any) -> VirtualResults:
    """The program on ranks that have no group, in each way in which PyTorch runs NCCL."""

    def body(ctx: RankContext) -> bool:
        sys.argv = [main, *arguments]
        PROGRAMS[main].main()
        return dist.is_initialized()

    options = {"rules": "nccl", "seed": 1, "process_group": False, "learner_files": FILES}
    results = run_virtual(body, world_size, **options, **more, timeout=120)
    assert [*results] == [False] * world_size
    return results


def test_the_trainer_of_phase_1() -> None:
    results = run("trainer", 2, "--epochs", "1", "--device", "cuda")
    assert "digits_mlp: 2 ranks on cuda, 1 epochs" in results.output[0]


def test_all_reduces_are_measured() -> None:
    results = run("collectives", 3, "--sizes", "40", "400", "--device", "cuda")
    assert "busbw MB/s" in results.output[0]


def test_all_reduces_are_measured_and_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(allreduce_choice.measure, [400, 4000, 40000], repeats=1)
    monkeypatch.setattr(allreduce_choice, "measure", lambda sizes, device: few(device=device))
    results = run("allreduce_choice", 3, "--device", "cuda")
    assert results.output[0].count("predicted") == 3 * len(allreduce_choice.PATTERNS)


def test_all_reduces_are_compared_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    of_node = SimpleNamespace(gethostname=lambda: os.environ["GROUP_RANK"])
    monkeypatch.setattr(hierarchical_allreduce, "socket", of_node)
    results = run("hierarchical_allreduce", 4, "--device", "cuda", cluster=NODES)
    assert "ranks by node: ((0, 1), (2, 3))" in results.output[0]


def test_tensor_and_pipeline_parallel_training() -> None:
    arguments = ("--tensor", "2", "--pipeline", "2", "--steps", "2", "--device", "cuda")
    results = run("train_gpt", 4, *arguments)
    assert "tensor 2 x pipeline 2 x data 1, 1f1b, on cuda" in results.output[0]


def test_training_on_a_mesh() -> None:
    axes = ("--context", "2", "--experts", "2", "--micro-batches", "1", "--batch", "4")
    results = run("train_mesh", 4, *axes, "--steps", "1", "--device", "cuda")
    assert "expert 2 x context 2, 1f1b, on cuda" in results.output[0]


@pytest.mark.parametrize("rules", ["nccl2", "legacy lazy", "legacy eager"])
def test_all_strategies_on_two_nodes(rules: str, tmp_path: Path) -> None:
    """Also the parameter server, whose values travel over gloo beside NCCL."""
    numbers, sent = tmp_path / "nodes.json", itertools.count(1)
    options = train_two_nodes.options_of(["--device=cuda", "--every=1", "--interface=lo"])
    options.steps = {"digits_cnn": 2} | ({"tiny_gpt": 2} if rules == "nccl2" else {})
    options.json = numbers

    def body(ctx: RankContext) -> None:
        train_two_nodes.options_of = lambda: copy.copy(options)  # each rank notes its device
        train_two_nodes.socket = SimpleNamespace(gethostname=lambda: os.environ["GROUP_RANK"])
        two_node_measuring.gc = SimpleNamespace(freeze=int, unfreeze=int)
        two_node_measuring.live_bytes = int  # ranks of one process have one garbage collector
        two_node_measuring.bytes_sent = lambda _: next(sent)
        train_two_nodes.main()

    how = {"rules": rules, "process_group": False, "learner_files": FILES}
    results = run_virtual(body, 4, **how, cluster=NODES, timeout=120)
    assert "2 + 2 ranks on 2 nodes" in results.output[0]
    for rows in json.loads(numbers.read_text())["tables"].values():
        scores = {row["strategy"]: row["score"] for row in rows}
        exact = [scores[name] for name in ("ring DDP", "hierarchical DDP", "FSDP")]
        exact += [scores[name] for name in ("hybrid sharding", "parameter server")]
        assert exact == pytest.approx(exact[:1] * 5, abs=0.02)


def serve(ctx: RankContext, backend: str) -> list[float]:
    """Two workers of one server train on their GPUs."""
    device = torch.device("cuda", ctx.rank)
    torch.cuda.set_device(device)
    with process_group(backend, device_id=device):
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).to(device)
        torch.manual_seed(ctx.rank)
        batches = [(torch.randn(4, 3, device=device), torch.ones(4, device=device).long())] * 3
        values = fit(model, batches, servers=1, lr=0.1)
        return [value.sum().item() for value in values.values()]


def test_a_parameter_server_takes_a_group_of_both_backends() -> None:
    options = {"process_group": False, "learner_files": FILES, "seed": 1}
    for rules in ("nccl2", "legacy lazy", "legacy eager"):
        (weight, bias), *workers = run_virtual(
            serve, 3, "cpu:gloo,cuda:nccl", rules=rules, **options
        )
        assert workers == [[], []]
        assert math.isfinite(weight + bias)
    with pytest.raises(RankFailure, match="use the backend cpu:gloo,cuda:nccl, not nccl"):
        run_virtual(serve, 3, "nccl", rules="nccl2", **options)


def halve_and_double(ctx: RankContext, bind: bool) -> list[float]:
    """A program that joins by itself; of three ranks the third takes no part in the halving."""
    torch.cuda.set_device(ctx.rank)
    store = dist.PrefixStore("own", dist.HashStore())
    bound = {"device_id": torch.device("cuda", ctx.rank)} if bind else {}
    dist.init_process_group("nccl", rank=ctx.rank, world_size=3, store=store, **bound)
    x = torch.full((5,), float(ctx.rank), device="cuda")
    halving_doubling_all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()


def test_a_program_that_binds_no_device_before_its_first_batch() -> None:
    """Every rank begins with a batch: the group's communicator is made by all of them."""
    options = {"process_group": False, "learner_files": FILES}
    for bind in (True, False):
        for rules in ("nccl2", "legacy lazy", "legacy eager"):
            got = [*run_virtual(halve_and_double, 3, bind, rules=rules, **options)]
            assert got == [[3.0] * 5] * 3
