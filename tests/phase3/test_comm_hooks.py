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
    """What a rank has before any reduction."""
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
    """``results``: what ``reduced`` has returned on each rank."""
    ranks = range(len(results))
    own = [[own_gradients(seed, rank, step, dtype) for rank in ranks] for step in range(3)]
    for rank, got in enumerate(results):
        for step, (value, parts) in enumerate(zip(got, own, strict=True)):
            mean = torch.stack(parts).mean(0)
            if not torch.equal(value, results[0][step]):
                fail(
                    f"{what}: the gradients of step {step} on ranks 0 and {rank} are not the same "
                    "to the last bit: the replicas drift apart",
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


def tree(tensor: Tensor) -> None:
    """Up a binary tree to rank 0 and down again."""
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


@exercise("3.12", "virtual")
def test_blocking_reductions_are_hooks(impl, run, seed, cases):
    """A ring and a tree, written from messages, reduce the buckets; no all-reduce is used."""
    for name, reduce, world_size in cases(("ring", ring, 3), ("tree", tree, 5)):

        def body(ctx):
            hook = impl.blocking(reduce)
            with ctx.region("training"):
                return reduced(ctx, impl, hook, seed)

        results = run(body, world_size)
        check_means(results, f"{name} on {world_size} ranks", seed, rtol=1e-10, atol=1e-12)
        for log in results.logs:
            log.select(region="training").forbid("all_reduce", why=f"the {name} was given")
            log.all_waited()


@exercise("3.12", "virtual gloo cuda")
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
            hook(bucket).wait()
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


def fractions(seed: int) -> Tensor:
    return torch.rand(100, generator=torch.Generator().manual_seed(seed))


@exercise("3.12", "virtual")
def test_bf16_loses_precision_and_not_more(impl, run, seed):
    """The result is that of bfloat16, not of float32: the bytes were really saved."""

    def body(ctx):
        bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(100))])
        bucket.buffer.copy_(fractions(seed))
        impl.bf16_compress(bucket).wait()
        imaginary = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        bad = impl.module("buckets").Bucket(0, [imaginary])
        said = refusal(lambda: impl.bf16_compress(bad).wait())
        return bucket.buffer, said

    exact = fractions(seed) * 2
    for rank, (got, said) in enumerate(run(body, 2)):
        error = float(((got - exact) / exact).abs().max())
        if error == 0:
            fail(
                "the sum is exact to float32: nothing was rounded to bfloat16",
                cause="not-compressed",
                rank=rank,
            )
        if error > 2**-7:
            fail(
                f"a relative error of {error:.2g}, bfloat16 allows 2^-8 per rounding",
                cause="too-lossy",
                rank=rank,
            )
        expect_refusals([said], [("complex numbers", ())], rank=rank)


@exercise("3.12", "virtual")
def test_who_is_no_member_is_refused(impl, run):
    """A hook whose group this rank is not in raises ValueError; torch would do nothing."""

    def call(group):
        bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(4))])
        impl.bf16_compress(bucket, group=group)

    check_non_members(run, {"bf16_compress": call})


NODES = {3: [[0, 1], [2]], 5: [[0, 2, 4], [1, 3]], 2: [[0], [1]]}


@exercise("3.12", "virtual gloo")
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
                hook(bucket).wait()
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


@exercise("3.12", "virtual")
def test_hooks_begin_and_dont_wait(impl, run):
    """A hook returns while its bucket is on the way; only wait() takes the time of the wire."""

    def body(ctx):
        took = []
        group = dist.new_group([0, 1])
        hooks = (impl.bf16_compress, impl.two_level(group, dist.new_group([0])))
        for hook in hooks:
            bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.ones(100_000))])
            bucket.buffer.fill_(1.0)
            dist.barrier()
            begun = time.perf_counter()
            handle = hook(bucket)
            returned = time.perf_counter()
            handle.wait()
            took.append([returned - begun, time.perf_counter() - begun, float(bucket.buffer.sum())])
        return took

    for rank, took in enumerate(run(body, 2)):
        for name, (returned, waited, total) in zip(
            ("bf16_compress", "two_level"), took, strict=True
        ):
            expect_equal(total, 200_000.0, what=f"{name}: the sum", rank=rank)
            if returned > 0.1 * waited:
                fail(
                    f"{name} returns after {returned * 1e3:.2f} of {waited * 1e3:.2f} ms: it "
                    "waits, and backward stands still meanwhile",
                    cause="hook-waits",
                    rank=rank,
                )


@exercise("3.12", "virtual")
def test_hooks_work_in_a_group(impl, run, seed):
    """bf16_compress in a group that is not the whole world."""

    def body(ctx):
        group = dist.new_group([1, 2])
        if ctx.rank == 0:
            return None
        bucket = impl.module("buckets").Bucket(0, [nn.Parameter(torch.zeros(4))])
        bucket.buffer.fill_(float(ctx.rank))
        functools.partial(impl.bf16_compress, group=group)(bucket).wait()
        return bucket.buffer.tolist()

    for rank, got in enumerate(run(body, 3)):
        if rank:
            expect_equal(got, [3.0] * 4, what="the sum over ranks 1 and 2", rank=rank)


@exercise("3.12", "virtual gloo cuda")
def test_fp16_has_more_digits_and_less_range(impl, run, cases):
    """float16: a sum to 2^-10, half of the bytes; small numbers become 0, large sums infinite."""
    numbers = [1 / 3, -2 / 3, 1.001, 3e-5, 1e-9, 5e4]

    def body(ctx):
        parameter = nn.Parameter(torch.zeros(len(numbers), device=ctx.device))
        bucket = impl.module("buckets").Bucket(0, [parameter])
        bucket.buffer.copy_(torch.tensor(numbers))
        with ctx.region("bucket"):
            impl.fp16_compress(bucket).wait()
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


@trace("3.12")
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
