"""Checks of exercise 4.7: random-K with a shared seed."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_equal, expect_refused, fail, refusal, trace
from tests.phase4.compression import (
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

STEPS = 5
SHAPES = ((8, 5), (7,))  # 47 entries


@exercise("4.7", "virtual gloo cuda")
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
        known = {
            "no-error-feedback": (
                "it is what this step's gradients alone give: earlier ones are lost",
                follow(totals, positions, feedback=False),
            ),
            "residual-not-cleared": (
                "what was sent is still in the residual: it is sent again",
                follow(totals, positions, clear=False),
            ),
            "scaled-up": (
                "it is scaled up by n/k: right without a residual, too much with one",
                [47 / 14 * step for step in want],
            ),
        }
        # float32 sums over steps may cancel
        expect_steps(results, want, what, known, rtol=1e-5, atol=1e-5)


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


@exercise("4.7", "virtual")
def test_every_position_is_as_likely(impl, run, seed):
    """Over 300 calls each of 20 positions is drawn as often as chance allows; seeds differ."""
    calls, numel, k = 300, 20, 5

    def body(ctx):
        drawn = []
        for own_seed in (seed, seed + 1):
            bucket = bucket_of((numel,))
            hook = impl.RandomK(bucket.parameters, 0.25, own_seed)
            outs = [reduced(hook, bucket, torch.ones(numel)) != 0 for _ in range(calls)]
            drawn.append(torch.stack(outs))
        return drawn

    first, second = run(body, 1)[0]
    if torch.equal(first, second):
        fail("two hooks with different seeds draw the same positions", cause="seed-ignored")
    mean = calls * k / numel
    spread = (mean * (1 - k / numel)) ** 0.5
    worst = float((first.sum(0) - mean).abs().max())
    if worst > 6 * spread:
        fail(
            f"in {calls} calls the {numel} positions were drawn {first.sum(0).tolist()} times: "
            f"expected {mean:.0f} ± {spread:.0f} each",
            cause="not-uniform",
        )


@exercise("4.7", "virtual gloo")
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
            expect_bytes(log.select(region="steps"), want, formula, slack=8)


@exercise("4.7", "virtual")
def test_random_state_goes_on_to_the_bit(impl, run, seed):
    """Saved and loaded, in a new hook or an old one, the steps after it are the same."""
    check_resumed(run, lambda ps: impl.RandomK(ps, 0.3, seed), seed)


@exercise("4.7", "virtual gloo")
def test_random_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.RandomK(ps, 0.01), seed)


@exercise("4.7", "virtual")
def test_random_works_in_a_group(impl, run):
    """Ranks 1 and 2 of three compress among themselves."""
    check_in_a_group(run, lambda ps, group: impl.RandomK(ps, 0.5, group=group))


@exercise("4.7", "virtual")
def test_random_hook_begins_and_does_not_wait(impl, run):
    """The hook returns while the values are on the way."""
    check_begins(run, lambda ps: impl.RandomK(ps, 0.9))


@exercise("4.7", "virtual")
def test_random_bad_ratios_are_refused(impl, run):
    """Ratios outside (0, 1]."""

    def body(ctx):
        return [refusal(impl.RandomK, [], ratio) for ratio in (0.0, 1.25)]

    expect_refused(run(body, 2), [("ratio 0", ["0"]), ("ratio 1.25", ["1.25"])])


@trace("4.7")
def trace_random(impl):
    """A bucket with all-reduce, then with random-K."""
    return beside_all_reduce(lambda ps: impl.RandomK(ps, 0.01))
