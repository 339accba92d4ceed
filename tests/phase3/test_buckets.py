"""Checks of exercise 3.9: buckets, the order of gradients, state in few messages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    expect_refused,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory, storage_bytes
from tests.phase3.bad_input import check_non_members

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16


def parameter(*shape: int, dtype: torch.dtype = F32, start: float = 1.0) -> nn.Parameter:
    """start, start + 1, … in the given shape."""
    numel = torch.Size(shape).numel()
    return nn.Parameter(torch.arange(start, start + numel, dtype=dtype).view(shape))


def odd_parameters() -> list[nn.Parameter]:
    """Shapes with no, one and four dimensions, and memory that is not in the order of the shape."""
    images = torch.arange(48.0).view(2, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    turned = torch.arange(6.0).view(2, 3).t()
    more = [parameter(3, 1), parameter(2, 0, 4), nn.Parameter(torch.ones(4, 6)[:, ::2])]
    return [parameter(5), nn.Parameter(images), nn.Parameter(turned), parameter(), *more]


# -- partition ------------------------------------------------------------------------------------
# (elements, dtype) per tensor, limit and first limit in bytes, the lists
CUTS = [
    ("fills up to the limit", [(2, F32), (2, F32), (2, F32), (1, F32)], 16, 16, [[0, 1], [2, 3]]),
    ("a small first list", [(1, F32), (1, F32), (2, F32), (2, F32)], 16, 4, [[0], [1, 2], [3]]),
    ("one larger than the limit", [(1, F32), (9, F32), (1, F32)], 8, 8, [[0], [1], [2]]),
    ("the first larger than its limit", [(9, F32), (1, F32), (1, F32)], 8, 4, [[0], [1, 2]]),
    ("bytes, not elements", [(1, F64), (1, F64), (1, F64)], 16, 16, [[0, 1], [2]]),
    (
        "two dtypes by turns, complete in order of their last tensors",
        [(1, F32), (1, F64), (1, F32), (1, F64), (1, F32)],
        8,
        64,
        [[1, 3], [0, 2, 4]],
    ),
    (
        "a first limit for each dtype",
        [(1, F32), (1, F64), (1, F64), (1, F32), (1, F32)],
        64,
        4,
        [[0], [1], [2], [3, 4]],
    ),
    (
        "two dtypes of 2 bytes",
        [(2, F16), (1, BF16), (2, F16), (3, BF16), (2, F16), (1, BF16)],
        8,
        8,
        [[0, 2], [1, 3], [4], [5]],
    ),
    ("an empty tensor after a large one", [(9, F32), (0, F32), (1, F32)], 8, 8, [[0], [1, 2]]),
    ("empty tensors", [(0, F32), (4, F32), (0, F32)], 16, 16, [[0, 1, 2]]),
    ("nothing", [], 16, 16, []),
]


@exercise(
    "3.9", "virtual", asserts="lists positions limits first-limit order refused dtype refusals"
)
def test_partition_cuts_by_bytes_and_kind(impl, run):
    """Lists in order, within their limits, of one dtype and device, sorted by their last tensor."""

    def body(ctx):
        got = []
        for tensors, limit, first in given:
            made = [torch.zeros(n, dtype=dtype) for n, dtype in tensors]
            got.append([list(map(int, places)) for places in impl.partition(made, limit, first)])
        devices = [torch.zeros(1, device=d) for d in ("cpu", "meta", "cpu", "meta")]
        got.append([list(map(int, places)) for places in impl.partition(devices, 64, 64)])
        return got, [refusal(impl.partition, [torch.zeros(1)], *limits) for limits in wrong]

    given = [(tensors, limit, first) for _, tensors, limit, first, _ in CUTS]
    wrong = [(0, 16), (16, 0), (-1, 16), (16, -4)]

    got, refused = run(body, 1, process_group=False)[0]
    wanted = [(what, want) for what, *_, want in CUTS] + [("two devices", [[0, 2], [1, 3]])]
    for found, (what, want) in zip(got, wanted, strict=True):
        flat = sorted(place for places in found for place in places)
        if flat != sorted(place for places in want for place in places):
            fail(f"{what}: the lists {found} don't hold every tensor once", cause="tensor-lost")
        expect_equal(found, want, what=what, cause="wrong-buckets")
    expect_refusals(refused, [f"limits of {limits} bytes" for limits in wrong])


# -- Bucket ---------------------------------------------------------------------------------------
@exercise("3.9", "virtual", asserts="index buffer views layout parameters dtype")
def test_views_cover_the_buffer_once(impl, run):
    """Every view has its parameter's shape and order of strides; together they are the buffer."""

    def body(ctx):
        parameters = odd_parameters()
        halves = impl.Bucket(0, [parameter(3, dtype=BF16)])
        given = [*parameters]
        bucket = impl.Bucket(2, given)
        given.clear()
        layout = [
            [list(v.shape), list(v.stride()), list(p.stride())]
            for v, p in zip(bucket.views, parameters, strict=True)
        ]
        bucket.buffer.fill_(-1)
        for place, view in enumerate(bucket.views):
            view.fill_(place)
        shared = storage_bytes([bucket.buffer, *bucket.views])
        same = [a is b for a, b in zip(bucket.parameters, parameters, strict=True)]
        shape = list(bucket.buffer.shape)
        grads = any(t.requires_grad for t in (bucket.buffer, *bucket.views))
        dtypes = [str(t.dtype) for t in (bucket.buffer, halves.buffer, halves.views[0])]
        facts = shape, dtypes, int(bucket.index), all(same), grads
        return layout, bucket.buffer, shared, facts

    layout, buffer, shared, facts = run(body, 1, process_group=False)[0]
    shape, dtypes, index, same, grads = facts
    sizes = [p.numel() for p in odd_parameters()]
    places = [place for place, size in enumerate(sizes) for _ in range(size)]
    expect_equal(dtypes, [str(F32), str(BF16), str(BF16)], what="dtypes", cause="dtype")
    expect_equal(shape, [sum(sizes)], what="shape of the buffer", cause="wrong-buffer")
    expect_equal((index, same), (2, True), what="index and parameters kept", cause="wrong-buffer")
    if shared != 4 * sum(sizes):
        fail(
            f"buffer and views hold {shared} bytes, the gradients have {4 * sum(sizes)}: "
            "the views are copies",
            cause="copies",
        )
    what = "whose elements the buffer holds, one after the other"
    expect_equal(buffer.tolist(), places, what=what, cause="views-overlap")
    expect_equal(grads, False, what="a bucket that records gradients", cause="wrong-buffer")
    for (got, stride, want), p in zip(layout, odd_parameters(), strict=True):
        expect_equal(got, list(p.shape), what="shape of a view", cause="wrong-layout")
        longer = [d for d, n in enumerate(got) if n > 1 and p.numel()]
        if sorted(longer, key=stride.__getitem__) != sorted(longer, key=want.__getitem__):
            fail(
                f"a parameter of shape {got} has strides {want}, its view {stride}: the optimizer "
                "would read both in different order",
                cause="wrong-layout",
            )


