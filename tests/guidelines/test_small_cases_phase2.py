"""The answers to phase 2's small cases but for pipelines: each is computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.ranks import RankContext
from distlab.virtual import load_cluster, run_virtual
from solutions.phase2_advanced import (
    batch_size,
    gradient_accumulation,
    loss_scaling,
    random_streams,
    stage_bounds,
    tensor_parallel,
    vocabulary_parallel,
)
from solutions.phase2_advanced.parallel_transformer import rows_by_rank
from solutions.phase2_advanced.sequence_parallel import sum_replicated_gradients
from tests.guidelines.folded import answer, cases, says, sections


def virtual(body: Callable[[RankContext], Any], ranks: int) -> list[Any]:
    return [*run_virtual(body, ranks, learner_files=(__file__,))]


def test_every_section_has_a_case() -> None:
    assert cases(2) == {name for name in sections(2) if name[0].isdigit()}
    assert all(answer(2, name) for name in cases(2))


def test_2_1() -> None:
    losses = [[6.0], [1.0, 1.0, 1.0]]
    every = [loss for part in losses for loss in part]
    means = [sum(part) / len(part) for part in losses]
    says(2, "2.1", f"/ 4 = {sum(every) / len(every)}", f"/ 2 = {sum(means) / 2}")


def test_2_2() -> None:
    sums, targets = [4, 4], [1, 3]
    means = [s / n for s, n in zip(sums, targets, strict=True)]
    says(2, "2.2", f"(1 + 3) = {sum(sums) / sum(targets):g}", f"/ 2 = {sum(means) / 2:.2f}")


def test_2_3() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for p, gradient in zip(parameters, (3.0, 4.0), strict=True):
        p.grad = torch.tensor([gradient])
    norm = gradient_accumulation.clip_by_global_norm(parameters, 1.0)
    one, two = (p.grad.item() for p in parameters)
    says(2, "2.3", f"= {norm:g}", f"{1 / norm:g}", f"gradients {one:g} and {two:g}")


def test_2_4() -> None:
    rates = [
        batch_size.scaled_learning_rate(
            step, base_lr=0.1, base_batch=256, global_batch=8 * 128, warmup_steps=5
        )
        for step in range(7)
    ]
    told = ", ".join(f"{rate:.2f}" for rate in rates[:6])
    says(2, "2.4", f"k = 8·128/256 = {8 * 128 // 256}", f"{told} and {rates[6]:.2f} from then on")

    def body(ctx: RankContext) -> list[int]:
        tried: list[int] = []

        def trial(size: int) -> float:
            tried.append(size)
            return size

        batch_size.largest_micro_batch(trial, 100, budget_bytes=[21, 13][ctx.rank])
        return tried

    tried, others = virtual(body, 2)
    assert tried == others
    says(2, "2.4", ", ".join(map(str, tried)))


def test_2_5() -> None:
    master, updates = 1.0, 0
    low = torch.ones((), dtype=torch.bfloat16)
    while torch.tensor(master).bfloat16() == 1:
        master, updates = master + 0.002, updates + 1
        low += 0.002
    assert low == 1  # and so for ever: the next update meets the same number
    says(2, "2.5", f"After {updates} updates", f"becomes {torch.tensor(master).bfloat16():.4f}")
    says(2, "2.5", f"2⁻⁷ = {torch.finfo(torch.bfloat16).eps:.4f}", "never moves")


def test_the_notebook_s_step_disappears() -> None:
    one = torch.ones((), dtype=torch.bfloat16)
    assert one - 0.001 == 1
    assert one - 0.002 < 1


def test_2_6() -> None:
    assert torch.tensor(2.0**-26).half() == 0
    assert torch.tensor(2.0**-26 * 2**10).half() == 2.0**-16
    overflows = [k for k in range(20) if torch.tensor(8.0 * 2**k).half().isinf()]
    assert overflows[0] == 13
    says(2, "2.6", "2⁻¹⁶", "From S = 2¹³ on", f"{8 * 2**13}", "2¹² still works")
    assert torch.finfo(torch.float16).max == 65504


def test_hysteresis_is_in_a_row() -> None:
    scaler = loss_scaling.LossScaler(hysteresis=2)
    for finite in (False, True, False):
        scaler.finite = finite
        scaler.update()
    assert scaler.scale == 2.0**16


def peak(segments: int, layers: int, ratio: int) -> int:
    """In units of A: the formula of 2.7 with L = ratio·A."""
    return segments - 1 + math.ceil(layers / segments) * ratio


def true_peak(segments: int, layers: int, ratio: int) -> int:
    """The same, segment by segment: longer ones first, and backward frees the inputs behind it."""
    short, longer = divmod(layers, segments)
    lengths = [short + (k < longer) for k in range(segments)]
    return max(min(k + 1, segments - 1) + each * ratio for k, each in enumerate(lengths))


def test_2_7() -> None:
    tried = (1, 2, 4, 8, 16)
    for ratio in (4, 9):
        peaks = [peak(s, 16, ratio) for s in tried]
        best = min(range(1, 17), key=lambda s, ratio=ratio: peak(s, 16, ratio))
        says(2, "2.7", f"L = {ratio}A: {', '.join(map(str, peaks))}", f"least at s = {best}")
        says(2, "2.7", f"= {2 * 16 - 16 // best}")
    says(2, "2.7", f"root is {math.isqrt(16 * 9)}", f"11 + 2·9 = {peak(12, 16, 9)}")
    true = {s: true_peak(s, 16, 9) for s in range(1, 17)}
    least = min(true, key=true.__getitem__)
    says(2, "2.7", f"the true peak of s = 12 is {true[12]}")
    says(2, "2.7", f"The least true peak of all is {true[least]}, at s = {least}")
    assert all(
        true_peak(s, 16, 9) == max(s - 1 + 16 // s * 9, 16 % s + math.ceil(16 / s) * 9)
        for s in range(1, 17)
    )
    table = [peak(s, 16, 9) for s in (1, 2, 4, 8, 9, 12, 16)]
    assert " ".join(map(str, table)) in " ".join(sections(2)["2.7"].split())


def test_2_8() -> None:
    weights = [torch.tensor(w, requires_grad=True) for w in (2.0, 3.0, 4.0)]
    outputs = [torch.tensor(1.0)]
    for weight in weights:
        outputs.append(weight * outputs[-1])
        outputs[-1].retain_grad()
    outputs[-1].backward()
    sent, loss = [y.item() for y in outputs[1:3]], outputs[3].item()
    back = [outputs[2].grad.item(), outputs[1].grad.item()]
    says(2, "2.8", f"rank 0 sends {sent[0]:g}, rank 1 sends {sent[1]:g}; the loss is {loss:g}")
    says(2, "2.8", f"rank 2 sends {back[0]:g}, rank 1 sends 3·4 = {back[1]:g}")
    assert weights[0].grad == 12
    says(2, "2.8", f"weights have {weights[1].grad:g} and {weights[2].grad:g}")


def test_2_20() -> None:
    costs = [7, 3, 7, 3, 3]

    def largest(stages: int) -> float:
        bounds = stage_bounds.partition(costs, stages)
        edges = zip(bounds, [*bounds[1:]], strict=False)
        return max(sum(costs[a:b]) for a, b in edges)

    assert largest(2) == 13
    says(2, "2.20", f"stage then costs {largest(3)}")


def test_2_14() -> None:
    def body(ctx: RankContext) -> tuple[float, float]:
        x = torch.tensor(3.0, requires_grad=True)
        y = [2, 5][ctx.rank] * tensor_parallel.copy_to_ranks(x)
        loss = tensor_parallel.sum_over_ranks(y)
        loss.backward()
        return loss.item(), x.grad.item()

    (loss, gradient), other = virtual(body, 2)
    assert (loss, gradient) == other
    says(2, "2.14", f"6 + 15 = {loss:g}", f"2 + 5 = {gradient:g}")


@pytest.mark.parametrize("kind", ["ColumnParallelLinear", "RowParallelLinear"])
def test_2_15(kind: str) -> None:
    def body(ctx: RankContext) -> tuple[list[float], list[float]]:
        whole = nn.Linear(2, 2)
        with torch.no_grad():
            whole.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            whole.bias.copy_(torch.tensor([10.0, 20.0]))
        layer = getattr(tensor_parallel, kind)(whole)
        x = torch.ones(1, 2) if kind.startswith("Column") else torch.ones(1, 1)
        return layer.weight.flatten().tolist(), layer(x).flatten().tolist()

    (zero, y_0), (one, y_1) = virtual(body, 2)
    name = "row" if kind.startswith("Column") else "column"
    says(2, "2.15", f"the {name} ({zero[0]:g}, {zero[1]:g})", f"({one[0]:g}, {one[1]:g})")
    y = [*y_0, *y_1] if kind.startswith("Column") else y_0
    says(2, "2.15", f"y = ({y[0]:g}, {y[1]:g})")


def test_2_16() -> None:
    logits = torch.tensor([1.0, 2.0, 0.0, 3.0])

    def body(ctx: RankContext) -> tuple[float, list[float]]:
        mine = logits.view(2, 2)[ctx.rank].reshape(1, 2).clone().requires_grad_()
        loss = vocabulary_parallel.vocab_parallel_cross_entropy(mine, torch.tensor([1]), 4).sum()
        loss.backward()
        return loss.item(), mine.grad.flatten().tolist()

    found = virtual(body, 2)
    sums = (logits - logits.max()).exp().view(2, 2).sum(1).tolist()
    says(2, "2.16", f"m = {logits.max():g}", f"{sums[0]:.3f} and {sums[1]:.3f}")
    says(2, "2.16", f"Σ = {sum(sums):.3f}", f"log Σ + m − z_t = {found[0][0]:.3f}")
    for rank, (_, gradient) in enumerate(found):
        told = ", ".join(f"{g:.3f}" for g in gradient).replace("-", "−")
        says(2, "2.16", f"({told}) on rank {rank}")


def test_2_17() -> None:
    qkv = nn.Linear(4, 12, bias=False)
    with torch.no_grad():
        qkv.weight.copy_(torch.arange(12.0)[:, None].expand(12, 4))
    rows = [int(row[0]) for row in rows_by_rank(qkv, 2).weight[6:]]
    q, k, v = rows[:2], rows[2:4], rows[4:]
    says(2, "2.17", f"{q[0]}, {q[1]} (q), {k[0]}, {k[1]} (k) and {v[0]}, {v[1]} (v)")
    says(2, "2.17", "columns 2 and 3")


def test_time_of_tensor_parallelism() -> None:
    """The table of 2.17, from the cluster's description."""
    cluster = load_cluster("dgx-h100")
    flops = cluster.gpu.flops["bfloat16"]
    cards = cluster.nics_per_node * cluster.between.bandwidth
    rows = re.findall(r"^\| (\d+) \| .* \| ([\d.]+) \(.* \| (\d+) % \|$", sections(2)["2.17"], re.M)
    inside, between = cluster.inside.bandwidth, cluster.between.bandwidth
    links = ((8, inside), (16, min(inside, cards)), (8, between))
    assert f"cards have {cards / 1e9:.0f} together" in sections(2)["2.17"]
    for (ranks, link), row in zip(links, rows, strict=True):
        share = 2 / 9 * (ranks - 1) * flops / link / 8192
        assert row == (str(ranks), f"{link / 1e9:g}", f"{share * 100:.0f}")


