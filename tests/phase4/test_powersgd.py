"""Checks of exercise 4.8: PowerSGD with warm start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import exercise, expect_close, expect_refused, fail, refusal, trace
from tests.phase4.compression import (
    Bucket,
    all_gradients,
    beside_all_reduce,
    bucket_of,
    check_begins,
    check_edges,
    check_in_a_group,
    check_refused_state,
    check_resumed,
    check_time_gained,
    expect_bytes,
    expect_same_bits,
    gradient,
    reduced,
    several_steps,
)

SHAPES = ((12, 9), (9,), (2, 2), (10, 3, 2, 2))  # what is compressed with rank 2: first and last
TINY = {"rtol": 1e-8, "atol": 1e-9}


def low_rank(m: int, n: int, rank: int, seed: int) -> Tensor:
    """(m, n) of the rank given."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, rank, generator=generator).double() for size in (m, n))
    return a @ b.T


def shares(total: Tensor, rank: int, world_size: int, seed: int) -> Tensor:
    """What ``rank`` has of ``total``: full of noise that cancels in the sum over the ranks."""
    noise = [
        torch.randn(total.shape, generator=torch.Generator().manual_seed(seed + r)).double()
        for r in range(world_size)
    ]
    return total / world_size + noise[rank] - sum(noise) / world_size


def sum_of_rank_2(bucket: Bucket, seed: int) -> Tensor:
    """A sum over the ranks whose first and last matrix have rank 2, for a bucket of ``SHAPES``."""
    bucket.buffer.copy_(gradient(bucket, seed, 0, 0))
    bucket.views[0].copy_(low_rank(12, 9, 2, seed))
    bucket.views[3].copy_(low_rank(10, 12, 2, seed + 1).view(SHAPES[3]))
    return bucket.buffer.cpu()


def two_steps(seed: int) -> tuple[Bucket, Tensor]:
    """A bucket, and what its second step's sum shall be with what the first has left out."""
    return bucket_of((12, 9), (4,)), torch.cat([low_rank(12, 9, 2, seed).flatten(), torch.ones(4)])


def left_out(bucket: Bucket, seed: int, world_size: int, out: Tensor) -> Tensor:
    """What the first step's sum over the ranks has more than ``out``."""
    return sum(gradient(bucket, seed, r, 0) for r in range(world_size)) - out


