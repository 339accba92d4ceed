"""Checks of exercise 2.29: numbers of 8 bits, scales, blocks, and the layer's three products."""

from __future__ import annotations

import math

import torch

from distlab.grading import exercise, expect_close, expect_equal, fail
from tests.phase2.eight_bits import (
    E4M3,
    E5M2,
    INNER,
    LARGEST,
    OUTER,
    ROWS,
    in_blocks,
    largest,
    linear,
    products,
    rounded,
    scale_of,
    table,
)
from tests.phase2.parallel_values import strided, values

NEAR = {"rtol": 2e-6, "atol": 2e-6}
SCALES = [0.125, 64.0, 2.0**20]  # known ones of input, weight and gradient


def expect_same(got, want, what, cause, rank=None):
    """Equal numbers, NaN included."""
    got, want = got.double().cpu(), want.double()
    apart = ~((got == want) | (got.isnan() & want.isnan()))
    if got.shape != want.shape:
        fail(f"{what}: shape {tuple(got.shape)} for {tuple(want.shape)}", cause="shape", rank=rank)
    if apart.any():
        first = tuple(apart.nonzero()[0].tolist())
        text = f"{what}: {int(apart.sum())} elements are wrong; at {list(first)}, "
        fail(f"{text}{got[first]:g} for {want[first]:g}", cause=cause, rank=rank)


