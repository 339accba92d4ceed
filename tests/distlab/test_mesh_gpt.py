"""A GPT on a mesh: in every combination of axes it trains, counts and saves like one process."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

from distlab.ranks import RankFailure, run_ranks
from distlab.virtual import run_virtual
from solutions.phase3_multi_node.mesh import Grid
from solutions.phase3_multi_node.mesh_gpt import MeshGPT, evaluate
from solutions.phase3_multi_node.mesh_specs import BATCH as BATCH_AXES
from solutions.phase3_multi_node.mesh_specs import MeshLayout
from solutions.phase3_multi_node.mesh_traffic import axes_of, best_grid, expected
from tests.distlab.meshes import (
    BATCH,
    LENGTH,
    STEPS,
    Fields,
    batch_of,
    joined,
    one_process,
    train,
    whole,
)

pytestmark = pytest.mark.verdict

AXES = ("data", "shard", "tensor", "pipeline", "context", "experts")
PAIRS = [dict.fromkeys(pair, 2) | {"micro_batches": 2} for pair in itertools.combinations(AXES, 2)]
TRIPLES = [
    ("data", "tensor", "pipeline"),
    ("context", "tensor", "experts"),
    ("shard", "context", "pipeline"),
    ("data", "experts", "context"),
]
OTHERS: list[Fields] = [
    {"shard": 3, "micro_batches": 2},  # rows that don't divide
    {"tensor": 2, "context": 2, "experts": 2, "sequence_parallel": True},
    {"tensor": 2, "shard": 2, "sequence_parallel": True, "micro_batches": 2},
    {"pipeline": 2, "shard": 2, "schedule": "gpipe", "micro_batches": 4},
    {"pipeline": 2, "experts": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 4},
]
DENSE: list[Fields] = [
    {"pipeline": 3, "context": 2, "schedule": "zero-bubble", "micro_batches": 4},
    {"pipeline": 2, "tensor": 2, "schedule": "zero-bubble", "sequence_parallel": True},
    {"pipeline": 2, "shard": 2, "chunks": 2, "schedule": "interleaved", "micro_batches": 4},
]
FIVE = dict.fromkeys(("data", "tensor", "pipeline", "context", "experts"), 2) | {"micro_batches": 2}


def expect_one_process(results: list[Any], mixed: bool = True) -> None:
    """Losses and norms on every rank, and the parts of all ranks together."""
    losses, norms, tensors = one_process(mixed)
    for rank, (own_losses, own_norms, _) in enumerate(results):
        assert own_losses == pytest.approx(losses, rel=1e-12), f"losses of rank {rank}"
        assert own_norms == pytest.approx(norms, rel=1e-12), f"norms of rank {rank}"
    found = joined(part for _, _, part in results)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-10, msg=name)


def body(ctx: Any, fields: Fields, mixed: bool = True) -> Any:
    with ctx.region("all"):
        return train(fields, range(STEPS), mixed=mixed)


def named(fields: Fields | str) -> str:
    if isinstance(fields, str):
        return "refused"
    return "-".join(f"{name}-{value}" for name, value in fields.items())


@pytest.mark.parametrize("fields", [*PAIRS, *OTHERS], ids=named)
def test_any_axes_train_like_one_process(fields: Fields) -> None:
    ranks = MeshLayout(**fields).ranks
    expect_one_process(run_virtual(body, ranks, fields, timeout=120))


@pytest.mark.parametrize("fields", DENSE, ids=named)
def test_schedules_go_with_the_axes(fields: Fields) -> None:
    ranks = MeshLayout(**fields).ranks
    expect_one_process(run_virtual(body, ranks, fields, False, timeout=120), mixed=False)


def test_triples_on_real_ranks() -> None:
    def every(ctx: Any) -> list[Any]:
        return [train(dict.fromkeys(axes, 2), range(STEPS)) for axes in TRIPLES]

    results = run_ranks(every, 8, timeout=240)
    for number in range(len(TRIPLES)):
        expect_one_process([result[number] for result in results])


def test_five_axes_on_32_ranks_send_what_the_formulas_say() -> None:
    results = run_virtual(body, 32, FIVE, timeout=240)
    expect_one_process(results)
    layout = MeshLayout(**FIVE)
    grid, sent, messages = layout.grid(), Counter[tuple[str, ...]](), 0
    for log in results.logs:
        for event in log.select(region="all").events:
            sent[axes_of(grid, event.group)] += event.sent
            messages += 1
    want = expected(whole(), layout, BATCH, LENGTH)
    assert sent.keys() == want.keys()
    for axes, nbytes in want.items():
        # a rank's share of a message is a whole number of bytes
        assert sent[axes] == pytest.approx(STEPS * nbytes, rel=1e-6, abs=32 * STEPS), axes


def test_the_shard_axis_sends_no_more_than_the_formula() -> None:
    fields = {"shard": 2, "pipeline": 2, "micro_batches": 2}
    layout = MeshLayout(**fields)
    sent = Counter[tuple[str, ...]]()
    for log in run_virtual(body, 4, fields, timeout=60).logs:
        for event in log.select(region="all").events:
            sent[axes_of(layout.grid(), event.group)] += event.sent
    most = expected(whole(), layout, BATCH, LENGTH)["shard",]
    assert 0.8 * most < sent["shard",] / STEPS < 1.1 * most  # rows are padded in messages


def test_the_order_of_the_axes_changes_no_value() -> None:
    fields = {"data": 2, "tensor": 2, "pipeline": 2}
    sizes = dict(reversed([*MeshLayout(**fields).grid().sizes.items()]))

    def reordered(ctx: Any) -> Any:
        return train(fields, range(STEPS), grid=Grid(sizes, BATCH_AXES))

    expect_one_process(run_virtual(reordered, 8, timeout=60))


def test_the_axis_that_sends_most_stays_in_the_node() -> None:
    layout = MeshLayout(data=2, tensor=2, pipeline=2)
    sizes = best_grid(whole(), layout, BATCH, LENGTH, node_size=2).sizes
    inner = [axis for axis, size in sizes.items() if size > 1]
    assert inner[-1] == "tensor"
    everywhere = best_grid(whole(), layout, BATCH, LENGTH, node_size=8).sizes
    assert [*everywhere] == [*layout.grid().sizes]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"shard": 3, "tensor": 2}, {"pipeline": 2, "context": 2, "experts": 2}),
        ({"context": 2, "experts": 2, "pipeline": 2}, {}),
        ({}, {"shard": 2, "data": 2, "tensor": 2}),
    ],
    ids=named,
)
def test_another_mesh_goes_on(old: Fields, new: Fields) -> None:
    """A step on one mesh, the last one on another: as if nothing had happened."""

    def begin(ctx: Any) -> Any:
        return train(old, range(STEPS - 1))

    first = run_virtual(begin, MeshLayout(**old).ranks, timeout=60)
    parts = [part for _, _, part in first]

    def end(ctx: Any) -> Any:
        return train(new, [STEPS - 1], parts[::-1])

    done = run_virtual(end, MeshLayout(**new).ranks, timeout=60)
    whole_run = [(first[0][0] + a, first[0][1] + b, part) for a, b, part in done]
    expect_one_process(whole_run)


def test_a_checkpoint_without_a_rank_is_refused_and_changes_nothing() -> None:
    fields = {"tensor": 2, "pipeline": 2}

    def begin(ctx: Any) -> Any:
        return train(fields, [0])[2]

    parts = list(run_virtual(begin, 4, timeout=60))

    def end(ctx: Any) -> Any:
        return train({}, [], parts[1:])

    with pytest.raises(RankFailure, match="are in none of the pieces"):
        run_virtual(end, 1, timeout=60)


def test_evaluation_is_that_of_one_process_and_changes_nothing() -> None:
    fields = {"shard": 2, "context": 2, "pipeline": 2, "micro_batches": 2}

    def body(ctx: Any) -> Any:
        model = MeshGPT(whole(), MeshLayout(**fields))
        pipeline = model.pipeline(BATCH, LENGTH)
        loss = evaluate(model, pipeline, *map(model.own, batch_of(0)))
        counted = [b.sum().item() for n, b in model.named_buffers() if n.endswith("counted_E")]
        return loss, [p.grad for p in model.parameters()], counted, model.training

    for loss, grads, counted, training in run_virtual(body, 8, timeout=60):
        assert loss == pytest.approx(one_process()[0][0], rel=1e-12)
        assert not any(grad is not None for grad in grads)
        assert not any(counted)
        assert training


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor": 3}, "2 heads"),
        ({"tensor": 5}, "24 words don't divide by 5"),
        ({"experts": 3}, "4 experts"),
        ({"context": 3}, "6 chunks"),
        ({"data": 5}, "batch of 24 does not divide by 5"),
        ({"pipeline": 5}, "5 stages"),
        ({"pipeline": 2, "schedule": "zero-bubble"}, "a router returns more"),
        ({"shard": 2, "pipeline": 2, "schedule": "zero-bubble"}, "zero-bubble needs parameters"),
        ({"shard": 2, "chunks": 2, "schedule": "interleaved"}, "chunks need a pipeline"),
        ({"context": 0}, "at least 1"),
    ],
    ids=named,
)
def test_what_does_not_go_together_is_refused(fields: Fields, words: str) -> None:
    with pytest.raises((RankFailure, ValueError), match=words):
        run_virtual(body, MeshLayout(**fields).ranks, fields, timeout=20)


def test_experts_need_a_model_that_has_some() -> None:
    with pytest.raises(RankFailure, match="the model has no experts"):
        run_virtual(body, 2, {"experts": 2}, False, timeout=20)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(RankFailure, match="is no grid of 3 ranks"):
        run_virtual(body, 3, {"tensor": 2}, timeout=20)
