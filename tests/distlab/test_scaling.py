"""``docs/scaling.md``: recorded cells are what the simulator says now, and 3.21 against them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

import pytest
import torch
import torchvision  # noqa: F401 (here, once: not in every process that simulates)

from benchmarks import scaling, scaling_choice, scaling_page
from benchmarks.scaling import COUNTS, ROWS, key_of, load
from distlab.course.catalogue import root
from distlab.hardware.clusters import load_cluster
from distlab.simulate import models
from distlab.simulate.plan import ALIKE, Plan
from distlab.simulate.prediction import simulate
from solutions.phase3_multi_node.sharding_strategies import estimate

CLUSTER = "dgx-h100"


@pytest.fixture(scope="module", autouse=True)
def profiles() -> Iterator[None]:
    """Each model's profile is taken once for all tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling_choice, "profile_of", functools.cache(scaling_choice.profile_of))
        yield


def cells_of(model: str) -> scaling_choice.Cells:
    return scaling_page.by_numbers(load(model))


@pytest.mark.parametrize(
    ("model", "name", "gpus"),
    [
        ("resnet50", "FSDP with prefetch", 256),
        ("resnet50", "DDP, own ring", 2),
        ("resnet50", "parameter server, 1", 2),
        ("gpt-1b", "ZeRO-2", 16),
        ("gpt-7b", "hybrid FSDP", 32),
    ],
)
def test_recorded_cells_come_out_again(model: str, name: str, gpus: int) -> None:
    row = next(row for row in ROWS if row.name == name)
    (answer,) = simulate(row.plan(CLUSTER, model, gpus))
    recorded = load(model)[key_of(CLUSTER, row, gpus)]
    for field in ("step", "exposed", "memory", "rate"):
        assert getattr(answer, field) == pytest.approx(recorded[field], rel=1e-6), field


@pytest.mark.parametrize("model", list(scaling.CLUSTERS))
def test_tables_go_from_1_to_256_where_some_ranks_tell(model: str) -> None:
    cells = cells_of(model)
    for cluster in scaling.CLUSTERS[model]:
        for row in ROWS:
            counts = [g for g in COUNTS if (cluster, row.name, g) in cells]
            assert counts == [g for g in COUNTS if counts[0] <= g <= counts[-1]]
            if row.strategy in ALIKE:
                assert counts == list(COUNTS)


def test_page_is_what_the_recorded_cells_make(tmp_path, monkeypatch) -> None:
    page = scaling_page.FOLDER.parent / "scaling.md"
    recorded = {model: load(model) for model in scaling.CLUSTERS}
    monkeypatch.setattr(scaling_page, "draw", lambda *_: None)
    text = scaling_page.page_of(recorded, [row.name for row in ROWS], COUNTS)
    assert page.read_text(encoding="utf-8") == text


