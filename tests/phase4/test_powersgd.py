"""Checks of exercise 4.8: PowerSGD with warm start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase4.compressed_training import SIZES, Sums, check_memory, check_training
from tests.phase4.compression import (
    Bucket,
    all_gradients,
    also,
    beside_all_reduce,
    bucket_of,
    check_begins,
    check_edges,
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
    """The summand of ``rank`` in ``total``: full of noise that cancels in
    the sum over the ranks."""
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
    """A bucket, and the sum that its second step shall have with the part that
    the first has left out."""
    return bucket_of((12, 9), (4,)), torch.cat([low_rank(12, 9, 2, seed).flatten(), torch.ones(4)])


def left_out(bucket: Bucket, seed: int, world_size: int, out: Tensor) -> Tensor:
    """The part of the first step's sum over the ranks that ``out`` lacks."""
    return sum(gradient(bucket, seed, r, 0) for r in range(world_size)) - out


def second_of(
    bucket: Bucket, whole: Tensor, seed: int, rank: int, world_size: int, out: Tensor
) -> Tensor:
    """The gradients of ``rank`` in step 2: with all that step 1 left out,
    their sum is ``whole``."""
    left = left_out(bucket, seed, world_size, out)  # of rank 7 and more
    return shares(whole - left, rank, world_size, seed)


def own_qs(bucket: Bucket, whole: Tensor, seed: int, world_size: int, out: Tensor) -> Tensor:
    """The result of step 2 for the matrix if each rank keeps its own Mᵀ·P of step 1."""
    sent = out[:108].view(12, 9)
    basis, p = torch.linalg.svd(sent).U[:, :2], 0
    for rank in range(world_size):
        first = gradient(bucket, seed, rank, 0)[:108].view(12, 9)
        second = second_of(bucket, whole, seed, rank, world_size, out)[:108].view(12, 9)
        p = p + (second + first - sent / world_size) @ (first.T @ basis)
    columns = torch.linalg.qr(p).Q
    return (columns @ (columns.T @ whole[:108].view(12, 9))).flatten()


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


@exercise("4.8", "virtual", asserts="dependent dtype")
def test_orthonormal_columns(impl, run, seed):
    """Columns are orthonormal and span those given: also dependent ones, zeros, and 16 bits."""
    whole = low_rank(12, 3, 3, seed)
    cases = {
        "12 × 3": whole,
        "one column": whole[:, :1],
        "two equal columns": torch.stack([whole[:, 0], whole[:, 0]], 1),
        "zeros": torch.zeros(12, 2).double(),
        "float32": whole.float(),
        "bfloat16": whole.bfloat16(),
        "float16": whole.half(),
    }

    def body(ctx):
        return [impl.orthonormal(p.clone()) for p in cases.values()]

    for (what, p), got in zip(cases.items(), run(body, 1)[0], strict=True):
        expect_equal((str(got.dtype), tuple(got.shape)), (str(p.dtype), tuple(p.shape)), what=what)
        coarse = p.dtype in (torch.bfloat16, torch.float16)
        near = {"rtol": 2e-2, "atol": 2e-2} if coarse else {"rtol": 1e-4, "atol": 1e-4}
        wide, columns = got.double(), p.double()
        square = wide.T @ wide
        if not torch.allclose(square, torch.eye(p.shape[1]).double(), **near):
            text = ", ".join(f"{x:.3g}" for x in square.flatten().tolist())
            fail(
                f"the columns made of {what} are not orthonormal: PᵀP is {text}. Columns that are "
                "dependent, or zeros, take orthonormal ones in their place, as QR does",
                cause="not-orthonormal",
            )
        expect_close(wide @ (wide.T @ columns), columns, what=f"P·Pᵀ times {what}", **near)


@exercise("4.8", "virtual gloo cuda", asserts="projection same-bits others-exact")
def test_a_sum_of_low_rank_is_exact(impl, run, seed, cases):
    """If the sum over the ranks has rank 2, rank 2 gives it exactly, whatever the summands are."""
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


@exercise("4.8", "virtual", asserts="residual")
def test_what_is_left_out_comes_next(impl, run, seed):
    """Error feedback: the next step approximates its gradient plus the part that
    the last step left out."""

    def body(ctx):
        bucket, whole = two_steps(seed)
        hook = impl.PowerSGD(bucket.parameters, 2)
        out = reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))
        second = second_of(bucket, whole, seed, ctx.rank, ctx.world_size, out)
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
                own = own_qs(bucket, target, seed, world_size, out)
                if world_size > 1 and torch.allclose(got[:108], own, rtol=1e-5, atol=1e-6):
                    fail(
                        f"step 2 on rank {rank} of {world_size} begins with each rank's own Mᵀ·P "
                        "of step 1. The Q that is kept must be the sum over the ranks",
                        cause="own-q",
                        rank=rank,
                    )
                fail(
                    f"on rank {rank} of {world_size}, step 1 left out a part of norm {left:.3g}. "
                    f"With it, step 2's sum has rank 2, but is wrong by {off:.3g}. A rank's "
                    "residual is its own value minus 1/W of the sum that was sent",
                    cause="no-error-feedback",
                    rank=rank,
                )


