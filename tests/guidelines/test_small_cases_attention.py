"""The answers to phase 2's small cases of attention over ranks, and the numbers of its pictures."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import context_balance
from distlab.ranks import RankContext
from distlab.virtual import load_cluster, run_virtual
from solutions.phase2_advanced.all_to_all_attention import (
    Layer,
    all_to_all_seconds,
    crossing,
    heads_for_positions,
    ring_seconds,
)
from solutions.phase2_advanced.context_parallel import attend, merge_
from tests.guidelines.folded import says, sections


def test_2_22() -> None:
    query, values = torch.ones(1, 1), torch.tensor([[1.0], [3.0], [8.0]])
    keys = torch.tensor([[0.0], [0.0], [math.log(2)]])  # one feature, 1 for the query: the scores
    places = slice(2), slice(2, 3)
    parts = [attend(query, keys[at], values[at], False, 1.0) for at in places]
    (a, a_lse), (b, b_lse) = parts
    says(2, "2.22", f"= {a.item():g}, L = log {a_lse.exp().item():g}")
    says(2, "2.22", f"B: out = {b.item():g}, L = log {b_lse.exp().item():g}")
    merge_(a, a_lse, b, b_lse)
    says(2, "2.22", f"Both: L = log {a_lse.exp().item():g}", f"/2 = {a.item():g}. One")


def test_from_which_length_on_the_ring_is_hidden() -> None:
    """The numbers of 2.22, from the cluster's description."""
    cluster = load_cluster("dgx-h100")
    flops = 2 * cluster.gpu.flops["bfloat16"]  # two bytes per number
    for link in (cluster.inside, cluster.between):
        assert f"{flops / link.bandwidth:,.0f}" in sections(2)["2.22"]


def test_positions_in_a_row_are_unequal_work() -> None:
    pairs = [(2 * rank + 1) + (2 * rank + 2) for rank in range(8)]
    assert f"{pairs[-1]} of the chunks' pairs" in sections(2)["2.22"]
    assert f"{pairs[-1] * 8 / sum(pairs):.2f} times the mean" in sections(2)["2.22"]


def test_the_balance_that_was_measured_is_told() -> None:
    """Zig-zag, the slowest rank takes at most 1.1 times the mean, as the record has it."""
    found = json.loads(context_balance.FILE.read_text(encoding="utf-8"))
    took = found["milliseconds"]
    shares = [max(took[way]) * found["ranks"] / sum(took[way]) for way in context_balance.WAYS]
    assert shares[1] <= 1.1 < 1.5 < shares[0]
    for share in shares:
        assert f"takes {share:.2f} times the mean" in " ".join(sections(2)["2.22"].split())


def test_both_placements_have_every_pair_that_the_mask_shows_once() -> None:
    """And so the times of the picture are those of the same products."""
    for way in context_balance.WAYS.values():
        ranks = range(context_balance.RANKS)
        pairs = 0
        for ours, theirs, masked in (p for r in ranks for s in ranks for p in way(r, s)):
            rows, columns = ours.stop - ours.start, theirs.stop - theirs.start
            pairs += rows * columns - masked * rows * (rows - 1) // 2
        length = 2 * context_balance.RANKS * context_balance.CHUNK
        assert pairs == length * (length + 1) // 2


def test_2_23() -> None:
    every = torch.tensor([[1.0, 2, 3, 4], [11, 12, 13, 14]]).view(1, 2, 4, 1)

    def body(ctx: RankContext) -> list[float]:
        (mine,) = heads_for_positions([every.chunk(2, 2)[ctx.rank]])
        return [float(number) for number in mine.flatten()]

    held = [
        " ".join("ab"[number > 10] + str(int(number % 10)) for number in numbers)
        for numbers in run_virtual(body, 2, learner_files=(__file__,))
    ]
    says(2, "2.23", f"rank 0 has {held[0]}", f"rank 1 has {held[1]}")


@pytest.mark.parametrize("place", ["inside", "between"])
def test_the_crossing_of_ring_and_all_to_all_is_told(place: str) -> None:
    cluster = load_cluster("dgx-h100")
    layer = Layer(
        batch=1,
        heads=32,
        kv_heads=32,
        features=128,
        itemsize=2,
        ranks=8,
        flops=cluster.gpu.flops["bfloat16"],
        alpha=0.0,
        beta=getattr(cluster, place).beta,
    )
    at = crossing(layer)
    assert f"{at:,.0f} positions" in sections(2)["2.23"]
    assert ring_seconds(layer, at) == pytest.approx(all_to_all_seconds(layer, at))
