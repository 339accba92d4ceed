"""Checks of exercise 4.9: int8 with random rounding, and one bit with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from tests.phase4.compression import (
    Bucket,
    all_gradients,
    beside_all_reduce,
    bucket_of,
    check_begins,
    check_edges,
    check_in_a_group,
    check_resumed,
    expect_bytes,
    expect_same_bits,
    expect_steps,
    gradient,
    reduced,
    several_steps,
)

STEPS = 4


# -- int8 -----------------------------------------------------------------------------------------
@exercise("4.9", "virtual gloo cuda")
def test_int8_is_the_sum_within_its_steps(impl, run, seed, cases):
    """The sum over the ranks, off by less than a step of each quantisation, with the same bits."""
    sizes = (3, 50, torch.float32), (2, 33, torch.float64), (1, 9, torch.float32)
    for world_size, numel, dtype in cases(*sizes, (4, 3, torch.float32)):

        def body(ctx):
            bucket = bucket_of((numel,), dtype=dtype, device=ctx.device)
            own = [gradient(bucket, seed, ctx.rank, step) * 10.0**ctx.rank for step in range(STEPS)]
            return several_steps(lambda _: impl.Int8(seed=seed), bucket, own)

        own = all_gradients(bucket_of((numel,), dtype=dtype), seed, world_size, STEPS)
        results = run(body, world_size)
        what = f"{numel} numbers of {world_size} ranks, the next rank's ten times larger"
        expect_same_bits(results, what)
        for step in range(STEPS):
            parts = [steps[step] * 10.0**rank for rank, steps in enumerate(own)]
            total = sum(parts)
            off = float((results[0][step] - total).abs().max())
            steps = sum(float(p.abs().max()) for p in parts) + float(total.abs().max()) * 1.1
            if not off <= steps / 127 * 1.01:
                fail(
                    f"{what}: step {step} is off by {off:.4g}; the ranks' steps and that of the "
                    f"sum are {steps / 127:.4g} together",
                    cause="too-far-off",
                )


@exercise("4.9", "virtual")
def test_int8_rounding_is_right_in_the_mean(impl, run, seed):
    """Many equal numbers between two steps: their mean comes out right, on both sides of zero."""
    numel = 6000

    def body(ctx):
        hook, bucket = impl.Int8(seed=seed), bucket_of((numel,), dtype=torch.float32)
        values = torch.full((numel,), 0.3)
        values[numel // 2 :] = -0.3
        values[:: numel // 8] = 127.0  # so that one step is 1, in every piece
        got = reduced(hook, bucket, values / ctx.world_size)
        return float(got[1 : numel // 8].mean()), float(got[numel // 2 + 1 : numel // 8 * 5].mean())

    for world_size in (1, 2):
        for up, down in run(body, world_size):
            for got, want in ((up, 0.3), (down, -0.3)):
                if abs(got - want) > 0.2:
                    fail(
                        f"of {world_size} ranks: 749 numbers of {want}, of which a step is 1, come "
                        f"out as {got:.3f} in the mean: rounding is not right in the mean",
                        cause="biased",
                    )


@exercise("4.9", "virtual")
def test_int8_ranks_round_independently(impl, run, seed):
    """x on one rank and -x on the other: with equal random numbers no sum would ever be zero."""
    numel = 2000

    def body(ctx):
        hook, bucket = impl.Int8(seed=seed), bucket_of((numel,), dtype=torch.float32)
        values = torch.full((numel,), 0.5)
        values[:: numel // 4] = 127.0
        calls = [reduced(hook, bucket, values * (1 - 2 * ctx.rank)) for _ in range(2)]
        return [x.round() for x in calls]

    for rank, (first, second) in enumerate(run(body, 2)):
        zeros = float((first == 0).float().mean())
        if not 0.4 < zeros < 0.6:
            fail(
                f"x = 0.5 steps on one rank and -x on the other: {zeros:.0%} of the sums are 0, "
                "expected about half: the ranks draw the same random numbers, or none",
                cause="same-noise",
                rank=rank,
            )
        if torch.equal(first, second):
            fail("two calls draw the same random numbers", cause="same-noise", rank=rank)


@exercise("4.9", "virtual gloo")
def test_int8_bytes(impl, run, seed, cases):
    """2(W-1)(⌈n/W⌉ + 4) bytes in two messages, whatever the number of ranks."""
    for world_size in cases(3, 2, 1, 4):

        def body(ctx):
            hook, bucket = impl.Int8(seed=seed), bucket_of((1000,), dtype=torch.float32)
            with ctx.region("step"):
                reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))

        for log in run(body, world_size).logs:
            want = 2 * (world_size - 1) * (-(-1000 // world_size) + 4)
            mine, formula = log.select(region="step"), f"2(W-1)(⌈1000/{world_size}⌉ + 4)"
            expect_bytes(mine, want, formula, slack=8 * world_size, messages=2)


@exercise("4.9", "virtual")
def test_int8_shows_what_is_not_finite(impl, run, seed):
    """A nan or an infinity of one rank is seen by all, where it was."""

    def body(ctx):
        found = []
        for bad in (float("nan"), float("inf")):
            hook, bucket = impl.Int8(seed=seed), bucket_of((12,), dtype=torch.float32)
            values = torch.ones(12)
            if ctx.rank == 1:
                values[5] = bad
            found.append(reduced(hook, bucket, values))
        return found

    results = run(body, 3)
    expect_same_bits(results, "a nan, an infinity on rank 1")
    for rank, steps in enumerate(results):
        for got in steps:
            if torch.isfinite(got[5]):
                fail(f"it has become {float(got[5])}", cause="nan-hidden", rank=rank)


# -- one bit --------------------------------------------------------------------------------------
def simulate(
    own: list[list[Tensor]], *, feedback: bool = True, whose: int | None = None, same: bool = False
) -> list[Tensor]:
    """Each step's Σ s·sign(v); ``own``: for each rank the gradients of all steps.

    ``feedback`` False: no residual; ``whose``: everybody's scale is this rank's; ``same``: the
    residual takes back signs of size 1.
    """
    sums = [torch.zeros_like(g) for g in own[0]]
    rest = [torch.zeros_like(gradients[0]) for gradients in own]
    for step, total in enumerate(sums):
        vs = [g[step] + (r if feedback else 0) for g, r in zip(own, rest, strict=True)]
        scales = [v.abs().mean().float().to(v.dtype) for v in vs]
        signs = [2.0 * (v >= 0) - 1 for v in vs]
        for rank, (v, scale, sign) in enumerate(zip(vs, scales, signs, strict=True)):
            total += (scale if whose is None else scales[whose]) * sign
            rest[rank] = v - (1 if same else scale) * sign
    return sums


@exercise("4.9", "virtual gloo cuda")
def test_one_bit_sends_signs_and_owes_the_rest(impl, run, seed, cases):
    """Signs with each rank's own mean size are summed; what they lack goes into the next step."""
    for world_size, numel in cases((3, 41), (2, 8), (1, 7), (4, 17)):

        def body(ctx):
            bucket = bucket_of((numel - 2,), (2,), device=ctx.device)
            own = scaled(bucket, seed, ctx.rank)
            return several_steps(lambda ps: impl.OneBit(ps), bucket, own)

        like = bucket_of((numel - 2,), (2,))
        own = [scaled(like, seed, rank) for rank in range(world_size)]
        known = {
            "no-error-feedback": (
                "it is what this step's gradients alone give: what signs lack is lost",
                simulate(own, feedback=False),
            ),
            **{
                f"scale-of-rank-{rank}": (
                    f"every rank's signs are multiplied by rank {rank}'s scale",
                    simulate(own, whose=rank),
                )
                for rank in range(world_size if world_size > 1 else 0)
            },
            "residual-without-scale": (
                "the residual was reduced by the signs, not by scale times sign",
                simulate(own, same=True),
            ),
        }
        what = f"one bit of each of {numel} numbers, {world_size} ranks"
        expect_steps(run(body, world_size), simulate(own), what, known, rtol=1e-5, atol=1e-6)