@pytest.mark.parametrize(("ranks", "share"), [(2, "40 %"), (8, "73 %")])
def test_share_of_what_is_repeated(ranks: int, share: str) -> None:
    assert f"{4 / (4 + 12 / ranks):.0%}".replace("%", " %") == share
    assert f"{share} with W = {ranks}" in sections(2)["2.18"]


def test_2_18() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def body(ctx: RankContext) -> tuple[float, float]:
        g = nn.Parameter(torch.ones(()))
        (g * x.view(2, 2)[ctx.rank]).sum().backward()
        own = g.grad.item()
        sum_replicated_gradients([g])
        return own, g.grad.item()

    (one, whole), (two, _) = virtual(body, 2)
    says(2, "2.18", f"dg = 1 + 2 = {one:g}", f"dg = 3 + 4 = {two:g}", f"3 + 7 = {whole:g}")


def test_2_19() -> None:
    def body(ctx: RankContext) -> list[int]:
        streams = random_streams.RandomStreams(0)
        with streams.sharded():
            numbers = torch.rand(5).tolist()
        streams, drawn = random_streams.RandomStreams(0), []

        def region(x: torch.Tensor) -> torch.Tensor:
            with streams.sharded():
                drawn.append(torch.rand(()).item())
            return x.sin()

        y = torch.ones((), requires_grad=True)
        for _ in range(2):
            y = checkpoint(region, y, use_reentrant=False, context_fn=streams.contexts)
        y.backward()
        region(y.detach())
        return [numbers.index(number) + 1 for number in drawn]

    drawn = virtual(body, 1)[0]
    says(2, "2.19", ", ".join(map(str, drawn)))
