"""Checks of exercise 3.12: whatever sums over the ranks can reduce a bucket."""

from __future__ import annotations

import functools
import time

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refusals,
    fail,
    refusal,
    trace,
)
from distlab.observe.memory import PeakMemory
from distlab.reference.workloads import digits
from tests.phase3.bad_input import check_non_members

WIDTH, LAYERS = 6, 4


def model_of(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + 31 * step + rank)
    p = next(model.parameters())
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(p)
    return model(x).square().mean()


def flat_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def reduced(ctx, impl, hook, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Per step the gradients by DDP with ``hook``."""
    model = model_of(seed, dtype).to(ctx.device)
    make = impl.module("overlap").BucketedDDP
    with ctx.region("start"):
        wrapped = make(model, bucket_bytes=400, first_bucket_bytes=200)
    wrapped.register_comm_hook(hook)
    got = []
    for step in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, seed, ctx.rank, step).backward()
        got.append(flat_gradients(model))
    return got


def own_gradients(seed: int, rank: int, step: int, dtype: torch.dtype) -> Tensor:
    """A rank's gradients before any reduction."""
    alone = model_of(seed, dtype)
    loss_of(alone, seed, rank, step).backward()
    return flat_gradients(alone)


def check_means(
    results: list[list[Tensor]],
    what: str,
    seed: int,
    dtype: torch.dtype = torch.float64,
    **tolerance: float,
) -> None:
    """``results``: the values returned by ``reduced`` on each rank."""
    ranks = range(len(results))
    own = [[own_gradients(seed, rank, step, dtype) for rank in ranks] for step in range(3)]
    for rank, got in enumerate(results):
        for step, (value, parts) in enumerate(zip(got, own, strict=True)):
            mean = torch.stack(parts).mean(0)
            if not torch.equal(value, results[0][step]):
                fail(
                    f"{what}: the gradients of step {step} on ranks 0 and {rank} are not the same "
                    "to the last bit. The replicas drift apart",
                    cause="ranks-differ",
                    rank=rank,
                )
            expect_close(
                value,
                mean,
                what=f"{what}: gradients of step {step}",
                rank=rank,
                contributions=parts,
                before=parts[rank] / len(parts),
                **tolerance,
            )


def complete(handle: object) -> None:
    """Wait for a hook's return value; None: it is complete already."""
    if handle is not None and not callable(getattr(handle, "wait", None)):
        raise TypeError(f"a hook returns a handle with wait(), or None; got {handle!r}")
    if handle is not None:
        handle.wait()


def ring(tensor: Tensor) -> None:
    """Whole tensors round the ring, W-1 times: simple, and right."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, moving = tensor.clone(), tensor.clone()
    parts = {rank: tensor.clone()}
    for step in range(1, world_size):
        incoming = torch.empty_like(moving)
        work = dist.isend(moving, (rank + 1) % world_size)
        dist.recv(incoming, (rank - 1) % world_size)
        work.wait()
        parts[(rank - step) % world_size], moving = incoming, incoming
    total.zero_()
    for place in sorted(parts):  # in the order of the ranks: the same bits everywhere
        total += parts[place]
    tensor.copy_(total)


def tree(tensor: Tensor) -> Tensor:
    """Up a binary tree to rank 0 and down again. Its return value is no handle."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    children = [c for c in (2 * rank + 1, 2 * rank + 2) if c < world_size]
    for child in children:
        incoming = torch.empty_like(tensor)
        dist.recv(incoming, child)
        tensor += incoming
    if rank:
        dist.send(tensor, (rank - 1) // 2)
        dist.recv(tensor, (rank - 1) // 2)
    for child in children:
        dist.send(tensor, child)
    return tensor


class Trap:
    """The return value of a reduction counts for nothing, and nothing waits for it."""

    def wait(self) -> None:
        raise AssertionError("blocking() has waited for what reduce returned")


@exercise("3.12", "virtual", asserts="blocking in-place layout")
def test_blocking_reductions_are_hooks(impl, run, seed, cases):
    """A ring and a tree, written from messages, reduce the buckets; no all-reduce is used."""
    for name, reduce, world_size in cases(("ring", ring, 3), ("tree", tree, 5)):

        def body(ctx):
            hook, given = impl.blocking(reduce), []
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(4, 2))])
            complete(impl.blocking(lambda tensor: given.append(tensor) or Trap())(bucket))
            itself = [tensor is bucket.buffer for tensor in given]
            with ctx.region("training"):
                return reduced(ctx, impl, hook, seed), itself

        results = run(body, world_size)
        for rank, (_, itself) in enumerate(results):
            what = "whether reduce got bucket.buffer itself, in each of its calls for one bucket"
            expect_equal(itself, [True], what=what, rank=rank, cause="copies")
        check_means(
            [means for means, _ in results],
            f"{name} on {world_size} ranks",
            seed,
            rtol=1e-10,
            atol=1e-12,
        )
        for log in results.logs:
            log.select(region="training").forbid("all_reduce", why=f"the {name} was given")
            log.all_waited()


