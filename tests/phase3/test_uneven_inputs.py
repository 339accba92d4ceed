"""Checks of exercise 3.31: ranks with different numbers of batches train like one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from distlab.grading import exercise, expect_close, expect_equal, expect_few_waits, trace
from tests.phase3.uneven_models import (
    Batch,
    batches,
    compare,
    expect_same,
    join_steps,
    loss_of,
    net,
    one_process,
    optimizer_of,
    samples_in,
    state_of,
)

SIZES = {"bucket_bytes": 120, "first_bucket_bytes": 60}


def alone(seed: int, first: int, of_ranks: Sequence[Sequence[Batch]], **options) -> dict:
    """One process that starts with the values of rank ``first``."""
    model = net(seed + first)
    optimizer = optimizer_of(model)
    one_process(model, optimizer, of_ranks, **options)
    return state_of(model, optimizer)


@exercise(
    "3.31",
    "virtual gloo cuda",
    asserts="steps mean state unused ddp dtype layout parameters alone",
)
def test_training_equals_one_process(impl, run, seed, cases):
    """Each step is the mean over the ranks that have a batch; in the end all ranks are equal."""
    for counts in cases((2, 0, 4), (0, 3, 1), (3, 3, 3), (1,)):

        def body(ctx):
            model = net(seed + ctx.rank).to(ctx.device)
            wrapped = impl.UnevenDDP(model, agree=True, **SIZES)
            optimizer = optimizer_of(model)
            own = batches(seed, ctx.rank, counts[ctx.rank], ctx.device)
            had = list(join_steps(wrapped, optimizer, own))
            return had, state_of(model, optimizer)

        results = run(body, len(counts))
        want = alone(seed, 0, [batches(seed, r, n) for r, n in enumerate(counts)])
        for rank, (had, got) in enumerate(results):
            expected = [step < counts[rank] for step in range(max(counts))]
            what = f"batches {counts}: in which steps a batch came, not None"
            expect_equal(had, expected, what=what, rank=rank, cause="steps")
            compare(got, want, rank, f"batches {counts}")
        expect_same([state for _, state in results], range(len(counts)))


@exercise("3.31", "virtual gloo", asserts="weight mean")
def test_weights_make_the_mean_over_samples(impl, run, seed):
    """With weight=the number of samples, the mean is over the samples of all ranks."""
    counts = (3, 1, 2)

    def body(ctx):
        model = net(seed)
        wrapped = impl.UnevenDDP(model, agree=True)
        optimizer = optimizer_of(model)
        own = batches(seed, ctx.rank, counts[ctx.rank])
        list(join_steps(wrapped, optimizer, own, weight=samples_in))
        return state_of(model, optimizer)

    of_ranks = [batches(seed, r, n) for r, n in enumerate(counts)]
    for rank, got in enumerate(run(body, 3)):
        compare(got, alone(seed, 0, of_ranks, weight=samples_in), rank, "weighted by samples")


GROUPS = [3, 1, 4], [0, 2]  # both join at the same time


@exercise("3.31", "virtual", asserts="group state mean")
def test_groups_join_by_themselves(impl, run, seed):
    """Two groups end after different numbers of steps; numbers are those in the group."""
    counts = {3: 0, 1: 1, 4: 3, 0: 0, 2: 5}

    def body(ctx):
        groups = [dist.new_group(sorted(members)) for members in GROUPS]
        k = int(ctx.rank in GROUPS[1])
        model = net(seed + ctx.rank)
        wrapped = impl.UnevenDDP(model, group=groups[k], agree=True, **SIZES)
        optimizer = optimizer_of(model)
        own = batches(seed, ctx.rank, counts[ctx.rank])
        steps = len(list(join_steps(wrapped, optimizer, own)))
        return steps, state_of(model, optimizer)

    results = run(body, 5)
    for members in map(sorted, GROUPS):
        want = alone(seed, members[0], [batches(seed, r, counts[r]) for r in members])
        most = max(counts[rank] for rank in members)
        for rank in members:
            steps, got = results[rank]
            what = f"steps of ranks {members} of 5"
            expect_equal(steps, most, what=what, rank=rank, cause="steps")
            compare(got, want, rank, f"ranks {members} of 5")
        expect_same([state for _, state in results], members)


@exercise("3.31", "virtual", asserts="life buffers ddp unused")
def test_join_again_and_train_without(impl, run, seed):
    """Two epochs with different counts, a step without a join between them; other bucket order."""
    epochs = [(1, 0, 3), (2, 4, 0)]

    def body(ctx):
        model = net(seed)
        wrapped = impl.UnevenDDP(model, agree=True, **SIZES)
        optimizer = optimizer_of(model)
        for counts in epochs:
            list(join_steps(wrapped, optimizer, batches(seed, ctx.rank, counts[ctx.rank])))
            optimizer.zero_grad()
            loss_of(wrapped, batches(seed, ctx.rank + 7, 1)[0]).backward()
            optimizer.step()
        return {n: v for n, v in state_of(model, optimizer).items() if "norm." not in n}

    model = net(seed)
    optimizer = optimizer_of(model)
    for counts in epochs:
        one_process(model, optimizer, [batches(seed, r, n) for r, n in enumerate(counts)])
        one_process(model, optimizer, [batches(seed, r + 7, 1) for r in range(3)])
    want = state_of(model, optimizer)
    for rank, got in enumerate(run(body, 3)):
        compare(got, {name: want[name] for name in got}, rank, "two joins, a plain step after each")


@exercise("3.31", "virtual", asserts="buffers buffers-end training cost ddp")
def test_buffers_come_from_a_rank_with_a_batch(impl, run, seed):
    """A forward finds the buffers of the first rank that has a batch; the mode counts."""
    counts = (1, 3, 2)

    def body(ctx):
        model = nn.BatchNorm1d(2, momentum=None)
        wrapped = impl.UnevenDDP(model)
        found = []
        for mode in (True, False):
            wrapped.module.train(mode)
            with (
                ctx.region(f"train={mode}"),
                wrapped.join(range(counts[ctx.rank])) as steps,
            ):
                for step in steps:
                    found.append(model.running_mean.tolist())
                    if step is None:
                        wrapped.shadow()
                    else:
                        x = torch.tensor([[0.0, 1.0], [2.0, 5.0]]) + 10 * ctx.rank + step
                        wrapped(x).sum().backward()
            found.append(model.running_mean.tolist())
        wrapped.module.train()
        with ctx.region("plain"):
            wrapped(torch.zeros(2, 2))
        return found

    results = run(body, 3)
    alone = {rank: nn.BatchNorm1d(2, momentum=None) for rank in range(3)}
    wanted: list[list[float]] = []
    source = 0
    for step in range(3):
        source = next(rank for rank in range(3) if step < counts[rank])
        start = {k: v.clone() for k, v in alone[source].state_dict().items()}
        wanted.append(start["running_mean"].tolist())
        for rank in range(3):
            alone[rank].load_state_dict(start)
            if step < counts[rank]:
                alone[rank](torch.tensor([[0.0, 1.0], [2.0, 5.0]]) + 10 * rank + step)
    end = alone[source].running_mean.tolist()
    wanted += [end] * 5  # after the join; before each of three steps in evaluation, and after them
    for rank, found in enumerate(results):
        for k, (got, want) in enumerate(zip(found, wanted, strict=True)):
            expect_close(
                torch.tensor(got),
                torch.tensor(want),
                what=f"the running mean at moment {k} (0 to 2: with a batch; 3: after the join; "
                "4 to 7: the same in evaluation)",
                rank=rank,
                rtol=1e-5,
            )
        ops = {m: results.logs[rank].select(region=f"train={m}").ops() for m in (True, False)}
        what = (
            "broadcasts, training (two dtypes, 3 steps, the end; 1 for the order) and in evaluation"
        )
        told = ops[True]["broadcast"], ops[False]["broadcast"]
        expect_equal(told, (9, 0), what=what, rank=rank, cause="too-many-messages")
        plain = results.logs[rank].select(region="plain").ops()["broadcast"]
        what = "broadcasts of a forward outside of a join: one for each of 2 dtypes, as in DDP"
        expect_equal(plain, 2, what=what, rank=rank, cause="buffers-not-sent")


@exercise("3.31", "virtual", asserts="cost buffers buffers-end")
def test_buffers_fill_messages_of_bucket_bytes(impl, run, seed):
    """Also the first message of a dtype has room for bucket_bytes, as in DDP.forward."""

    def body(ctx):
        model = nn.Linear(1, 1)
        for k in range(4):
            model.register_buffer(f"kept_{k}", torch.full((2,), float(ctx.rank)))
        wrapped = impl.UnevenDDP(model, bucket_bytes=16, first_bucket_bytes=8)
        wrapped(torch.ones(1, 1)).sum().backward()  # learns the order of the buckets
        with ctx.region("join"), wrapped.join([torch.ones(1, 1)] * ctx.rank) as steps:
            for batch in steps:
                wrapped.shadow() if batch is None else wrapped(batch).sum().backward()

    for rank, log in enumerate(run(body, 2).logs):
        events = log.select(region="join").events
        told = [event.payload for event in events if event.op == "broadcast"]
        what = "broadcasts of four buffers of 8 bytes, before one step and at the end, in bytes"
        expect_equal(told, [16] * 4, what=what, rank=rank, cause="too-many-messages")


@exercise("3.31", "virtual", asserts="group ddp mean")
def test_after_a_join_the_mean_is_over_the_group(impl, run, seed):
    """A backward outside of a join divides by the ranks of the group again."""

    def body(ctx):
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
        model = nn.Linear(1, 1, bias=False)
        wrapped = impl.UnevenDDP(model, group=groups[ctx.rank % 2])
        with wrapped.join([torch.ones(1, 1)] * ctx.rank) as steps:
            for batch in steps:
                wrapped.shadow() if batch is None else wrapped(batch).sum().backward()
        wrapped.zero_grad()
        wrapped(torch.full((1, 1), 1.0 + ctx.rank)).sum().backward()
        return model.weight.grad

    for rank, got in enumerate(run(body, 3)):
        what = "the mean gradient in groups [0, 2] and [1], where rank r has r + 1"
        expect_close(got, torch.full((1, 1), 2.0), what=what, rank=rank)


@exercise("3.31", "virtual gloo cuda", asserts="cost ends ddp")
def test_a_step_costs_8_bytes_more(impl, run, seed):
    """One all-gather of 8 bytes and DDP's messages in each step, and one all-gather at the end."""
    counts = (4, 1)

    def body(ctx):
        model = nn.Linear(4, 3).to(ctx.device)
        wrapped = impl.UnevenDDP(model, agree=True)
        own = [torch.ones(2, 4, device=ctx.device)] * 4
        wrapped(own[0]).sum().backward()  # learns the order of the buckets
        with ctx.region("join"), wrapped.join(own[: counts[ctx.rank]]) as steps:
            for batch in steps:
                if batch is None:
                    wrapped.shadow()
                else:
                    wrapped(batch).sum().backward()

    for rank, log in enumerate(run(body, 2).logs):
        sent = log.select(region="join")
        told = [event.payload for event in sent.events if event.op == "all_gather"]
        expect_equal(told, [8] * 5, what="all-gathers, in bytes", rank=rank, cause="cost")
        payloads = sorted(event.payload for event in sent.events if event.op == "all_reduce")
        what = "all-reduces in bytes: for 4 steps a bucket of 60, and 12 to agree"
        expect_equal(payloads, [12] * 4 + [60] * 4, what=what, rank=rank, cause="cost")
        expect_equal(sent.messages, 13, what="messages", rank=rank, cause="too-many-messages")
        sent.all_waited()


