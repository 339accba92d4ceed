"""Checks of exercise 3.33: gradients, norms and checkpoints under every combination of axes."""

from __future__ import annotations

import math

import torch
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
)
from tests.phase3.mesh_cases import (
    GRIDS,
    SHAPES,
    block,
    coordinates,
    held,
    local_gradient,
    mesh_of,
    own_parameters,
    plain,
    spec_of,
    true_gradient,
    whole_values,
)


@exercise("3.33", "virtual gloo cuda", asserts="reduced alone")
def test_gradients_are_those_of_one_process(impl, run, seed, cases):
    """Every parameter ends with its block of the whole batch's gradient, on every grid."""
    grids = cases(GRIDS[0], *GRIDS[1:], {"data": 1, "tensor": 1})

    for sizes in grids:

        def body(ctx, sizes=sizes):
            parameters = own_parameters(sizes, seed, ctx.rank, ctx.device)
            mesh_of(impl, sizes).reduce_gradients(parameters)
            return {name: p.grad for name, p in parameters.items()}

        for rank, got in enumerate(run(body, math.prod(sizes.values()))):
            for name, grad in got.items():
                spec = spec_of(name, sizes)
                want = block(true_gradient(name, sizes, seed), spec, sizes, rank)
                what = f"{plain(sizes)}, {spec}: the gradient"
                expect_close(grad, want, what=what, rank=rank, rtol=1e-4)


@exercise("3.33", "virtual gloo cuda", asserts="reduce-cost dtype cost group")
def test_one_message_for_the_same_ranks_and_dtype(impl, run, seed):
    """Joined sums: one all-reduce per set of ranks and dtype, with these gradients' bytes."""
    sizes = {"data": 2, "shard": 2, "tensor": 2}

    def body(ctx):
        mesh, parameters = mesh_of(impl, sizes), own_parameters(sizes, seed, ctx.rank, ctx.device)
        for name in ("scale", "embed"):
            half = nn.Parameter(parameters[name].detach().bfloat16())
            half.grad, parameters[name] = torch.ones_like(half), half
        with ctx.region("reduce"):
            mesh.reduce_gradients(parameters)
        return [str(p.grad.dtype) for p in parameters.values()]

    results = run(body, 8)
    for rank, dtypes in enumerate(results):
        own = {n: block(whole_values(n, seed), spec_of(n, sizes), sizes, rank) for n in SHAPES}
        count = {name: each.numel() for name, each in own.items()}
        want = sorted(
            [
                ("all_reduce", 4 * count["norm"]),  # data, shard and tensor
                ("all_reduce", 2 * (count["scale"] + count["embed"])),  # data and shard, bf16
                ("all_reduce", 4 * count["experts"]),  # data and shard, float32
                ("all_reduce", 4 * (count["up"] + count["down"])),  # data
            ]
        )
        sent = sorted((e.op, e.payload) for e in results.logs[rank].events if e.region == "reduce")
        expect_equal(sent, want, what="messages (operation, bytes)", rank=rank, cause="messages")
        mixed = ["torch.bfloat16" if n in ("scale", "embed") else "torch.float32" for n in SHAPES]
        expect_equal(dtypes, mixed, what="dtypes of the gradients", rank=rank, cause="dtype")


@exercise("3.33", "virtual gloo", asserts="missing frozen alone parameters layout life")
def test_missing_frozen_and_strided_gradients(impl, run, seed):
    """Missing ones count as zeros where there is a sum; frozen ones stay; strides don't matter."""
    sizes = {"data": 2, "tensor": 2}

    def body(ctx):
        mesh, parameters = mesh_of(impl, sizes), own_parameters(sizes, seed, ctx.rank, ctx.device)
        if coordinates(sizes, ctx.rank)["data"]:
            parameters["down"].grad = None
        else:
            parameters["down"].grad = parameters["down"].grad.T.contiguous().T
        parameters["wrapped"].grad = None  # another completes it: no sum
        parameters["experts"].requires_grad_(False)
        parameters["experts"].grad = torch.full_like(parameters["experts"], ctx.rank)
        mesh.reduce_gradients(parameters)
        first = {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}
        parameters["scale"].grad = torch.tensor(ctx.rank + 1.0, device=ctx.device)
        mesh.reduce_gradients(
            {"scale": parameters["scale"]}
        )  # some of the layout, in a second call
        return first, parameters["scale"].grad

    for rank, (got, again) in enumerate(run(body, 4)):
        data, tensor = coordinates(sizes, rank).values()
        want = local_gradient("down", sizes, seed, tensor) / 2
        what = "the mean of a gradient that one of two ranks has"
        expect_close(got["down"], want, what=what, rank=rank)
        expect_equal(got["wrapped"], None, what="a missing gradient without a sum", rank=rank)
        frozen = torch.full(SHAPES["experts"], float(rank))
        expect_close(got["experts"], frozen, what="a frozen parameter's old gradient", rank=rank)
        expect_close(again, torch.tensor(tensor + 2.0), what="a second call's mean", rank=rank)


