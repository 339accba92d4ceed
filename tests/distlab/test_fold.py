"""Ranks that do the same are run once: a folded run equals one of every rank to the last digit."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from distlab.hardware.clusters import load_cluster
from distlab.ranks import RankFailure
from distlab.simulate import models, prediction
from distlab.simulate.choices import ALIKE
from distlab.simulate.plan import Plan
from distlab.simulate.prediction import simulate
from distlab.simulate.roles import roles
from distlab.virtual import run_virtual
from distlab.virtual.fold import Fold
from distlab.virtual.journal import Journal
from distlab.virtual.network import PortClasses
from distlab.virtual.shards import Shards, cut, wholes_of

pytestmark = pytest.mark.verdict


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPT whose words don't divide into equal shards for two ranks."""
    spec = models._gpt("gpt-tiny", 4, 16, 4, 8, 1, vocabulary=35)
    monkeypatch.setitem(models.MODELS, spec.name, spec)
    return spec.name


@pytest.fixture
def crowded(tmp_path: Path) -> str:
    """Two cards for four GPUs, and half of their bandwidth in the core of the network."""
    path = tmp_path / "crowded.yaml"
    data = yaml.safe_load((Path(__file__).parents[2] / "clusters" / "p4d-a100.yaml").read_text())
    data |= {"gpus_per_node": 4, "nics_per_node": 2, "oversubscription": 2}
    data["sources"]["oversubscription"] = "chosen for this test"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def expect_equal(plan: Plan, running: int) -> None:
    """So many ranks run, and the answer is that of all ranks, spans and all."""
    (gpus,) = plan.gpus
    assert len(set(roles(plan, gpus))) == running < gpus
    (folded,) = simulate(plan)
    (whole,) = simulate(dataclasses.replace(plan, every_rank=True, every_micro_batch=True))
    assert folded.row() == whole.row()
    assert folded.spans == whole.spans
    assert {*zip(folded.states, folded.kept, strict=True)} == {
        *zip(whole.states, whole.kept, strict=True)
    }


RUNNING = {"zero1": 6, "zero2": 6, "fsdp": 3}  # of 64 ranks; of other strategies 2


@pytest.mark.parametrize("strategy", [name for name in ALIKE if name != "hybrid"])
def test_data_parallelism_of_64_gpus(strategy: str) -> None:
    plan = Plan(model="mlp", gpus=(64,), strategy=strategy, every=2)
    expect_equal(plan, RUNNING.get(strategy, 2))


@pytest.mark.parametrize("strategy", ["ddp", "bucketed"])
def test_torchs_own_data_parallelism(strategy: str) -> None:
    expect_equal(Plan(model="mlp", gpus=(64,), strategy=strategy, impl="torch"), 2)


def test_hybrid_sharding_where_two_gpus_share_a_card() -> None:
    expect_equal(Plan(model="mlp", gpus=(64,), strategy="hybrid", cluster="p4d-a100"), 12)


def test_shards_that_are_shorter_or_empty() -> None:
    """The last node is not full, and some vectors have fewer elements than there are ranks."""
    expect_equal(Plan(model="mlp", gpus=(61,), strategy="fsdp", cluster="p4d-a100"), 3)


LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"tensor": 2, "pipeline": 2, "micro_batches": 4}, 4),
    ({"tensor": 2, "pipeline": 4, "micro_batches": 4, "schedule": "zero-bubble"}, 8),
    (
        {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2}
        | {"micro_batches": 4, "sequence_parallel": True},
        4,
    ),
    ({"tensor": 4, "pipeline": 2, "schedule": "gpipe", "micro_batches": 4}, 8),
    ({"tensor": 1, "pipeline": 4, "micro_batches": 4, "recompute": "full"}, 8),
]


@pytest.mark.parametrize(("layout", "running"), LAYOUTS)
def test_tensor_pipeline_and_data_parallelism_where_two_gpus_share_a_card(
    tiny: str, layout: dict[str, Any], running: int
) -> None:
    expect_equal(Plan(model=tiny, gpus=(64,), cluster="p4d-a100", **layout), running)