def scaled(bucket: Bucket, seed: int, rank: int) -> list[Tensor]:
    """The rank's gradients of all steps, three times as large as those of the rank before."""
    own = [gradient(bucket, seed, rank, step) * 3.0**rank for step in range(STEPS)]
    own[0][0] = 0.0  # its sign is 1
    return own


@exercise("4.9", "virtual gloo")
def test_one_bit_bytes(impl, run, seed, cases):
    """(W-1)(⌈n/8⌉ + 4) bytes in one message per bucket: eight signs to a byte, and the scale."""
    for world_size, numel in cases((3, 1001), (2, 64), (1, 64)):

        def body(ctx):
            bucket = bucket_of((numel,), dtype=torch.float32)
            hook = impl.OneBit(bucket.parameters)
            with ctx.region("step"):
                reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))

        for log in run(body, world_size).logs:
            want = (world_size - 1) * (-(-numel // 8) + 4)
            mine = log.select(region="step")
            expect_bytes(mine, want, f"(W-1)(⌈{numel}/8⌉ + 4)", messages=1)


@exercise("4.9", "virtual")
def test_signs_fill_bytes(impl, run, seed):
    """Bit j of byte i is the sign of entry 8i + j; unpacking gives the signs back."""
    sizes = (1, 7, 8, 9, 100)

    def body(ctx):
        found = []
        for numel in sizes:
            v = gradient(bucket_of((numel,)), seed, 0, numel)
            packed = impl.pack_signs(v)
            signs = impl.unpack_signs(packed, numel, torch.float32)
            found.append((packed.tolist(), str(packed.dtype), signs))
        return found

    for numel, (packed, dtype, signs) in zip(sizes, run(body, 1)[0], strict=True):
        positive = gradient(bucket_of((numel,)), seed, 0, numel) >= 0
        bits = [*positive.tolist(), *[False] * (-len(positive) % 8)]
        want = [sum(bits[i + j] << j for j in range(8)) for i in range(0, len(bits), 8)]
        what = f"{len(positive)} signs"
        expect_equal(dtype, "torch.uint8", what=f"dtype of {what}")
        expect_equal(packed, want, what=f"bytes of {what}", cause="bits")
        expect_close(signs, 2.0 * positive - 1, what=f"{what}, unpacked")


# -- both -----------------------------------------------------------------------------------------
@exercise("4.9", "virtual")
def test_quantised_state_goes_on_to_the_bit(impl, run, seed):
    """Saved and loaded, in a new hook or an old one, the steps after it are the same."""
    check_resumed(run, lambda ps: impl.OneBit(ps), seed)
    check_resumed(run, lambda _: impl.Int8(seed=seed), seed)


@exercise("4.9", "virtual gloo")
def test_quantised_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.OneBit(ps), seed)
    check_edges(run, lambda _: impl.Int8(seed=seed), seed)


@exercise("4.9", "virtual")
def test_quantised_works_in_a_group(impl, run):
    """Ranks 1 and 2 of three compress among themselves."""
    check_in_a_group(run, lambda ps, group: impl.OneBit(ps, group=group))
    check_in_a_group(run, lambda _, group: impl.Int8(group=group))


@exercise("4.9", "virtual")
def test_quantised_hooks_begin_and_do_not_wait(impl, run):
    """The hooks return while their messages are on the way."""
    check_begins(run, lambda ps: impl.OneBit(ps))
    check_begins(run, lambda _: impl.Int8())


@trace("4.9")
def trace_quantised(impl):
    """A bucket with all-reduce, then with int8."""
    return beside_all_reduce(lambda _: impl.Int8())