@exercise("4.8", "virtual", asserts="residual dtype")
def test_what_16_bits_leave_out_comes_next(impl, run, seed):
    """In bfloat16, too, steps of rank 1 give in the mean a matrix of rank 3."""

    def body(ctx):
        bucket = bucket_of((12, 9), dtype=torch.bfloat16)
        hook = impl.PowerSGD(bucket.parameters, 1)
        own = whole.to(torch.bfloat16) / ctx.world_size
        return [reduced(hook, bucket, own).double() for _ in range(12)]

    sizes = torch.tensor([3.0, 2.5, 2.0, *[0.0] * 6]).double()
    whole = with_sizes(seed, sizes).flatten()
    results = run(body, 2)
    expect_same_bits(results, "12 steps in bfloat16")
    mean = sum(results[0]) / 12  # what is owed in the end counts a twelfth
    off = float((mean - whole).norm() / whole.norm())
    if not off < 0.4:
        fail(
            f"the same matrix of rank 3 in 12 steps of rank 1, in bfloat16. Their mean is off by "
            f"{off:.0%} of it: the next steps must bring what a step leaves out",
            cause="no-error-feedback",
        )


@exercise("4.8", "virtual", asserts="warm-start")
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
            f"{least:.4g}. Each step must begin with the Q of the step before",
            cause="no-warm-start",
        )


@exercise("4.8", "virtual gloo", asserts="bytes messages width cost")
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


@exercise("4.8", "virtual", asserts="messages cost")
def test_one_message_where_nothing_is_compressed(impl, run, seed):
    """A bucket of vectors and small matrices is one all-reduce."""
    widths = {(5,): 0, (4, 4): 0, (2, 3): 0, (4, 5): 2, (1, 50): 0, (9, 2, 3, 2): 2, (): 0}
    widths |= {(4, 5, 2): 2, (6, 2, 2, 2, 2): 2, (3, 2, 1): 0}

    def body(ctx):
        bucket = bucket_of((5,), (4, 4), (2, 3))  # 2·(4 + 4) = 4·4: two factors are not less
        hook = impl.PowerSGD(bucket.parameters, 2)
        reduced(hook, bucket, gradient(bucket, seed, ctx.rank, 0))
        return [hook.width(torch.zeros(shape)) for shape in widths]

    results = run(body, 3)
    for shape, got in zip(widths, results[0], strict=True):
        what = f"width of a parameter {shape} with rank 2 (0: two factors are not smaller)"
        expect_equal(got, widths[shape], what=what, cause="width")
    for log in results.logs:
        expect_bytes(log, 2 * 2 / 3 * 8 * 27, "2(W-1)/W·8·27", slack=16, messages=1)


@exercise("4.8", "virtual", asserts="others-exact width")
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
                what=f"the part that is sent uncompressed, step {step}",
                rank=rank,
                contributions=parts,
                **TINY,
            )


def both_of_rank_2(seed: int) -> Tensor:
    """Two matrices of rank 2, one after the other, as they lie in memory."""
    return torch.cat([low_rank(*size, 2, seed).flatten() for size in ((9, 12), (10, 12))])


@exercise("4.8", "virtual", asserts="layout dependent matrix")
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


@exercise("4.8", "virtual", asserts="state copy life")
def test_power_state_goes_on_to_the_bit(impl, run, seed):
    """After a save and a load, in a new hook or an old one, the later steps are the same."""
    check_resumed(run, lambda ps: impl.PowerSGD(ps, 1), seed)


@exercise("4.8", "virtual gloo", asserts="empty dependent")
def test_power_empty_and_tiny_buckets(impl, run, seed):
    """Buckets of no, one and two entries, and of zeros only."""
    check_edges(run, lambda ps: impl.PowerSGD(ps, 2), seed)


MATRICES = ((0, 108, (9, 12)), (108, 228, (10, 12)))  # begin, end and shape in the large buckets


def projected(total: Tensor, start: Tensor | None, rank: int) -> tuple[Tensor, Tensor]:
    """(P·Qᵀ, Q) of the matrix ``total``, P the orthonormal columns of total·start."""
    p = torch.linalg.qr(total @ start).Q[:, :rank]
    q = total.T @ p
    return p @ q.T, q