def norm_of(sizes, seed: int) -> float:
    gradients = [true_gradient(name, sizes, seed).double() for name in SHAPES]
    return math.sqrt(sum(float((g**2).sum()) for g in gradients))


@exercise("3.33", "virtual gloo cuda", asserts="norm clip-cost clipped cost")
def test_the_norm_counts_each_element_once(impl, run, seed, cases):
    """One norm on all ranks by one message of 8 bytes, and one factor for all gradients."""
    for sizes in cases(GRIDS[0], *GRIDS[1:]):
        limit = norm_of(sizes, seed) / 3

        def body(ctx, sizes=sizes, limit=limit):
            mesh, parameters = (
                mesh_of(impl, sizes),
                own_parameters(sizes, seed, ctx.rank, ctx.device),
            )
            for name, p in parameters.items():
                own = block(true_gradient(name, sizes, seed), spec_of(name, sizes), sizes, ctx.rank)
                p.grad = own.clone().to(ctx.device)
            norms = [mesh.clip(parameters, math.inf)]
            with ctx.region("clip"):
                norms.append(mesh.clip(parameters, limit))
            return norms, {name: p.grad for name, p in parameters.items()}

        results = run(body, math.prod(sizes.values()))
        for rank, (norms, got) in enumerate(results):
            for norm in norms:
                what = f"{plain(sizes)}: the norm"
                want = torch.tensor(3 * limit, dtype=torch.float64)
                have = torch.tensor(norm, dtype=torch.float64)
                expect_close(have, want, what=what, rank=rank, rtol=1e-5)
            for name, grad in got.items():
                own = block(true_gradient(name, sizes, seed), spec_of(name, sizes), sizes, rank) / 3
                expect_close(grad, own, what=f"{name}, clipped to a third", rank=rank, rtol=1e-4)
            sent = [(e.op, e.payload) for e in results.logs[rank].events if e.region == "clip"]
            expect_equal(sent, [("all_reduce", 8)], what="messages", rank=rank, cause="clip-cost")


@exercise("3.33", "virtual", asserts="clip-not-finite clip-frozen norm-float64")
def test_norms_that_are_not_finite_and_frozen_parameters(impl, run, seed):
    """Infinity changes nothing; frozen and missing gradients do not count; small ones add up."""
    sizes = {"data": 2, "tensor": 2}

    def body(ctx):
        mesh, parameters = mesh_of(impl, sizes), own_parameters(sizes, seed, ctx.rank, ctx.device)
        for p in parameters.values():
            p.grad = None
        parameters["down"].requires_grad_(False).grad = torch.ones_like(parameters["down"])
        parameters["scale"].grad = torch.tensor(3.0, device=ctx.device)
        parameters["norm"].grad = torch.full((4,), 1e-30, device=ctx.device)
        norms = [mesh.clip(parameters, 1.5), mesh.clip({"norm": parameters["norm"]}, 1.0)]
        halved = parameters["scale"].grad.clone()
        parameters["embed"].grad = torch.full_like(parameters["embed"], math.inf)
        norms.append(mesh.clip(parameters, 1.0))
        return norms, halved, parameters["scale"].grad, parameters["down"].grad

    for rank, (norms, halved, later, frozen) in enumerate(run(body, 4)):
        expect_equal(norms[0], 3.0, what="the norm of what is trained", rank=rank, cause="frozen")
        if not math.isclose(norms[1], 1e-30, rel_tol=1e-6):
            what = "the norm of four elements of 0.5e-30 is 1e-30: squares need float64"
            fail(f"{what}, got {norms[1]}", cause="norm-dtype", rank=rank)
        expect_equal(norms[2], math.inf, what="a norm with an infinite element", rank=rank)
        expect_equal([halved.item(), later.item()], [1.5, 1.5], what="the gradient", rank=rank)
        expect_close(frozen, torch.ones(4, 3), what="a frozen gradient", rank=rank)