def own_gradients(seed: int) -> list[torch.Tensor]:
    """For parameters of the shapes (5,) and (2, 3)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64) for shape in ((5,), (2, 3))]


@exercise("3.9", "virtual", asserts="take no-gradient left-alone passes sparse life alone")
def test_take_moves_and_scales_the_gradient(impl, run, seed):
    """p.grad becomes the view and holds share times its old values; None counts as zeros."""

    def body(ctx):
        parameters = [parameter(5, dtype=F64), parameter(2, 3, dtype=F64), parameter(4, dtype=F64)]
        bucket = impl.Bucket(0, parameters)
        bucket.buffer.fill_(float("nan"))
        held, whose, passes = [], [], []
        given = own_gradients(seed)
        for p, g in zip(parameters, given, strict=False):
            p.grad = g
        for share in (0.25, 1.0, 2.0):  # moved; in its place already, twice
            version = bucket.buffer._version
            for place in range(2):
                bucket.take(place, share)
            passes.append(bucket.buffer._version - version)  # how often it was written to
            bucket.take(2, share)
            held.append(torch.cat([p.grad.flatten() for p in parameters]))
            at = bucket.buffer.untyped_storage().data_ptr()
            whose.append([p.grad.untyped_storage().data_ptr() == at for p in parameters])
        whole = bucket.buffer.clone()
        parameters[2].grad = torch.sparse_coo_tensor([[1]], [2.0], (4,), dtype=F64)
        refused = refusal(bucket.take, 2, 0.5)
        turned = nn.Parameter(torch.zeros(2, 3, dtype=F16).t())
        turned.grad = torch.arange(6, dtype=F16).view(3, 2)  # in another order than its parameter
        impl.Bucket(0, [turned]).take(0, 0.5)
        return held, whose, whole, refused, passes, given, turned.grad

    held, whose, whole, refused, passes, given, turned = run(body, 1, process_group=False)[0]
    for k, (got, want) in enumerate(zip(given, own_gradients(seed), strict=True)):
        what = f"the tensor that held gradient {k} before"
        expect_equal(got.tolist(), want.tolist(), what=what, cause="extra-pass")
    flat = torch.cat([g.flatten() for g in (*own_gradients(seed), torch.zeros(4, dtype=F64))])
    for got, share, what in zip(
        held,
        (0.25, 0.25, 0.5),
        ("a share of 1/4", "then a share of 1", "then a share of 2"),
        strict=True,
    ):
        expect_close(got, flat * share, what=what, before=flat, rtol=1e-12, atol=1e-12)
    expect_equal(whose, [[True] * 3] * 3, what="p.grad lies in the buffer", cause="not-a-view")
    expect_close(whole, flat * 0.5, what="the buffer", rtol=1e-12, atol=1e-12)
    what = "a transposed gradient in 16 bits"
    expect_close(turned, torch.arange(6, dtype=F16).view(3, 2) / 2, what=what)
    expect_refusals([refused], ["a sparse gradient"])
    for count, most, what in zip(
        passes,
        (2, 0, 2),
        ("moved", "in place, a share of 1", "in place, a share of 2"),
        strict=True,
    ):
        if count > most:
            fail(
                f"two gradients, {what}: {count} writes to the buffer, {most} are enough",
                cause="extra-pass",
            )


HAD = [0, 2, 3, 5]  # of six parameters: who has a gradient before there are buckets


@exercise("3.9", "virtual", asserts="moved none-stays in-order make-refused one-copy resources")
def test_buckets_keep_gradients_and_hold_no_second_copy(impl, run):
    """New buckets take the gradients that are there; gradients and buckets together are N bytes."""

    def body(ctx):
        parameters = [parameter(256, 256, start=k) for k in range(6)]
        with PeakMemory() as memory:
            had = [parameters[k] for k in HAD]
            for p in had:
                p.grad = p.detach() * 2
            before = [p.grad for p in parameters]
            refused = [refusal(impl.make_buckets, parameters, *wrong) for wrong in ((0, 1), (1, 0))]
            same = all(p.grad is g for p, g in zip(parameters, before, strict=True))
            del before
            buckets = impl.make_buckets(parameters[::-1], 600_000, 300_000)
            inside = [p.grad is not None and p.grad.untyped_storage().data_ptr() for p in had]
            homes = [b.buffer.untyped_storage().data_ptr() for b in buckets for _ in b.parameters]
            in_place = inside == [homes[5 - k] for k in HAD]
            for bucket in buckets[1:2]:
                for place in range(len(bucket.parameters)):
                    bucket.take(place)
            alive = memory.current
        kept = [None if p.grad is None else p.grad.clone() for p in had]
        order = [
            [next(i for i, q in enumerate(parameters) if q is p) for p in b.parameters]
            for b in buckets
        ]
        without = [p.grad is None for p in (parameters[1], parameters[4])]
        none = impl.make_buckets([], 8, 8)
        facts = refused, same, without, list(none), in_place
        return order, [int(b.index) for b in buckets], kept, alive, facts

    order, indices, kept, alive, facts = run(body, 1, process_group=False)[0]
    refused, same, without, none, in_place = facts
    expect_refusals(refused, ["a limit of 0 bytes", "a first limit of 0 bytes"])
    expect_equal(same, True, what="gradients where they were after a refusal", cause="moved")
    what = "gradients 1 and 4, which did not exist, are None (take was called for 4)"
    expect_equal(without, [True, False], what=what, cause="zeros-for-none")
    expect_equal(none, [], what="buckets of no parameters", cause="wrong-buckets")
    expect_equal(
        order, [[5], [4, 3], [2, 1], [0]], what="parameters of the buckets", cause="wrong-buckets"
    )
    expect_equal(indices, [0, 1, 2, 3], what="index of each bucket", cause="wrong-buckets")
    missing = [g is None for g in kept]
    expect_equal(missing, [False] * 4, what="gradients lost", cause="gradient-lost")
    wanted = [parameter(256, 256, start=k).detach() * 2 for k in HAD]
    right = [torch.equal(g, want) for g, want in zip(kept, wanted, strict=True)]
    expect_equal(right, [True] * 4, what="gradients kept their values", cause="gradient-lost")
    what = "every gradient lies in the buffer of its bucket"
    expect_equal(in_place, True, what=what, cause="copies")
    if alive > 1.05 * 6 * 256 * 256 * 4:
        fail(
            f"{alive / 1e6:.2f} MB are alive for {6 * 256 * 256 * 4 / 1e6:.2f} MB of gradients: "
            "there are copies beside the buckets",
            cause="copies",
        )


# -- what the ranks agree on ----------------------------------------------------------------------
@exercise("3.9", "virtual gloo cuda", nccl=True, asserts="first-ranks-order order-cost group cost")
def test_first_ranks_order_is_everybodys(impl, run, cases):
    """All ranks get the order of the group's first rank, also in a group without global rank 0."""
    for world_size, members in cases((4, [3, 1]), (3, [0, 1, 2]), (2, [1]), (1, [0])):

        def body(ctx):
            group = dist.new_group(members)
            others = dist.new_group([r for r in range(world_size) if r not in members] or [0])
            if ctx.rank not in members:
                return list(impl.order_of_first_rank([7, 8, 9], ctx.device, others))
            arrived = torch.arange(5).roll(ctx.rank).tolist()
            with ctx.region("order"):
                return list(impl.order_of_first_rank(arrived, ctx.device, group))

        results = run(body, world_size)
        want = torch.arange(5).roll(min(members)).tolist()
        for rank in members:
            what = f"the order that ranks {members} use"
            expect_equal(results[rank], want, what=what, rank=rank, cause="own-order")
        for log in results.logs:
            log.select(region="order").sent_at_most(40, "8 bytes per number, by the first rank")


