"""Checks of exercise 2.29: scales of several steps and ranks, masters, memory, and a training."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_few_waits,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import digits
from tests.phase2.eight_bits import DELAYED, E4M3, INNER, OUTER, in_tensor, linear, scale_of
from tests.phase2.half_precision import seeded
from tests.phase2.parallel_values import values

HISTORY, MARGIN, STEPS = 3, 1, 7
NAN, INF = math.nan, math.inf


def amaxes(seed: int, rank: int) -> torch.Tensor:
    """(steps, 2 layers, 3): zeros at first, a peak that leaves the history, one rank's NaN and inf."""
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
        state = [(torch.tensor(k).T.clone(), torch.tensor(s)) for k, s in zip(kept, scales)]
        out.append((state, bool(finite.all())))
    return out


def steps_of(impl, seed, ctx, group=None):
    """What the layers remember after each update, from amaxes that are written down."""
    model = model_of(impl, ctx.device)
    layers, out = (model[0], model[1][0]), []
    for step in range(STEPS):
        for layer, amax in zip(layers, amaxes(seed, ctx.rank)[step]):
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
            for name, mine, theirs in zip(("history", "scales"), state[layer], right[layer]):
                cause = "wrong-history" if name == "history" else "wrong-scale"
                if not torch.equal(mine, theirs):
                    text = f"{what}{name} {mine.tolist()} for {theirs.tolist()}"
                    fail(text, cause=cause, rank=rank)
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


@exercise("2.29", "virtual gloo cuda", nccl=True, asserts="cost no-layers parameters")
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


# -- what a layer remembers -----------------------------------------------------------------------
@exercise("2.29", "virtual cuda", asserts="remembered evaluation first-scale life saturated")
def test_amax_over_several_passes(impl, run, seed):
    """The largest |x| since the last update; evaluation leaves it; old scales until the update."""

    def tensors():
        factors = (1.0, 5.0, 0.3)
        return [
            (values(seed, 30 + i, 4, INNER).float() * f, values(seed, 40 + i, 4, OUTER).float() * f)
            for i, f in enumerate(factors)
        ]

    def body(ctx):
        layer = impl.Float8Linear(linear(seed), history=2).to(ctx.device)
        passes = [(x.to(ctx.device).requires_grad_(), g.to(ctx.device)) for x, g in tensors()]

        def run_all():
            for x, g in passes:
                layer(x).backward(g)
            return layer.amax_T.cpu().clone()

        seen, fresh = [run_all()], layer.scale_T.cpu().clone()
        impl.update_scales(layer)
        known, empty = layer.scale_T.cpu().clone(), layer.amax_T.cpu().clone()
        layer.eval()
        layer(passes[1][0] * 100).backward(passes[1][1])
        seen.append(layer.amax_T.cpu().clone())
        layer.train()
        with torch.no_grad():
            layer.weight *= 100
            clipped = layer(passes[0][0]).detach().cpu()
        layer(torch.full((1, INNER), NAN, device=ctx.device))
        seen.append(layer.amax_T.cpu().clone())
        y = layer(passes[0][0])
        impl.update_scales(layer)
        y.sum().backward()  # begun before the update
        return seen, fresh, known, empty, clipped

    seen, fresh, known, empty, clipped = run(body, 1)[0]
    layer = linear(seed)
    x, g = (max(t[i].abs().max().item() for t in tensors()) for i in range(2))
    most = [x, layer.weight.abs().max().item(), g]
    expect_close(seen[0], torch.tensor(most), what="amax_T after three passes", cause="wrong-amax")
    expect_equal(fresh.tolist(), [0.0] * 3, what="scale_T before an update", cause="wrong-scale")
    want = [scale_of(m, d) for m, d in zip(torch.tensor(most).tolist(), DELAYED, strict=True)]
    expect_equal(known.tolist(), want, what="scale_T after it", cause="wrong-scale")
    expect_equal(empty.tolist(), [0.0] * 3, what="amax_T after it", cause="not-cleared")
    what = "amax_T after an evaluation"
    expect_equal(seen[1].tolist(), [0.0] * 3, what=what, cause="evaluation-counts")
    expect_equal(math.isnan(seen[2][0]), True, what="whether amax_T tells of a NaN in x")
    x8 = in_tensor(tensors()[0][0], E4M3, want[0])
    w8 = in_tensor(layer.weight.detach() * 100, E4M3, want[1])
    right = (x8 @ w8.T + layer.bias.detach().double()).float()
    what = "y with a weight that outgrew its scale"
    expect_close(clipped, right, what=what, rtol=1e-5, atol=1e-4)


