"""Checks of exercise 2.29: scales of several steps and ranks."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    fail,
)
from tests.phase2.eight_bits import (
    DELAYED,
    E4M3,
    INNER,
    in_blocks,
    in_tensor,
    largest,
    linear,
    scale_of,
)
from tests.phase2.parallel_values import values

HISTORY, MARGIN, STEPS = 3, 1, 7
NAN, INF = math.nan, math.inf


def amaxes(seed: int, rank: int) -> torch.Tensor:
    """(steps, 2 layers, 3): first zeros, then a peak that leaves the history, NaN and infinity."""
    found = values(seed, 20 + rank, STEPS, 2, 3).abs().float()
    found[0, 0] = 0
    found[:2, 1, 2] = 0
    found[1, 0, 0] = 5e4
    if rank == 1:
        found[2, 0] = torch.tensor([INF, 1.0, NAN])
        found[3] = 0  # this rank has nothing to do
    if rank == 2:
        found[5, 1, 1] = NAN
        found[6, 0, 1] = -NAN
    return found


def model_of(impl, device="cpu"):
    """Two layers with delayed scaling, one of them used twice, and one with blocks."""
    first = impl.Float8Linear(linear(0), history=HISTORY, margin=MARGIN)
    second = impl.Float8Linear(linear(1))
    blocks = impl.Float8Linear(linear(2), block=4)
    return nn.ModuleList([first, nn.Sequential(second, blocks), nn.Tanh(), first]).to(device)


def histories(seed: int, ranks: list[int]) -> list:
    """For each step: both layers' history and scales, and whether all was finite."""
    lengths, margins = (HISTORY, 16), (MARGIN, 0)
    kept = [[[0.0] * n for _ in range(3)] for n in lengths]
    scales = [[0.0] * 3 for _ in range(2)]
    out = []
    for step in range(STEPS):
        most = torch.stack([amaxes(seed, r)[step] for r in ranks])
        finite = most.isfinite().all(0)
        most = most.nan_to_num(INF, INF).amax(0)
        for layer in range(2):
            for kind in range(3):
                if finite[layer, kind]:
                    row = kept[layer][kind]
                    kept[layer][kind] = [most[layer, kind].item(), *row[:-1]]
                peak = max(kept[layer][kind])
                if peak:
                    scales[layer][kind] = scale_of(peak, DELAYED[kind], margins[layer])
        state = [
            (torch.tensor(k).T.clone(), torch.tensor(s)) for k, s in zip(kept, scales, strict=True)
        ]
        out.append((state, bool(finite.all())))
    return out


def steps_of(impl, seed, ctx, group=None):
    """What the layers remember after each update, from amaxes that are written down."""
    model = model_of(impl, ctx.device)
    layers, out = (model[0], model[1][0]), []
    for step in range(STEPS):
        for layer, amax in zip(layers, amaxes(seed, ctx.rank)[step], strict=True):
            layer.amax_T.copy_(amax)
        with ctx.region("update"):
            finite = impl.update_scales(model, group)
        state = [(m.history_HT.cpu().clone(), m.scale_T.cpu().clone()) for m in layers]
        left = [m.amax_T.abs().sum().item() for m in layers]
        kind = finite.dtype == torch.bool and finite.dim() == 0
        out.append((state, bool(finite), left, kind))
    return out


def expect_histories(found, wanted, rank):
    """Compare a rank's steps with the histories of one process."""
    for step, (got, want) in enumerate(zip(found, wanted, strict=True)):
        (state, finite, left, kind), (right, all_finite) = got, want
        for layer in range(2):
            what = f"after update {step}, layer {layer}: "
            for number, name in enumerate(("history", "scale")):
                mine, theirs = state[layer][number], right[layer][number]
                if not torch.equal(mine, theirs):
                    text = f"{what}{name} {mine.tolist()} for {theirs.tolist()}"
                    fail(text, cause=f"wrong-{name}", rank=rank)
        what = f"update {step}: whether every amax of all ranks was finite"
        expect_equal(finite, all_finite, what=what, rank=rank, cause="wrong-answer")
        expect_equal(left, [0.0, 0.0], what=f"amax_T after update {step}", rank=rank)
        expect_equal(kind, True, what="a bool without dimensions came back", rank=rank)


