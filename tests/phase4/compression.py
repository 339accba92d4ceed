"""What the checks of compression hooks share: buckets, gradients, and expectations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.diagnose import Case, Diagnosis
from distlab.grading import expect_close, expect_equal, fail
from distlab.ledger import Log
from distlab.netcluster import bytes_sent
from distlab.ranks import RankContext
from solutions.phase3_multi_node.buckets import Bucket
from solutions.phase3_multi_node.comm_hooks import all_reduce

Make = Callable[[], Any]  # a new hook
Variants = dict[str, tuple[str, list[Tensor]]]  # cause -> what it means, what each step then gives


def bucket_of(
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: Any = "cpu",
    index: int = 0,
) -> Bucket:
    """A bucket for new parameters of these shapes."""
    parameters = [nn.Parameter(torch.zeros(s, dtype=dtype, device=device)) for s in shapes]
    return Bucket(index, parameters)


def gradient(bucket: Bucket, seed: int, rank: int, step: int) -> Tensor:
    """What ``rank`` puts into the bucket in this step: (n,), of many sizes, all different."""
    generator = torch.Generator().manual_seed(seed * 7919 + 101 * step + rank)
    numbers = torch.randn(bucket.buffer.numel(), generator=generator, dtype=torch.float64)
    return (numbers * numbers.abs()).to(bucket.buffer)


def reduced(hook: Any, bucket: Bucket, values: Tensor) -> Tensor:
    """What the hook makes of ``values`` in the bucket, a copy."""
    bucket.buffer.copy_(values)
    handle = hook(bucket)
    if handle is not None:
        handle.wait()
    return bucket.buffer.detach().clone()


def also(step: int, variants: Variants) -> list[Callable[[Case], Diagnosis | None]]:
    """Rules that recognise what a known mistake would have given in ``step``."""

    def rule(cause: str, sentence: str, values: Tensor) -> Callable[[Case], Diagnosis | None]:
        wide = values.double()
        return lambda case: Diagnosis(cause, sentence) if case.fits(wide) else None

    return [rule(cause, said, steps[step]) for cause, (said, steps) in variants.items()]


def expect_steps(
    results: Sequence[list[Tensor]],
    want: list[Tensor],
    what: str,
    variants: Variants | None = None,
    **tolerance: Any,
) -> None:
    """Every rank has ``want`` of every step, and the ranks agree to the last bit."""
    expect_same_bits(results, what)
    for rank, steps in enumerate(results):
        for step, (got, right) in enumerate(zip(steps, want, strict=True)):
            expect_close(
                got,
                right,
                what=f"{what}, step {step}",
                rank=rank,
                rules=also(step, variants or {}),
                **tolerance,
            )


def expect_same_bits(results: Sequence[list[Tensor]], what: str) -> None:
    """All ranks hold the same bits after every step; none is nan where another is not."""
    for rank, steps in enumerate(results):
        for step, (mine, first) in enumerate(zip(steps, results[0], strict=True)):
            if not torch.equal(mine.nan_to_num(7e7), first.nan_to_num(7e7)):
                fail(
                    f"{what}: step {step} leaves other bits on rank {rank} than on rank 0: the "
                    "replicas drift apart",
                    cause="ranks-differ",
                    rank=rank,
                )


def expect_bytes(log: Log, want: float, formula: str, slack: float = 0.0) -> None:
    """The rank sent ``want`` bytes, and waited for everything."""
    log.sent_at_most(want + slack, formula)
    log.sent_at_least(want - slack, formula)
    log.all_waited()


def is_tree(state: object) -> bool:
    """Whether a checkpoint without pickle can hold it: dicts and lists of tensors, numbers."""
    if isinstance(state, dict):
        return all(isinstance(key, str) and is_tree(value) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return all(map(is_tree, state))
    return state is None or isinstance(state, (Tensor, int, float, str, bool))


SHAPES = (((5, 4), (4,)), ((3,), (4, 6)))  # of two buckets
BEFORE, AFTER = 3, 3  # steps before and after the save
NEW, AGAIN, BACK = SAVED_WAYS = (
    "a new hook",
    "a hook whose state was loaded and saved again",
    "the same hook, set back",
)


def resumed(make: Make, seed: int, rank: int) -> dict[str, Any]:
    """What the last steps give, uninterrupted and from a saved state in three ways."""

    def steps(hook: Any, buckets: Sequence[Bucket], first: int, count: int) -> list[Tensor]:
        return [
            torch.cat([reduced(hook, b, gradient(b, seed + b.index, rank, step)) for b in buckets])
            for step in range(first, first + count)
        ]

    def new() -> list[Bucket]:
        return [bucket_of(*shapes, index=i) for i, shapes in enumerate(SHAPES)]

    hook, buckets = make(), new()
    steps(hook, buckets, 0, BEFORE)
    state = hook.state_dict()
    found = {"tree": is_tree(state), "right": steps(hook, buckets, BEFORE, AFTER)}
    if not found["tree"]:
        return found
    fresh, twice = make(), make()
    fresh.load_state_dict(state)
    twice.load_state_dict(fresh.state_dict())  # saved again before the first step
    found[NEW] = steps(fresh, new(), BEFORE, AFTER)
    found[AGAIN] = steps(twice, new(), BEFORE, AFTER)
    hook.load_state_dict(state)
    found[BACK] = steps(hook, buckets, BEFORE, AFTER)
    return found


def check_resumed(results: Sequence[dict[str, Any]]) -> None:
    """``resumed`` gave the same bits every time."""
    for rank, found in enumerate(results):
        expect_equal(
            found["tree"],
            True,
            what="state_dict() holds dicts, lists, tensors and numbers only",
            rank=rank,
            cause="not-a-tree",
        )
        for name in SAVED_WAYS:
            _expect_resumed(found, name, rank)


def _expect_resumed(found: dict[str, Any], name: str, rank: int) -> None:
    for step, (got, right) in enumerate(zip(found[name], found["right"], strict=True)):
        if not torch.equal(got, right):
            off = float((got - right).abs().max())
            fail(
                f"{name}, with the state saved after step {BEFORE - 1}: step {BEFORE + step} "
                f"differs from the uninterrupted run by up to {off:.3g}: something that later "
                "steps depend on is not in state_dict(), or was not copied",
                cause="resume-differs",
                rank=rank,
            )


def begin_times(make: Make, numel: int = 100_000) -> list[float]:
    """[seconds until the hook returns, until wait() is done] in virtual time."""
    hook, bucket = make(), bucket_of((numel,), dtype=torch.float32)
    bucket.buffer.fill_(1.0)
    dist.barrier()
    begun = time.perf_counter()
    handle = hook(bucket)
    returned = time.perf_counter()
    handle.wait()
    return [returned - begun, time.perf_counter() - begun]


def check_begins(results: Sequence[list[float]]) -> None:
    """The hook returned while its message was on the way."""
    for rank, (returned, waited) in enumerate(results):
        if returned > 0.1 * waited:
            fail(
                f"the hook returns after {returned * 1e6:.1f} of {waited * 1e6:.1f} µs: it waits, "
                "and backward stands still meanwhile",
                cause="hook-waits",
                rank=rank,
            )


def in_a_group(impl_make: Callable[[Any], Any], rank: int) -> list[float] | None:
    """The sum over ranks 1 and 2 of three, of a bucket with one entry; None on rank 0."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    bucket = bucket_of((1,))
    return reduced(impl_make(group), bucket, torch.full((1,), float(rank)).double()).tolist()


