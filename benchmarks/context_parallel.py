"""Attention over ranks: phase 2's ring and all-to-all, against PyTorch's ring.

PyTorch's ring runs the same two chunks per rank. On a CPU its public ``context_parallel`` raises
NotImplementedError (2.15.0): no rule is there. Its loop takes any attention that also returns a
logarithm, so here it gets the CPU's fused one, and phase 2's products. PyTorch has no all-to-all
attention. All run in the same ranks, step by step in turn. Results and gradients are compared
before anything is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _templated_ring_attention

from distlab.ranks import RankContext, run_ranks
from given.attention_parts import tiles
from solutions.phase2_advanced.all_to_all_attention import all_to_all_attention
from solutions.phase2_advanced.context_parallel import (
    attend,
    gradients,
    own_positions,
    ring_attention,
)

from .common import milliseconds, on_slowest_rank
from .pairs import Case, Paired, Start

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = 1024, 2048
Step = Callable[[], list[Tensor]]
NAMES = "ring", "PyTorch, fused", "PyTorch, same products", "all-to-all"


def step(attention: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Forward and backward of one of phase 2's ways; ``tensors``: q, k, v and the gradient."""
    *given, grad = tensors
    given = [t.detach().requires_grad_() for t in given]
    out = attention(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def our_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Phase 2's products as PyTorch's loop calls a kernel."""
    t, scale = q.shape[-2], q.shape[-1] ** -0.5
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    for ours, theirs, masked in tiles([(slice(0, t), slice(0, k.shape[-2]), is_causal)]):
        keys, values = k[..., theirs, :], v[..., theirs, :]
        more, more_lse = attend(q[..., ours, :], keys, values, masked, scale)
        out[..., ours, :], lse[..., ours] = more, more_lse.squeeze(-1)
    return out, lse


def our_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    dropout_p: float,
) -> list[Tensor]:
    """Phase 2's gradients as PyTorch's loop calls a kernel."""
    del dropout_p
    q, k, v, grad = (x.unsqueeze(2) for x in (query, key, value, grad_out))
    lse, rest = logsumexp[:, :, None, :, None], (grad * out.unsqueeze(2)).sum(-1, keepdim=True)
    found = [torch.zeros_like(x) for x in (q, k, v)]
    parts = [(slice(0, q.shape[-2]), slice(0, k.shape[-2]), is_causal)]
    for ours, theirs, masked in tiles(parts):
        a, b, c, d = (x[..., ours, :] for x in (q, grad, lse, rest))
        keys, values = k[..., theirs, :], v[..., theirs, :]
        of_tile = gradients(a, b, c, d, keys, values, masked, q.shape[-1] ** -0.5)
        for whole, rows, part in zip(found, (ours, theirs, theirs), of_tile, strict=True):
            whole[..., rows, :] += part
    return [x.squeeze(2) for x in found]


Kernels = tuple[Callable[..., Any], Callable[..., Any]]
FUSED: Kernels = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def pytorch_step(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by PyTorch's loops, with the CPU's fused attention, or with phase 2's products."""
    of_torch = sys.modules[_templated_ring_attention.__module__]  # another one in each version
    forward, backward = kernels
    group = dist.group.WORLD
    out, lse, *_ = _templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
    saved = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse}
    more = {"dropout_p": 0.0, "is_causal": True}
    grads = of_torch._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", **saved, **more
    )
    return [out, *grads[:3]]


def compare(world_size: int, length: int, repeats: int, number: int = 0) -> dict[str, list[float]]:
    """Seconds of each step, slowest rank; fails unless all compute the same."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(BATCH, HEADS, length, WIDTH, generator=generator) for _ in range(4)]
        zigzag = own_positions([length], ctx.rank, ctx.world_size)
        in_a_row = torch.arange(length).chunk(ctx.world_size)[ctx.rank]
        mine, other = ([t[:, :, rows].contiguous() for t in whole] for rows in (zigzag, in_a_row))
        steps: dict[str, Step] = {
            "ring": partial(step, ring_attention, *mine),
            "PyTorch, fused": partial(pytorch_step, FUSED, *mine),
            "PyTorch, same products": partial(pytorch_step, (our_forward, our_backward), *mine),
            "all-to-all": partial(step, all_to_all_attention, *other),
        }
        right = step(partial(F.scaled_dot_product_attention, is_causal=True), *whole)
        for name, rows in zip(NAMES, (zigzag, zigzag, zigzag, in_a_row), strict=True):
            for got, want in zip(steps[name](), right, strict=True):
                torch.testing.assert_close(got, want[:, :, rows], rtol=1e-3, atol=1e-3)

        return on_slowest_rank(steps, repeats, ctx.device, number)

    found: dict[str, list[float]] = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    return found


def start(world_size: int, length: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(milliseconds(compare(world_size, length, rounds, number)))


PAIRED = Paired(
    title="Attention over ranks, one forward and backward",
    labels=("positions", "ranks"),
    unit="ms",
    pairs=[
        ("ring", "PyTorch, same products"),
        ("ring", "PyTorch, fused"),
        ("all-to-all", "PyTorch, fused"),
    ],
    cases=lambda: [
        Case((str(length), str(world_size)), partial(start, world_size, length))
        for world_size in (2, 4)
        for length in LENGTHS
    ],
    rounds=11,
    note=f"Batch {BATCH}, {HEADS} heads of {WIDTH} features, float32, causal; the slowest rank's "
    "time. PyTorch's ring runs once with the products of phase 2, and once with the CPU's fused "
    "kernel of attention, which never writes its scores to memory. The exercise writes its "
    "products out, so only a ring with the same products does the same work. In one process with "
    "1,024 positions, half of the exercise's time is its seven products, and the fused kernel "
    "takes 1.2 times as long as these alone. Tried: tiles of 32, 64, 256 and 512 queries take 1.1 "
    "to 1.6 times as long as 128. Gradients of k and v that are added without a copy save 4 %.",
)