def states(rank: int, device: torch.device) -> list[torch.Tensor]:
    """Tensors of several dtypes and layouts that differ by rank; empty ones too."""
    start = 10.0 * rank
    mixed = [
        torch.arange(6.0).view(3, 2).add(start)
        if rank == 1
        else torch.arange(6.0).view(2, 3).t() + start,
        torch.tensor(rank + 7),
        torch.tensor([rank == 0, True]),
        torch.arange(4, dtype=torch.bfloat16) + start,
        torch.zeros(0),
        nn.Parameter(torch.arange(9.0) + start),
        torch.arange(8.0)[::2] + start,
        torch.tensor(rank, dtype=torch.uint8),
        torch.tensor(start),
        torch.tensor([2**60 + rank, -(2**55) - rank]),
        torch.tensor([float("nan"), start], dtype=torch.float16),
        torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last) + start,
    ]
    mixed += [mixed[0], mixed[0].t()[1:]]  # one under two names, and a part of it
    return [nn.Parameter(t.to(device)) if t.requires_grad else t.to(device) for t in mixed]


@exercise(
    "3.9", "virtual gloo cuda", asserts="state any-tensor leaves group dtype layout parameters"
)
def test_broadcast_gives_the_first_ranks_state(impl, run, cases):
    """Any dtype and strides, in place, from the group's first rank, whatever the limit."""
    for world_size, members, limit in cases(
        (4, [3, 1], 24), (2, [0, 1], 1), (4, [0, 1, 2, 3], 10_000), (1, [0], 16)
    ):

        def body(ctx):
            group = dist.new_group(members)
            others = dist.new_group([r for r in range(world_size) if r not in members] or [0])
            if ctx.rank not in members:
                impl.broadcast_tensors([torch.zeros(3, device=ctx.device)], limit, others)
                return None
            tensors = states(ctx.rank, ctx.device)
            at = [t.data_ptr() for t in tensors]
            impl.broadcast_tensors(tensors, limit, group)
            kept = [t.data_ptr() for t in tensors] == at
            leaf = tensors[5].is_leaf and tensors[5].requires_grad
            return kept and leaf, [t.detach() for t in tensors]

        results = run(body, world_size)
        want = states(min(members), torch.device("cpu"))
        for rank in members:
            same, got = results[rank]
            expect_equal(
                same,
                True,
                what="written into the tensors, as leaves",
                rank=rank,
                cause="new-tensors",
            )
            for number, (a, b) in enumerate(zip(got, want, strict=True)):
                what = f"ranks {members}, limit {limit}: tensor {number} ({b.dtype})"
                right = torch.allclose(a.cpu(), b.detach(), rtol=0, atol=0, equal_nan=True)
                if not right or (not b.is_floating_point() and not torch.equal(a.cpu(), b)):
                    fail(
                        f"{what} on rank {rank} is {a.tolist()}, rank {min(members)} has "
                        f"{b.tolist()}",
                        cause="not-broadcast",
                        rank=rank,
                    )


