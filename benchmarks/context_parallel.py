"""Ring attention: phase 2's against PyTorch's, which runs the same two chunks per rank.

On a CPU PyTorch's public ``context_parallel`` raises NotImplementedError (2.15.0): no rule there.
Its loop takes any attention that also returns a logarithm, so here it gets the CPU's fused one.
Both run in the same ranks, step by step in turn. Results and gradients are compared before anything
is timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._attention import _templated_ring_attention

from distlab.ranks import RankContext, run_ranks
from solutions.phase2_advanced.context_parallel import own_positions, ring_attention

from .common import Table, in_turn, seconds, spread

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = 1024, 4096
Step = Callable[[], list[Tensor]]


def solution_step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """Forward and backward of phase 2's ring."""
    given = [t.detach().requires_grad_() for t in (q, k, v)]
    out = ring_attention(*given)
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
    """Milliseconds of each step, slowest rank; fails unless both compute the same."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(BATCH, HEADS, length, WIDTH, generator=generator) for _ in range(4)]
        rows = own_positions([length], ctx.rank, ctx.world_size)
        mine = [t[:, :, rows].contiguous() for t in whole]
        steps = {"solution": partial(solution_step, *mine), "PyTorch": partial(pytorch_step, *mine)}
        for ours, theirs in zip(*(step() for step in steps.values()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)

        def timed(step: Step) -> float:
            dist.barrier()
            took = torch.tensor(seconds(step) * 1e3)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            return took.item()

        return in_turn({name: partial(timed, step) for name, step in steps.items()}, repeats)

    found: dict[str, list[float]] = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    return found


def measure(repeats: int = 11) -> Table:
    """Step times side by side."""
    rows = []
    for world_size in (2, 4):
        for length in LENGTHS:
            times = compare(world_size, length, repeats)
            ratio = statistics.median(times["solution"]) / statistics.median(times["PyTorch"])
            spans = [spread(times[name], 1) for name in ("solution", "PyTorch")]
            rows.append([str(length), str(world_size), *spans, f"{ratio:.2f}"])
    return Table(
        "Ring attention, one forward and backward",
        ["positions", "ranks", "phase 2 solution, ms", "PyTorch's ring, ms", "ratio of medians"],
        rows,
        f"Batch {BATCH}, {HEADS} heads of {WIDTH} features, float32, causal, zig-zag. Median "
        f"(least … most) of {repeats} steps, taken in turn in the same ranks, of the slowest rank. "
        "PyTorch's ring runs with the CPU's fused kernel of attention, which never writes its "
        "scores to memory. The solution multiplies matrices, and writes them.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
