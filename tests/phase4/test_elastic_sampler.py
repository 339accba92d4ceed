"""Checks of exercise 4.18: samples and batches are dealt out to another number of ranks."""

from __future__ import annotations

import time
from itertools import chain

import torch

from distlab.grading import (
    exercise,
    expect_close,
    expect_equal,
    expect_refused,
    fail,
    refusal,
    trace,
)
from tests.phase4.small_training import first_draws, next_draws, seed_streams

CHAINS = ((4, 2), (4, 3, 4), (4, 1), (2, 5), (1, 4, 2), (3, 3))


def sampler_of(impl, rank: int, world_size: int, size: int, batch: int, **options):
    return impl.ElasticSampler(
        size, global_batch_size=batch, rank=rank, world_size=world_size, **options
    )


def order_of(size: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(size, generator=generator).tolist()


def plain(mine):
    """The list, if it is a list of ints; else a word for it."""
    kinds = {type(index).__name__ for index in mine} - {"int"}
    return mine if isinstance(mine, list) and not kinds else f"{type(mine).__name__} of {kinds}"


def chain_of_runs(impl, worlds, size, batch, seed, steps):
    """The samples of the ranks in each run of a chain: ``steps`` steps, then
    the next size goes on."""
    state, runs, begun = None, [], 0
    for number, world_size in enumerate(worlds):
        got, states, lengths, kept = [], [], [], []
        for rank in range(world_size):
            sampler = sampler_of(impl, rank, world_size, size, batch, seed=seed)
            sampler.set_epoch(3)
            if state is not None:
                sampler.load_state_dict(state)
                sampler.set_epoch(3)
            ahead = [plain(mine) for mine in sampler]  # a loader reads all of them ahead
            got.append(ahead if number == len(worlds) - 1 else ahead[:steps])
            sizes = [sampler.size_of(begun + k) for k in range(len(got[-1]))]
            lengths.append((len(sampler), len(ahead), sizes))
            consumed = sampler.batch_size * (begun + len(got[-1]))  # may be above the size
            states.append(sampler.state_dict(consumed))
            kept.append((consumed, states[-1].get("consumed")))
        runs.append((lengths, got, states, kept))
        begun += len(got[0])
        state = states[0]
    return runs


@exercise(
    "4.18", "virtual", asserts="parts order alike len size-of same-state resumed alone layout"
)
def test_every_sample_once_however_many_ranks(impl, run, seed, cases):
    """Saved by W ranks, resumed by another number, twice: together one epoch,
    the same global batches."""
    shapes = cases((21, 6), (64, 16), (10, 4), (19, 8), (30, 7))

    def body(ctx):
        return [
            [chain_of_runs(impl, worlds, size, batch, seed, steps=1) for worlds in CHAINS]
            for size, batch in shapes
        ]

    for (size, batch), chains in zip(shapes, run(body, 1)[0], strict=True):
        order = order_of(size, seed, 3)
        for worlds, runs in zip(CHAINS, chains, strict=True):
            expect_chain(worlds, runs, order, batch)


def expect_chain(worlds, runs, order, batch) -> None:
    at, seen, size = 0, [], len(order)
    for world_size, (lengths, got, states, kept) in zip(worlds, runs, strict=True):
        what = f"{size} samples in batches of {batch}, {'→'.join(map(str, worlds))} ranks"
        whole, left = -(-size // batch), -(-(size - at) // batch)
        for rank, (length, ahead, sizes) in enumerate(lengths):
            where = f"{what}, with {world_size} from sample {at}"
            expect_equal(length, whole, what=f"{where}: len", rank=rank, cause="steps")
            expect_equal(ahead, left, what=f"{where}: batches left", rank=rank, cause="steps")
            want = [min(batch, size - start) for start in range(at, size, batch)][: len(sizes)]
            expect_equal(sizes, want, what=f"{where}: size_of", rank=rank, cause="size-of")
        for number in range(len(got[0])):
            parts = [batches[number] for batches in got]
            strange = [part for part in parts if not isinstance(part, list)]
            if strange:
                fail(f"{what}: expected lists of ints, got {strange[0]}", cause="type")
            want = order[at : at + batch]
            union = sorted(i for part in parts for i in part)
            if union != sorted(want):
                fail(
                    f"{what}, with {world_size} from sample {at}: expected the samples "
                    f"{sorted(want)}, together the ranks have {union}",
                    cause="global-batch",
                )
            sizes = [len(part) for part in parts]
            if max(sizes) - min(sizes) > 1:
                fail(f"{what}: parts of {sizes} samples differ by more than one", cause="uneven")
            seen += union
            at += len(want)
        for rank, (consumed, noted) in enumerate(kept):
            said = f"{what}: consumed in the state"
            expect_equal(
                consumed if noted is None else noted,
                consumed,
                what=said,
                rank=rank,
                cause="consumed",
            )
        for rank, state in enumerate(states):
            expect_equal(state, states[0], what=f"{what}: state", rank=rank, cause="state-per-rank")
    expect_equal(sorted(seen), list(range(size)), what="the epoch's samples", cause="global-batch")


@exercise("4.18", "virtual", asserts="refusals nothing-changed numbers")
def test_positions_that_mean_something_else_are_refused(impl, run, seed):
    """The state is numbers; another data set or global batch: ValueError, nothing has changed."""

    def body(ctx):
        sampler = sampler_of(impl, 0, 2, 20, 4, seed=seed)
        sampler.set_epoch(1)
        state = sampler.state_dict(4)
        types = [type(v).__name__ for v in state.values()]
        others = [sampler_of(impl, 0, 2, 30, 4), sampler_of(impl, 0, 2, 20, 6)]
        for other in others:  # both are in an epoch
            other.load_state_dict(other.state_dict(12))
        refused = [refusal(other.load_state_dict, state) for other in others]
        refused += [
            refusal(sampler_of, impl, 2, 2, 20, 4),
            refusal(sampler_of, impl, 0, 2, 20, 0),
            refusal(sampler_of, impl, -1, 2, 20, 4),
            refusal(sampler_of, impl, 0, 2, 0, 4),
            refusal(sampler_of, impl, 0, 0, 20, 4),
        ]
        fresh = [sampler_of(impl, 0, 2, 30, 4), sampler_of(impl, 0, 2, 20, 6)]
        for other in fresh:
            other.load_state_dict(other.state_dict(12))
        batches = [[list(mine) for mine in sampler] for sampler in (*others, *fresh)]
        return types, batches, refused

    results = run(body, 1)
    types, batches, refused = results[0]
    plain = {*types} <= {"int", "str", "float", "bool"}
    same = [after == new for after, new in zip(batches[:2], batches[2:], strict=True)]
    expect_equal(plain, True, what="only numbers in the state", cause="not-plain")
    results[0] = refused
    calls = [
        "a position in 20 samples loaded for 30",
        "a position in batches of 4 loaded for 6",
        "rank 2 of 2",
        "a global batch of 0",
        "rank -1 of 2",
        "a data set of 0",
        "a world size of 0",
    ]
    expect_refused(results, calls)
    expect_equal(same, [True, True], what="the sampler after a refusal", cause="half-loaded")


@exercise(
    "4.18",
    "virtual",
    asserts="order same-state epochs once resumed streams life resources randomness",
)
def test_epochs(impl, run, seed):
    """Each epoch has its own order; a resumed position holds for one pass and its epoch only."""

    def body(ctx):
        sampler = sampler_of(impl, 0, 1, 12, 4, seed=seed)
        got = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            got.append(list(chain(*sampler)))
        state = sampler.state_dict(8)
        resumed = sampler_of(impl, 0, 1, 12, 4, seed=seed + 5)
        resumed.load_state_dict(state)
        resumed.set_epoch(1)
        rest = [list(chain(*resumed)), list(chain(*resumed))]
        resumed.load_state_dict(state)
        resumed.set_epoch(2)
        rest.append(list(chain(*resumed)))
        found = [sampler.state_dict(8), sampler_of(impl, 2, 4, 12, 4, seed=seed)]
        found[1].set_epoch(1)
        found[1] = found[1].state_dict(8)
        resumed.load_state_dict(state)  # in its epoch, without naming it
        pass_, other = iter(resumed), sampler_of(impl, 0, 1, 12, 4, seed=seed)
        left = [next(pass_), list(chain(*resumed)), list(chain(*other))]
        short = sampler_of(impl, 0, 1, 10, 4, seed=seed)
        short.load_state_dict(short.state_dict(12))  # three batches, the last of them of 2
        left += [list(short), list(chain(*short))]
        seed_streams(seed)
        list(sampler_of(impl, 0, 1, 12, 4, seed=seed))
        draws = next_draws(torch.device("cpu"))
        unshuffled = sampler_of(impl, 0, 1, 6, 4, shuffle=False)
        unshuffled.set_epoch(3)
        return got, rest, list(unshuffled), found, left, draws

    got, (rest, again, other), plain, (one, two), left, draws = run(body, 1)[0]
    expect_equal(one, two, what="states of 1 rank and of 4 at one point", cause="state-per-rank")
    orders = {epoch: order_of(12, seed, epoch) for epoch in (0, 1)}
    want = [orders[1][8:], orders[1], orders[0], [], order_of(10, seed, 0)]
    whats = ["the rest of epoch 1, resumed without set_epoch", "a pass after one left early"]
    whats += ["another sampler of epoch 0", "resumed behind the last batch", "the pass after that"]
    for what, found, wanted in zip(whats, left, want, strict=True):
        expect_equal(found, wanted, what=what, cause="resumed-epoch")
    what = "this process's random streams after a pass"
    expect_equal(draws, first_draws(seed), what=what, cause="moved-stream")
    for epoch, samples in enumerate(got):
        expect_equal(samples, order_of(12, seed, epoch), what=f"epoch {epoch}", cause="order")
    want = order_of(12, seed, 1)
    expect_equal(rest, want[8:], what="the rest of epoch 1, resumed", cause="resumed-epoch")
    expect_equal(again, want, what="the pass after it", cause="resumed-epoch")
    want = order_of(12, seed, 2)
    expect_equal(other, want, what="epoch 2 instead of the rest of 1", cause="resumed-epoch")
    expect_equal(plain, [[0, 1, 2, 3], [4, 5]], what="without shuffle", cause="order")


@exercise("4.18", "virtual", asserts="weight no-samples")
def test_weighted_losses_give_the_global_gradient(impl, run, seed):
    """Parts of 3, 2, 0 … samples: the mean of the ranks' gradients is the batch's."""
    parts = {1: [5], 2: [3, 2], 3: [2, 2, 1], 4: [1, 1, 1, 0]}

    def body(ctx):
        w = {}
        for world_size, sizes in parts.items():
            total = sum(sizes)
            w[world_size] = [float(impl.loss_weight(n, total, world_size)) for n in sizes]
        return w, [impl.loss_weight(4, 4 * world_size, world_size) for world_size in parts]

    weights, equal = run(body, 1)[0]
    what = "weights of equal parts, whose mean needs none"
    expect_equal(equal, [1.0] * len(parts), what=what, cause="equal-parts")
    for world_size, sizes in parts.items():
        total = sum(sizes)
        x = torch.randn(total, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        means = [part.mean() if len(part) else torch.zeros(()) for part in x.split(sizes)]
        got = sum(w * m for w, m in zip(weights[world_size], means, strict=True)) / world_size
        expect_close(
            torch.as_tensor(got, dtype=torch.float64),
            x.mean(),
            what=f"mean over {world_size} ranks with parts of {sizes}",
            rtol=1e-12,
            atol=1e-12,  # terms of order one may cancel
        )


@trace("4.18")
def trace_batches(impl):
    """An epoch of 22 samples in batches of 6: a rank computes for 5 ms per sample that it has."""

    def body(ctx):
        sampler = sampler_of(impl, ctx.rank, ctx.world_size, 22, 6)
        ctx.start_picture()
        for mine in sampler:
            with ctx.span("samples", str(len(mine))):
                time.sleep(0.005 * len(mine))
            torch.distributed.barrier()

    return body
