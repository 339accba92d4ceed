"""Activation checkpointing: exercise 2.7 against torch.utils.checkpoint, and against none.

All run the same layers in the same segments. Forward and backward are timed in turn in one process;
the peaks are those of all tensors made meanwhile. The number of layers is a multiple of the
segments, so PyTorch divides them alike. No contestant computes the last segment again. PyTorch's
non-reentrant version stops the second forward at the last tensor that backward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import Block
from solutions.phase2_advanced.activation_checkpointing import checkpoint_sequential

from .common import in_turn, seconds
from .pairs import Case, Paired, Start

Run = Callable[[nn.Sequential, int, Tensor], Tensor]
CONTESTANTS: dict[str, Run] = {
    "solution": checkpoint_sequential,
    "not reentrant": lambda *args: torchs.checkpoint_sequential(*args, use_reentrant=False),
    "reentrant": lambda *args: torchs.checkpoint_sequential(*args, use_reentrant=True),
    "none": lambda layers, segments, x: layers(x),
}


def mlp_layer() -> nn.Module:
    """One layer of the MLP, four times wider inside."""
    return nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, tuple[int, ...]]] = {
    "12 transformer blocks": (lambda: Block(128, 4), 12, 3, (4, 128, 128)),
    "16 MLP layers": (mlp_layer, 16, 4, (512, 128)),
}


def compare(
    case: str, repeats: int, number: int = 0
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds of each forward and backward, and the peak bytes, of every contestant."""
    make, count, segments, shape = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(*(make() for _ in range(count)))
        x = torch.randn(*shape, requires_grad=True)  # as reentrant checkpointing needs it

    def step(name: str) -> None:
        CONTESTANTS[name](layers, segments, x).square().mean().backward()

    peaks, gradients = {}, {}
    for name in CONTESTANTS:
        for p in layers.parameters():  # gradients exist before, so they are not counted
            p.grad = torch.zeros_like(p)
        with PeakMemory() as memory:
            step(name)
        peaks[name] = memory.peak
        gradients[name] = torch.cat([p.grad.flatten() for p in layers.parameters()])
    for found in gradients.values():
        torch.testing.assert_close(found, gradients["none"])

    def timed(name: str) -> float:
        return 1e3 * seconds(lambda: step(name))

    contestants = {name: partial(timed, name) for name in CONTESTANTS}
    in_turn(contestants, 1)
    return in_turn(contestants, repeats, number), peaks


def start(case: str, rounds: int, number: int) -> Start:
    """One new process."""

    def body(_: RankContext) -> tuple[dict[str, list[float]], dict[str, int]]:
        return compare(case, rounds, number)

    times, peaks = run_ranks(body, 1, ledger=False, timeout=300)[0]
    return Start(times, {f"{name}, peak MB": f"{n / 1e6:.1f}" for name, n in peaks.items()})


PAIRED = Paired(
    title="Forward and backward with activation checkpointing",
    labels=("layers",),
    unit="ms",
    pairs=[("solution", other) for other in CONTESTANTS if other != "solution"],
    facts=[f"{name}, peak MB" for name in CONTESTANTS],
    cases=lambda: [Case((case,), partial(start, case)) for case in CASES],
    rounds=25,
    note="Exercise 2.7 against torch.utils.checkpoint, and against no checkpointing. Blocks are in "
    "3 segments and MLP layers in 4. The last segment is not checkpointed. The peak counts all "
    "tensors that one forward and backward make.",
)
