"""The answers to phase 1's small cases: each is computed, and stands in its folded answer."""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from distlab.ranks import RankContext, RankFailure, run_ranks
from distlab.virtual import run_virtual
from solutions.phase1_data_parallel import (
    collectives,
    data_loader,
    evaluation,
    simple_allreduce,
    trainer,
)
from tests.at_exit.expected import needs_proc
from tests.at_exit.sitecustomize import Watch
from tests.guidelines.folded import answer, cases, says, sections

GENERAL = {"Joining", "What"}  # sections without a number that have a small case


def virtual(body: Callable[[RankContext], Any], ranks: int, **options: Any) -> list[Any]:
    return [*run_virtual(body, ranks, learner_files=(__file__,), **options)]


def test_every_section_has_a_case() -> None:
    exercises = {name for name in sections(1) if name[0].isdigit()}
    assert cases(1) == exercises | GENERAL
    assert all(answer(1, name) for name in cases(1))


def shards(remainder: Any) -> list[list[int]]:
    return [
        [*data_loader.ShardedSampler(5, rank=r, world_size=3, shuffle=False, remainder=remainder)]
        for r in range(3)
    ]


def test_1_1() -> None:
    for remainder in ("pad", "drop", "keep"):
        cells = [" ".join(map(str, shard)) for shard in shards(remainder)]
        found = re.search(rf"^{remainder} ([\d *]+)", sections(1)["1.1"], re.MULTILINE)
        assert found
        assert found[1].replace("*", "").split() == " ".join(cells).split()


def test_1_2() -> None:
    def second(rank: int) -> list[int]:
        sampler = data_loader.ShardedSampler(
            5, rank=rank, world_size=4, shuffle=False, remainder="keep"
        )
        _, batch = data_loader.ShardedBatchSampler(sampler, data_loader.split_batch(4, 4))
        return batch

    assert [second(rank) for rank in range(4)] == [[4], [], [], []]
    says(1, "1.2", "In step 1 rank 0 has sample 4", "ranks 1, 2 and 3 have empty batches")


def two_steps(starts: list[float], decay: float) -> list[list[float]]:
    """Where two ranks' weights are after each step with averaged gradients 2 and 1."""
    weights = [torch.tensor([start], dtype=torch.float64, requires_grad=True) for start in starts]
    optimizers = [torch.optim.SGD([w], lr=0.1, weight_decay=decay) for w in weights]
    found = []
    for gradient in (2.0, 1.0):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.tensor([gradient], dtype=torch.float64)
            optimizer.step()
        found.append([round(w.item(), 6) for w in weights])
    return found


def test_1_3() -> None:
    plain, decayed = two_steps([1, 3], 0), two_steps([1, 3], 0.5)
    for step, (a, b) in enumerate(plain, 1):
        assert f"| {3 - step} | {a} | {b} | {b - a:.1f} |" in sections(1)["1.3"]
    says(1, "1.3", *[f"{w:g}" for pair in decayed for w in pair])
    says(1, "1.3", "2, " + ", ".join(f"{b - a:g}" for a, b in decayed))
    alike = two_steps([1, 1], 0.5)
    says(1, "1.3", "1, then " + ", then ".join(f"{a:g}" for a, _ in alike))


def test_1_4() -> None:
    def body(ctx: RankContext) -> float:
        weight = nn.Parameter(torch.zeros(()))
        weight.grad = torch.tensor([4.0, 0.0][ctx.rank])
        trainer.average_gradients([weight], [1, 3][ctx.rank])
        return weight.grad.item()

    says(1, "1.4", f"(1·4 + 3·0) / 4 = {virtual(body, 2)[0]:g}", f"(4 + 0) / 2 = {(4 + 0) / 2:g}")


def test_1_5() -> None:
    samples = [[(1.0, 0.0)], [(2.0, 0.0), (1.0, 1.0)]]

    def gradient_of(weight: nn.Parameter, chosen: list[tuple[float, float]]) -> None:
        x, t = torch.tensor(chosen, dtype=torch.float64).T
        (0.5 * (weight * x - t) ** 2).mean().backward()

    def stepped(weight: nn.Parameter) -> float:
        torch.optim.SGD([weight], lr=0.3).step()
        return round(weight.item(), 12)

    def body(ctx: RankContext) -> tuple[float, float]:
        weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        gradient_of(weight, samples[ctx.rank])
        own = weight.grad.item()
        trainer.average_gradients([weight], len(samples[ctx.rank]))
        return own, stepped(weight)

    (one, after), (two, _) = virtual(body, 2)
    alone = nn.Parameter(torch.ones((), dtype=torch.float64))
    gradient_of(alone, [*samples[0], *samples[1]])
    assert alone.grad.item() == pytest.approx(5 / 3)
    says(1, "1.5", f"(1·{one:g} + 2·{two:g}) / 3 = 5/3", f"w = 1 − 0.3·5/3 = {after:g}")
    says(1, "1.5", f"w = {stepped(alone):g}", f"{(one + two) / 2:g}")
    says(1, "1.5", f"would give {1 - 0.3 * (one + two) / 2:g}")


