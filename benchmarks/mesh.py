"""Phase 3's mesh against torch's DeviceMesh: groups, and a step's gradients with their norm.

A step completes the gradients of weights that the axis tensor cuts and of gains that are partial on
it, and clips them. torch's side is a DTensor per gradient: each is redistributed, then
``clip_grad_norm_`` scales all of them. Both begin with the same gradients, in turn in the same
ranks, and end with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distlab.ranks import RankContext, run_ranks
from solutions.phase3_multi_node.mesh import Grid, Mesh, Spec

from .common import milliseconds, on_slowest_rank
from .pairs import Case, Paired, Start

GRIDS: tuple[dict[str, int], ...] = (
    {"data": 2, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
)
LAYERS, WIDTH, LIMIT = 12, 256, 0.1
Step = Callable[[], list[Tensor]]
GROUPS, STEP = "groups", "sums and norm"


def layout() -> dict[str, Spec]:
    """A weight and a gain per layer, as sequence parallelism has them."""
    specs = {}
    for layer in range(LAYERS):
        specs[f"{layer}.weight"] = Spec(shape=[WIDTH, WIDTH], cut={"tensor": 0})
        specs[f"{layer}.gain"] = Spec(shape=[WIDTH], partial=["tensor"])
    return specs


def gradients(sizes: dict[str, int], ctx: RankContext) -> dict[str, Tensor]:
    """What a backward would leave on this rank."""
    draw = torch.Generator().manual_seed(ctx.rank)
    cut = {"weight": [WIDTH // sizes["tensor"], WIDTH], "gain": [WIDTH]}
    return {
        name: torch.randn(cut[name.split(".")[1]], generator=draw).to(ctx.device)
        for name in layout()
    }


def ours(sizes: dict[str, int], grads: dict[str, Tensor]) -> Step:
    """The solution of exercise 3.33."""
    batch = [axis for axis in sizes if axis != "tensor"]
    mesh = Mesh(Grid(sizes, batch), layout())
    own = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in grads.items()}

    def step() -> list[Tensor]:
        for name, p in own.items():
            p.grad = grads[name].clone()
        mesh.reduce_gradients(own)
        mesh.clip(own, LIMIT)
        return [p.grad for p in own.values() if p.grad is not None]

    return step


def torchs(sizes: dict[str, int], grads: dict[str, Tensor]) -> Step:
    """The same with DTensors, whose placements say what each axis of the mesh does."""
    mesh, mean = _device_mesh(sizes), [Partial("avg")] * (len(sizes) - 1)
    copied: list[Placement] = [Replicate()] * (len(sizes) - 1)
    own: dict[str, tuple[nn.Parameter, list[Placement]]] = {}
    for name, grad in grads.items():
        here, done = (Shard(0), Shard(0)) if "weight" in name else (Partial(), Replicate())
        value = DTensor.from_local(torch.zeros_like(grad), mesh, [*copied, done], run_check=False)
        own[name] = nn.Parameter(value), [*mean, here]

    def step() -> list[Tensor]:
        for name, (p, placed) in own.items():
            grad = DTensor.from_local(grads[name].clone(), mesh, placed, run_check=False)
            p.grad = grad.redistribute(mesh, p.placements)
        torch.nn.utils.clip_grad_norm_([p for p, _ in own.values()], LIMIT, foreach=False)
        return [p.grad.to_local() for p, _ in own.values() if isinstance(p.grad, DTensor)]

    return step


def _device_mesh(sizes: dict[str, int]) -> DeviceMesh:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (*sizes.values(),), mesh_dim_names=(*sizes,))


def compare(
    sizes: dict[str, int], work: str, repeats: int, number: int = 0
) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by contestant."""

    def body(ctx: RankContext) -> dict[str, list[float]]:
        grads = gradients(sizes, ctx)
        steps = {"solution": ours(sizes, grads), "torch": torchs(sizes, grads)}
        for mine, theirs in zip(*(step() for step in steps.values()), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        groups = {"solution": lambda: Mesh(Grid(sizes), {}), "torch": lambda: _device_mesh(sizes)}
        works = {GROUPS: groups, STEP: steps}[work]
        on_slowest_rank(works, 2, ctx.device)  # warms up
        return on_slowest_rank(works, repeats, ctx.device, number)

    world_size = torch.Size(sizes.values()).numel()
    return run_ranks(body, world_size, ledger=False, timeout=300)[0]


def start(sizes: dict[str, int], work: str, rounds: int, number: int) -> Start:
    """One start of the ranks."""
    return Start(milliseconds(compare(sizes, work, rounds, number)))


PAIRED = Paired(
    title="The mesh: its groups, and a step's sums and norm",
    labels=("mesh", "work"),
    unit="ms",
    pairs=[("solution", "torch")],
    cases=lambda: [
        Case((" × ".join(f"{a} {n}" for a, n in sizes.items()), work), partial(start, sizes, work))
        for sizes in GRIDS
        for work in (GROUPS, STEP)
    ],
    rounds=15,
    note=f"{LAYERS} weights of {WIDTH} × {WIDTH}, cut by tensor, and as many gains; the slowest "
    "rank's time. torch makes a DeviceMesh, and sums DTensors. The solution sends one message for "
    "all weights, one for all gains, and one for the norm. DTensors send at least one for each "
    "parameter. Both make a group for each line.",
)