def with_sizes(seed: int, sizes: Tensor) -> Tensor:
    """(12, 9) with these singular values; its directions follow from the seed."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, 9, generator=generator).double()).Q for n in (12, 9))
    return u * sizes @ v.T


def not_orthonormal(want: Tensor, shape: tuple[int, int]):
    """A rule: the right columns, of another size."""

    def rule(case: Case) -> Diagnosis | None:
        got, right = (t.flatten()[: want.numel()].view(shape) for t in (case.got, want.double()))
        basis = torch.linalg.svd(right, full_matrices=False).U[:, :2]
        inside = basis.T @ got
        sizes = torch.linalg.svdvals(inside)
        outside = got - basis @ inside
        if sizes[1] < 1e-6 * sizes[0] or outside.norm() > 1e-6 * got.norm():
            return None
        return Diagnosis(
            "not-orthonormal",
            "the columns are a combination of the right ones, of other sizes: P·Qᵀ with Q = Mᵀ·P "
            "is M only if P's columns are orthonormal",
        )

    return rule


@exercise("4.8", "virtual gloo cuda")
def test_a_sum_of_low_rank_is_exact(impl, run, seed, cases):
    """If the sum over the ranks has rank 2, rank 2 gives it exactly, whatever each rank has."""
    for world_size in cases(3, 1, 2, 4):

        def body(ctx):
            bucket = bucket_of(*SHAPES, device=ctx.device)
            hook = impl.PowerSGD(bucket.parameters, 2)
            own = shares(sum_of_rank_2(bucket, seed), ctx.rank, ctx.world_size, seed)
            return [reduced(hook, bucket, own.to(ctx.device)).cpu()]

        total = sum_of_rank_2(bucket_of(*SHAPES), seed)
        results = run(body, world_size)
        what = f"a bucket of {world_size} ranks whose sum has rank 2"
        expect_same_bits(results, what)
        for rank, (got,) in enumerate(results):
            expect_close(
                got,
                total,
                what=what,
                rank=rank,
                contributions=[shares(total, r, world_size, seed) for r in range(world_size)],
                rules=[not_orthonormal(total[:108], (12, 9))],
                **TINY,
            )


@exercise("4.8", "virtual")
def test_what_is_left_out_comes_next(impl, run, seed):
    """Error feedback: the next step approximates its gradient plus what the last one left out."""

    def body(ctx):
        bucket, whole = two_steps(seed)
        hook = impl.PowerSGD(bucket.parameters, 2)
        out = reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))
        left = left_out(bucket, seed, ctx.world_size, out)  # of rank 7 and more
        second = shares(whole - left, ctx.rank, ctx.world_size, seed)
        return [out, reduced(hook, bucket, second)]

    bucket, target = two_steps(seed)
    for world_size in (3, 1):
        results = run(body, world_size)
        expect_same_bits(results, "two steps")
        for rank, (out, got) in enumerate(results):
            left = float(left_out(bucket, seed, world_size, out).norm())
            if left < 1e-6:
                fail("the first step left nothing out: it was not compressed", cause="exact")
            if not torch.allclose(got, target, rtol=1e-7, atol=1e-7):
                off = float((got - target).norm())
                fail(
                    f"on rank {rank} of {world_size}, step 1 left out a part of norm {left:.3g}; "
                    f"with it, step 2's sum has rank 2, but comes out wrong by {off:.3g}: each "
                    "rank owes what it had minus 1/W of what was sent",
                    cause="no-error-feedback",
                    rank=rank,
                )


@exercise("4.8", "virtual")
def test_warm_start_finds_the_best_approximation(impl, run, seed):
    """The same matrix in 25 steps: the last approximation is the best of its rank."""
    sizes = torch.tensor([8.0, 6.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7, 0.6]).double()

    def body(ctx):
        bucket = bucket_of((12, 9))
        hook = impl.PowerSGD(bucket.parameters, 2)
        put, got = with_sizes(seed, sizes).flatten(), []
        for _ in range(25):
            got.append(reduced(hook, bucket, put / ctx.world_size))
            put = got[-1]  # with what is owed, that is the whole matrix again
        return got

    results = run(body, 2)
    expect_same_bits(results, "25 steps")
    matrix, best = (with_sizes(seed, s).flatten() for s in (sizes, sizes * (sizes > 2)))
    least, last = (float((x - matrix).norm()) for x in (best, results[0][-1]))
    if last > 1.001 * least:
        fail(
            f"after 25 steps the approximation is off by {last:.4g}, the best of rank 2 is off by "
            f"{least:.4g}: each step must begin with the Q of the step before",
            cause="no-warm-start",
        )


@exercise("4.8", "virtual gloo")
def test_bytes_are_those_of_two_thin_matrices(impl, run, seed, cases):
    """2(W-1)/W·itemsize·(Σ r(m + n) + the rest) bytes, in two messages per bucket."""
    shapes = ((40, 30), (30,), (8, 4, 3, 3), (3, 2), (1, 50))
    for world_size, rank_, dtype in cases(
        (3, 2, torch.float32), (2, 1, torch.float64), (1, 4, torch.float32), (4, 4, torch.bfloat16)
    ):

        def body(ctx):
            bucket = bucket_of(*shapes, dtype=dtype)
            hook = impl.PowerSGD(bucket.parameters, rank_)
            with ctx.region("steps"):
                for step in range(2):
                    reduced(hook, bucket, gradient(bucket, seed, ctx.rank, step))

        sent = 0
        for m, n in ((40, 30), (30, 1), (8, 36), (3, 2), (1, 50)):
            r = min(rank_, m, n)
            sent += r * (m + n) if n > 1 and r * (m + n) < m * n else m * n
        want = 2 * 2 * (world_size - 1) / world_size * dtype.itemsize * sent
        formula = f"2 steps × 2(W-1)/W·{dtype.itemsize}·{sent}"
        for log in run(body, world_size).logs:
            expect_bytes(log.select(region="steps"), want, formula, slack=16, messages=4)


@exercise("4.8", "virtual")
def test_vectors_and_small_matrices_are_exact(impl, run, seed):
    """Biases, and matrices that two factors would not make smaller, are sums, step by step."""
    shapes = ((5,), (2, 3), (1, 7), ())

    def body(ctx):
        bucket = bucket_of((9, 9), *shapes)
        own = [gradient(bucket, seed, ctx.rank, step) for step in range(3)]
        return several_steps(lambda ps: impl.PowerSGD(ps, 2), bucket, own)

    own = all_gradients(bucket_of((9, 9), *shapes), seed, 2, 3)
    for rank, steps in enumerate(run(body, 2)):
        for step, got in enumerate(steps):
            parts = [values[step][81:] for values in own]
            expect_close(
                got[81:],
                sum(parts),
                what=f"what is sent as it is, step {step}",
                rank=rank,
                contributions=parts,
                **TINY,
            )


def both_of_rank_2(seed: int) -> Tensor:
    """Two matrices of rank 2, one after the other, as they lie in memory."""
    return torch.cat([low_rank(*size, 2, seed).flatten() for size in ((9, 12), (10, 12))])


@exercise("4.8", "virtual")
def test_layouts_and_zeros(impl, run, seed):
    """Transposed and channels-last parameters; after a step of zeros nothing is nan or lost."""

    def body(ctx):
        flat = nn.Parameter(torch.zeros(9, 12).double().T)
        images = torch.zeros(10, 3, 2, 2).double().to(memory_format=torch.channels_last)
        bucket = Bucket(0, [flat, nn.Parameter(images)])
        hook = impl.PowerSGD(bucket.parameters, 2)
        found, total = [], both_of_rank_2(seed)
        for values in (total * 0, total, total * 0, total * 0):
            own = shares(values, ctx.rank, ctx.world_size, seed) if values.any() else values
            found.append(reduced(hook, bucket, own))
        return found

    for rank, steps in enumerate(run(body, 2)):
        if not all(torch.isfinite(got).all() for got in steps):
            fail("after a step of zeros there is nan", cause="nan", rank=rank)
        expect_close(
            sum(steps),
            both_of_rank_2(seed),
            what="the sum of steps of zeros, of rank 2, of zeros and of zeros",
            rank=rank,
            rtol=1e-6,
            atol=1e-7,
        )


@exercise("4.8", "virtual")
def test_power_state_goes_on_to_the_bit(impl, run, seed):
    """Saved and loaded, in a new hook or an old one, the steps after it are the same."""
    check_resumed(run, lambda ps: impl.PowerSGD(ps, 1), seed)


@exercise("4.8", "virtual gloo")
def test_power_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.PowerSGD(ps, 2), seed)


@exercise("4.8", "virtual")
def test_power_works_in_a_group(impl, run):
    """Ranks 1 and 2 of three compress among themselves."""
    check_in_a_group(run, lambda ps, group: impl.PowerSGD(ps, group=group))


@exercise("4.8", "virtual")
def test_power_hook_begins_and_does_not_wait(impl, run):
    """The hook returns while P is on the way."""
    check_begins(run, lambda ps: impl.PowerSGD(ps))


@exercise("4.8", "virtual")
def test_power_bad_input_is_refused(impl, run):
    """A rank of 0 or less; a state of another model, or of another rank."""

    def body(ctx):
        mine, others = (bucket_of(shape).parameters for shape in ((6, 5), (5, 6)))
        hook = impl.PowerSGD(mine, 1)
        return [
            refusal(impl.PowerSGD, mine, 0),
            refusal(impl.PowerSGD, mine, -3),
            refusal(hook.load_state_dict, impl.PowerSGD(others, 1).state_dict()),
            refusal(hook.load_state_dict, impl.PowerSGD(mine, 2).state_dict()),
        ]

    calls = [("rank 0", [0]), ("rank -3", [-3]), ("another model", []), ("another rank", [])]
    expect_refused(run(body, 2), calls)


@exercise("4.8", "virtual")
def test_a_refused_power_state_changes_nothing(impl, run):
    """A state of which a part fits is refused as a whole."""
    make = lambda ps: impl.PowerSGD(ps, 1)
    check_refused_state(run, [("a second parameter of another size", 4, make, make)])


@exercise("4.8", "gloo")
def test_power_gains_time_between_nodes(impl, run, nodes):
    """Two nodes with a link of 8 Mbit/s: 1 MB takes a second, and compressed far less."""
    check_time_gained(run, nodes, lambda ps: impl.PowerSGD(ps, 2), 30)


@trace("4.8")
def trace_powersgd(impl):
    """A bucket with all-reduce, then with PowerSGD."""
    return beside_all_reduce(lambda ps: impl.PowerSGD(ps, 2))
