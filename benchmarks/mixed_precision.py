"""Mixed precision: exercise 2.5's step against torch.autocast, and both against float32.

The same GPT, the same tokens, AdamW; the contestants take their steps in turn in the same process.
Autocast casts the float32 weights anew in every forward; the solution keeps a 16-bit copy, rounds
the masters into it after the step, and casts every gradient as soon as it is there. For float16
both scale the loss, torch by its GradScaler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import GPT
from solutions.phase2_advanced import gradient_accumulation as float32
from solutions.phase2_advanced import mixed_precision as mixed
from solutions.phase2_advanced.loss_scaling import LossScaler, scaled_step

from .common import in_turn, seconds
from .pairs import Case, Paired, Start

VOCABULARY, LENGTH, BATCH = 512, 128, 4
SCALE = 2.0**10
Step = Callable[[Tensor, Tensor], float]


def gpt() -> nn.Module:
    """3.4 million parameters, most of them in matrices of 256×1024."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(VOCABULARY, LENGTH, layers=4, width=256, heads=4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contestants."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def solution_step(dtype: torch.dtype) -> Step:
    """One step of exercise 2.5 or, in float16, of exercise 2.6."""
    model = mixed.MixedPrecision(gpt(), dtype)
    optimizer, scaler = adamw(model), LossScaler(scale=SCALE)

    def step(inputs: Tensor, targets: Tensor) -> float:
        if dtype == torch.float16:
            return scaled_step(model, optimizer, scaler, [(inputs, targets)], max_norm=1.0)[0]
        return mixed.mixed_step(model, optimizer, [(inputs, targets)], max_norm=1.0)[0]

    return step


def torch_step(dtype: torch.dtype) -> Step:
    """The same step by autocast, GradScaler (float16) and, with several ranks, DDP."""
    model: nn.Module = gpt()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=dtype == torch.float16)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=dtype):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    return step


def float32_step() -> Step:
    """The step of exercise 2.3 in float32."""
    model = gpt()
    optimizer = adamw(model)
    return lambda inputs, targets: float32.train_window(
        model, optimizer, [(inputs, targets)], max_norm=1.0
    )[0]


def compare(
    dtype: torch.dtype, world_size: int, repeats: int, number: int = 0
) -> dict[str, list[float]]:
    """Milliseconds per step of each contestant on rank 0; all see the same losses."""

    def body(ctx: RankContext) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        steps = {"solution": solution_step(dtype), "torch": torch_step(dtype)}
        steps["fp32"] = float32_step()
        losses: dict[str, list[float]] = {name: [] for name in steps}

        def timed(name: str) -> float:
            generator = torch.Generator().manual_seed(len(losses[name]) * 100 + ctx.rank)
            tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            batch = tokens[:, :-1], tokens[:, 1:].flatten()
            dist.barrier()
            return 1e3 * seconds(lambda: losses[name].append(steps[name](*batch)))

        contestants = {name: partial(timed, name) for name in steps}
        in_turn(contestants, 2)  # warm-up
        return in_turn(contestants, repeats, number), losses

    times, losses = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    found = [torch.tensor(losses[name]) for name in ("solution", "torch", "fp32")]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0.02, atol=0.02)  # the same training
    return times


def start(dtype: torch.dtype, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(compare(dtype, world_size, rounds, number))


PAIRED = Paired(
    title="A step in mixed precision",
    labels=("type", "ranks"),
    unit="ms",
    pairs=[("solution", "torch"), ("solution", "fp32")],
    cases=lambda: [
        Case((str(dtype).removeprefix("torch."), str(w)), partial(start, dtype, w))
        for dtype, w in ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 1))
    ],
    rounds=3,
    note=f"Exercises 2.5 and 2.6 against torch.autocast (with DDP for 2 ranks, with GradScaler for "
    f"float16), and against exercise 2.3 in fp32. GPT of 4 layers, width 256, {BATCH}×{LENGTH} "
    "tokens per rank, AdamW, clipped. The solution does more in two places: it computes exercise "
    "2.3's norm in float64, and joins the gradients to one message. A processor without "
    "instructions for 16 bits takes 20 times as long as in fp32, either way. One that has them for "
    "bfloat16 takes 0.7 times as long.",
)
