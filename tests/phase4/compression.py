"""What the checks of compression hooks share: buckets, gradients, and expectations."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import expect_close, expect_equal, expect_refusals, fail, refusal
from distlab.netcluster import bytes_sent
from distlab.observe.log import Log
from distlab.ranks import RankContext, RankResults
from given.bucket_hooks import Handle

Make = Callable[[Sequence[nn.Parameter]], Any]  # a new hook for these parameters
Run = Callable[..., RankResults]  # the fixture `run`
Variants = dict[str, tuple[str, list[Tensor]]]  # cause -> what it means, what each step then gives


class Bucket:
    """What a hook may use of a bucket (``given.bucket_hooks.Bucket``), and nothing else."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter]) -> None:
        self.index, self.parameters = index, list(parameters)
        sizes = [p.numel() for p in parameters]
        self.buffer = parameters[0].detach().new_empty(sum(sizes))
        parts = zip(self.parameters, self.buffer.split(sizes), strict=True)
        self.views = [part.as_strided(p.size(), p.stride()) for p, part in parts]


def all_reduce(bucket: Bucket) -> Handle | None:
    """The hook that compresses nothing."""
    return dist.all_reduce(bucket.buffer, async_op=True)


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
    return at_once(hook, [bucket], [values])[0]


def at_once(hook: Any, buckets: Sequence[Bucket], values: Sequence[Tensor]) -> list[Tensor]:
    """Begin to reduce all buckets, then wait for them; what their first buffers hold, copies."""
    buffers = [bucket.buffer for bucket in buckets]
    for buffer, own in zip(buffers, values, strict=True):
        buffer.copy_(own)
    handles = []
    for bucket in buckets:
        handles.append(hook(bucket))
        if not hasattr(handles[-1], "wait") and handles[-1] is not None:
            kind = type(handles[-1]).__name__
            raise TypeError(f"the hook returned a {kind}: neither None nor something to wait for")
    for handle in handles:
        if handle is not None:
            handle.wait()
    for bucket, buffer in zip(buckets, buffers, strict=True):
        if bucket.buffer is not buffer:
            raise TypeError("the bucket has a new buffer: gradients are views of its first one")
    return [buffer.detach().clone() for buffer in buffers]


def several_steps(make: Make, bucket: Bucket, own: Sequence[Tensor]) -> list[Tensor]:
    """What a new hook makes of each step's ``own`` gradients, on the CPU."""
    hook = make(bucket.parameters)
    return [reduced(hook, bucket, g).cpu() for g in own]


def all_gradients(bucket: Bucket, seed: int, world_size: int, steps: int) -> list[list[Tensor]]:
    """For each rank what it puts into the bucket in each step."""
    return [
        [gradient(bucket, seed, rank, step) for step in range(steps)] for rank in range(world_size)
    ]


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


def expect_bytes(
    log: Log, want: float, formula: str, slack: float = 0.0, messages: int | None = None
) -> None:
    """The rank sent ``want`` bytes in at most ``messages`` messages, and waited for everything."""
    log.sent_at_most(want + slack, formula)
    log.sent_at_least(want - slack, formula)
    if messages is not None and log.messages > messages:
        fail(
            f"rank {log.rank} sends {log.messages} messages, {messages} are enough: each one takes "
            "the time of a message, however short it is",
            cause="too-many-messages",
            rank=log.rank,
        )
    log.all_waited()


