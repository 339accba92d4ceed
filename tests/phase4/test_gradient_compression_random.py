"""Checks of exercise 4.7: random-K with a shared seed."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from tests.phase4.compressed_training import Sums, check_memory, check_training
from tests.phase4.compression import (
    Variants,
    all_gradients,
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

STEPS, CALLS = 5, 400
SHAPES = ((8, 5), (7,))  # 47 entries


@exercise("4.7", "virtual gloo cuda", nccl=True, asserts="count shared residual unscaled same-bits")
def test_sums_at_shared_positions_and_owes_the_rest(impl, run, seed, cases):
    """k positions, the same on all ranks; residuals are summed there, unscaled, and sent later."""
    for world_size, dtype in cases((3, torch.float64), (2, torch.float32), (1, torch.float64)):

        def body(ctx):
            bucket = bucket_of(*SHAPES, dtype=dtype, device=ctx.device)
            own = [gradient(bucket, seed, ctx.rank, step) for step in range(STEPS)]
            return several_steps(lambda ps: impl.RandomK(ps, 0.3, seed), bucket, own)

        results = run(body, world_size)
        what = f"14 of 47 entries of {world_size} ranks"
        expect_same_bits(results, what)
        own = all_gradients(bucket_of(*SHAPES, dtype=dtype), seed, world_size, STEPS)
        totals = [sum(parts) for parts in zip(*own, strict=True)]
        positions = [got.nonzero().flatten() for got in results[0]]
        for step, chosen in enumerate(positions):
            expect_equal(
                len(chosen), 14, what=f"{what}: entries sent in step {step}", cause="count"
            )
        want = follow(totals, positions)
        known = variants(totals, positions, 47 / 14)
        near = 1e-12 if dtype == torch.float64 else 1e-5  # sums over steps may cancel
        expect_steps(results, want, what, known, rtol=near, atol=near)


def variants(totals, positions, scale: float) -> Variants:
    """The sums that known mistakes give; ``scale``: n/k."""
    return {
        "no-error-feedback": (
            "this step's gradients alone give this sum: the residuals of earlier steps are lost",
            follow(totals, positions, feedback=False),
        ),
        "residual-not-cleared": (
            "sent entries are still in the residual: they are sent again",
            follow(totals, positions, clear=False),
        ),
        "scaled-up": (
            "it is scaled up by n/k: right without a residual, too much with one",
            [scale * step for step in follow(totals, positions)],
        ),
    }


def follow(totals, positions, feedback: bool = True, clear: bool = True) -> list[torch.Tensor]:
    """The sums that ``positions`` give, from each step's sum over the ranks; or after a mistake."""
    v, sums = torch.zeros_like(totals[0]), []
    for g, chosen in zip(totals, positions, strict=True):
        v = (v if feedback else 0) + g
        out = torch.zeros_like(v)
        out[chosen] = v[chosen]
        if clear:
            v[chosen] = 0
        sums.append(out)
    return sums


@exercise("4.7", "virtual", asserts="uniform independent randomness")
def test_every_position_is_as_likely(impl, run, seed):
    """Over 400 calls positions, pairs of them and repetitions are as frequent as chance allows."""
    numel, k = 20, 5

    def body(ctx):
        buckets = [bucket_of((numel,), index=index) for index in range(2)]
        hook = impl.RandomK([p for b in buckets for p in b.parameters], 0.25, seed)
        ones = torch.ones(numel)
        return torch.stack([reduced(hook, buckets[call % 2], ones) != 0 for call in range(CALLS)])

    drawn = run(body, 1)[0].double()
    expect_equal(drawn.sum(1).tolist(), [k] * CALLS, what="positions per call", cause="count")
    counts, pairs = drawn.sum(0), (drawn.T @ drawn).fill_diagonal_(0)
    mean = CALLS * k / numel
    spread = (mean * (1 - k / numel)) ** 0.5
    if (counts - mean).abs().max() > 6 * spread:
        fail(
            f"in {CALLS} calls the {numel} positions were drawn {counts.int().tolist()} times: "
            f"expected {mean:.0f} ± {spread:.0f} each",
            cause="not-uniform",
        )
    mean = CALLS * k * (k - 1) / (numel * (numel - 1))
    one, other = divmod(int(pairs.argmax()), numel)
    if pairs[one, other] > mean + 8 * mean**0.5:
        fail(
            f"in {CALLS} calls positions {one} and {other} were drawn together "
            f"{int(pairs[one, other])} times, expected {mean:.0f} ± {mean**0.5:.0f}. Any k "
            "positions must be as likely as any others",
            cause="positions-together",
        )
    for lag in (1, 2):
        again = float((drawn[lag:] * drawn[:-lag]).sum(1).mean())
        if abs(again - k * k / numel) > 6 * (0.75 / CALLS) ** 0.5:
            fail(
                f"{again:.2f} of {k} positions come again {lag} calls later in the mean, expected "
                f"{k * k / numel:.2f}. A call's positions must not depend on those before",
                cause="calls-depend",
            )