# -- scales over steps and ranks ------------------------------------------------------------------
@exercise(
    "2.29", "virtual gloo cuda", nccl=True, asserts="update history bad-amax answer alone life"
)
def test_scales_follow_the_largest_of_all_ranks(impl, run, seed, cases):
    """History, scales and answer over seven steps, with an idle rank, a NaN and an infinity."""
    worlds = cases(3, 1, 2)

    def body(ctx):
        return steps_of(impl, seed, ctx)

    for w, results in zip(worlds, run.worlds(body, worlds), strict=True):
        wanted = histories(seed, list(range(w)))
        for rank, found in enumerate(results):
            expect_histories(found, wanted, rank)


@exercise("2.29", "virtual gloo", asserts="group")
def test_a_group_has_its_own_scales(impl, run, seed):
    """Ranks 2 and 0 agree on their scales, while rank 1 does something else."""

    def body(ctx):
        group = dist.new_group([2, 0])
        if ctx.rank == 1:
            return None
        return steps_of(impl, seed, ctx, group)

    results = run(body, 3)
    for rank in (0, 2):
        expect_histories(results[rank], histories(seed, [0, 2]), rank)


@exercise("2.29", "virtual gloo cuda", nccl=True, asserts="cost no-layers parameters update")
def test_one_message_for_all_layers(impl, run, seed):
    """12 bytes per layer with delayed scaling, also if it is used twice; nothing without them."""

    def body(ctx):
        model = model_of(impl, ctx.device).requires_grad_(False)
        other = nn.Sequential(nn.Linear(3, 3), impl.Float8Linear(linear(2), block=4))
        with ctx.region("layers"):
            x = torch.ones(2, INNER, device=ctx.device, requires_grad=True)
            model[0](x).sum().backward()
        with ctx.region("update"):
            impl.update_scales(model)
        with ctx.region("nothing"):
            answer = impl.update_scales(other)
        return bool(answer), answer.dtype

    results = run(body, 3)
    for rank, log in enumerate(results.logs):
        for region, want in (("layers", []), ("update", [("all_reduce", 24)]), ("nothing", [])):
            found = [(event.op, event.payload) for event in log.select(region=region).events]
            what = f"{region}: operators and bytes that a rank brings"
            expect_equal(found, want, what=what, rank=rank, cause="cost")
        want = (True, torch.bool)
        expect_equal(results[rank], want, what="the answer without such layers", rank=rank)


@exercise("2.29", "nccl", asserts="host")
def test_no_step_waits_for_the_gpu(impl, run, seed):
    """Forward, backward and update read nothing from the device, in both kinds of layers."""

    def body(ctx):
        layers = model_of(impl, ctx.device)
        x = torch.ones(2, INNER, device=ctx.device, requires_grad=True)

        def step():
            (layers[0](x).sum() + layers[1][1](x).sum()).backward()
            impl.update_scales(layers)

        step()
        with ctx.region("step"):
            step()

    expect_few_waits(run(body, 2), 0, "a step of 8-bit layers")


@exercise("2.29", "virtual cuda", asserts="both layout")
def test_a_tensor_and_its_transpose(impl, run, seed):
    """Both in 8 bits: each with its own blocks, or one tensor seen in two ways."""
    kinds = range(3)

    def body(ctx):
        x, out = values(seed, 60, 6, 10).float().to(ctx.device)[:, ::2], []
        for block in (None, 4):
            layer = impl.Float8Linear(linear(seed), block=block, margin=2).to(ctx.device)
            for kind in kinds:
                rows, columns = layer.quantise(x, kind)
                shared = rows.data.data_ptr() == columns.data.data_ptr()
                restored = impl.restore(rows).cpu(), impl.restore(columns).cpu()
                out.append((restored, rows.data.dtype, columns.block, shared))
        return out

    x = values(seed, 60, 6, 10).float()[:, ::2]
    for number, ((rows, columns), dtype, block, shared) in enumerate(run(body, 1)[0]):
        blocks, kind = number > 2, number % 3
        format_ = E4M3 if blocks else DELAYED[kind]
        what = f"kind {kind}, {'blocks of 4' if blocks else 'delayed scaling'}: "
        want = format_, 4 if blocks else None
        expect_equal((dtype, block), want, what=f"{what}format and block", cause="wrong-format")
        if blocks:
            right = in_blocks(x, 4, E4M3), in_blocks(x.T, 4, E4M3)
        else:
            right = [in_tensor(x, format_, scale_of(largest(x), format_, 2))] * 2
            right[1] = right[1].T
            expect_equal(shared, True, what=f"{what}one tensor in memory", cause="two-tensors")
        expect_close(rows.double(), right[0], what=f"{what}rows")
        expect_close(columns.double(), right[1], what=f"{what}columns")
