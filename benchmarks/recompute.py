"""Activation checkpointing: exercise 2.7 against torch.utils.checkpoint, and against none.

All run the same layers in the same segments. Forward and backward are timed in turn in one process;
the peaks are those of all tensors made meanwhile. The number of layers is a multiple of the
segments, so PyTorch divides them alike. No contestant computes the last segment again. PyTorch's
non-reentrant version stops the second forward at the last tensor that backward needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import Block
from solutions.phase2_advanced.activation_checkpointing import checkpoint_sequential

from .common import Table, in_turn, seconds, spread

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


def compare(case: str, repeats: int) -> tuple[dict[str, list[float]], dict[str, int]]:
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
    return in_turn(contestants, repeats), peaks


def measure(repeats: int = 25) -> Table:
    """Step times and peaks side by side."""
    rows = []
    for case in CASES:
        times, peaks = compare(case, repeats)
        ours = statistics.median(times["solution"])
        rows += [
            [
                case if name == "solution" else "",
                {"solution": "exercise 2.7", "none": "no checkpointing"}.get(name, f"torch {name}"),
                spread(times[name], 1),
                f"{ours / statistics.median(times[name]):.2f}",
                f"{peaks[name] / 1e6:.1f}",
            ]
            for name in CONTESTANTS
        ]
    return Table(
        "Forward and backward with activation checkpointing",
        ["layers", "by", "ms", "solution / this", "peak MB"],
        rows,
        "Blocks are in 3 segments and MLP layers in 4. The last segment is not checkpointed. "
        f"Median (least … most) of {repeats} runs, taken in turn. The peak counts all tensors "
        "that one forward and backward make.",
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure().markdown())