@exercise("3.31", "virtual", asserts="windows forwards")
def test_a_window_is_one_batch(impl, run, seed):
    """A batch may be a window of no_sync; the number of forwards in a step is free."""
    counts = (2, 1, 3)

    def windows(rank):
        found = batches(seed, rank, 2 * counts[rank])
        return [found[k : k + 2] for k in range(0, len(found), 2)]

    def body(ctx):
        model = net(seed)
        wrapped = impl.UnevenDDP(model, agree=True, **SIZES)
        with wrapped.join(windows(ctx.rank)) as steps:
            for number, window in enumerate(steps):
                if window is None:
                    wrapped.shadow()
                elif number:
                    sum(loss_of(wrapped, batch) for batch in window).backward()
                else:
                    with wrapped.no_sync():
                        loss_of(wrapped, window[0]).backward()
                    loss_of(wrapped, window[1]).backward()
        return {n: g for n, g in state_of(model, optimizer_of(model)).items() if "gradient" in n}

    model = net(seed)
    for step in range(3):  # gradients are never zeroed: each step adds its mean
        having = [windows(rank)[step] for rank in range(3) if step < counts[rank]]
        for window in having:
            (sum(loss_of(model, batch) for batch in window) / len(having)).backward()
    want = state_of(model, optimizer_of(model))
    for rank, got in enumerate(run(body, 3)):
        compare(got, {name: want[name] for name in got}, rank, "windows of two micro-batches")