def test_a_stage_that_cannot_be_repeated_runs_each_micro_batch(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(model=tiny, gpus=(4,), tensor=2, pipeline=2, micro_batches=4)
    (expected,) = simulate(dataclasses.replace(plan, every_micro_batch=True))
    started: list[bool] = []

    def run(body: Any, gpus: int, given: Plan, **options: Any) -> Any:
        started.append(given.every_micro_batch)
        return run_virtual(body, gpus, given, **options)

    monkeypatch.setattr(prediction, "run_virtual", run)
    monkeypatch.setattr(Journal, "outlives", lambda self, _: setattr(self, "usable", False))
    (answer,) = simulate(plan)
    assert started == [False, True]
    assert answer.row() == expected.row()


def test_an_oversubscribed_network(tiny: str, crowded: str) -> None:
    """All GPUs of a node take turns on its uplink."""
    plan = Plan(model=tiny, gpus=(32,), cluster=crowded, tensor=2, pipeline=2, micro_batches=4)
    expect_equal(plan, 8)


def test_copies_that_cross_nodes_in_other_ways(tiny: str) -> None:
    """6 ranks of a stage on nodes of 8: some copies send inside of a node, and some do not."""
    plan = Plan(model=tiny, gpus=(24,), tensor=1, pipeline=4, micro_batches=4)
    expect_equal(plan, 12)


def test_roles_of_16384_gpus() -> None:
    plan = Plan(model="gpt-175b", gpus=(16_384,), tensor=8, pipeline=8)
    found = roles(plan, 16_384)
    first = [stage * 2048 + place for stage in range(8) for place in range(2)]
    assert Counter(found) == {rank: 256 if rank % 2 == 0 else 7 * 256 for rank in first}
    assert len(set(roles(Plan(model="gpt-7b", gpus=(16_384,), strategy="fsdp"), 16_384))) == 3


@pytest.mark.parametrize("strategy", ["ring", "tree", "parameter-server"])
def test_ranks_that_differ_all_run(strategy: str) -> None:
    assert not roles(Plan(model="mlp", gpus=(8,), strategy=strategy), 8)
    assert not roles(Plan(model="mlp", gpus=(8,), strategy="zero1", impl="torch"), 8)


def test_a_message_to_a_rank_that_does_not_run_is_refused() -> None:
    def body(ctx: Any) -> None:
        if ctx.rank == 0:
            dist.send(torch.zeros(1), 2)

    with pytest.raises(RankFailure, match="rank 1 stands for it") as failure:
        run_virtual(body, 3, roles=(0, 1, 1))
    assert failure.value.cause == "absent-rank"


def test_a_rank_stands_for_its_role_in_values_and_bytes() -> None:
    """Sums, gathers and traffic count every rank."""

    def body(ctx: Any) -> list[float]:
        total, parts = torch.tensor([1.0 + ctx.rank]), [torch.zeros(1) for _ in range(5)]
        dist.all_gather(parts, total.clone())
        dist.all_reduce(total)
        return [total.item(), *(part.item() for part in parts)]

    folded = run_virtual(body, 5, roles=(0, 1, 1, 0, 1))
    assert folded[0] == [1 + 2 + 2 + 1 + 2, 1, 2, 2, 1, 2]
    assert folded[2] is None
    assert folded.traffic == run_virtual(body, 5).traffic
    assert folded.clocks[0] == run_virtual(body, 5).clocks[0]


def test_groups_without_a_rank_that_runs_are_not_made() -> None:
    def body(ctx: Any) -> int:
        pairs = [dist.new_group([first, first + 1]) for first in (0, 2, 4)]
        total = torch.ones(1)
        dist.all_reduce(total, group=pairs[ctx.rank // 2])
        return sum(pair is dist.GroupMember.NON_GROUP_MEMBER for pair in pairs)

    assert run_virtual(body, 6, roles=(0, 1, 0, 1, 0, 1))[:2] == [2, 2]


def test_a_fold_needs_ranks_that_stand_for_themselves() -> None:
    with pytest.raises(ValueError, match="must run itself"):
        Fold((1, 0))


def test_classes_of_ports_tell_the_time_of_each_port() -> None:
    """Against one time for each port, in a random order of groups."""
    draw = random.Random(7)
    groups = [frozenset(draw.sample(range(40), draw.randint(1, 30))) for _ in range(12)]
    classes, free = PortClasses(), dict.fromkeys(range(40), 0.0)
    known: dict[frozenset[int], Any] = {}
    for moment in range(400):
        group = draw.choice(groups[: 1 + moment // 20])
        if group not in known:
            known[group] = classes.of(group)
        assert max(each.free for each in known[group]) == max(free[port] for port in group)
        assert sum(len(each.ports) for each in known[group]) == len(group)
        for each in known[group]:
            each.free = moment
        free |= dict.fromkeys(group, float(moment))
    assert len(known) == 12


def test_shards_are_the_chunks() -> None:
    wholes = [torch.empty(12, device="meta"), torch.empty(8, device="meta")]
    shards = cut(wholes, 4)
    assert isinstance(shards, Shards)
    assert [len(shard) for shard in shards] == [3] * 4 + [2] * 4
    assert [len(shards[n]) for n in (0, 7, -1)] == [3, 2, 2]
    assert [s.storage_offset() for s in shards[1:6]] == [3, 6, 9, 0, 2]
    assert wholes_of(shards) is wholes
    real = cut([torch.arange(5)], 4)  # values: all shards, as chunk makes them
    assert [s.tolist() for s in real] == [[0, 1], [2, 3], [4]]
    assert wholes_of(real) is real


def test_card_of_the_cluster_that_is_tested_with_is_shared() -> None:
    cluster = load_cluster("p4d-a100")
    assert cluster.nic(0) == cluster.nic(1) != cluster.nic(2)
