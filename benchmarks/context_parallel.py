"""Attention over ranks: phase 2's ring and all-to-all, against PyTorch's ring.

PyTorch's ring runs the same two chunks per rank. On a CPU its public ``context_parallel`` raises
NotImplementedError (2.15.0): no rule is there. Its loop takes any attention that also returns a
logarithm, so here it gets the CPU's fused one. PyTorch has no all-to-all attention. All run in the
same ranks, step by step in turn. Results and gradients are compared before anything is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _templated_ring_attention

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.all_to_all_attention import all_to_all_attention
from solutions.phase2_advanced.context_parallel import own_positions, ring_attention

from .common import Table, in_turn, seconds, spread

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = 1024, 4096
Step = Callable[[], list[Tensor]]
NAMES = "ring", "PyTorch", "all-to-all"


def step(attention: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    """Forward and backward of one of phase 2's ways; ``tensors``: q, k, v and the gradient."""
    *given, grad = tensors
    given = [t.detach().requires_grad_() for t in given]
    out = attention(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def pytorch_step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The same by PyTorch's loops, with the CPU's fused attention."""
    of_torch = sys.modules[_templated_ring_attention.__module__]  # another one in each version
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    group = dist.group.WORLD
    out, lse, *_ = _templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
    saved = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse}
    more = {"dropout_p": 0.0, "is_causal": True}
    grads = of_torch._templated_ring_attention_backward(
        group, 2, backward, grad, "grad_out", **saved, **more
    )
    return [out, *grads[:3]]


def compare(world_size: int, length: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each step, slowest rank; fails unless all compute the same."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(BATCH, HEADS, length, WIDTH, generator=generator) for _ in range(4)]
        zigzag = own_positions([length], ctx.rank, ctx.world_size)
        in_a_row = torch.arange(length).chunk(ctx.world_size)[ctx.rank]
        mine, other = ([t[:, :, rows].contiguous() for t in whole] for rows in (zigzag, in_a_row))
        steps: dict[str, Step] = {
            "ring": partial(step, ring_attention, *mine),
            "PyTorch": partial(pytorch_step, *mine),
            "all-to-all": partial(step, all_to_all_attention, *other),
        }
        right = step(partial(F.scaled_dot_product_attention, is_causal=True), *whole)
        for name, rows in zip(NAMES, (zigzag, zigzag, in_a_row), strict=True):
            for got, want in zip(steps[name](), right, strict=True):
                torch.testing.assert_close(got, want[:, :, rows], rtol=1e-3, atol=1e-3)

        def timed(one: Step) -> float:
            dist.barrier()
            took = torch.tensor(seconds(one) * 1e3)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            return took.item()

        return in_turn({name: partial(timed, one) for name, one in steps.items()}, repeats)

    found: dict[str, list[float]] = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    return found


def measure(repeats: int = 11) -> Table:
    """Step times side by side."""
    rows = []
    for world_size in (2, 4):
        for length in LENGTHS:
            times = compare(world_size, length, repeats)
            ring, theirs, exchanged = (statistics.median(times[name]) for name in NAMES)
            spans = [spread(times[name], 1) for name in NAMES]
            ratios = [f"{ring / theirs:.2f}", f"{exchanged / theirs:.2f}"]
            rows.append([str(length), str(world_size), *spans, *ratios])
    return Table(
        "Attention over ranks, one forward and backward",
        [
            "positions",
            "ranks",
            "phase 2's ring, ms",
            "PyTorch's ring, ms",
            "phase 2's all-to-all, ms",
            "ring / PyTorch",
            "all-to-all / PyTorch",
        ],
        rows,
        f"Batch {BATCH}, {HEADS} heads of {WIDTH} features, float32, causal. Median "
        f"(least … most) of {repeats} steps, taken in turn in the same ranks, of the slowest rank. "
        "PyTorch's ring runs with the CPU's fused kernel of attention, which never writes its "
        "scores to memory. The solution multiplies matrices, and writes them.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
