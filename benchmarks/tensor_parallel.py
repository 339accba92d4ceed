"""Tensor parallelism: the layers of phase 2 against torch.distributed.tensor.parallel.

Both are made from the same whole model and take the same steps (forward and backward) in turn in
the same ranks. Outputs and gradients are compared before anything is timed. PyTorch's layers carry
DTensors, which know their placement and cost time at every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from distlab.observe.memory import SavedActivations
from distlab.ranks import RankContext, run_ranks
from distlab.reference.workloads import Block
from solutions.phase2_advanced.parallel_transformer import ParallelBlock, rows_by_rank
from solutions.phase2_advanced.sequence_parallel import (
    SequenceParallelBlock,
    sum_replicated_gradients,
)
from solutions.phase2_advanced.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .common import milliseconds, on_slowest_rank
from .pairs import Case, Paired, Start

BATCH, LENGTH, WIDTH, HEADS = 8, 128, 256, 8
Side = tuple[nn.Module, Callable[[], object]]  # the model, and what a step does after backward
CPU = torch.device("cpu")
KINDS = ("MLP", "block", "block, sequence parallel", "the same, gathered again")


def whole(kind: str) -> nn.Module:
    """The model of one process, the same on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "MLP":
            up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            return nn.Sequential(up, nn.GELU(), down)
        return Block(WIDTH, HEADS)


def solution(kind: str, device: torch.device = CPU) -> Side:
    """The layers of phase 2."""
    model = whole(kind).to(device)
    if kind == "MLP":
        up, gelu, down = model.children()
        return nn.Sequential(ColumnParallelLinear(up), gelu, RowParallelLinear(down)), lambda: None
    if kind == "block":
        return ParallelBlock(model), lambda: None
    block = SequenceParallelBlock(model, regather=kind != KINDS[2])
    return block, lambda: sum_replicated_gradients(block.replicated())


def pytorch(kind: str, device: torch.device = CPU) -> Side:
    """PyTorch's own; the rows of q, k and v are put in order first, or it would mix them up."""
    model, world_size = whole(kind).to(device), dist.get_world_size()
    plan: dict[str, object] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind != "MLP":
        model.qkv, model.heads = rows_by_rank(model.qkv, world_size), HEADS // world_size
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {}
        if kind != "block":
            columns = ColwiseParallel(input_layouts=Shard(1))
            rows = RowwiseParallel(output_layouts=Shard(1))
            plan = {"norm_attention": SequenceParallel(), "norm_mlp": SequenceParallel()}
        plan |= {"qkv": columns, "up": columns, "out": rows, "down": rows}
    model = parallelize_module(model, init_device_mesh(device.type, (world_size,)), plan)

    def complete() -> None:
        """Sum the gradients that every rank has of its own positions, as an optimizer would."""
        for p in model.parameters():
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    return model, complete


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, after its communication."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


class LocalActivations(SavedActivations):
    """Counts only this rank's part of a DTensor."""

    def _pack(self, tensor: Tensor) -> Tensor:
        super()._pack(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        return tensor


def step(side: Side, x: Tensor, weight: Tensor) -> list[Tensor]:
    """One forward and backward; output and gradients."""
    model, complete = side
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    (y * weight).sum().backward()
    complete()
    return [y, x.grad, *[p.grad for p in model.parameters()]]


def data(kind: str, rank: int, world_size: int) -> list[Tensor]:
    """This rank's input, and a weight for each element of the output."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(2)]
    cut = kind not in KINDS[:2]
    return [t.chunk(world_size, 1)[rank].contiguous() if cut else t for t in drawn]


def compare(
    world_size: int,
    repeats: int,
    device: str = "cpu",
    number: int = 0,
    kinds: Sequence[str] = KINDS,
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each step by kind, slowest rank; fails unless both compute the same."""

    def body(ctx: RankContext) -> dict[str, dict[str, list[float]]]:
        return {kind: timed(kind, ctx.rank, repeats, ctx.device, number) for kind in kinds}

    return run_ranks(body, world_size, ledger=False, timeout=300, device=device)[0]


def timed(
    kind: str, rank: int, repeats: int, device: torch.device, number: int
) -> dict[str, list[float]]:
    """Steps of both in turn, after one that is not timed and whose results must agree."""
    tensors = [t.to(device) for t in data(kind, rank, dist.get_world_size())]
    sides = {"solution": solution(kind, device), "PyTorch": pytorch(kind, device)}
    results = [[local(t) for t in step(side, *tensors)] for side in sides.values()]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    calls = {name: partial(step, side, *tensors) for name, side in sides.items()}
    return on_slowest_rank(calls, repeats, device, number)


def costs(world_size: int, device: str = "cpu") -> dict[str, list[tuple[int, int]]]:
    """Bytes that rank 0 sends in a step, and keeps for backward: (solution, PyTorch) of each."""

    def body(ctx: RankContext) -> dict[str, list[int]]:
        kept: dict[str, list[int]] = {}
        for kind in KINDS:
            x, weight = (t.to(ctx.device) for t in data(kind, ctx.rank, ctx.world_size))
            for name, make in (("solution", solution), ("PyTorch", pytorch)):
                side = make(kind, ctx.device)
                with ctx.region(f"{kind} {name}"):
                    step(side, x, weight)
                with LocalActivations() as saved:
                    saved.known = {local_storage(p) for p in side[0].parameters()}
                    side[0](x.clone().requires_grad_())
                kept.setdefault(kind, []).append(saved.bytes)
        return kept

    results = run_ranks(body, world_size, timeout=300, device=device)
    log, found = results.logs[0], {}
    for kind in KINDS:
        sent = [log.select(region=f"{kind} {name}").sent for name in ("solution", "PyTorch")]
        found[kind] = [(sent[0], sent[1]), tuple(results[0][kind])]
    return found


def local_storage(p: Tensor) -> int:
    """The address of a parameter's memory."""
    return (p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr()


def start(kind: str, world_size: int, rounds: int, number: int) -> Start:
    """One start of the ranks. What is sent and kept is counted once: it never differs."""
    taken = compare(world_size, rounds, number=number, kinds=[kind])[kind]
    counted = zip(FACTS, spent(world_size)[kind], strict=True)
    facts = {heading: " / ".join(f"{n / 1e6:.2f}" for n in pair) for heading, pair in counted}
    return Start(milliseconds(taken), facts)


spent = cache(costs)
FACTS = ("MB sent by a rank, solution / PyTorch", "MB kept for backward, solution / PyTorch")
PAIRED = Paired(
    title="Tensor parallelism, one forward and backward",
    labels=("model", "ranks"),
    unit="ms",
    pairs=[("solution", "PyTorch")],
    facts=FACTS,
    cases=lambda: [
        Case((kind, str(world_size)), partial(start, kind, world_size))
        for world_size in (2, 4)
        for kind in KINDS
    ],
    rounds=15,
    note=f"Phase 2 against torch.distributed.tensor.parallel. Batch {BATCH}, {LENGTH} positions, "
    f"width {WIDTH}, {HEADS} heads, float32, the slowest rank's time. All kinds have the same "
    "outputs and gradients. The last kind keeps fewer activations, and pays with one more "
    "all-gather per column-parallel layer. PyTorch has no such choice.",
)