def same_tree(a: Any, b: Any) -> bool:
    """Whether two states hold the same, to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_tree, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def is_tree(state: object) -> bool:
    """Whether a checkpoint without pickle can hold it: dicts and lists of tensors, numbers."""
    if isinstance(state, dict):
        return all(isinstance(key, str) and is_tree(value) for key, value in state.items())
    if isinstance(state, (list, tuple)):
        return all(map(is_tree, state))
    return state is None or isinstance(state, (Tensor, int, float, str, bool))


SHAPES = ((5, 4), (4,), (5, 4), (4,), (5, 4))  # of five parameters
LAYOUTS = (((4, 3), (2, 1, 0)), ((2, 3, 0), (1,), (4,)))  # which are in which bucket, then later
STEPS, SAVES = 6, (1, 3)  # all steps, and how many were done when the state was saved
SAVED_WAYS = (
    "a new hook",
    "a hook whose state was loaded and saved again",
    "the same hook, set back",
)


def check_resumed(run: Run, make: Make, seed: int) -> None:
    """Saved and loaded, the steps after it are the same to the bit, as under DDP.

    Buckets are made anew after the first step; a resumed run has the later ones from the start.
    """

    def body(ctx: RankContext) -> dict[str, Any]:
        return _resumed(make, seed, ctx.rank)

    for rank, found in enumerate(run(body, 2)):
        expect_equal(
            found["tree"],
            True,
            what="state_dict() holds dicts, lists, tensors and numbers only",
            rank=rank,
            cause="not-a-tree",
        )
        if not found["kept as it was"]:
            fail(
                f"rank {rank}: what state_dict() gave changes when the hook loads another state: "
                "the tensors in it must be copies",
                cause="state-not-copied",
                rank=rank,
            )
        if not found["states as they were"]:
            fail(
                f"rank {rank}: a state that was loaded changes when the hook makes steps: the next "
                "one that loads it goes on from elsewhere. load_state_dict must copy the tensors",
                cause="state-changed",
                rank=rank,
            )
        for saved in SAVES:
            for name in SAVED_WAYS:
                _expect_resumed(found[f"{name} {saved}"], found["right"], name, saved, rank)


def _resumed(make: Make, seed: int, rank: int) -> dict[str, Any]:
    """What the steps give, uninterrupted and from states saved, in three ways."""

    def new() -> tuple[Any, list[list[Bucket]]]:
        parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        layouts = [
            [Bucket(index, [parameters[k] for k in places]) for index, places in enumerate(layout)]
            for layout in LAYOUTS
        ]
        return make(parameters), layouts

    def steps(hook: Any, layouts: list[list[Bucket]], first: int) -> Iterator[Tensor]:
        for step in range(first, STEPS):
            buckets = layouts[min(step, 1)]
            values = [gradient(b, seed + b.index, rank, step) for b in buckets]
            yield torch.cat(at_once(hook, buckets, values))

    hook, layouts = new()
    states, saves, right = {}, {}, []
    for done, values in enumerate(steps(hook, layouts, 0), 1):
        right.append(values)
        if done in SAVES:
            states[done] = hook.state_dict()
            saves[done] = copy.deepcopy(states[done])
    found: dict[str, Any] = {"tree": all(map(is_tree, states.values())), "right": right}
    if found["tree"]:
        before = hook.state_dict()
        copied = copy.deepcopy(before)
        hook.load_state_dict(states[SAVES[0]])
        found["kept as it was"] = same_tree(before, copied)
        copies = same_tree(before, copied) and same_tree([*states.values()], [*saves.values()])
        for saved, state in states.items():
            (fresh, its_own), (twice, anothers) = new(), new()
            fresh.load_state_dict(state)
            twice.load_state_dict(fresh.state_dict())  # saved again before the first step
            hook.load_state_dict(state)
            ways = (fresh, its_own), (twice, anothers), (hook, layouts)
            for name, way in zip(SAVED_WAYS, ways, strict=True):
                found[f"{name} {saved}"] = [*steps(*way, saved)]
        same = same_tree([*states.values()], [*saves.values()])
        found["states as they were"] = same or not copies  # not the loading's mistake, then
    return found


def _expect_resumed(
    steps: list[Tensor], right: list[Tensor], name: str, saved: int, rank: int
) -> None:
    for step, got in enumerate(steps, saved):
        if not torch.equal(got, right[step]):
            off = float((got - right[step]).abs().max())
            fail(
                f"{name}, with the state saved after step {saved - 1}: step {step} differs from "
                f"the uninterrupted run by up to {off:.3g}: something that later steps depend on "
                "is not in state_dict(), was not copied, or went to another parameter (buckets "
                "are made anew after the first step; a resumed run has the new ones at once)",
                cause="resume-differs",
                rank=rank,
            )


def check_refused_state(run: Run, cases: Sequence[tuple[str, int, Make, Make]]) -> None:
    """A state of which the first parameter fits, or all: a ValueError, and nothing is half loaded.

    ``cases``: what is wrong; how many entries the second parameter had when the state was saved (it
    has 3); the hook that saves and the one that loads.
    """

    def body(ctx: RankContext) -> list[tuple[str, Tensor, bool]]:
        found = []
        for _, numel, saves, loads in cases:
            mine, others = bucket_of((6, 5), (3,)), bucket_of((6, 5), (numel,))
            hook, other = loads(mine.parameters), saves(others.parameters)
            reduced(other, others, gradient(others, 1, ctx.rank, 0))
            said = refusal(hook.load_state_dict, other.state_dict())
            zeros, values = torch.zeros_like(mine.buffer), gradient(mine, 2, ctx.rank, 0)
            control = loads(mine.parameters)  # a hook that was never asked to load anything
            first, then = (reduced(hook, mine, v) for v in (zeros, values))
            right = [reduced(control, mine, v) for v in (zeros, values)][1]
            found.append((said, first, torch.equal(then, right)))
        return found

    for rank, found in enumerate(run(body, 2)):
        said = [refused for refused, *_ in found]
        expect_refusals(said, [what for what, *_ in cases], rank=rank)
        for (what, *_), (_, got, alike) in zip(cases, found, strict=True):
            if got.any():
                fail(
                    f"{what}: load_state_dict raised ValueError, and the hook then made "
                    f"{float(got.abs().max()):.3g} of zeros: a part of the state was loaded "
                    "before all of it was compared",
                    cause="half-loaded",
                    rank=rank,
                )
            if not alike:
                fail(
                    f"{what}: load_state_dict raised ValueError, and the hook then sent something "
                    "else than one that loaded nothing: a part of the state (its random numbers?) "
                    "was loaded before all of it was compared",
                    cause="half-loaded",
                    rank=rank,
                )


def check_begins(run: Run, make: Make, halves: bool = False) -> None:
    """The hook returns while its message is on the way, in virtual time.

    Unless there are two ``halves``, ``wait`` sends nothing.
    """

    def body(ctx: RankContext) -> list[float]:
        bucket = bucket_of((100_000,), dtype=torch.float32)
        hook = make(bucket.parameters)
        bucket.buffer.fill_(1.0)
        dist.barrier()
        begun = time.perf_counter()
        handle = hook(bucket)
        returned = time.perf_counter()
        if handle is None:
            return [returned - begun, returned - begun]
        with ctx.region("wait"):
            handle.wait()
        return [returned - begun, time.perf_counter() - begun]

    results = run(body, 2)
    for rank, (returned, waited) in enumerate(results):
        late = results.logs[rank].select(region="wait").events
        if late and not halves:
            fail(
                f"rank {rank} begins its {late[0]} in wait() only: the hook must begin all that it "
                "sends, so that it travels while backward goes on",
                cause="sent-in-wait",
                rank=rank,
                line=late[0].line,
            )
        if returned > 0.1 * waited:
            fail(
                f"the hook returns after {returned * 1e6:.1f} of {waited * 1e6:.1f} µs: it waits, "
                "and backward stands still meanwhile",
                cause="hook-waits",
                rank=rank,
            )


def check_edges(run: Run, make: Make, seed: int) -> None:
    """Buckets of no, one and two entries, and of zeros, twice each: nothing is nan or lost.

    An empty one sends nothing.
    """

    def body(ctx: RankContext) -> list[list[Tensor]]:
        buckets = [bucket_of((numel,)) for numel in (0, 1, 2, 9)]
        hook = make([p for bucket in buckets for p in bucket.parameters])
        found = []
        for bucket in buckets:
            numel = bucket.buffer.numel()
            values = gradient(bucket, seed, ctx.rank, numel) * (numel < 9)
            with ctx.region("" if numel else "empty"):
                found.append([reduced(hook, bucket, values) for _ in range(2)])
        return found

    results = run(body, 2)
    for rank, (empty, one, two, zeros) in enumerate(results):
        sent = results.logs[rank].select(region="empty").events
        if sent:
            fail(
                f"rank {rank} sends {sent[0]} for an empty bucket: there is nothing to wait for",
                cause="empty-sent",
                rank=rank,
                line=sent[0].line,
            )
        expect_equal(len(empty[0]), 0, what="entries of an empty bucket", rank=rank)
        for steps in (one, two, zeros):
            for values in steps:
                if not torch.isfinite(values).all():
                    fail(f"a tiny bucket holds {values.tolist()}", cause="nan", rank=rank)
        expect_same_bits([r[2] for r in results], "a bucket of two entries")
        expect_equal(
            float(zeros[1].abs().max()), 0.0, what="the sum of zeros", rank=rank, cause="zeros-lost"
        )


def _over_the_link(make: Make, numel: int) -> tuple[int, float]:
    """(bytes that the node has sent, seconds) of one bucket in float32."""
    small, bucket = (bucket_of((rows, 500), dtype=torch.float32) for rows in (4, numel // 500))
    hook = make([*small.parameters, *bucket.parameters])
    reduced(hook, small, gradient(small, 1, dist.get_rank(), 0))  # opens the connections
    values = gradient(bucket, 1, dist.get_rank(), 0)
    dist.barrier()
    before, begun = bytes_sent(), time.perf_counter()
    reduced(hook, bucket, values)
    took = time.perf_counter() - begun
    dist.barrier()
    return bytes_sent() - before, took


def check_time_gained(run: Run, nodes: Any, make: Make, fewer: float) -> None:
    """Two nodes with a link of 8 Mbit/s: 1 MB takes a second, and compressed far less.

    The link makes sure of that second; of the hook the quickest of three, as a busy machine delays.
    """

    def reference(ctx: RankContext) -> tuple[int, float]:
        return _over_the_link(lambda _: all_reduce, 250_000)

    def body(ctx: RankContext) -> list[tuple[int, float]]:
        return [_over_the_link(make, 250_000) for _ in range(3)]

    with nodes(2, rate="8mbit") as net:
        expected = run(reference, 2, enter=net.placement((0, 1)))
        results = run(body, 2, enter=net.placement((0, 1)))
    for rank, ((plain, slow), ours) in enumerate(zip(expected, results, strict=True)):
        sent, fast = max(sent for sent, _ in ours), min(took for _, took in ours)
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
        for name, hook in (("all-reduce", all_reduce), ("compressed", make(bucket.parameters))):
            dist.barrier()
            if name == "all-reduce":
                ctx.start_picture()
            with ctx.region(name):
                reduced(hook, bucket, values)

    return body