@exercise("3.31", "gloo", asserts="mean state")
def test_weights_follow_torchs_join(impl, run, seed):
    """The same batches under torch's Join, which divides by the ranks that are left."""
    counts = (1, 0, 2)

    def body(ctx):
        model = net(seed)
        wrapped = impl.UnevenDDP(model, agree=True)
        own = batches(seed, ctx.rank, counts[ctx.rank])
        list(join_steps(wrapped, optimizer_of(model), own))
        return used(model)

    def reference(ctx):
        model = net(seed)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = optimizer_of(model)
        with Join([wrapped], divide_by_initial_world_size=False):
            for batch in batches(seed, ctx.rank, counts[ctx.rank]):
                optimizer.zero_grad()
                loss_of(wrapped, batch).backward()
                optimizer.step()
        return used(model)

    def used(model):
        """Under torch's Join what no rank uses gets zeros, not None [measured, torch 2.15]."""
        named = model.named_parameters()
        return {n: p.detach().clone() for n, p in named if n[:2] not in ("no", "b.")}

    results = run(body, 3)
    for rank, want in enumerate(run(reference, 3)):
        compare(results[rank], want, rank, "beside torch's Join")


@exercise("3.31", "virtual", asserts="resources")
def test_nothing_stays(impl, run, seed):
    """A batch is free when the next one came; after the join nothing is in flight or kept."""

    def body(ctx):
        wrapped = impl.UnevenDDP(nn.Linear(2, 1))
        seen = []

        def loader():
            for _ in range(2 + ctx.rank):
                batch = torch.ones(3, 2)
                seen.append(weakref.ref(batch))
                yield batch
                del batch

        with wrapped.join(loader()) as steps:
            for batch in steps:
                if batch is None:
                    wrapped.shadow()
                else:
                    wrapped(batch).sum().backward()
        del batch, steps
        gc.collect()
        return sum(ref() is not None for ref in seen), [e.end is None for e in ctx.ledger.events]

    for rank, (kept, flying) in enumerate(run(body, 2)):
        expect_equal(kept, 0, what="batches alive after the join", rank=rank, cause="memory-kept")
        expect_equal(sum(flying), 0, what="operations in flight", rank=rank, cause="in-flight")