@exercise("3.9", "virtual gloo", asserts="messages cost")
def test_broadcast_needs_few_messages(impl, run):
    """100 tensors of 400 bytes with a limit of 8,000: 5 messages, and every byte once."""

    def body(ctx):
        tensors = [torch.full((100,), float(ctx.rank)) for _ in range(100)]
        impl.broadcast_tensors(tensors, 8_000)
        return [float(t.sum()) for t in tensors]

    results = run(body, 3)
    for log in results.logs:
        if log.messages > 5:
            fail(
                f"rank {log.rank} issued {log.messages} messages for 100 tensors, 5 are enough: "
                "join tensors up to the limit",
                cause="too-many-messages",
                rank=log.rank,
            )
        if max(e.payload for e in log.events) > 8_000:
            fail(
                f"rank {log.rank} sent a message beyond the limit of 8,000 bytes",
                cause="beyond-limit",
                rank=log.rank,
            )
        log.sent_at_most(40_000, "the bytes of the state, by the first rank")
    results.logs[0].sent_at_least(40_000, "the bytes of the state")


@exercise("3.9", "virtual", asserts="memory resources")
def test_broadcast_copies_two_lists_at_a_time(impl, run):
    """Beside the tensors at most two copies of ``limit`` bytes are alive, and none afterwards."""
    limit = 40_000

    def body(ctx):
        tensors = [torch.full((5_000,), float(ctx.rank)) for _ in range(8)]
        with PeakMemory() as memory:
            impl.broadcast_tensors(tensors, limit)
        return memory.peak, memory.current

    for rank, (peak, left) in enumerate(run(body, 2)):
        if peak > 2 * limit + 1_000 or left:
            fail(
                f"rank {rank} holds up to {peak:,} bytes beside the tensors, and {left:,} in the "
                f"end, with a limit of {limit:,}. Let copies go when they have been sent",
                cause="too-much-memory",
                rank=rank,
            )


