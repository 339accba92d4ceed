"""The answers to phase 3's small cases: each is computed, and stands in its folded answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.observe.log import Log
from distlab.ranks import RankContext, RankFailure
from distlab.virtual import run_virtual
from given.team_program import make_teams
from solutions.phase3_multi_node import (
    allreduce_choice,
    buckets,
    ddp,
    halving_doubling,
    hierarchical_allreduce,
    ring_allreduce,
    segmented_ring,
    topology,
    tree_allreduce,
    uneven_inputs,
    zero,
)
from solutions.phase3_multi_node.comm_hooks import two_level
from tests.guidelines.folded import answer, cases, says, sections


def virtual(body: Callable[[RankContext], Any], ranks: int, **options: Any) -> Any:
    return run_virtual(body, ranks, learner_files=(__file__,), **options)


def own_log(logs: list[Log], rank: int) -> list[tuple[str, Any, int]]:
    return [(event.op, event.peer, event.payload) for event in logs[rank].events]


def test_every_exercise_has_a_case_with_an_answer() -> None:
    assert cases(3) == {name for name in sections(3) if name[0].isdigit()}
    assert all(answer(3, name) for name in cases(3))


def test_3_1() -> None:
    held = [[1, 2, 3], [10, 20, 30], [100, 200, 300]]
    for step in range(2):
        sends = [list(ring_allreduce.reduce_scatter_steps(rank, 3))[step][0] for rank in range(3)]
        moving = [held[rank][chunk] for rank, chunk in enumerate(sends)]
        for rank, chunk in enumerate(sends):
            held[(rank + 1) % 3][chunk] += moving[rank]
        says(3, "3.1", *(" ".join(map(str, row)) for row in held))


def test_3_2() -> None:
    for rank in range(3):
        steps = list(ring_allreduce.all_gather_steps(rank, 3))
        says(3, "3.2", f"Rank {rank}: " + ", ".join(f"({s}, {r})" for s, r in steps))


def test_3_3() -> None:
    alpha, beta, ranks = 10e-6, 1 / 10e9, 8
    says(3, "3.3", f"{2 * (ranks - 1)} messages", f"{ranks * alpha / beta / 1e3:.0f} kB")


def test_3_4() -> None:
    segments = [torch.zeros(4)[2 * c : 2 * c + 2].tensor_split(2) for c in range(2)]
    hops = list(segmented_ring.ring_hops(0, segments))
    says(3, "3.4", f"{len(hops)} hops")
    assert hops[2].outgoing is hops[0].target  # hop 3 sends what hop 1 has brought
    assert hops[1].outgoing is not hops[0].target


def test_3_5() -> None:
    parents = {rank: tree_allreduce.tree_links(rank, 3, 7)[0] for rank in range(7)}
    for rank, parent in parents.items():
        if parent is not None:
            number = (rank - 3) % 7
            line = f"Round {(number & -number).bit_length() - 1}: "
            (after,) = answer(3, "3.5").split(line)[1:]
            assert f"{rank} → {parent}" in after.split(".")[0]
            says(3, "3.5", f"{rank} → {parent}")


def test_3_6() -> None:
    results = virtual(lambda ctx: halving_doubling.halving_doubling_all_reduce(torch.ones(8)), 6)
    messages = [(op, peer, n // 4) for op, peer, n in own_log(results.logs, 1)]
    received = [(peer, n) for op, peer, n in messages if "recv" in op]
    assert received == [(5, 8), (3, 4), (0, 2), (0, 2), (3, 4)]
    says(3, "3.6", "rank 4 hands its tensor to rank 0", "0–2 and 1–3", "0–1 and 2–3")
    says(3, "3.6", "elements 0 to 3 with those of rank 3", "elements 2 and 3 complete")


def test_3_29() -> None:
    alpha, beta = 50e-6, 1e-9
    tree, ring = (allreduce_choice.critical_path(p, 6, 6_000_000) for p in ("tree", "ring"))
    bytes_per_byte = (tree[1] - ring[1]) / 6_000_000
    crossing = (ring[0] - tree[0]) * alpha / (bytes_per_byte * beta)
    says(3, "3.29", f"{crossing / 1e3:.0f} kB", f"{ring[0]} messages")


def test_3_7() -> None:
    def body(ctx: RankContext) -> list[list[int]]:
        nodes = ((0, 3), (1, 4), (2, 5))
        everyone = topology.Topology(
            tuple(tuple(r for r in n if r < ctx.world_size) for n in nodes)
        )
        groups = topology.make_groups(everyone)
        return [sorted(dist.get_process_group_ranks(g)) for g in (groups.node, groups.across)]

    for ranks in (6, 5):
        groups = {tuple(group) for found in virtual(body, ranks) for group in found}
        assert len(groups) == 5
        says(3, "3.7", *("{" + ", ".join(map(str, group)) + "}" for group in groups))


def test_3_8() -> None:
    def body(ctx: RankContext) -> list[float]:
        nodes = ((0, 1), (2, 3)) if EVEN else ((0, 1, 2), (3,))
        groups = topology.make_groups(topology.Topology(nodes))
        x = torch.full((2,), ctx.rank + 1.0)
        hierarchical_allreduce.all_reduce_hierarchical(x, groups=groups)
        return x.tolist()

    for EVEN in (True, False):
        results = virtual(body, 4)
        assert list(results) == [[10.0, 10.0]] * 4
        pairs = ({0, 2}, {1, 3}) if EVEN else ({0, 3},)
        crossed = sum(
            event.sent // 4
            for log in results.logs
            for event in log.events
            if set(event.group) in pairs and event.op == "all_reduce"
        )
        says(3, "3.8", f"{crossed} numbers")
    says(3, "3.8", f"hold {1 + 2}", f"hold {3 + 4}", "6, 6 and 4, 4")


def test_3_30() -> None:
    with pytest.raises(RankFailure) as caught:
        run_virtual(lambda ctx: make_teams(2) and None, 4, rules="nccl2")
    assert "rank 0 waits in new_group, which splits" in str(caught.value)
    assert "leaders = dist.new_group" in str(caught.value)
    says(3, "3.30", "new_group([0, 2])")


def test_3_9() -> None:
    tensors = [torch.zeros(n) for n in (1, 1, 2, 2)]
    found = buckets.partition(tensors, 16, 4)
    sizes = [" + ".join(str(tensors[k].nbytes) for k in part) for part in found]
    says(3, "3.9", " | ".join(sizes), f"{math.ceil(24 / 16)} is only the least")


def finish(ready: list[float], wire: float) -> float:
    end = 0.0
    for moment in ready:
        end = max(moment, end) + wire
    return end


def test_3_10() -> None:
    ready = [2.0, 4.0, 6.0]
    says(3, "3.10", f"f_3 = {finish(ready, 3):.0f} ms", f"{6 + 9} ms")
    says(3, "3.10", f"f_3 = {finish(ready, 1):.0f} ms", f"overlap {6 + 3} ms")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, first: bool) -> torch.Tensor:
        return 2 * self.a if first else 4 * self.b


def test_3_11() -> None:
    def body(ctx: RankContext) -> list[float]:
        wrapped = ddp.DDP(Branches(), bucket_bytes=4, first_bucket_bytes=4, agree=True)
        wrapped(ctx.rank == 0).sum().backward()
        return [wrapped.module.a.grad.item(), wrapped.module.b.grad.item()]

    for a, b in virtual(body, 2):
        says(3, "3.11", f"2 / 2 = {a:.0f}", f"4 / 2 = {b:.0f}")


def test_3_12() -> None:
    assert torch.tensor(1 + 2**-9, dtype=torch.bfloat16) == 1

    def body(ctx: RankContext) -> None:
        groups = topology.make_groups(topology.Topology(((0, 1), (2, 3))))
        leaders = groups.across if ctx.rank in (0, 2) else dist.GroupMember.NON_GROUP_MEMBER
        two_level(groups.node, leaders)(SimpleNamespace(buffer=torch.ones(4))).wait()

    logs = virtual(body, 4).logs
    per_rank = [len([e for e in log.events if e.op != "store"]) for log in logs]
    says(3, "3.12", f"Rank 1 takes part in {per_rank[1]} collectives, rank 0 in {per_rank[0]}")


def test_3_31() -> None:
    sizes = [[4.0], [4.0, 4.0, 2.0], [4.0, 2.0]]
    gradients = [[1.0], [1.0, 3.0, 1.0], [1.0, 9.0]]

    def joined(ctx: RankContext, weigh: bool) -> tuple[list[float], list[int], int]:
        model = nn.Linear(1, 1, bias=False)
        wrapped = uneven_inputs.UnevenDDP(model)
        found, sources = [], []
        own = list(zip(sizes[ctx.rank], gradients[ctx.rank], strict=True))
        with ctx.region("join"), wrapped.join(own, weight=lambda b: b[0] if weigh else 1) as steps:
            for batch in steps:
                wrapped.zero_grad()
                sources.append(wrapped.source)
                if batch is None:
                    wrapped.shadow()
                else:
                    wrapped(torch.tensor([[batch[1]]])).sum().backward()
                assert model.weight.grad is not None
                found.append(model.weight.grad.item())
        return found, sources, sum(event.op == "all_gather" for event in ctx.ledger.events)

    for weigh, formula in ((True, "(4·3 + 2·9) / (4 + 2)"), (False, "(3 + 9) / 2")):
        for found, sources, gathers in virtual(partial(joined, weigh=weigh), 3):
            says(3, "3.31", f"{formula} = {found[1]:.0f}", f"buffers are rank {sources[1]}'s")
            says(3, "3.31", f"{gathers} all-gathers", f"before each of {len(found)} steps")


def test_3_13() -> None:
    def body(ctx: RankContext) -> list[Any]:
        parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 3, 2)]
        flat = zero.FlatVector(parameters, None)
        own = [(p.start, p.stop) for p in flat.pieces]
        return [flat.own.numel(), flat.flat.numel() - 10, own]

    shard, padding, pieces = virtual(body, 3)[1]
    says(3, "3.13", f"= {shard} elements", f"{padding} are padding")
    says(3, "3.13", *(f"[{start}:{stop}]" for start, stop in pieces))


def test_3_14() -> None:
    psi, ranks = 1.5, 64
    says(3, "3.14", f"{16 * psi:.0f} GB", f"{8 * psi + 8 * psi / ranks:.1f} GB")
    says(3, "3.14", f"{4 * psi + 12 * psi / ranks:.1f} GB")


def test_3_15() -> None:
    shard = math.ceil(5 / 3)
    says(3, "3.15", f"Shards of {shard}, {shard} and {5 - 2 * shard}", f"{3 * shard} elements")
    says(3, "3.15", f"= {3 * 2 * shard}")


def test_3_16() -> None:
    compute, messages = 3 * (2 + 4), 3 * 3
    says(3, "3.16", f"{compute + messages} ms", f"{compute + 2} ms")


def test_3_17() -> None:
    low, full = torch.ones((), dtype=torch.bfloat16), torch.ones(())
    for _ in range(20):
        low, full = low + 0.001, full + 0.001
    says(3, "3.17", f"stays {low.item():.0f}", f"{full.item():.2f}")
    says(3, "3.17", f"{full.bfloat16().item():.4f}")


def test_3_18() -> None:
    moved = 12 * 1e9 / 8
    says(3, "3.18", f"{moved / 1e9} GB", f"{moved / 16e9 * 1e3:.0f} ms")
    says(3, "3.18", f"{6 * 1e9 * 4096 / 100e12 * 1e3:.0f} ms")