@exercise("2.29", "virtual", asserts="state masters life parameters")
def test_masters_and_state(impl, run, seed):
    """The linear layer's own float32 parameters; scales and history travel in the state_dict."""

    def body(ctx):
        plain = linear(seed)
        layer = impl.Float8Linear(plain, history=4)
        same = layer.weight is plain.weight, layer.bias is plain.bias
        bare = impl.Float8Linear(linear(seed, bias=False))
        blocks = impl.Float8Linear(linear(seed), block=8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-6)
        x = values(seed, 50, 4, INNER).float().requires_grad_()
        begun = layer.weight.detach().clone()
        layer(x).sum().backward()
        optimizer.step()
        impl.update_scales(layer)
        moved = (layer.weight.detach() - begun, layer.weight.grad.clone(), layer.weight.dtype)
        other = impl.Float8Linear(linear(seed + 1), history=4)
        other.load_state_dict(layer.state_dict())
        equal = torch.equal(other(x * 3), layer(x * 3))
        frozen = impl.Float8Linear(linear(seed).requires_grad_(False))
        y = frozen(x.detach())
        x.grad = None
        frozen(x).sum().backward()
        still = y.requires_grad, frozen.weight.grad, x.grad is not None
        kinds = {n: tuple(t.shape) for n, t in layer.state_dict().items()}
        default = tuple(bare.history_HT.shape)
        none = [blocks.scale_T, blocks.amax_T, blocks.history_HT]
        names = sorted(bare.state_dict()), sorted(blocks.state_dict())
        shape = tuple(bare(x).shape)
        return same, moved, equal, still, kinds, default, none, names, shape

    same, moved, equal, still, kinds, default, none, names, shape = run(body, 1)[0]
    expect_equal(same, (True, True), what="whether weight and bias are the given objects")
    by, grad, dtype = moved
    expect_equal(dtype, torch.float32, what="the master's dtype", cause="dtype")
    off = (by + 1e-6 * grad).abs().max().item()
    if off > 1e-7:
        fail(f"the optimizer's step is lost: {off:g} off", cause="no-master")
    expect_equal(equal, True, what="whether a layer goes on with another's state", cause="state")
    expect_equal(still, (False, None, True), what="a frozen layer", cause="frozen")
    buffers = {"scale_T": (3,), "history_HT": (4, 3)}
    want = {"weight": (OUTER, INNER), "bias": (OUTER,), **buffers}
    expect_equal(kinds, want, what="the state_dict", cause="state")
    expect_equal(default, (16, 3), what="the default history", cause="state")
    expect_equal(none, [None] * 3, what="what a layer with blocks remembers", cause="state")
    want = (["history_HT", "scale_T", "weight"], ["bias", "weight"])
    expect_equal(names, want, what="the states without bias, and with blocks", cause="state")
    expect_equal(shape, (4, OUTER), what="y without a bias", cause="shape")


@exercise("2.29", "virtual cuda", asserts="kept resources")
def test_one_byte_per_element_stays(impl, run, seed):
    """Between forward and backward: x and weight in 8 bits, y, and the units."""
    rows, inner, outer = 64, 96, 32

    def body(ctx):
        left = []
        for block in (None, 32):
            layer = impl.Float8Linear(linear(seed, inner, outer), block=block).to(ctx.device)
            x = torch.ones(rows, inner, device=ctx.device, requires_grad=True)
            with PeakMemory() as memory:
                y = layer(x)
                held = memory.current
                y.sum().backward()
                del y
                grads = sum(p.grad.nbytes for p in (x, layer.weight, layer.bias))
                left.append((held, memory.current - grads))
        return left

    for rank, left in enumerate(run(body, 1)):
        for block, (held, after) in zip((None, 32), left, strict=True):
            numbers = (rows + outer) * inner
            units = 2 * 4 if block is None else 4 * (inner * rows // 32 + inner * outer // 32)
            most = 4 * rows * outer + numbers + units + 256
            if held > most:
                text = f"block {block}: {held} bytes are alive after forward; y, 8-bit x and "
                fail(f"{text}weight, and units have {most}", cause="too-much-memory", rank=rank)
            if after > 256:
                text = f"block {block}: {after} bytes are alive after backward"
                fail(text, cause="too-much-memory", rank=rank)


@exercise("2.29", "virtual", asserts="refusals")
def test_low_precision_refuses_bad_input(impl, run, seed):
    """ValueError for other formats, blocks, histories, masters and widths, and outside of a group."""

    def body(ctx):
        group = dist.new_group([0])
        plain, half = linear(seed), linear(seed).bfloat16()
        layer = impl.Float8Linear(plain)
        with ctx.region("refused"):
            found = [
                refusal(impl.saturate, torch.ones(2), torch.float16),
                refusal(impl.quantise_blocks, torch.ones(2, 2), 0, E4M3),
                refusal(impl.Float8Linear, half),
                refusal(impl.Float8Linear, plain, block=0),
                refusal(impl.Float8Linear, plain, history=0),
                refusal(impl.Float8Linear, plain, margin=-1),
                refusal(layer, torch.ones(2, INNER + 1)),
            ]
        return found + [refusal(impl.update_scales, layer, group) if ctx.rank else found[0]]

    calls = ["float16", "a block of 0", "masters of bfloat16", "block=0", "history=0", "margin=-1"]
    calls += ["x of another width", "rank 1, which is not in the group"]
    results = run(body, 2)
    expect_refused(results, calls)


# -- a training -----------------------------------------------------------------------------------
def losses(make) -> list[float]:
    """Loss over all digits after 60 steps, for three seeds; ``make`` gives each layer."""
    images, targets = (t.clone() for t in digits())
    found = []
    for number in range(3):
        layers = [make(linear(10 * number + i, *n)) for i, n in enumerate(((64, 48), (48, 10)))]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        order = seeded(number, lambda: torch.randperm(len(images)))
        for step in range(60):
            rows = order[step * 64 % 1600 :][:64]
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows]).float(), targets[rows]).backward()
            yield_scales(model)
            optimizer.step()
        with torch.no_grad():
            found.append(F.cross_entropy(model(images).float(), targets).item())
    return found