@exercise("3.9", "virtual", asserts="member refusals state-refused")
def test_who_is_no_member_is_refused(impl, run):
    """A rank outside the group gets a ValueError; torch's broadcast would do nothing there."""
    calls = {
        "order_of_first_rank": lambda group: impl.order_of_first_rank([1, 0], "cpu", group),
        "broadcast_tensors": lambda group: impl.broadcast_tensors([torch.zeros(2)], 99, group),
    }
    check_non_members(run, calls)

    def body(ctx):
        return [refusal(impl.broadcast_tensors, [torch.zeros(2)], limit) for limit in (0, -8)]

    expect_refused(run(body, 2), ["a limit of 0 bytes", "a limit of -8 bytes"])


@trace("3.9")
def trace_buckets(impl):
    """A state of 64 tensors of 64 kB goes out in messages of 1 MB, then one by one."""

    def body(ctx):
        tensors = [torch.full((16_384,), float(ctx.rank)) for _ in range(64)]
        impl.broadcast_tensors(tensors, 1 << 20)
        ctx.start_picture()
        for limit in (1 << 20, 1):
            with ctx.region(f"limit {limit}"):
                impl.broadcast_tensors(tensors, limit)
        return impl.order_of_first_rank([0, 1, 2], "cpu")

    return body