@exercise("4.7", "virtual", asserts="independent seed randomness")
def test_calls_buckets_and_seeds_draw_their_own(impl, run, seed):
    """No draw comes twice: in 30 calls for two buckets alike, with four seeds."""
    seeds, numel = [seed, seed + 1, seed + 2, seed + 37], 47

    def body(ctx):
        found = []
        for own_seed in seeds:
            torch.manual_seed(5)
            buckets = [bucket_of((numel,), index=index) for index in range(2)]
            hook = impl.RandomK([p for b in buckets for p in b.parameters], 0.3, own_seed)
            ones = torch.ones(numel)
            drawn = [reduced(hook, buckets[call % 2], ones) for call in range(60)]
            found.append([tuple(out.nonzero().flatten().tolist()) for out in drawn])
        return found

    first: dict[tuple[int, ...], str] = {}
    for own_seed, drawn in zip(seeds, run(body, 1)[0], strict=True):
        for call, positions in enumerate(drawn):
            name = f"call {call // 2} for bucket {call % 2} with seed {own_seed}"
            if positions in first:
                same = first[positions].endswith(f"seed {own_seed}")
                fail(
                    f"{name} draws the positions of {first[positions]}",
                    cause="drawn-again" if same else "seeds-collide",
                )
            first[positions] = name


@exercise("4.7", "virtual gloo", asserts="bytes messages cost")
def test_bytes_are_those_of_k_values(impl, run, seed, cases):
    """2(W-1)/W·k·itemsize bytes per bucket: no index travels."""
    for world_size, dtype in cases((3, torch.float32), (2, torch.bfloat16), (1, torch.float32)):

        def body(ctx):
            bucket = bucket_of((30, 90), (300,), dtype=dtype)
            hook = impl.RandomK(bucket.parameters, 0.1, seed)
            with ctx.region("steps"):
                for step in range(2):
                    reduced(hook, bucket, gradient(bucket, seed, ctx.rank, step))

        for log in run(body, world_size).logs:
            want = 2 * 2 * (world_size - 1) / world_size * 300 * dtype.itemsize
            formula = f"2 steps × 2(W-1)/W·300·{dtype.itemsize}"
            expect_bytes(log.select(region="steps"), want, formula, slack=8, messages=2)


@exercise("4.7", "virtual", asserts="state copy life")
def test_random_state_goes_on_to_the_bit(impl, run, seed):
    """After a save and a load, in a new hook or an old one, the later steps are the same."""
    check_resumed(run, lambda ps: impl.RandomK(ps, 0.3, seed), seed)


@exercise("4.7", "virtual gloo", asserts="empty count")
def test_random_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.RandomK(ps, 0.01), seed)


@exercise(
    "4.7",
    "virtual",
    asserts="group-only several-under-way untouched same-bits shared "
    "group dtype layout parameters life alone",
)
def test_random_two_models_in_two_groups(impl, run, seed):
    """Ranks 4, 1, 3 and ranks 2, 0 compress among themselves, in float64, float32 and float16."""

    def expect(sums: Sums) -> None:
        k, exact = round(0.3 * len(sums.own[0][0])), sums.dtype == torch.float16
        totals = [sum(parts) for parts in zip(*sums.own, strict=True)]
        positions = [got.nonzero().flatten() for got in sums.got[0]]  # fewer where a sum is zero
        for step, chosen in enumerate(positions):
            if len(chosen) > k or (len(chosen) < k and not exact):
                fail(
                    f"{sums.what}, step {step}: {len(chosen)} entries are not zero, expected {k}",
                    cause="count",
                )
        want = follow(totals, positions)
        known = variants(totals, positions, len(totals[0]) / k)
        expect_steps(sums.got, want, sums.what, known, rtol=1e-5, atol=1e-5)

    check_training(run, lambda ps, group: impl.RandomK(ps, 0.3, seed, group), seed, expect)


@exercise("4.7", "virtual", asserts="memory resources")
def test_random_memory_is_a_copy_of_the_gradients(impl, run):
    """A copy of the gradients, also after buckets are made anew."""
    check_memory(run, lambda ps, _: impl.RandomK(ps, 0.01), 1)


@exercise("4.7", "virtual", asserts="other-state refusals")
def test_a_refused_random_state_changes_nothing(impl, run):
    """A state of which a part fits is refused as a whole."""
    make = lambda ps: impl.RandomK(ps, 0.1)
    check_refused_state(run, [("a second parameter of another size", 4, make, make)])


@exercise("4.7", "virtual", asserts="begins cost")
def test_random_hook_begins_and_does_not_wait(impl, run):
    """The hook returns while the values are on the way."""
    check_begins(run, lambda ps: impl.RandomK(ps, 0.9))


@exercise("4.7", "virtual", asserts="refused refusals")
def test_random_bad_ratios_are_refused(impl, run):
    """Ratios outside (0, 1]."""
    ratios = (0.0, 1.25, -0.5, float("nan"))

    def body(ctx):
        return [refusal(impl.RandomK, [], ratio) for ratio in ratios]

    expect_refused(run(body, 2), [f"ratio {ratio}" for ratio in ratios])


@trace("4.7")
def trace_random(impl):
    """A bucket with all-reduce, then with random-K."""
    return beside_all_reduce(lambda ps: impl.RandomK(ps, 0.01))