@exercise("3.12", "virtual gloo cuda", asserts="bf16 sum same-bits in-place one-message cost")
def test_bf16_sends_half_and_keeps_the_range(impl, run, seed, cases):
    """Values to 8 bits, float32's range, half of the bytes, the same bits on all ranks."""
    for world_size in cases(3, 2, 1):

        def body(ctx):
            hook = impl.bf16_compress
            with ctx.region("training"):
                means = reduced(ctx, impl, hook, seed, torch.float32)
            bucket = impl.module("buckets").Bucket(
                0, [nn.Parameter(torch.zeros(8, device=ctx.device))]
            )
            bucket.buffer.copy_(2.0 ** torch.tensor([-120, -60, -20, 0, 1, 20, 60, 120]))
            complete(hook(bucket))
            return means, bucket.buffer, str(bucket.buffer.dtype)

        results = run(body, world_size)
        what = f"bfloat16 on {world_size} ranks"
        check_means([r[0] for r in results], what, seed, torch.float32, rtol=4e-2, atol=4e-3)
        for rank, (_, wide, dtype) in enumerate(results):
            want = world_size * 2.0 ** torch.tensor([-120, -60, -20, 0, 1, 20, 60, 120])
            expect_equal(dtype, "torch.float32", what="dtype of the buffer", rank=rank)
            expect_close(
                wide,
                want,
                what="a sum of numbers from 2^-120 to 2^120",
                rank=rank,
                rtol=2e-2,
                atol=0.0,
            )
            log = results.logs[rank].select(op="all_reduce", region="training")
            numel = LAYERS * (WIDTH + 1) * WIDTH
            share = 2 * (world_size - 1) / world_size * 2 * numel * 3
            log.sent_at_most(share + 64, "2(W-1)/W of 2 bytes per gradient, three steps")
            log.sent_at_least(share - 64, "2(W-1)/W of 2 bytes per gradient, three steps")
            sent = results.logs[rank].select(region="training")
            kinds = {(event.op, event.dtype) for event in sent.events}
            if not kinds <= {("all_reduce", "bfloat16"), ("broadcast", "int64")}:
                fail(
                    f"rank {rank} issued {kinds}: one all-reduce in bfloat16 is enough",
                    cause="one-message",
                    rank=rank,
                )


def fractions(seed: int) -> Tensor:
    return torch.rand(100, generator=torch.Generator().manual_seed(seed))