@exercise("3.31", "nccl", asserts="host")
def test_a_step_waits_for_the_gpu_twice(impl, run, seed):
    """Without agreement the host waits for its GPU twice at most in a step of a join."""

    def body(ctx):
        wrapped = impl.UnevenDDP(nn.Linear(4, 3).to(ctx.device))
        own = [torch.ones(2, 4, device=ctx.device)] * (4 - ctx.rank)
        for region in ("first", "step"):
            with wrapped.join(own) as steps, ctx.region(region):
                for batch in steps:
                    if batch is None:
                        wrapped.shadow()
                    else:
                        wrapped(batch).sum().backward()

    expect_few_waits(run(body, 2), 10, "a join of four steps, and its end")


@trace("3.31")
def trace_uneven(impl):
    """Three ranks with 4, 2 and 3 batches: who has none shadows the others' messages."""

    def body(ctx):
        for _ in ctx.steps(2):
            model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10))
            wrapped = impl.UnevenDDP(model, bucket_bytes=200_000, first_bucket_bytes=50_000)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            own = [torch.randn(32, 256) for _ in range((4, 2, 3, 1)[ctx.rank % 4])]
            with wrapped.join(own) as steps:
                for batch in steps:
                    optimizer.zero_grad()
                    if batch is None:
                        wrapped.shadow()
                    else:
                        wrapped(batch).square().mean().backward()
                    optimizer.step()

    return body