def expect_projections(sums: Sums, rank: int = 2) -> None:
    """The Q of the step before gives every step; the first step is a projection."""
    owed = torch.zeros(SIZES[sums.dtype][0]).double()
    of_five = owed  # what is owed if the share is that of all 5 ranks, not of the group's
    qs: dict[int, Tensor] = {}
    for step, got in enumerate(sums.got[0]):
        total = owed + sum(steps[step].double() for steps in sums.own)
        want, got = total.clone(), got.double()
        known = {
            "share-of-all-ranks": (
                "each rank subtracts 1/W of the sum that was sent, and W counts the ranks of its "
                "group: here 5, all ranks of the program, were counted",
                total - owed + of_five,
            ),
            "no-error-feedback": ("the part that earlier steps left out is lost", total - owed),
        }
        known = {cause: (said, wrong.clone()) for cause, (said, wrong) in known.items()}
        if sums.dtype != torch.float16:  # its matrices are too small
            for begin, end, shape in MATRICES:
                whole, out = (x[begin:end].view(shape) for x in (total, got))
                if not step:  # the first Q is anybody's
                    qs[begin] = torch.linalg.svd(out).Vh[:rank].T
                    left = torch.linalg.svd(out).U[:, :rank]
                    want[begin:end] = (left @ left.T @ whole).flatten()
                    qs[begin] = whole.T @ left
                else:
                    for _, wrong in known.values():
                        part = projected(wrong[begin:end].view(shape), qs[begin], rank)[0]
                        wrong[begin:end] = part.flatten()
                    new, qs[begin] = projected(whole, qs[begin], rank)
                    want[begin:end] = new.flatten()
        expect_close(
            got,
            want,
            what=f"{sums.what}, step {step}",
            rank=sums.ranks[0],
            rules=also(0, {cause: (said, [wrong]) for cause, (said, wrong) in known.items()}),
            rtol=1e-3 if sums.dtype == torch.float32 else 1e-6,
            atol=1e-3 if sums.dtype == torch.float32 else 1e-6,
        )
        owed = total - want  # 0 where all was sent
        of_five = torch.where(owed == 0, owed, total - want * len(sums.ranks) / 5)


@exercise(
    "4.8",
    "virtual",
    asserts="projection residual warm-start matrix same-bits others-exact group-only shared-start "
    "several-under-way untouched group dtype layout parameters life alone",
)
def test_power_two_models_in_two_groups(impl, run, seed):
    """Ranks 4, 1, 3 and ranks 2, 0 compress among themselves, in float64, float32 and float16."""
    make = lambda ps, group: impl.PowerSGD(ps, 2, group)
    check_training(run, make, seed, expect_projections)


@exercise("4.8", "virtual", asserts="memory resources")
def test_power_memory_is_a_copy_of_the_gradients(impl, run):
    """A copy of the gradients and the Qs, also after buckets are made anew."""
    check_memory(run, lambda ps, _: impl.PowerSGD(ps, 2), 1)


@exercise("4.8", "virtual", asserts="shared-start randomness")
def test_the_first_q_finds_any_columns(impl, run, seed):
    """A sum of rank 2 with few columns that aren't zero, anywhere, is exact in the first step."""

    def body(ctx):
        torch.manual_seed(ctx.rank)
        bucket = bucket_of((30, 20), (12, 20))
        own = shares(few_columns(seed), ctx.rank, ctx.world_size, seed)
        return reduced(impl.PowerSGD(bucket.parameters, 2), bucket, own)

    for rank, got in enumerate(run(body, 2)):
        expect_close(got, few_columns(seed), what="a sum of rank 2", rank=rank, **TINY)


def few_columns(seed: int) -> Tensor:
    """Two matrices of rank 2, one after the other, with 4 of 20 columns that are not zero."""
    order = torch.randperm(20, generator=torch.Generator().manual_seed(seed))
    matrices = []
    for number, rows in enumerate((30, 12)):
        whole = torch.zeros(rows, 20).double()
        chosen = order[4 * number : 4 * number + 4]
        whole[:, chosen] = low_rank(rows, 4, 2, seed + number)
        matrices.append(whole.flatten())
    return torch.cat(matrices)


@exercise("4.8", "virtual", asserts="begins cost")
def test_power_hook_begins_and_does_not_wait(impl, run):
    """The hook returns while P is on the way."""
    check_begins(run, lambda ps: impl.PowerSGD(ps), halves=True)


@exercise("4.8", "virtual", asserts="refused other-state refusals")
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

    calls = ["rank 0", "rank -3", "a state of another model", "a state of another rank"]
    expect_refused(run(body, 2), calls)


@exercise("4.8", "virtual", asserts="other-state refusals")
def test_a_refused_power_state_changes_nothing(impl, run):
    """A state of which a part fits is refused as a whole."""
    make, wider = (lambda ps, r=r: impl.PowerSGD(ps, r) for r in (1, 2))
    cases = [
        ("a second parameter of another size", 4, make, make),
        ("saved with rank 2, loaded with rank 1", 3, wider, make),
        ("saved with rank 1, loaded with rank 2", 3, make, wider),
    ]
    check_refused_state(run, cases)


@exercise("4.8", "gloo", asserts="bytes cost")
def test_power_gains_time_between_nodes(impl, run, nodes):
    """Two nodes with a link of 8 Mbit/s: 1 MB takes a second, and compressed far less."""
    check_time_gained(run, nodes, lambda ps: impl.PowerSGD(ps, 2), 30)


@trace("4.8")
def trace_powersgd(impl):
    """A bucket with all-reduce, then with PowerSGD."""
    return beside_all_reduce(lambda ps: impl.PowerSGD(ps, 2))