def test_batch_norm_makes_hashes_differ() -> None:
    """As section 1.5 says: parameters stay equal, running statistics do not."""

    def body(ctx: RankContext) -> tuple[str, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        torch.manual_seed(ctx.rank + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.train_step(model, optimizer, torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))
        whole = trainer.weight_hash(model)
        for buffer in model.buffers():
            buffer.zero_()
        return whole, trainer.weight_hash(model)

    (whole, parameters), (others, same) = virtual(body, 2)
    assert whole != others
    assert parameters == same


@needs_proc
@pytest.mark.parametrize("late", [True, False])
def test_joining_and_leaving(late: bool) -> None:
    """Threads of gloo are left if the functions' defaults hold the group, else not."""

    def rank(ctx: RankContext) -> tuple[int, list[str]]:
        sys.modules.pop("torch.distributed.nn.functional", None)
        watch = Watch()
        watch.start(distributed_c10d)
        if not late:
            importlib.import_module("torch.distributed.nn.functional")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if late:
            importlib.import_module("torch.distributed.nn.functional")
        dist.destroy_process_group()
        return len(watch.made), watch.left()

    ((made, left),) = run_ranks(rank, 1, process_group=False, ledger=False, timeout=60)
    assert len(left) == (made if late else 0)
    says(1, "Joining", *(f"`{name}`" for name in {*left} if "gloo" in name))
    says(1, "Joining", "Imported before, the defaults are None")


def test_1_6() -> None:
    right, counts = [3, 0, 5], [4, 1, 5]

    def body(ctx: RankContext) -> float:
        _, accuracy = evaluation.global_metrics(0.0, right[ctx.rank], counts[ctx.rank])
        return accuracy

    means = sum(r / n for r, n in zip(right, counts, strict=True)) / 3
    says(1, "1.6", f"8/10 = {virtual(body, 3)[0]:.3f}", f"/ 3 = {means:.3f}")


def test_1_7() -> None:
    def body(ctx: RankContext) -> list[float]:
        found = []
        for op in ("sum", "mean", "max", "min", "product"):
            value = torch.tensor([3.0, 4.0][ctx.rank])
            simple_allreduce.all_reduce_root(value, op)
            found.append(value.item())
        return found

    one, two = virtual(body, 2)
    assert one == two
    names = ("sum", "mean", "max", "min", "product")
    says(1, "1.7", ", ".join(f"{name} {v:g}" for name, v in zip(names, one, strict=True)))


def test_1_8() -> None:
    def body(ctx: RankContext) -> float:
        value = torch.tensor(10.0**ctx.rank)
        simple_allreduce.all_reduce_chain(value)
        return value.item()

    assert virtual(body, 3) == [111.0] * 3
    says(1, "1.8", "1 (0 → 1), 11 (1 → 2), 111 (2 → 1) and 111 (1 → 0)")
    world, alpha, beta = 4, 10e-6, 1 / 10e9
    size = alpha / (beta * (1 - 2 / world))

    def seconds(strategy: str, nbytes: float, message: float) -> float:
        steps = simple_allreduce.communication_cost(strategy, world, int(nbytes)).steps
        return steps * (alpha + message * beta)

    direct = seconds("direct", size, size)
    assert seconds("ring", size, size / world) == pytest.approx(direct)
    says(1, "1.8", f"{size:,.0f} bytes", f"both take {direct * 1e6:.0f} µs")
    shared = alpha / (beta * (world - 2))  # one link for all: direct's messages take turns
    assert seconds("direct", shared, world * shared) == pytest.approx(
        seconds("root", shared, shared)
    )


@pytest.mark.parametrize("nbytes", [1, 10_000, 10**9])
def test_direct_takes_half_of_root_and_chain(nbytes: int) -> None:
    """Section 1.8: without contention their lines never cross."""
    steps = {
        name: simple_allreduce.communication_cost(name, 5, nbytes).steps
        for name in ("root", "direct", "chain")
    }
    assert steps["root"] == steps["chain"] == 2 * steps["direct"]


@pytest.mark.parametrize(
    ("receives_first", "ends"), [((), False), ((0,), True), ((0, 1, 2), False)]
)
def test_what_nccl_changes(receives_first: tuple[int, ...], ends: bool) -> None:
    def body(ctx: RankContext) -> float:
        mine = torch.full((1,), float(ctx.rank), device=ctx.device)
        got = torch.zeros(1, device=ctx.device)
        issue = [
            lambda: dist.isend(mine, (ctx.rank + 1) % 3),
            lambda: dist.irecv(got, (ctx.rank - 1) % 3),
        ]
        if ctx.rank in receives_first:
            issue.reverse()
        for handle in [each() for each in issue]:
            handle.wait()
        return got.item()

    if ends:
        assert virtual(body, 3, rules="nccl2") == [2.0, 0.0, 1.0]
    else:
        with pytest.raises(RankFailure, match="deadlock"):
            virtual(body, 3, rules="nccl2")
    says(1, "What", "One is enough", "If all three change")


def test_1_9() -> None:
    def body(ctx: RankContext) -> float:
        wait = 0.01 if ctx.rank == 0 else 0.0
        return collectives.time_collective(lambda: time.sleep(wait), warmup=1, repeats=3)

    found = {f"{seconds * 1e3:.0f} ms" for seconds in virtual(body, 2)}
    assert len(found) == 1
    says(1, "1.9", f"Both {found.pop()}")