def check_in_a_group(results: Sequence[list[float] | None]) -> None:
    """``in_a_group`` gave 1 + 2."""
    for rank, got in enumerate(results):
        if rank:
            expect_close(
                torch.tensor(got),
                torch.tensor([3.0]),
                what="the sum over ranks 1 and 2",
                rank=rank,
                rtol=1e-2,
            )


def edges(make: Make, seed: int, rank: int) -> list[list[Tensor]]:
    """An empty bucket, buckets of one and of two entries, and zeros, twice each."""
    hook = make()
    found = []
    for numel in (0, 1, 2, 9):
        bucket = bucket_of((numel,))
        values = gradient(bucket, seed, rank, numel) * (numel < 9)
        found.append([reduced(hook, bucket, values) for _ in range(2)])
    return found


def check_edges(results: Sequence[list[list[Tensor]]]) -> None:
    """``edges`` gave what they must: a single entry is exact, zeros stay zeros."""
    for rank, (empty, one, two, zeros) in enumerate(results):
        expect_equal(len(empty[0]), 0, what="entries of an empty bucket", rank=rank)
        for steps in (one, two, zeros):
            for values in steps:
                if not torch.isfinite(values).all():
                    fail(f"a tiny bucket holds {values.tolist()}", cause="nan", rank=rank)
        expect_same_bits([r[2] for r in results], "a bucket of two entries")
        expect_equal(
            float(zeros[1].abs().max()), 0.0, what="the sum of zeros", rank=rank, cause="zeros-lost"
        )


def over_the_link(hook: Any, numel: int) -> tuple[int, float]:
    """(bytes that the node has sent, seconds) of one bucket in float32."""
    small, bucket = (bucket_of((rows, 500), dtype=torch.float32) for rows in (4, numel // 500))
    reduced(hook, small, gradient(small, 1, dist.get_rank(), 0))  # opens the connections
    values = gradient(bucket, 1, dist.get_rank(), 0)
    dist.barrier()
    before, begun = bytes_sent(), time.perf_counter()
    reduced(hook, bucket, values)
    took = time.perf_counter() - begun
    dist.barrier()
    return bytes_sent() - before, took


def check_time_gained(results: Sequence[Any], fewer: float) -> None:
    """Each rank returned ``over_the_link`` of all-reduce and of the hook."""
    for rank, ((plain, slow), (sent, fast)) in enumerate(results):
        if sent * fewer > plain:
            fail(
                f"the node of rank {rank} sent {sent:,} bytes over its link, an all-reduce "
                f"{plain:,}: expected {fewer:g} times fewer",
                cause="too-many-bytes-between-nodes",
                rank=rank,
            )
        if fast > slow:
            fail(
                f"rank {rank} took {fast * 1e3:.0f} ms, an all-reduce {slow * 1e3:.0f} ms: fewer "
                "bytes gained no time",
                cause="no-time-gained",
                rank=rank,
            )


def beside_all_reduce(make: Make) -> Callable[[RankContext], None]:
    """A body to trace: a bucket of a million entries with all-reduce, then with the hook."""

    def body(ctx: RankContext) -> None:
        bucket = bucket_of((1000, 1000), dtype=torch.float32)
        values = gradient(bucket, 1, ctx.rank, 0)
        for name, hook in (("all-reduce", all_reduce), ("compressed", make())):
            dist.barrier()
            if name == "all-reduce":
                ctx.start_picture()
            with ctx.region(name):
                reduced(hook, bucket, values)

    return body
