"""Checks of exercise 4.9: int8 with random rounding, and one bit with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.grading import exercise, expect_close, expect_equal, fail, trace
from tests.phase4.compressed_training import Sums, check_memory, check_training
from tests.phase4.compression import (
    Bucket,
    beside_all_reduce,
    bucket_of,
    check_begins,
    check_edges,
    check_refused_state,
    check_resumed,
    expect_bytes,
    expect_same_bits,
    expect_steps,
    gradient,
    reduced,
    several_steps,
)

STEPS = 4
BAD = (float("nan"), float("inf"), float("-inf"))


# -- int8 -----------------------------------------------------------------------------------------
def uneven(bucket: Bucket, seed: int, rank: int, world_size: int) -> list[Tensor]:
    """The rank's gradients of all steps: each rank's and each piece's are 10 times the last one's.

    In float16 they are tiny: a scale is too small for it, the numbers are not.
    """
    numel = bucket.buffer.numel()
    piece = torch.arange(numel) // -(-numel // world_size)
    wide = Bucket(0, [torch.nn.Parameter(torch.zeros(numel).double())])
    size = 3e-7 if bucket.buffer.dtype == torch.float16 else 1.0
    own = [gradient(wide, seed, rank, step) for step in range(STEPS)]
    return [(g * size * 10.0 ** (rank + piece)).to(bucket.buffer) for g in own]


def expect_within_steps(
    what: str, parts: list[Tensor], got: Tensor, rank: int | None = None
) -> None:
    """``got`` is the sum of ``parts``, off by no more than a step of each piece and of its sum."""
    wide = [p.double() for p in parts]
    total = torch.stack(wide).sum(0)
    size = -(-len(total) // len(parts))
    exact = torch.finfo(got.dtype)
    for piece, begin in enumerate(range(0, len(total), size)):
        here = slice(begin, begin + size)
        largest = sum(float(p[here].abs().max()) for p in wide)
        largest += (float(total[here].abs().max()) + largest / 127) * (1 + 4 * exact.eps)
        slack = exact.eps * largest + exact.smallest_normal * exact.eps
        off = float((got[here].double() - total[here]).abs().max())
        if not off <= largest / 127 * 1.001 + slack:
            hint = ": in float16 such a scale is 0, multiply in float32" if largest < 1e-3 else ""
            fail(
                f"{what}: piece {piece} is off by {off:.4g}; the ranks' steps and that of the sum "
                f"are {largest / 127:.4g} together{hint}",
                cause="scale-in-16-bits" if hint and got.dtype == torch.float16 else "too-far-off",
                rank=rank,
            )


@exercise("4.9", "virtual gloo cuda", asserts="int8-sum pieces scale same-bits dtype")
def test_int8_is_the_sum_within_its_steps(impl, run, seed, cases):
    """The sum over the ranks, off by less than a step of each quantisation, with the same bits."""
    sizes = (3, 50, torch.float32), (2, 33, torch.float64), (1, 9, torch.float32)
    more = (4, 3, torch.float32), (2, 40, torch.float16), (3, 40, torch.bfloat16)
    for world_size, numel, dtype in cases(*sizes, *more):

        def body(ctx):
            bucket = bucket_of((numel,), dtype=dtype, device=ctx.device)
            own = uneven(bucket, seed, ctx.rank, world_size)
            return several_steps(lambda _: impl.Int8(seed=seed), bucket, own)

        bucket = bucket_of((numel,), dtype=dtype)
        own = [uneven(bucket, seed, rank, world_size) for rank in range(world_size)]
        results = run(body, world_size)
        what = f"{numel} numbers of {world_size} ranks, in {str(dtype).removeprefix('torch.')}"
        expect_same_bits(results, what)
        for step, got in enumerate(results[0]):
            expect_within_steps(f"{what}, step {step}", [steps[step] for steps in own], got)


@exercise("4.9", "virtual", asserts="unbiased independent scale-bytes randomness")
def test_int8_packs_with_the_right_mean(impl, run, seed):
    """Over 400 draws every number comes out right in the mean, by itself; integers fit."""
    draws, columns = 400, 24

    def row(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 5 + number)
        values = (torch.rand(columns, generator=generator) * 240 - 120).mul(10.0**-number)
        values[:4] = torch.tensor([127.0, -127.0, 0.5, -0.5]) * 10.0**-number
        return values

    x = torch.stack([row(0), row(1), torch.zeros(columns)])

    def body(ctx):
        generator = torch.Generator().manual_seed(seed)
        packed = [impl.pack_int8(x.clone(), generator) for _ in range(draws)]
        first = impl.unpack_int8(packed[0], torch.float64)
        small = impl.unpack_int8(impl.pack_int8(tiny, generator), torch.float32)
        return torch.stack(packed), str(first.dtype), first, small

    tiny = row(30).unsqueeze(0)
    packed, dtype, first, small = run(body, 1)[0]
    off = float((small - tiny).abs().max() / tiny.abs().max())
    if not off < 1.01 / 127:
        fail(
            f"numbers of up to 1.27e-28 come back wrong by {off:.2g} of the largest. A step is "
            "1/127 of it, however small it is",
            cause="small-scale",
        )
    expect_equal(
        (tuple(packed.shape[1:]), str(packed.dtype)),
        ((3, columns + 4), "torch.int8"),
        what="shape and dtype of three packed rows",
        cause="packed-shape",
    )
    scales = packed[:, :, -4:].clone().view(torch.float32)
    want = (x.abs().amax(1, keepdim=True) / 127).expand(draws, 3, 1)
    expect_close(scales[:, :2], want[:, :2], what="the scale behind the integers", rtol=1e-6)
    integers = packed[:, :, :-4].double()
    if integers.min() < -127 or integers[:, 2].any():
        fail(
            "an integer is -128, or those of a row of zeros are not zero: the largest absolute "
            "value is 127 steps",
            cause="out-of-range",
        )
    expect_equal(dtype, "torch.float64", what="dtype of what unpack_int8 gives for float64")
    expect_close(first, (integers * want.double())[0], what="unpack_int8", rtol=1e-6)
    exact = (x[:2] / want[0, :2]).double()
    errors = integers[:, :2] - exact
    worst = (errors.mean(0).abs() - 6 * (0.25 / draws) ** 0.5).max()
    if worst > 0 or errors.abs().max() > 1.001:
        place = errors.mean(0).abs().argmax()
        fail(
            f"{float(exact.flatten()[place]):.4g} steps come out as "
            f"{float((errors.mean(0) + exact).flatten()[place]):.4g} in the mean of {draws} draws",
            cause="biased",
        )
    _expect_independent(errors.flatten(1)[:, (exact.flatten() % 1 - 0.5).abs() < 0.4])


def _expect_independent(errors: Tensor) -> None:
    """(draws, numbers): no two numbers, and no two draws, err together."""
    draws = len(errors)
    single = errors - errors.mean(0)
    single = single / single.std(0)
    together = (single.T @ single / draws).fill_diagonal_(0).abs().max()
    later = (single[1:] * single[:-1]).mean().abs() * single.shape[1] ** 0.5
    if max(together, later) > 7 / draws**0.5:
        fail(
            "numbers of one call, or of two calls in a row, are rounded up together. Each one "
            f"draws for itself (correlations up to {float(max(together, later)):.2f})",
            cause="same-noise",
        )


@exercise("4.9", "virtual", asserts="unbiased independent randomness")
def test_int8_rounding_is_right_in_the_mean(impl, run, seed):
    """Many equal numbers between two steps: their mean comes out right, on both sides of zero."""
    _expect_new_numbers(impl, run, seed)
    _expect_sums_in_float32(impl, run, seed)
    numel = 6000

    def body(ctx):
        hook, bucket = impl.Int8(seed=seed), bucket_of((numel,), dtype=torch.float32)
        values = torch.full((numel,), 100.4)  # too many digits for sums in 16 bits
        values[numel // 2 :] = -0.3
        values[:: numel // 8] = 127.381  # so that one step is 1.003, in every piece
        got = reduced(hook, bucket, values / ctx.world_size)
        return float(got[1 : numel // 8].mean()), float(got[numel // 2 + 1 : numel // 8 * 5].mean())

    for world_size in (1, 2):
        for up, down in run(body, world_size):
            for got, want in ((up, 100.4), (down, -0.3)):
                if abs(got - want) > 0.15:
                    fail(
                        f"of {world_size} ranks: 749 numbers of {want}, with steps of about 1, "
                        f"come out as {got:.3f} in the mean. Rounding is not right in the mean",
                        cause="biased",
                    )


def _expect_sums_in_float32(impl, run, seed) -> None:
    """In bfloat16, 3 ranks with steps of 1: sums are 381 at most, and 300 is exactly 100 steps of
    3.

    381 is no number of bfloat16: if sums are rounded to 16 bits, the step is another.
    """
    numel = 1200

    def body(ctx):
        hook, bucket = impl.Int8(seed=seed), bucket_of((numel,), dtype=torch.bfloat16)
        values = torch.full((numel,), 100.0)
        values[:: numel // 12] = 127.0
        return float((reduced(hook, bucket, values).round() == 300).double().mean())

    for rank, exact in enumerate(run(body, 3)):
        if exact < 0.95:
            fail(
                f"a bucket in bfloat16, 3 ranks, 100 and at most 127 steps of 1 on each: "
                f"{1 - exact:.0%} of the sums are not 300, which is 100 steps of 3. Add the "
                "pieces in float32, and pack that sum",
                cause="sum-rounded",
                rank=rank,
            )


def _expect_new_numbers(impl, run, seed) -> None:
    """Half a step on one rank is a quarter of a step of the sum. It is rounded twice, and the mean
    is right.

    If the second rounding reuses the numbers of the first, all that was rounded up goes up again.
    """
    numel = 1200

    def body(ctx):
        hook, bucket = impl.Int8(seed=seed), bucket_of((numel,), dtype=torch.float32)
        values = torch.zeros(numel)
        half = numel // 2
        values[half * ctx.rank : half * (ctx.rank + 1)] = 0.5
        values[::half] = 127.0
        got = reduced(hook, bucket, values)
        return [float(got[1:half].mean()), float(got[half + 1 :].mean())]

    for rank, means in enumerate(run(body, 2)):
        for piece, mean in enumerate(means):
            if abs(mean - 0.5) > 0.27:
                fail(
                    f"599 sums of 0.5, rounded twice, come out as {mean:.3f} in the mean in piece "
                    f"{piece}. The second rounding must draw new random numbers",
                    cause="biased",
                    rank=rank,
                )


@exercise("4.9", "virtual", asserts="independent randomness alone")
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
                "expected about half. The ranks draw the same random numbers, or none",
                cause="same-noise",
                rank=rank,
            )
        if torch.equal(first, second):
            fail("two calls draw the same random numbers", cause="same-noise", rank=rank)


@exercise("4.9", "virtual gloo", asserts="int8-bytes cost")
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


@exercise("4.9", "virtual", asserts="not-finite alone")
def test_int8_shows_what_is_not_finite(impl, run, seed):
    """A nan or an infinity of one rank spoils its piece on all ranks, and no other piece."""

    def body(ctx):
        found = []
        for bad in BAD:
            hook, bucket = impl.Int8(seed=seed), bucket_of((12,), dtype=torch.float32)
            values = torch.ones(12)
            if ctx.rank == 1:
                values[5] = bad
            found.append(reduced(hook, bucket, values))
        return found

    results = run(body, 3)
    expect_same_bits(results, "a nan, an infinity on rank 1")
    for rank, steps in enumerate(results):
        for bad, got in zip(BAD, steps, strict=True):
            finite = torch.isfinite(got)
            if finite[4:8].any():
                fail(
                    f"rank 1 has {bad} among entries 4 to 7; their sums are {got[4:8].tolist()}: "
                    "all ranks must see values that are not finite",
                    cause="nan-hidden",
                    rank=rank,
                )
            elsewhere = got[[0, 1, 2, 3, 8, 9, 10, 11]]
            if not (elsewhere - 3).abs().max() < 0.1:
                fail(
                    f"rank 1 has {bad} in piece 1; in the other pieces three ones add up to "
                    f"{elsewhere.tolist()}",
                    cause="piece-spoiled",
                    rank=rank,
                )


@exercise("4.9", "virtual", asserts="bit-not-finite alone")
def test_one_bit_shows_what_is_not_finite(impl, run):
    """A nan or an infinity of one rank is seen by all."""

    def body(ctx):
        found = []
        for bad in BAD:
            bucket = bucket_of((12,), dtype=torch.float32)
            values = torch.ones(12)
            if ctx.rank == 1:
                values[5] = bad
            found.append(reduced(impl.OneBit(bucket.parameters), bucket, values))
        return found

    for rank, steps in enumerate(run(body, 3)):
        for bad, got in zip(BAD, steps, strict=True):
            if torch.isfinite(got).any():
                fail(
                    f"rank 1 has {bad} in the bucket, whose mean size is {bad} then: the sums are "
                    f"{got.tolist()}",
                    cause="nan-hidden",
                    rank=rank,
                )


# -- one bit --------------------------------------------------------------------------------------
def simulate(
    own: list[list[Tensor]],
    *,
    feedback: bool = True,
    whose: int | None = None,
    same: bool = False,
    zero: float = 1.0,
    owed: float = 1.0,
) -> list[Tensor]:
    """Each step's Σ s·sign(v); ``own``: for each rank the gradients of all steps.

    ``feedback`` False: no residual; ``whose``: all scales are this rank's. ``same``: the residual
    takes back signs of size 1. ``zero``, ``owed``: sign(0) in the signs that are sent and taken
    back.
    """
    sums = [torch.zeros_like(g) for g in own[0]]
    rest = [torch.zeros_like(gradients[0]) for gradients in own]
    for step, total in enumerate(sums):
        vs = [g[step] + (r if feedback else 0) for g, r in zip(own, rest, strict=True)]
        scales = [v.abs().mean().float().to(v.dtype) for v in vs]
        for rank, (v, scale) in enumerate(zip(vs, scales, strict=True)):
            total += (scale if whose is None else scales[whose]) * v.sign().where(v != 0, zero)
            rest[rank] = v - (1 if same else scale) * v.sign().where(v != 0, owed)
    return sums


@exercise("4.9", "virtual gloo cuda", asserts="bit-sum residual same-bits")
def test_one_bit_sends_signs_and_owes_the_rest(impl, run, seed, cases):
    """Signs with each rank's own mean size are summed; the difference goes into the next step."""
    for world_size, numel in cases((3, 41), (2, 8), (1, 7), (4, 17)):

        def body(ctx):
            bucket = bucket_of((numel - 2,), (2,), device=ctx.device)
            own = scaled(bucket, seed, ctx.rank)
            return several_steps(lambda ps: impl.OneBit(ps), bucket, own)

        like = bucket_of((numel - 2,), (2,))
        own = [scaled(like, seed, rank) for rank in range(world_size)]
        known = {
            "no-error-feedback": (
                "this step's gradients alone give this sum: the error of the signs is lost",
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
            "sign-of-zero": (
                "an entry of 0 was sent as 1, and the residual lessened by 0: sign(0) is 1 in both",
                simulate(own, owed=0.0),
            ),
            "sign-of-zero-sent": (
                "an entry of 0 was sent as -1: sign(0) is 1",
                simulate(own, zero=-1.0, owed=-1.0),
            ),
        }
        what = f"one bit of each of {numel} numbers, {world_size} ranks"
        digit = 1e-6 * 3.0 ** (world_size - 1)  # of the largest scale, which is a float32
        expect_steps(run(body, world_size), simulate(own), what, known, rtol=1e-5, atol=digit)


def scaled(bucket: Bucket, seed: int, rank: int) -> list[Tensor]:
    """The rank's gradients of all steps, three times as large as those of the rank before."""
    own = [gradient(bucket, seed, rank, step) * 3.0**rank for step in range(STEPS)]
    own[0][0] = 0.0  # its sign is 1
    return own


@exercise("4.9", "virtual", asserts="residual dtype")
def test_one_bit_owes_the_last_digits(impl, run):
    """1/3 in float64 is sent as a float32; the difference is a residual,
    and comes in later steps."""

    def body(ctx):
        bucket = bucket_of((5,))
        hook = impl.OneBit(bucket.parameters)
        values = torch.full((5,), (1 + ctx.rank) / 3, dtype=torch.float64)
        return [reduced(hook, bucket, values * (step == 0)) for step in range(3)]

    for rank, steps in enumerate(run(body, 2)):
        off = float((sum(steps) - 1).abs().max())
        if not off < 1e-12:
            fail(
                f"1/3 and 2/3 on two ranks, then two steps of zeros, in float64: all that was sent "
                f"is off by {off:.3g} on rank {rank}. Subtract from the residual the sent value, "
                "with the scale as the float32 in the message",
                cause="residual-of-another-scale",
                rank=rank,
            )


@exercise("4.9", "virtual gloo", asserts="bit-bytes cost")
def test_one_bit_bytes(impl, run, seed, cases):
    """(W-1)(⌈n/8⌉ + 4) bytes in one message per bucket: eight signs to a byte, and the scale."""
    wide, half = torch.float64, torch.bfloat16
    for world_size, numel, dtype in cases((3, 1001, wide), (2, 64, half), (1, 64, half)):

        def body(ctx):
            bucket = bucket_of((numel,), dtype=dtype)
            hook = impl.OneBit(bucket.parameters)
            with ctx.region("step"):
                reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))

        for log in run(body, world_size).logs:
            want = (world_size - 1) * (-(-numel // 8) + 4)
            mine = log.select(region="step")
            expect_bytes(mine, want, f"(W-1)(⌈{numel}/8⌉ + 4)", messages=1)


@exercise("4.9", "virtual", asserts="bits layout")
def test_signs_fill_bytes(impl, run, seed):
    """Bit j of byte i is the sign of entry 8i + j; unpacking gives the signs back."""
    sizes = (1, 7, 8, 9, 100)

    def body(ctx):
        found = []
        for numel in sizes:
            v = signed(numel, seed)
            packed = impl.pack_signs(v)
            signs = impl.unpack_signs(packed, numel, torch.float64)
            strided = impl.pack_signs(torch.stack([v, -v], 1)[:, 0])
            found.append((packed.tolist(), str(packed.dtype), signs, strided.tolist()))
        return found

    for numel, (packed, dtype, signs, strided) in zip(sizes, run(body, 1)[0], strict=True):
        positive = signed(numel, seed) >= 0
        bits = [*positive.tolist(), *[False] * (-len(positive) % 8)]
        want = [sum(bits[i + j] << j for j in range(8)) for i in range(0, len(bits), 8)]
        what = f"{len(positive)} signs"
        expect_equal(dtype, "torch.uint8", what=f"dtype of {what}")
        expect_equal(packed, want, what=f"bytes of {what}", cause="bits")
        expect_equal(strided, want, what=f"bytes of {what} of a strided tensor", cause="bits")
        expect_equal(str(signs.dtype), "torch.float64", what=f"dtype of {what}, unpacked")
        expect_close(signs, 2.0 * positive.double() - 1, what=f"{what}, unpacked")


def signed(numel: int, seed: int) -> Tensor:
    """(numel,) in bfloat16, with zeros of both signs."""
    v = gradient(bucket_of((numel,), dtype=torch.bfloat16), seed, 0, numel)
    v[2::8], v[5::8] = 0.0, -0.0
    return v


# -- both -----------------------------------------------------------------------------------------
@exercise("4.9", "virtual", asserts="state copy life")
def test_quantised_state_goes_on_to_the_bit(impl, run, seed):
    """After a save and a load, in a new hook or an old one, the later steps are the same."""
    check_resumed(run, lambda ps: impl.OneBit(ps), seed)
    check_resumed(run, lambda _: impl.Int8(seed=seed), seed)


@exercise("4.9", "virtual gloo", asserts="empty")
def test_quantised_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.OneBit(ps), seed)
    check_edges(run, lambda _: impl.Int8(seed=seed), seed)


@exercise(
    "4.9",
    "virtual",
    asserts="int8-sum alone group-only several-under-way untouched same-bits "
    "group dtype layout parameters life",
)
def test_int8_two_models_in_two_groups(impl, run, seed):
    """Ranks 4, 1, 3 and ranks 2, 0 send int8 among themselves, in three dtypes."""

    def expect(sums: Sums) -> None:
        for step, got in enumerate(sums.got[0]):
            parts = [steps[step] for steps in sums.own]
            expect_within_steps(f"{sums.what}, step {step}", parts, got, sums.ranks[0])

    check_training(run, lambda _, group: impl.Int8(group, seed), seed, expect)


@exercise(
    "4.9",
    "virtual",
    asserts="bit-sum residual alone group-only several-under-way untouched same-bits "
    "group dtype layout parameters life",
)
def test_one_bit_two_models_in_two_groups(impl, run, seed):
    """Ranks 4, 1, 3 and ranks 2, 0 send signs among themselves, in three dtypes."""

    def expect(sums: Sums) -> None:
        exact = sums.dtype != torch.float16
        steps = len(sums.own[0]) if exact else 1  # later signs depend on how a mean is rounded
        want = simulate([own[:steps] for own in sums.own])
        known = {
            "no-error-feedback": (
                "this step's gradients alone give this sum: the error of the signs is lost",
                simulate([own[:steps] for own in sums.own], feedback=False),
            )
        }
        got = [of_rank[:steps] for of_rank in sums.got]
        rtol = 1e-5 if exact else 4e-3
        expect_steps(got, want, sums.what, known, rtol=rtol, atol=1e-6)

    check_training(run, lambda ps, group: impl.OneBit(ps, group=group), seed, expect)


@exercise("4.9", "virtual", asserts="memory resources")
def test_quantised_memory(impl, run):
    """One bit keeps a copy of the gradients, int8 nothing."""
    check_memory(run, lambda ps, _: impl.OneBit(ps), 1)
    check_memory(run, lambda ps, _: impl.Int8(), 0)


@exercise("4.9", "virtual", asserts="other-state refusals")
def test_a_refused_one_bit_state_changes_nothing(impl, run):
    """A state of which a part fits is refused as a whole."""
    make = lambda ps: impl.OneBit(ps)
    check_refused_state(run, [("a second parameter of another size", 4, make, make)])


@exercise("4.9", "virtual", asserts="begins cost")
def test_quantised_hooks_begin_and_do_not_wait(impl, run):
    """The hooks return while their messages are on the way."""
    check_begins(run, lambda ps: impl.OneBit(ps))
    check_begins(run, lambda _: impl.Int8(), halves=True)


@trace("4.9")
def trace_quantised(impl):
    """A bucket with all-reduce, then with int8."""
    return beside_all_reduce(lambda _: impl.Int8())
