"""Experts on W ranks: the layer of phase 2 against a plain one, and grouped products of PyTorch.

PyTorch has no layer for a mixture of experts. So the plain layer is what people write with
PyTorch's parts: ``torch.distributed.nn.functional`` moves the rows, a mask finds each expert's
rows, and a loop over experts computes them. All contestants take the same steps in turn in the same
ranks. Outputs and gradients are compared before anything is timed.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.expert_parallel import ExpertParallel, compute_experts
from solutions.phase2_advanced.mixture_of_experts import Router

from .common import in_turn, milliseconds, on_slowest_rank, seconds
from .pairs import Case, Paired, Start

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 1024, 256, 512, 8, 2


class Plain(nn.Module):
    """The same layer, as it is often written: one message for each kind of number, and masks."""

    def __init__(self, layer: ExpertParallel) -> None:
        super().__init__()
        self.router, self.up, self.down = layer.router, layer.up, layer.down

    def forward(self, x_ND: Tensor) -> tuple[Tensor, object]:
        """Sizes, rows and experts' numbers travel; then each expert masks its rows."""
        routing, w = self.router(x_ND), dist.get_world_size()
        expert_M = routing.experts_NK.flatten()
        order_M = expert_M.argsort(stable=True)
        counts_E = torch.bincount(expert_M, minlength=EXPERTS)
        gives = counts_E.view(w, -1).sum(1)
        gets = torch.empty_like(gives)
        dist.all_to_all_single(gets, gives)
        out, back = gets.tolist(), gives.tolist()
        number_R = expert_M.new_empty(sum(out))
        dist.all_to_all_single(number_R, expert_M[order_M], out, back)
        rows_MD = x_ND[order_M // TOP_K]
        rows_RD = all_to_all_single(rows_MD.new_empty(sum(out), WIDTH), rows_MD, out, back)
        done_RD = torch.zeros_like(rows_RD)
        for e in range(len(self.up)):
            mine = (number_R == e + dist.get_rank() * len(self.up)).nonzero().flatten()
            y = F.gelu(rows_RD[mine] @ self.up[e]) @ self.down[e]
            done_RD = done_RD.index_add(0, mine, y)
        rows_MD = all_to_all_single(rows_MD.new_empty(sum(back), WIDTH), done_RD, back, out)
        weight_M1 = routing.weights_NK.flatten()[order_M].unsqueeze(1)
        return torch.zeros_like(x_ND).index_add(0, order_M // TOP_K, rows_MD * weight_M1), routing


def contestants() -> dict[str, nn.Module]:
    """Both layers, with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        up = torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5
        down = torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5
    layer = ExpertParallel(
        Router(WIDTH, EXPERTS, top_k=TOP_K), up.requires_grad_(), down.requires_grad_()
    )
    return {"solution": layer, "beside it": Plain(layer)}


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """One forward and backward; output and gradients."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, _ = layer(x)
    y.square().mean().backward()
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]


def compare(world_size: int, repeats: int, number: int = 0) -> dict[str, list[float]]:
    """Seconds of each step, slowest rank; fails unless both compute the same."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        layers = contestants()
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(ctx.rank))
        for mine, theirs in zip(*(step(layer, x) for layer in layers.values()), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
        calls = {name: partial(step, layer, x) for name, layer in layers.items()}
        return on_slowest_rank(calls, repeats, ctx.device, number)

    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def grouped(repeats: int, number: int = 0) -> dict[str, list[float]]:
    """Seconds of the products alone, forward, against ``grouped_mm``, where torch has it."""
    up = torch.randn(EXPERTS, WIDTH, INNER) / WIDTH**0.5
    down = torch.randn(EXPERTS, INNER, WIDTH) / INNER**0.5
    sizes = [TOKENS * TOP_K // EXPERTS] * EXPERTS
    rows, ends = torch.randn(sum(sizes), WIDTH), torch.tensor(sizes).cumsum(0).int()

    def theirs() -> Tensor:
        inner: Tensor = F.grouped_mm(rows, up, offs=ends)
        done: Tensor = F.grouped_mm(F.gelu(inner), down, offs=ends)
        return done

    def ours() -> Tensor:
        return compute_experts(rows, [sizes], up, down)

    calls = {"solution": ours}
    if hasattr(F, "grouped_mm"):
        torch.testing.assert_close(theirs(), ours(), rtol=1e-3, atol=1e-4)
        calls["beside it"] = theirs
    return in_turn({name: partial(seconds, call) for name, call in calls.items()}, repeats, number)


def start(world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks; of one process for the products alone (0 ranks)."""

    def body(_: RankContext) -> dict[str, list[float]]:
        return grouped(rounds, number)

    if world_size:
        found = compare(world_size, rounds, number)
    else:
        found = run_ranks(body, 1, ledger=False, timeout=300)[0]
    return Start(milliseconds(found))


def cases() -> list[Case]:
    """Whole steps, and the products alone where torch has a function for them."""
    found = [Case(("step", str(w)), partial(start, w)) for w in (2, 4)]
    return found + [Case(("products", "1"), partial(start, 0))] * hasattr(F, "grouped_mm")


PAIRED = Paired(
    title="Experts, one forward and backward",
    labels=("what", "ranks"),
    unit="ms",
    pairs=[("solution", "beside it")],
    cases=cases,
    rounds=15,
    note=f"{TOKENS} tokens for each rank, width {WIDTH}, {EXPERTS} experts of inner width {INNER}, "
    f"{TOP_K} for each token, float32, the slowest rank's time. PyTorch has no layer for a mixture "
    "of experts. Beside the steps stands a plain layer of PyTorch's parts, with the same outputs "
    "and gradients. Beside the products, forward alone, stands `torch.nn.functional.grouped_mm`.",
)