def hard_numbers(seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the format, the middles between them with both neighbours, and beyond its end."""
    numbers = table(dtype).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beyond = LARGEST[dtype] * torch.tensor([1.03, 1.04, 1.07, 1.2, 3.0, 1e30])
    around = [middles, middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])]
    random = values(seed, 1, 200).float() * LARGEST[dtype] / 3
    positive = torch.cat([numbers, *around, beyond, random, torch.tensor([math.inf, math.nan])])
    return torch.cat([positive, -positive])


# -- numbers and scales ---------------------------------------------------------------------------
@exercise("2.29", "virtual cuda", asserts="rounded saturated input-dtypes dtype")
def test_numbers_of_8_bits(impl, run, seed):
    """The nearest number, ties to even; the largest one for all that is beyond it."""

    def body(ctx):
        out = []
        for dtype in (E4M3, E5M2):
            for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                x = hard_numbers(seed, dtype).to(kind).to(ctx.device)
                before = x.clone()
                short = impl.saturate(x, dtype)
                same = torch.equal(x.nan_to_num(), before.nan_to_num())
                out.append((short.float().cpu(), short.dtype, same))
        return out

    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    cases = [(dtype, kind) for dtype in (E4M3, E5M2) for kind in kinds]
    for (dtype, kind), (got, found, same) in zip(cases, run(body, 1)[0], strict=True):
        expect_equal(found, dtype, what="the dtype of the result", cause="dtype")
        expect_equal(same, True, what="whether x stays as it is", cause="input-changed")
        x = hard_numbers(seed, dtype).to(kind)
        beyond = x.abs() > LARGEST[dtype]
        what = f"{kind} to {dtype}"
        want = rounded(x, dtype)
        expect_same(got[beyond], want[beyond], f"{what}, beyond the largest", "not-saturated")
        expect_same(got, want, what, "wrong-rounding")


def amaxes() -> list[float]:
    """Borders of the scales of both formats, the ends of float32, and what is no number."""
    edges = [largest * 2.0**k for largest in LARGEST.values() for k in (-130, -9, 0, 3, 100)]
    edges = torch.tensor(edges)
    up, down = torch.tensor(math.inf), torch.tensor(0.0)
    ends = torch.tensor([0.0, 2.0**-149, 2.0**-126, 3e38, 1.0, 5.0, math.inf, math.nan])
    return torch.cat([edges, edges.nextafter(up), edges.nextafter(down), ends]).tolist()


@exercise("2.29", "virtual cuda", asserts="powers scale-range no-scale margin")
def test_scales_are_powers_of_two(impl, run):
    """The largest power of two that fits, between 2^-126 and 2^126; 1 for zeros, else NaN."""
    margins = (0, 1, 12)

    def body(ctx):
        amax = torch.tensor(amaxes(), device=ctx.device)
        folded = impl.scale_for(amax[:6].view(2, 3), E4M3)
        one = impl.scale_for(amax[0], E5M2)
        found = [impl.scale_for(amax, d, m).cpu() for d in (E4M3, E5M2) for m in margins]
        return found, folded.cpu(), one.cpu()

    found, folded, one = run(body, 1)[0]
    for number, got in enumerate(found):
        dtype, margin = (E4M3, E5M2)[number // len(margins)], margins[number % len(margins)]
        want = torch.tensor([scale_of(a, dtype, margin) for a in amaxes()])
        expect_equal(got.dtype, torch.float32, what="the scales' dtype", cause="dtype")
        expect_same(got, want, f"scales for {dtype} with margin {margin}", "wrong-scale")
    expect_same(folded, found[0][:6].view(2, 3), "scales of a (2, 3) tensor", "wrong-scale")
    expect_same(one, found[len(margins)][0], "the scale of one number", "wrong-scale")


@exercise("2.29", "virtual cuda", asserts="amax layout")
def test_the_largest_of_a_tensor(impl, run, seed):
    """Zero of an empty tensor, NaN if it has one; without dimensions, in float32."""

    def tensors():
        x = values(seed, 2, 4, 6) - 3
        bad = x.clone()
        bad[2, 3] = math.nan
        inf = x.bfloat16().clone()
        inf[0, 0] = -math.inf
        return [x, x[:, ::2].T, x[0, 0], x[:0], bad, inf, x.half().requires_grad_()]

    def body(ctx):
        found = [impl.largest_in(x.to(ctx.device)) for x in tensors()]
        return [(x.cpu().item(), x.dtype, x.dim(), x.requires_grad) for x in found]

    for x, (got, *kind) in zip(tensors(), run(body, 1)[0], strict=True):
        what = f"dtype, dimensions, needs a gradient: of {tuple(x.shape)} in {x.dtype}"
        expect_equal(kind, [torch.float32, 0, False], what=what, cause="dtype")
        want = torch.tensor(largest(x)).float()
        expect_same(torch.tensor(got), want, f"max |x| of {tuple(x.shape)}", "wrong-amax")


# -- blocks ---------------------------------------------------------------------------------------
def block_inputs(seed: int) -> list[torch.Tensor]:
    """Rows whose blocks have different sizes, outliers, zeros, NaN; strided, empty and 1-d ones."""
    x = values(seed, 3, 6, 13) * 10.0 ** values(seed, 4, 6, 13)
    x[1, 2], x[2, 3], x[3, 4] = 1e5, math.nan, -math.inf
    x[4] = 0
    return [x.float(), strided(x)[:, ::2], x.bfloat16().view(2, 3, 13), x[0], x[:0], x[:, :0]]


@exercise("2.29", "virtual cuda", asserts="blocks last-block bad-block restored layout dtype")
def test_blocks_have_their_own_scales(impl, run, seed):
    """One scale per block of a row, from the block; a short last block; NaN stays in its block."""
    settings = [(block, dtype) for block in (1, 4, 13, 64) for dtype in (E4M3, E5M2)]

    def body(ctx):
        out = []
        for x in block_inputs(seed):
            x = x.to(ctx.device)
            before = x.clone()
            for block, dtype in settings:
                short = impl.quantise_blocks(x, block, dtype)
                kinds = short.data.dtype, short.inverse_scale.dtype, short.block
                shapes = tuple(short.data.shape), tuple(short.inverse_scale.shape)
                data = short.data.float().cpu()
                restored = impl.restore(short).cpu()
                out.append((data, short.inverse_scale.cpu(), kinds, shapes, restored))
            same = torch.equal(x.nan_to_num(), before.nan_to_num())
            out[-1] += (same,)
        return out

    found = iter(run(body, 1)[0])
    for x in block_inputs(seed):
        for block, dtype in settings:
            data, inverse, kinds, shapes, restored, *same = next(found)
            count = math.ceil(x.shape[-1] / block)
            what = f"{tuple(x.shape)} of {x.dtype} in blocks of {block}, {dtype}: "
            expect_equal(kinds, (dtype, torch.float32, block), what=f"{what}kinds", cause="dtype")
            wanted = (tuple(x.shape), (*x.shape[:-1], count))
            expect_equal(shapes, wanted, what=f"{what}shapes of data and scales", cause="shape")
            want = in_blocks(x, block, dtype)
            expect_same(restored, want, f"{what}values", "wrong-blocks")
            each = inverse.repeat_interleave(block, -1)[..., : x.shape[-1]].double()
            expect_same(data.double() * each, want, f"{what}data times inverse", "wrong-blocks")
            expect_equal(same, [True] * len(same), what=f"{what}x stays", cause="input-changed")


@exercise("2.29", "virtual cuda", asserts="restored multiplied dtype")
def test_products_of_restored_values(impl, run, seed):
    """data·inverse, and a·bᵀ in float32, also under autocast; with one scale and with blocks."""

    def shorts(impl, device):
        a, b = values(seed, 5, 6, 70).float().to(device), values(seed, 6, 4, 70).float().to(device)
        whole = [
            impl.Float8(impl.saturate(t * 32, E4M3), torch.tensor(2.0**-5, device=device))
            for t in (a, b)
        ]
        return whole, [impl.quantise_blocks(t, 16, E5M2) for t in (a, b)]

    def body(ctx):
        out = []
        for a, b in shorts(impl, ctx.device):
            plain = impl.multiply(a, b)
            with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
                mixed = impl.multiply(a, b)
            inverse = a.inverse_scale if a.block is None else a.inverse_scale[:0]
            single = impl.Float8(a.data[:0], inverse, a.block)
            nothing = tuple(impl.multiply(single, b).shape)
            out.append([t.cpu() for t in (plain, mixed, impl.restore(a), impl.restore(b))])
            out[-1].append(nothing)
        return out

    a, b = values(seed, 5, 6, 70).float(), values(seed, 6, 4, 70).float()
    wanted = [
        [rounded(t * 32, E4M3) / 32 for t in (a, b)],
        [in_blocks(t, 16, E5M2) for t in (a, b)],
    ]
    for (plain, mixed, left, right, nothing), (x, w) in zip(run(body, 1)[0], wanted, strict=True):
        expect_same(left, x, "the restored values of a", "wrong-values")
        expect_same(right, w, "the restored values of b", "wrong-values")
        for got, where in ((plain, ""), (mixed, " under autocast")):
            expect_equal(got.dtype, torch.float32, what=f"dtype of a·bᵀ{where}", cause="dtype")
            expect_close(got.double(), x @ w.T, what=f"a·bᵀ{where}", **NEAR)
        expect_equal(nothing, (0, 4), what="shape of the product without rows", cause="shape")


# -- the layer ------------------------------------------------------------------------------------
def inputs_of(seed, kind, shape, block):
    """x and the gradient of y, of many magnitudes: gradients are small, as in a training.

    Beside an outlier of its block a number loses bits only if it is 2¹⁴ times smaller.
    """
    spread = 2 if block else 1  # decades
    x = values(seed, 7, *shape, 2 * INNER) * 10.0 ** (spread * values(seed, 9, *shape, 2 * INNER))
    powers = spread * values(seed, 10, *shape, OUTER) - 5
    grad = values(seed, 8, *shape, OUTER) * 10.0**powers
    return x[..., ::2].to(kind), grad.to(kind)


CASES = [
    # dtype, leading dimensions, block, known scales
    (torch.float32, (ROWS,), None, False),
    (torch.float32, (ROWS,), None, True),
    (torch.float32, (ROWS,), 4, False),
    (torch.bfloat16, (2, ROWS), None, True),
    (torch.bfloat16, (2, ROWS), 4, False),
    (torch.float64, (), None, True),
    (torch.float64, (3, 1, 2), 32, False),
    (torch.float32, (2, 0), None, True),
    (torch.float32, (2, 0), None, False),
    (torch.float32, (0,), 4, False),
]


@exercise("2.29", "virtual cuda", asserts="layer formats-used first-scale blocks-used dtype layout")
def test_layer_multiplies_8_bits(impl, run, seed):
    """y and all gradients equal those of 8-bit operands, with delayed and with block scaling."""

    def body(ctx):
        out = []
        for kind, shape, block, known in CASES:
            layer = impl.Float8Linear(linear(seed), block=block).to(ctx.device)
            if known:
                layer.scale_T.copy_(torch.tensor(SCALES))
            x, grad = (t.to(ctx.device) for t in inputs_of(seed, kind, shape, block))
            x.requires_grad_()
            y = layer(x)
            y.backward(grad)
            grads = x.grad, layer.weight.grad, layer.bias.grad
            out.append([t.detach().cpu() for t in (y, *grads)])
        return out

    right = linear(seed)
    for (kind, shape, block, known), got in zip(CASES, run(body, 1)[0], strict=True):
        x, grad = inputs_of(seed, kind, shape, block)
        rows = x.reshape(-1, INNER), right.weight, right.bias, grad.reshape(-1, OUTER)
        want = products(*rows, block, SCALES if known else [0.0] * 3)
        scaling = f"blocks of {block}" if block else "known scales" if known else "no scales yet"
        tolerance = {torch.bfloat16: 2**-8}.get(kind, 2e-6)
        kinds = (kind, kind, torch.float32, torch.float32)
        for name, t, dtype in zip(want, got, kinds, strict=True):
            what = f"{scaling}, x {(*shape, INNER)} of {kind}: "
            what += name if name == "y" else f"gradient of {name}"
            expect_equal(t.dtype, dtype, what=f"{what}, dtype", cause="dtype")
            value, size = (w.view(t.shape) for w in want[name])
            near = tolerance if name in ("y", "x") else 2e-6
            expect_close(t.double() / size, value / size, what=what, rtol=0, atol=near)
