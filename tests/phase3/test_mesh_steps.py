"""Checks of exercise 3.33: steps on a mesh beside one process, and checkpoints that do not fit."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import exercise, expect_close, expect_equal, expect_refusals, refusal, trace
from tests.phase3.mesh_cases import (
    GRIDS,
    block,
    coordinates,
    mesh_of,
    own_parameters,
    plain,
)

SAMPLES, STEPS, LIMIT, RATE = 12, 3, 0.5, 0.5
NET: dict[str, dict] = {
    "in.weight": {"shape": [8, 5], "cut": {"tensor": 0, "shard": 0}},
    "in.bias": {"shape": [8], "cut": {"tensor": 0}},
    "out.weight": {"shape": [3, 8], "cut": {"tensor": 1}},
    "out.bias": {"shape": [3]},
}
MESHES: tuple[dict[str, int], ...] = (
    {"data": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"data": 3, "shard": 2},
    {"data": 2, "shard": 2, "tensor": 2},
)


def on_grid(spec: dict, sizes: dict[str, int]) -> dict:
    """The spec without the axes that the grid lacks."""
    return spec | {"cut": {a: d for a, d in spec.get("cut", {}).items() if a in sizes}}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(spec["shape"], generator=generator) for n, spec in NET.items()}


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100 + step)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return inputs, torch.randint(3, (SAMPLES,), generator=generator)


def one_process(seed: int) -> tuple[list[float], dict[str, Tensor]]:
    """The norms before clipping, and the parameters at the end."""
    parameters = {name: nn.Parameter(value) for name, value in values(seed).items()}
    norms = []
    for step in range(STEPS):
        inputs, targets = batch(seed, step)
        hidden = F.relu(F.linear(inputs, parameters["in.weight"], parameters["in.bias"]))
        logits = F.linear(hidden, parameters["out.weight"], parameters["out.bias"])
        gradients = torch.autograd.grad(F.cross_entropy(logits, targets), [*parameters.values()])
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
        norms.append(norm)
        with torch.no_grad():
            for p, g in zip(parameters.values(), gradients, strict=True):
                p -= RATE * g * min(1.0, LIMIT / norm)
    return norms, {name: p.detach() for name, p in parameters.items()}


def backward(mesh, sizes, own, inputs: Tensor, targets: Tensor) -> None:
    """Gradients of this rank's samples: rows gathered over "shard", terms added over "tensor"."""
    rows = own["in.weight"]
    if "shard" in sizes:
        parts = [torch.empty_like(rows) for _ in range(sizes["shard"])]
        dist.all_gather(parts, rows.detach(), group=mesh.group("shard"))
        rows = torch.cat(parts).requires_grad_()
    logits = F.linear(F.relu(F.linear(inputs, rows, own["in.bias"])), own["out.weight"])
    if "tensor" in sizes:
        whole = logits.detach().clone()
        dist.all_reduce(whole, group=mesh.group("tensor"))
        logits = logits + (whole - logits).detach()
    F.cross_entropy(logits + own["out.bias"], targets).backward()
    if rows is not own["in.weight"]:
        dist.all_reduce(rows.grad, group=mesh.group("shard"))
        shard = mesh.grid.coordinates(mesh.rank)["shard"]
        own["in.weight"].grad = rows.grad.chunk(sizes["shard"])[shard].clone()


@exercise("3.33", "virtual gloo cuda", asserts="reduced norm clipped life")
def test_steps_are_those_of_one_process(impl, run, seed, cases):
    """Clipped steps of a tensor-parallel and sharded net: the norms and weights of one process."""
    norms, want = one_process(seed)
    for sizes in cases(*MESHES):

        def body(ctx, sizes=sizes):
            specs = {name: on_grid(spec, sizes) for name, spec in NET.items()}
            over = [axis for axis in ("data", "shard") if axis in sizes]
            layout = {name: impl.Spec(**spec) for name, spec in specs.items()}
            mesh, found = impl.Mesh(impl.Grid(sizes, over), layout), []
            own = {
                name: nn.Parameter(block(whole, specs[name], sizes, ctx.rank).to(ctx.device))
                for name, whole in values(seed).items()
            }
            here, replica, replicas = coordinates(sizes, ctx.rank), 0, 1
            for axis in over:
                replica, replicas = replica * sizes[axis] + here[axis], replicas * sizes[axis]
            optimizer = torch.optim.SGD(own.values(), RATE)
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs, targets = (t.chunk(replicas)[replica] for t in batch(seed, step))
                backward(mesh, sizes, own, inputs.to(ctx.device), targets.to(ctx.device))
                mesh.reduce_gradients(own)
                found.append(mesh.clip(own, LIMIT))
                optimizer.step()
            return found, {name: p.detach() for name, p in own.items()}

        for rank, (found, own) in enumerate(run(body, math.prod(sizes.values()))):
            what = f"{plain(sizes)}: the norms before clipping"
            expect_close(torch.tensor(found), torch.tensor(norms), what=what, rank=rank, rtol=1e-3)
            for name, value in own.items():
                part = block(want[name], on_grid(NET[name], sizes), sizes, rank)
                what = f"{plain(sizes)}: {name} after {STEPS} steps"
                expect_close(value, part, what=what, rank=rank, rtol=1e-3)


@exercise("3.33", "virtual", asserts="load-refused refusals life")
def test_pieces_that_lack_something_are_refused(impl, run, seed):
    """A lost piece, a piece of another shape: ValueError, and no value has changed."""
    sizes = GRIDS[2]

    def body(ctx):
        mesh, mine = mesh_of(impl, sizes), own_parameters(sizes, seed, ctx.rank, "cpu")
        pieces = [None] * ctx.world_size
        dist.all_gather_object(pieces, mesh.pieces(mine))
        every = [piece for part in pieces for piece in part]
        new = {name: p.detach() + 1 for name, p in mine.items()}
        before = {name: value.clone() for name, value in new.items()}
        norm = next(piece for piece in every if piece["name"] == "norm")
        wrong = norm | {"shape": [5], "values": torch.zeros(5)}
        refused = [
            refusal(mesh.load, new, [p for p in every if p is not norm]),
            refusal(mesh.load, new, [wrong if p is norm else p for p in every]),
        ]
        same = all(torch.equal(before[name], value) for name, value in new.items())
        mesh.load(new, every)
        return refused, same, all(torch.equal(mine[name], value) for name, value in new.items())

    for rank, (refused, same, loaded) in enumerate(run(body, 6)):
        calls = ["pieces without that of `norm`", "a piece with shape (5,) of a parameter (4,)"]
        expect_refusals(refused, calls, rank=rank)
        expect_equal(same, True, what="nothing has changed", rank=rank, cause="changed")
        expect_equal(loaded, True, what="all pieces load after a refusal", rank=rank, cause="load")


@trace("3.33")
def trace_mesh(impl):
    """A step's sums and its norm on data 2 x shard 2 x tensor 2."""

    def body(ctx):
        sizes = GRIDS[6] | {"pipeline": 1}
        parameters = own_parameters(sizes, 0, ctx.rank, ctx.device)
        mesh = mesh_of(impl, sizes)
        for _ in ctx.steps(2):  # the first one warms up and is not drawn
            mesh.reduce_gradients(parameters)
            mesh.clip(parameters, 1.0)

    return body