@exercise("3.12", "virtual", asserts="bf16 sum refused dtype refusals")
def test_bf16_loses_precision_and_not_more(impl, run, seed):
    """The result is that of bfloat16, not of float32, and stays in the bucket's own dtype."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

    def body(ctx):
        got, sent = [], []
        for dtype in dtypes:
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(100, dtype=dtype))])
            bucket.buffer.copy_(fractions(seed))
            before = bucket.buffer.data_ptr()
            with ctx.region("sums"):
                complete(impl.bf16_compress(bucket))
            sent.append(bucket.buffer.data_ptr() == before)
            got.append(bucket.buffer)
        said = []
        with ctx.region("refused"):
            for dtype in (torch.complex64, torch.complex128):
                imaginary = nn.Parameter(torch.zeros(2, dtype=dtype))
                bad = impl.module("buckets").Bucket(0, [imaginary])
                hooks = impl.bf16_compress, impl.fp16_compress
                said += [refusal(lambda hook, b=bad: complete(hook(b)), hook) for hook in hooks]
        return got, sent, said

    results = run(body, 2)
    for rank, (sums, same, said) in enumerate(results):
        expect_refusals(said, ["complex numbers, bf16", "complex numbers, fp16"] * 2, rank=rank)
        kinds = {event.dtype for event in results.logs[rank].select(region="sums").events}
        what = "dtypes that bf16_compress sends, of buckets of several"
        expect_equal(kinds, {"bfloat16"}, what=what, rank=rank, cause="not-compressed")
        if results.logs[rank].select(region="refused").events:
            fail(f"rank {rank} sends before it refuses", cause="late-check", rank=rank)
        expect_equal(same, [True] * 4, what="the buffer's memory kept", rank=rank, cause="moved")
        for got, dtype in zip(sums, dtypes, strict=True):
            exact = fractions(seed).to(dtype).double() * 2
            if got.dtype != dtype:
                said = f"a bucket of {dtype} is one of {got.dtype} afterwards"
                fail(said, cause="wrong-dtype", rank=rank)
            error = float(((got.double() - exact) / exact).abs().max())
            if error == 0 and dtype != torch.bfloat16:
                fail(
                    f"the sum is exact to {dtype}: nothing was rounded to bfloat16",
                    cause="not-compressed",
                    rank=rank,
                )
            if error > 2**-7:
                fail(
                    f"a relative error of {error:.2g}, bfloat16 allows 2^-8 per rounding",
                    cause="too-lossy",
                    rank=rank,
                )


@exercise("3.12", "virtual", asserts="refused refusals")
def test_who_is_no_member_is_refused(impl, run):
    """A hook whose group lacks this rank raises ValueError; torch would do nothing."""

    def with_hook(name):
        def call(group):
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(4))])
            getattr(impl, name)(bucket, group=group)

        return call

    calls = {name: with_hook(name) for name in ("bf16_compress", "fp16_compress")}
    check_non_members(run, calls | {"two_level": lambda node: impl.two_level(node, node)})


NODES = {3: [[0, 1], [2]], 5: [[0, 2, 4], [1, 3]], 2: [[0], [1]]}


@exercise("3.12", "virtual gloo", asserts="two-level in-place same-bits cost alone")
def test_two_levels_send_little_between_nodes(impl, run, seed, cases):
    """Sums in the nodes, then between their first ranks only, then hands the sum out."""
    for world_size in cases(3, 5, 2):
        nodes = NODES[world_size]

        def body(ctx):
            groups = [dist.new_group(ranks) for ranks in nodes]
            leaders = dist.new_group([ranks[0] for ranks in nodes])
            (mine,) = (g for g, ranks in zip(groups, nodes, strict=True) if ctx.rank in ranks)
            hook = impl.two_level(mine, leaders)
            means = reduced(ctx, impl, hook, seed)
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(600))])
            bucket.buffer.fill_(ctx.rank + 1.0)
            with ctx.region("one bucket"):
                complete(hook(bucket))
            return means, bucket.buffer[::599].tolist()

        results = run(body, world_size)
        check_means([r[0] for r in results], f"nodes {nodes}", seed, rtol=1e-10, atol=1e-12)
        total = float(sum(range(1, world_size + 1)))
        for rank, (_, ends) in enumerate(results):
            expect_equal(ends, [total, total], what=f"a sum over the nodes {nodes}", rank=rank)
            log = results.logs[rank]
            log.all_waited()
            inside = lambda e: any(set(e.group) <= set(ranks) for ranks in nodes)
            events = [e for e in log.select(region="one bucket").events if not inside(e)]
            sent = sum(e.sent for e in events)
            leads = any(rank == ranks[0] for ranks in nodes)
            share = 2 * (len(nodes) - 1) / len(nodes) * 2_400 if leads else 0
            if sent > share:
                fail(
                    f"rank {rank} sends {sent} bytes between the nodes {nodes}, expected "
                    f"{share:.0f}: only the first ranks of the nodes talk to other nodes",
                    cause="too-many-bytes",
                    rank=rank,
                )


@exercise("3.12", "virtual", asserts="begins several resources cost life")
def test_hooks_begin_and_dont_wait(impl, run):
    """A hook returns while its bucket is on the way; two buckets travel; a copy is freed again."""
    size = 100_000

    def body(ctx):
        took = []
        group = dist.new_group([0, 1])
        hooks = (impl.bf16_compress, impl.two_level(group, dist.new_group([0])))
        make = impl.module("buckets").Bucket
        for hook in hooks:
            buckets = [make(k, [nn.Parameter(torch.ones(size - k))]) for k in range(2)]
            for k, bucket in enumerate(buckets):
                bucket.buffer.fill_(1.0 + 2 * k)
            dist.barrier()
            with PeakMemory() as memory:
                begun = time.perf_counter()
                with ctx.region(f"begun {len(took)}"):
                    handles = [hook(bucket) for bucket in buckets]
                returned = time.perf_counter()
                for handle in handles:
                    complete(handle)
                waited = time.perf_counter()
                del handles, handle
                held = memory.current, memory.peak
            ends = [bucket.buffer[::99_997].tolist() for bucket in buckets]
            took.append([returned - begun, waited - begun, ends, *held])
        return took

    results = run(body, 2)
    for rank, took in enumerate(results):
        for k, (returned, waited, ends, left, peak) in enumerate(took):
            name = ("bf16_compress", "two_level")[k]
            if results.logs[rank].select(region=f"begun {k}").messages < 2:
                said = f"{name} of two buckets returns before it has begun two messages: the first "
                fail(f"{said}step begins in the call, not in wait()", cause="late", rank=rank)
            want = [[2.0, 2.0], [6.0, 6.0]]
            what = f"{name}: the sums of two buckets on their way at the same time"
            expect_equal(ends, want, what=what, rank=rank)
            if returned > 0.1 * waited:
                fail(
                    f"{name} returns after {returned * 1e3:.2f} of {waited * 1e3:.2f} ms: it "
                    "waits, and backward stands still meanwhile",
                    cause="hook-waits",
                    rank=rank,
                )
            if left > 1000 or peak > 2 * 2 * size + 1000:
                fail(
                    f"{name} holds {left:,} B after wait(), and {peak:,} B at most for two buckets "
                    f"of {4 * size:,} B: a copy in 16 bits, until it has arrived",
                    cause="copies",
                    rank=rank,
                )


@exercise("3.12", "virtual", asserts="sum two-level group alone")
def test_hooks_work_in_a_group(impl, run, seed):
    """Two groups of four ranks sum at the same time; one rank's infinity is everybody's."""
    groups = [1, 3], [0, 2]

    def body(ctx):
        made = [dist.new_group(members) for members in groups]
        k = int(ctx.rank % 2 == 0)
        alone = [dist.new_group([rank]) for rank in range(4)][ctx.rank]
        whole = impl.bf16_compress, impl.fp16_compress
        hooks = [functools.partial(hook, group=made[k]) for hook in whole]
        hooks += [impl.two_level(made[k], alone if ctx.rank < 2 else -100)]
        hooks += [impl.two_level(alone, made[k])]
        got = []
        for hook in hooks:
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(3))])
            bucket.buffer.fill_(ctx.rank + 1.0)
            bucket.buffer[1] = float("inf") if ctx.rank == 3 else 1.0
            complete(hook(bucket))
            got.append(bucket.buffer.tolist())
        return got

    names = "bf16_compress", "fp16_compress", "two_level in one node", "two_level, a node per rank"
    for rank, got in enumerate(run(body, 4)):
        members = groups[rank % 2 == 0]
        total = float(sum(members) + 2)
        want = [total, float("inf") if 3 in members else 2.0, total]
        for name, values in zip(names, got, strict=True):
            what = f"{name}: the sum over ranks {members} of 4"
            expect_equal(values, want, what=what, rank=rank, cause="group")


@exercise("3.12", "virtual gloo cuda", asserts="fp16 sum dtype")
def test_fp16_has_more_digits_and_less_range(impl, run, cases):
    """float16: a sum to 2^-10, half of the bytes; small numbers become 0, large sums infinite."""
    numbers = [1 / 3, -2 / 3, 1.001, 3e-5, 1e-9, 5e4]

    def body(ctx):
        parameter = nn.Parameter(torch.zeros(len(numbers), device=ctx.device))
        bucket = impl.module("buckets").Bucket(0, [parameter])
        bucket.buffer.copy_(torch.tensor(numbers))
        with ctx.region("bucket"):
            complete(impl.fp16_compress(bucket))
        return bucket.buffer.cpu()

    for world_size in cases(2):
        results = run(body, world_size)
        for rank, got in enumerate(results):
            for number, value in zip(numbers[:4], got.tolist(), strict=False):
                if abs(value / (world_size * number) - 1) > 2**-10:
                    fail(
                        f"the sum of {world_size} times {number:.6g} is {value:.6g}: float16 has "
                        "11 bits of precision, bfloat16 has 8",
                        cause="too-lossy",
                        rank=rank,
                    )
            ends = [0.0, float("inf")]
            what = "the sums of 1e-9 and of 5e4, which float16 can't hold"
            expect_equal(got[4:].tolist(), ends, what=what, rank=rank, cause="not-compressed")
            log = results.logs[rank].select(region="bucket")
            log.sent_at_most(len(numbers) * 2 + 8, "2(W-1)/W of 2 bytes per number")


@trace("3.12", measures="hidden")
def trace_bf16(impl):
    """A step with all-reduce and one in bfloat16."""
    digits()

    def body(ctx):
        images, labels = digits()[64 * ctx.rank : 64 * ctx.rank + 64]
        wide = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 768), nn.ReLU(), *wide, nn.Linear(768, 10)
        )
        wrapped = impl.module("overlap").BucketedDDP(
            model, bucket_bytes=2_500_000, first_bucket_bytes=1_000_000
        )
        for step in range(6):
            if step == 4:
                dist.barrier()
                ctx.start_picture()
            wrapped.register_comm_hook(impl.bf16_compress if step % 2 else impl.all_reduce)
            wrapped.zero_grad()
            with ctx.region("bfloat16" if step % 2 else "float32"):
                F.cross_entropy(wrapped(images), labels).backward()

    return body
