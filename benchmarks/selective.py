"""Selective recomputation: exercise 2.27 against torch.utils.checkpoint's contexts, full and none.

All run the same transformer blocks, a segment each. Selective keeps the products with weights.
Forward and backward are timed in turn in one process. The peaks are those of all tensors made
meanwhile, and the FLOPs those of one forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torchs

from distlab.observe.memory import PeakMemory
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import Block
from given.operators import Mode, Operation
from solutions.phase2_advanced.selective_recomputation import selective_checkpoint

from .common import in_turn, seconds
from .pairs import Case, Paired, Start

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
LAYERS, WIDTH, HEADS = 6, 128, 4
SHAPES = {"4 sequences of 128": (4, 128, WIDTH), "1 sequence of 32": (1, 32, WIDTH)}


def products(operation: Operation) -> bool:
    """The policy of all selective contestants."""
    return operation.op in KEPT


def nothing(operation: Operation) -> bool:
    """The policy of full recomputation."""
    return False


def by_torch(layer: nn.Module, x: Tensor) -> Tensor:
    """PyTorch's own, with the same choice."""
    contexts = partial(torchs.create_selective_checkpoint_contexts, KEPT)
    out: Tensor = torchs.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    return out


class Flops(Mode):
    """Counts FLOPs. PyTorch's FlopCounterMode adds a view to modules whose input is a leaf, and
    exercise 2.27 refuses a second forward with another operator."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``op`` and count."""
        out = op(*args, **(kwargs or {}))
        self.total += Operation(op, args, kwargs or {}, out).flops
        return out


CONTESTANTS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "exercise 2.27": partial(selective_checkpoint, products),
    "torch, selective": by_torch,
    "exercise 2.27, nothing kept": partial(selective_checkpoint, nothing),
    "torch, full": partial(torchs.checkpoint, use_reentrant=False),
    "no checkpointing": lambda layer, x: layer(x),
}


def compare(
    shape: tuple[int, ...], repeats: int, number: int = 0
) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    """Milliseconds of each forward and backward, and peak bytes and FLOPs, of every contestant."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [Block(WIDTH, HEADS) for _ in range(LAYERS)]
        x = torch.randn(*shape, requires_grad=True)
    parameters = [p for layer in layers for p in layer.parameters()]

    def step(name: str) -> None:
        h = x
        for layer in layers:
            h = CONTESTANTS[name](layer, h)
        h.square().mean().backward()

    costs, gradients = {}, {}
    for name in CONTESTANTS:
        for p in parameters:  # gradients exist before, so they are not counted
            p.grad = torch.zeros_like(p)
        with PeakMemory() as memory, Flops() as flops:
            step(name)
        costs[name] = memory.peak, flops.total
        gradients[name] = torch.cat([p.grad.flatten() for p in parameters])
    for found in gradients.values():
        torch.testing.assert_close(found, gradients["no checkpointing"])

    def timed(name: str) -> float:
        return 1e3 * seconds(lambda: step(name))

    contestants = {name: partial(timed, name) for name in CONTESTANTS}
    in_turn(contestants, 1)
    return in_turn(contestants, repeats, number), costs


OURS, THEIRS, FULL, TORCHS_FULL, NONE = CONTESTANTS
FACTS = ("peak MB: ours, torch, full, none", "GFLOP: ours, torch, full, none")


def start(shape: tuple[int, ...], rounds: int, number: int) -> Start:
    """One start of a process."""

    def body(_: RankContext) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
        return compare(shape, rounds, number)

    times, costs = run_ranks(body, 1, ledger=False, timeout=300)[0]
    told = [costs[name] for name in (OURS, THEIRS, FULL, NONE)]
    peaks = " / ".join(f"{peak / 1e6:.1f}" for peak, _ in told)
    flops = " / ".join(f"{flop / 1e9:.2f}" for _, flop in told)
    return Start(times, dict(zip(FACTS, (peaks, flops), strict=True)))


PAIRED = Paired(
    title="Forward and backward with selective recomputation",
    labels=("input",),
    unit="ms",
    pairs=[(OURS, THEIRS), (FULL, TORCHS_FULL), (OURS, NONE)],
    facts=FACTS,
    cases=lambda: [Case((name,), partial(start, shape)) for name, shape in SHAPES.items()],
    rounds=11,
    note=f"{LAYERS} transformer blocks of width {WIDTH}, a segment each. Selective keeps the "
    "products with weights. The peak counts all tensors that one forward and backward make. With "
    "nothing kept, exercise 2.27 still looks at each operator in Python, which torch's full "
    "checkpointing does not: a small input shows it. Tried: torch's full checkpointing "
    "with a mode that does nothing takes 1.03 times as long as the exercise there. So no faster "
    "policy or mode in Python would help. Full checkpointing is exercise 2.7.",
)