@exercise("3.33", "virtual", asserts="clip-refused refusals")
def test_bad_limits_are_refused(impl, run):
    """A limit of zero, below zero or NaN: ValueError before any message."""
    bad = [0.0, -1.0, math.nan]

    def body(ctx):
        mesh = impl.Mesh(impl.Grid({"data": 2}, ["data"]), {})
        return [refusal(mesh.clip, {}, limit) for limit in bad]

    expect_refused(run(body, 2), [f"max_norm {limit}" for limit in bad])


@exercise("3.33", "virtual gloo", asserts="pieces pieces-cost pieces-copy resources cost")
def test_each_element_is_in_one_piece(impl, run, seed, cases):
    """All ranks' pieces together are the model, each element once; nothing is sent."""
    for sizes in cases(GRIDS[0], *GRIDS[1:]):

        def body(ctx, sizes=sizes):
            mesh, parameters = (
                mesh_of(impl, sizes),
                own_parameters(sizes, seed, ctx.rank, ctx.device),
            )
            with ctx.region("pieces"):
                pieces = mesh.pieces(parameters)
            for p in parameters.values():
                p.detach().zero_()
            alive = [piece["values"].requires_grad for piece in pieces]
            return pieces, any(alive)

        results = run(body, math.prod(sizes.values()))
        whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        times = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for rank, (pieces, alive) in enumerate(results):
            expect_equal(alive, False, what="values that need gradients", rank=rank)
            sent = [e.op for e in results.logs[rank].events if e.region == "pieces"]
            expect_equal(sent, [], what="messages", rank=rank, cause="pieces-cost")
            for piece in pieces:
                name, values = piece["name"], piece["values"]
                what = f"{plain(sizes)}, a piece of {name}"
                expect_equal(piece["shape"], SHAPES[name], what=f"{what}: shape", rank=rank)
                if not values.numel():
                    fail(f"{what} is empty", cause="empty-piece", rank=rank)
                place = tuple(
                    slice(f, f + n) for f, n in zip(piece["first"], values.shape, strict=True)
                )
                whole[name][place] = values
                times[name][place] += 1
        for name, count in times.items():
            what = f"{plain(sizes)}, {name}: pieces that have each element"
            expect_equal(count.unique().tolist(), [1.0], what=what, cause="pieces")
            expect_close(whole[name], whole_values(name, seed), what=f"{plain(sizes)}, {name}")


@exercise("3.33", "virtual", asserts="load load-cost")
def test_another_mesh_loads_the_pieces(impl, run, seed, cases):
    """What one grid has written, any other grid loads: each rank gets its blocks."""
    pairs = cases((0, 2), (2, 0), (6, 4), (1, 7))

    for saving, loading in pairs:
        old, new = GRIDS[saving], GRIDS[loading]

        def save(ctx, sizes=old):
            return mesh_of(impl, sizes).pieces(own_parameters(sizes, seed, ctx.rank, ctx.device))

        saved = [piece for part in run(save, math.prod(old.values())) for piece in part][::-1]

        def body(ctx, sizes=new, saved=saved):
            mesh, mine = mesh_of(impl, sizes), own_parameters(sizes, seed + 1, ctx.rank, "cpu")
            with ctx.region("load"):
                mesh.load(mine, iter(saved))
            return {name: p.detach() for name, p in mine.items()}

        results = run(body, math.prod(new.values()))
        for rank, got in enumerate(results):
            expect_equal([*got], held(new, rank), what="names", rank=rank)
            for name, values in got.items():
                want = block(whole_values(name, seed), spec_of(name, new), new, rank)
                what = f"{name}, from {plain(old)} to {plain(new)}"
                expect_close(values, want, what=what, rank=rank)