def test_estimates_of_memory_are_the_simulators() -> None:
    """Exercise 3.21's peaks, for every recorded model and strategy, and for ViT.

    Within 10 %; but ZeRO-1's of GPT-7B is that of the first step, whose gradients are in buckets
    twice before there is an optimizer's state; the simulator tells of the steps after it.
    """
    cluster = load_cluster(CLUSTER)
    for model in (*scaling.CLUSTERS, "vit_b16"):
        profile = scaling_choice.profile_of(model)
        for strategy, name in scaling_choice.SIMULATED.items():
            for gpus in (16,) if model == "vit_b16" else (16, 64, 256):
                local = cluster.gpus_per_node
                said = estimate(profile, strategy, gpus // local, local).peak
                if model == "vit_b16":
                    row = next(row for row in ROWS if row.name == name)
                    (answer,) = simulate(row.plan(CLUSTER, model, gpus))
                    memory = answer.memory
                else:
                    memory = cells_of(model)[CLUSTER, name, gpus]["memory"]
                first = (model, strategy) == ("gpt-7b", "zero1")
                assert said == pytest.approx(memory, rel=0.12 if first else 0.1), (model, strategy)


def test_choice_of_exercise_3_21_fits_and_is_fastest_where_memory_is_short() -> None:
    """Where several strategies fit, it is the least on the wire and may be slower: see the page."""
    cluster = load_cluster(CLUSTER)
    for model, budget, counts in (("gpt-1b", 18e9, (4, 16, 256)), ("gpt-7b", 20e9, (8, 32, 128))):
        profile, cells = scaling_choice.profile_of(model), cells_of(model)
        for gpus in counts:
            chosen = scaling_choice.choice_of(profile, cluster, gpus, budget)
            assert chosen == scaling_choice.fastest_of(cells, CLUSTER, gpus, budget)[0][0], gpus
    for budget in (80e9, 40e9):
        chosen = scaling_choice.choice_of(profile, cluster, 16, budget)
        assert chosen in dict(scaling_choice.fastest_of(cells, CLUSTER, 16, budget))


def test_plans_of_all_rows_are_valid() -> None:
    for model in scaling.CLUSTERS:
        for cluster, row, gpus in scaling.cells(model):
            assert isinstance(row.plan(cluster, model, gpus), Plan)


# -- what the texts conclude ----------------------------------------------------------------------
FUSED = 14  # bytes that AdamW reads and writes per bfloat16 parameter, if it is one kernel


@functools.cache
def step_of(model: str, name: str, gpus: int, bucket_mb: float = 0.0) -> tuple[float, float]:
    """Milliseconds of a step, and of the optimizer in it."""
    plan = next(row for row in ROWS if row.name == name).plan(CLUSTER, model, gpus)
    if bucket_mb:
        plan = dataclasses.replace(plan, bucket_mb=bucket_mb)
    (answer,) = simulate(plan)
    updates = [s.seconds for s in answer.spans if (s.rank, s.name) == (0, "optimizer")]
    return answer.step * 1e3, sum(updates) * 1e3


def parameters_of(model: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in models.model_spec(model).build().parameters())


def fused_update(model: str) -> float:
    """Milliseconds of one GPU that updates all parameters with a fused AdamW."""
    return parameters_of(model) * FUSED / load_cluster(CLUSTER).gpu.bandwidth * 1e3


def seen(model: str) -> str:
    return " ".join(scaling_page.SEEN[model].split())


def test_guideline_ranks_with_and_without_the_optimizer() -> None:
    text = (root() / "phase3_multi_node" / "guidelines.md").read_text(encoding="utf-8")
    for row, name in (
        ("fsdp", "FSDP with prefetch"),
        ("hybrid", "hybrid FSDP"),
        ("ddp", "DDP in buckets"),
    ):
        step, update = step_of("gpt-1b", name, 16)
        numbers = [f"{x:.1f} ms" for x in (step, update, step - update)]
        assert f"| {row} | {' | '.join(numbers)} |" in text
    (ddp, update), (fsdp, small) = (
        step_of("gpt-1b", name, 16) for name in ("DDP in buckets", "FSDP with prefetch")
    )
    fused = fused_update("gpt-1b")
    ahead = (ddp - update + fused) / (fsdp - small + fused / 16) - 1
    assert f"update takes {fused:.0f} ms" in text
    assert f"FSDP is {ahead:.0%} ahead of DDP instead of {ddp / fsdp - 1:.0%}".replace(
        "%", " %"
    ) in (" ".join(text.split()))


def test_gpt_7b_with_a_fused_optimizer() -> None:
    (ddp, update), (fsdp, small) = (
        step_of("gpt-7b", name, 16) for name in ("DDP in buckets", "FSDP with prefetch")
    )
    fused, count = fused_update("gpt-7b"), parameters_of("gpt-7b")
    assert f"{16 * count / 1e9:.0f} GB" in seen("gpt-7b")
    assert (
        f"16 GPUs AdamW takes {update:.0f} ms of DDP's step of {ddp:.0f} ms, and {small:.0f} ms"
        in seen("gpt-7b")
    )
    assert f"would take {fused:.0f} and {fused / 16:.0f} ms" in seen("gpt-7b")
    ratio = (ddp - update + fused) / (fsdp - small + fused / 16)
    assert f"{ratio:.1f} times as fast instead of {ddp / fsdp:.1f} times" in seen("gpt-7b")


def test_zero_1_with_larger_buckets() -> None:
    small, large, ddp = (
        step_of("gpt-1b", name, 64, mb)[0]
        for name, mb in (("ZeRO-1", 0.0), ("ZeRO-1", 250.0), ("DDP in buckets", 250.0))
    )
    assert f"takes {large:.0f} instead of {small:.0f} ms, and DDP's step takes {ddp:.0f}" in seen(
        "gpt-1b"
    )


def test_resnet50_with_foreach(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("DDP in buckets", "FSDP with prefetch")
    before = [f"{step_of('resnet50', name, 1)[0]:.1f}" for name in names]
    sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)
    spec = dataclasses.replace(models.MODELS["resnet50"], optimizer=sgd)
    monkeypatch.setitem(models.MODELS, "resnet50", spec)
    step_of.cache_clear()
    after = [f"{step_of('resnet50', name, 1)[0]:.1f}" for name in names]
    found = re.search(
        r"takes (\S+) instead of (\S+) ms, and FSDP's takes (\S+) instead of (\d+\.\d)",
        seen("resnet50"),
    )
    assert found
    assert [*found.groups()] == [after[0], before[0], after[1], before[1]]
    step_of.cache_clear()
