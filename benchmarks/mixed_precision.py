"""Mixed precision: exercise 2.5's step against torch.autocast, and both against float32.

The contestants train the same GPT on the same tokens with AdamW, in turn in the same process.
Autocast casts the float32 weights anew in every forward. The solution keeps a 16-bit copy, rounds
the masters into it after the step, and casts every gradient as soon as it is there. For float16
both scale the loss; torch uses its GradScaler.
"""

from __future__ import annotations

import statistics
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

from .common import Table, in_turn, seconds, spread

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


def compare(dtype: torch.dtype, world_size: int, repeats: int) -> dict[str, list[float]]:
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
        return in_turn(contestants, repeats), losses

    times, losses = run_ranks(body, world_size, ledger=False, timeout=300)[0]
    found = [torch.tensor(losses[name]) for name in ("solution", "torch", "fp32")]
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0.02, atol=0.02)  # the same training
    return times


def measure(repeats: int = 15) -> Table:
    """Step times side by side."""
    rows = []
    for dtype, world_size in ((torch.bfloat16, 1), (torch.bfloat16, 2), (torch.float16, 1)):
        times = compare(dtype, world_size, repeats)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append(
            [
                str(dtype).removeprefix("torch."),
                str(world_size),
                *(spread(times[name], 0) for name in ("solution", "torch", "fp32")),
                f"{medians['solution'] / medians['torch']:.2f}",
                f"{medians['fp32'] / medians['solution']:.2f}",
            ]
        )
    return Table(
        "A step in mixed precision, ms",
        ["type", "ranks", "exercises 2.5, 2.6", "torch.autocast", "fp32", "ratio", "speed-up"],
        rows,
        f"GPT of 4 layers, width 256, {BATCH}×{LENGTH} tokens per rank, AdamW, clipped; median "
        f"(least … most) of {repeats} steps taken in turn. Ratio: solution to autocast (with DDP "
        "for 2 ranks, GradScaler for float16). Speed-up: fp32 to solution. The solution needs "
        "longer for exercise 2.3's norm, which it takes in float64, and for joining the gradients "
        "to one message.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
