"""Checks of exercises 1.1 and 1.2: sharded sampling and loading."""

from __future__ import annotations

import random
from collections import Counter

import torch

from distlab.grading import exercise, expect_equal, fail, trace
from distlab.reference.workloads import digits

LIMIT = 6  # seconds for each run of 1.1: an endless loop in a first exercise is told soon
CASES = [
    (n, w) for w in (3, 2, 1, 4, 7) for n in (64, 21, 13, w + 1, w, w - 1, 1) if n >= 1
]  # the telling ones first; also more ranks than samples


def order_of(n: int, seed: int) -> list[int]:
    """The contract's order of epoch 0 with this seed."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def expected_shard(n: int, w: int, rank: int, remainder: str, order: list[int]) -> list[int]:
    rounds = {"pad": -(-n // w), "drop": n // w, "keep": len(range(rank, n, w))}[remainder]
    return [order[(rank + w * i) % n] for i in range(rounds)]


def shards(run, impl, cases, **options) -> list:
    """For each (n, w): per rank (len, num_real, indices), computed by the learner's sampler."""

    def body(ctx):
        out = []
        for n, w in cases:
            ranks = [impl.ShardedSampler(n, rank=r, world_size=w, **options) for r in range(w)]
            out.append([[len(s), s.num_real, [int(i) for i in s]] for s in ranks])
        return out

    return run(body, 1, process_group=False, timeout=LIMIT)[0]


def explain_shards(n: int, w: int, got: list[list[int]], remainder: str) -> tuple[str, str]:
    """(cause, sentence): what is wrong with the shards of all ranks."""
    seen = Counter(i for shard in got for i in shard)
    if any(i not in range(n) for i in seen):
        return "out-of-range", f"an index is outside 0 … {n - 1}"
    if w > 1 and n >= w and all(set(shard) == set(got[0]) for shard in got):
        return "same-shard", "every rank got the same samples"
    if remainder != "drop" and len(seen) < n:
        return "gaps", f"{n - len(seen)} samples reach no rank (overlaps and gaps)"
    extra = sum(seen.values()) - n
    allowed = -(-n // w) * w - n if remainder == "pad" else 0
    if extra > max(allowed, 0):
        return "overlap", f"{extra} samples more than the data set has reach the ranks"
    sizes = {len(shard) for shard in got}
    if remainder != "keep" and len(sizes) > 1:
        return "uneven-steps", f"ranks have different numbers of samples: {sorted(sizes)}"
    return "wrong-order", "the samples are not dealt out as the docstring says"


def check_remainder(run, impl, seed: int, remainder: str) -> None:
    for shuffle in (False, True):
        options = {"remainder": remainder, "seed": seed, "shuffle": shuffle}
        for (n, w), ranks in zip(CASES, shards(run, impl, CASES, **options), strict=True):
            order = order_of(n, seed) if shuffle else list(range(n))
            got = [indices for _, _, indices in ranks]
            for rank, (length, num_real, indices) in enumerate(ranks):
                want = expected_shard(n, w, rank, remainder, order)
                where = f"{n} samples, {w} ranks, remainder={remainder!r}, shuffle={shuffle}"
                if indices != want:
                    cause, sentence = explain_shards(n, w, got, remainder)
                    fail(
                        f"{where}: {sentence}\n  rank {rank} expected {want[:8]}"
                        f" ({len(want)} entries)\n  rank {rank} got      {indices[:8]}"
                        f" ({len(indices)} entries)",
                        cause=cause,
                        rank=rank,
                    )
                expect_equal(
                    length, len(want), what=f"len(sampler), {where}", rank=rank, cause="length"
                )
                real = n // w if remainder == "drop" else len(range(rank, n, w))
                expect_equal(
                    num_real,
                    real,
                    what=f"num_real (entries that are not padding), {where}",
                    rank=rank,
                    cause="padding-counted",
                )


@exercise("1.1")
def test_padded_shards_cover_the_data(impl, run, seed):
    """Padded shards are disjoint, equally long and cover the data."""
    check_remainder(run, impl, seed, "pad")


@exercise("1.1")
def test_dropped_and_kept_remainders(impl, run, seed):
    """Dropping leaves whole rounds, keeping leaves no sample out or twice."""
    check_remainder(run, impl, seed, "drop")
    check_remainder(run, impl, seed, "keep")


@exercise("1.1")
def test_epochs_differ_and_repeat(impl, run, seed):
    """Every epoch has its own order, the same on all ranks and in every run."""

    def body(ctx):
        def epochs(new_seed):
            out = []
            for rank in range(2):
                s = impl.ShardedSampler(40, rank=rank, world_size=2, seed=new_seed)
                passes = []
                for epoch in (0, 1, 2, 0):
                    s.set_epoch(epoch)
                    torch.rand(3)  # the global generator must not matter
                    passes.append([int(i) for i in s])
                out.append(passes)
            return out

        return epochs(seed), epochs(seed), epochs(seed + 1000)

    first, again, other = run(body, 1, process_group=False, timeout=LIMIT)[0]
    if first != again:
        fail("two samplers with the same seed give different orders", cause="not-repeatable")
    for rank, (zero, one, two, zero_again) in enumerate(first):
        if zero == one or one == two:
            fail(
                "epochs 0 and 1 have the same order: set_epoch has no effect",
                cause="same-order-each-epoch",
                rank=rank,
            )
        expect_equal(
            zero_again, zero, what="epoch 0, visited again", rank=rank, cause="not-repeatable"
        )
    for epoch in range(3):
        union = sorted(first[0][epoch] + first[1][epoch])
        if union != list(range(40)):
            fail(
                f"in epoch {epoch} the two ranks' shards overlap: they draw different orders",
                cause="overlap",
            )
        want = order_of(40, seed + epoch)[0::2]
        expect_equal(
            first[0][epoch], want, what=f"order of epoch {epoch}", rank=0, cause="wrong-order"
        )
    if first == other:
        fail("another seed gives the same orders", cause="seed-ignored")


@exercise("1.1")
def test_resume_continues_where_training_was(impl, run, seed):
    """An interrupted epoch continues exactly where training was, later ones are whole."""

    def body(ctx):
        def sampler():
            return impl.ShardedSampler(37, rank=1, world_size=3, seed=seed)

        whole = sampler()
        whole.set_epoch(2)
        full = [int(i) for i in whole]
        running = sampler()
        running.set_epoch(2)
        ahead = iter(running)
        for _ in range(9):  # a loader with workers reads ahead of the training
            next(ahead)
        state = running.state_dict(5)
        resumed = sampler()
        resumed.load_state_dict(state)
        resumed.set_epoch(2)
        rest = [int(i) for i in resumed]
        second = [int(i) for i in resumed]
        resumed.load_state_dict(state)
        resumed.set_epoch(3)
        next_epoch = [int(i) for i in resumed]
        whole.set_epoch(3)
        plain = [isinstance(v, (int, str, bool, float)) for v in state.values()]
        return full, rest, second, next_epoch, [int(i) for i in whole], plain

    results = run(body, 1, process_group=False, timeout=LIMIT)[0]
    full, rest, second, next_epoch, full_next, plain = results
    if rest == full[9:]:
        fail(
            "the resumed epoch skips what the loader had only read ahead: count what was trained "
            "on (`consumed`), not what the sampler handed out",
            cause="read-ahead-skipped",
        )
    cause = "starts-over" if rest == full else "wrong-position"
    expect_equal(rest, full[5:], what="the rest of the resumed epoch", cause=cause)
    expect_equal(second, full, what="a second pass after resuming", cause="skips-every-epoch")
    expect_equal(next_epoch, full_next, what="the epoch after", cause="skips-every-epoch")
    expect_equal(all(plain), True, what="state_dict holds plain values only")


@exercise("1.1")
def test_bad_arguments_are_refused(impl, run):
    """A rank or remainder that can't be is refused with a ValueError."""

    def body(ctx):
        out = []
        for n, rank, w, remainder in ((8, 2, 2, "pad"), (8, -1, 2, "pad"), (8, 0, 2, "cut")):
            try:
                impl.ShardedSampler(n, rank=rank, world_size=w, remainder=remainder)
                out.append("")
            except ValueError as error:
                out.append(str(error) or "ValueError")
        return out

    for said in run(body, 1, process_group=False, timeout=LIMIT)[0]:
        if not said:
            fail("a wrong rank or remainder was accepted", cause="not-refused")


class Numbers(torch.utils.data.Dataset):
    """Sample i is (i, its label); noisy: also one draw of each library."""

    def __init__(self, n: int, noisy: bool = False) -> None:
        self.n, self.noisy = n, noisy

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        if not self.noisy:
            return torch.tensor([float(i), 1.0]), i
        import numpy as np

        draws = (float(torch.rand(())), float(np.random.rand()), random.random())
        return torch.tensor(draws, dtype=torch.float64), i


@exercise("1.2")
def test_batch_size_of_a_rank(impl, run):
    """The global batch is split evenly, or refused with both numbers."""

    def body(ctx):
        out = [impl.split_batch(b, w) for b, w in ((8, 1), (8, 2), (12, 3), (64, 4))]
        for b, w in ((10, 4), (3, 4), (0, 2)):
            try:
                out.append(f"accepted {b} over {w}")
                impl.split_batch(b, w)
            except ValueError as error:
                out[-1] = str(error)
        return out

    got = run(body, 1, process_group=False)[0]
    if got[:4] == [8, 8, 12, 64]:
        fail("every rank gets the whole global batch", cause="global-batch-per-rank")
    expect_equal(got[:4], [8, 4, 4, 16], what="batch size per rank of 8/1, 8/2, 12/3, 64/4")
    for text, numbers in zip(got[4:], (("10", "4"), ("3", "4"), ("0", "2")), strict=True):
        if text.startswith("accepted") or not all(n in text for n in numbers):
            fail(f"expected a ValueError with both numbers, got: {text}", cause="not-refused")


def batches_of(run, impl, seed, cases, workers: int = 0) -> list:
    def body(ctx):
        out = []
        for n, w, remainder in cases:
            ranks = []
            for rank in range(w):
                loader = impl.build_loader(
                    Numbers(n),
                    rank=rank,
                    world_size=w,
                    global_batch_size=4 * w,
                    seed=seed,
                    remainder=remainder,
                    num_workers=workers,
                )
                got = [[list(x.shape), str(x.dtype), y.tolist()] for x, y in loader]
                ranks.append([len(loader), got])
            out.append(ranks)
        return out

    return run(body, 1, process_group=False)[0]


def check_batches(run, impl, seed, cases, workers: int = 0) -> None:
    found = batches_of(run, impl, seed, cases, workers)
    for (n, w, remainder), ranks in zip(cases, found, strict=True):
        where = f"{n} samples, {w} ranks, global batch {4 * w}, remainder={remainder!r}"
        steps = [len(batches) for _, batches in ranks]
        if len(set(steps)) > 1:
            fail(
                f"{where}: the ranks take {steps} steps: the one with fewer leaves the others "
                "waiting for ever",
                cause="uneven-steps",
                rank=steps.index(min(steps)),
            )
        order = order_of(n, seed)
        for rank, (length, batches) in enumerate(ranks):
            shard = expected_shard(n, w, rank, remainder, order)
            longest = -(-n // w) if remainder != "drop" else n // w
            want = [shard[i : i + 4] for i in range(0, longest, 4)]
            got = [labels for _, _, labels in batches]
            if sum(map(len, got)) == w * sum(map(len, want)) and w > 1:
                fail(f"{where}: the rank saw {w} times its share", cause="global-batch-per-rank")
            cause = "lost-samples" if sum(map(len, got)) < len(shard) else "wrong-batches"
            expect_equal(got, want, what=f"labels per batch, {where}", rank=rank, cause=cause)
            expect_equal(length, len(want), what=f"len(loader), {where}", rank=rank, cause="length")
            for shape, dtype, labels in batches:
                expect_equal(
                    (shape, dtype),
                    ([len(labels), 2], "torch.float32"),
                    what=f"shape and dtype of a batch of {len(labels)}, {where}",
                    rank=rank,
                    cause="empty-batch",
                )


@exercise("1.2")
def test_steps_consume_the_global_batches(impl, run, seed):
    """Step k of all ranks together is the k-th global batch; all take equally many steps."""
    cases = [
        (n, w, remainder)
        for remainder in ("pad", "drop", "keep")
        for w in (1, 2, 3, 4)
        for n in (w, 8 * w, 8 * w + 1, 29)
    ]
    check_batches(run, impl, seed, cases)


@exercise("1.2")
def test_worker_processes_give_the_same_batches(impl, run, seed):
    """Loading in worker processes changes nothing about the batches."""
    check_batches(run, impl, seed, [(29, 2, "keep")], workers=2)


@exercise("1.2")
def test_resumed_loader_stays_in_step(impl, run, seed):
    """After resuming, every rank has the same number of batches left, and the right ones."""

    def body(ctx):
        out = []
        for rank in range(3):
            passes = []
            for resume in (False, True):
                loader = impl.build_loader(
                    Numbers(25),
                    rank=rank,
                    world_size=3,
                    global_batch_size=6,
                    seed=seed,
                    remainder="keep",
                )
                if resume:
                    sampler = loader.batch_sampler.sampler
                    sampler.load_state_dict(sampler.state_dict(4))
                loader.batch_sampler.set_epoch(0)
                passes.append([y.tolist() for _, y in loader])
            out.append(passes)
        return out

    for rank, (whole, resumed) in enumerate(run(body, 1, process_group=False)[0]):
        what = "batches after resuming behind 2 of them"
        expect_equal(resumed, whole[2:], what=what, rank=rank, cause="wrong-position")


@exercise("1.2")
def test_ranks_and_workers_draw_different_numbers(impl, run, seed):
    """torch, numpy and random differ by rank, worker and epoch, and repeat with the seed."""

    def body(ctx):
        def draws(rank, new_seed):
            loader = impl.build_loader(
                Numbers(8, noisy=True),
                rank=rank,
                world_size=2,
                global_batch_size=4,
                seed=new_seed,
                shuffle=False,
                num_workers=2,
            )
            epochs = []
            for epoch in (0, 1):
                loader.batch_sampler.set_epoch(epoch)
                epochs.append([x[0].tolist() for x, _ in loader])  # batch i comes from worker i
            return epochs

        import numpy as np

        seeded = []
        for new_seed, rank, worker in ((seed, 0, 0), (seed, 1, 0), (seed, 0, 1), (seed + 1, 0, 0)):
            impl.seed_everything(new_seed, rank, worker)
            row = [float(torch.rand(())), float(np.random.rand()), random.random()]
            impl.seed_everything(new_seed, rank, worker)
            same = [float(torch.rand(())), float(np.random.rand()), random.random()]
            seeded.append([row, same])
        return [draws(0, seed), draws(1, seed), draws(0, seed)], seeded

    (rank0, rank1, again), seeded = run(body, 1, process_group=False)[0]
    for i, library in enumerate(("torch", "numpy", "random")):
        for row, same in seeded:
            if row[i] != same[i]:
                fail(f"{library} is not repeatable with the same seed", cause="not-repeatable")
        names = ("ranks 0 and 1", "workers 0 and 1", "seed s on rank 1 and seed s+1 on rank 0")
        firsts = [row[i] for row, _ in seeded]
        for a, b, who in ((0, 1, names[0]), (0, 2, names[1]), (1, 3, names[2])):
            if firsts[a] == firsts[b]:
                fail(f"{who} draw the same numbers from {library}", cause="same-seed")
        (w0, w1), next_epoch = ([batch[i] for batch in epoch] for epoch in rank0)
        if w0 == w1:
            fail(f"both workers of a loader draw the same from {library}", cause="same-seed")
        if w0 == rank1[0][0][i]:
            fail(f"worker 0 of ranks 0 and 1 draws the same from {library}", cause="same-seed")
        if w0 == next_epoch[0]:
            fail(f"{library} draws the same in every epoch", cause="same-seed-each-epoch")
        if w0 != again[0][0][i]:
            fail(f"{library} is not repeatable in workers", cause="not-repeatable")


@exercise("1.2")
def test_loader_settings_follow_workers_and_device(impl, run):
    """Prefetching only with workers; memory is pinned only where there is CUDA."""

    def body(ctx):
        out = []
        for workers, prefetch in ((0, 3), (2, 3)):
            loader = impl.build_loader(
                Numbers(8),
                rank=0,
                world_size=1,
                global_batch_size=4,
                num_workers=workers,
                prefetch=prefetch,
                device="cuda",
            )
            out.append([loader.num_workers, loader.prefetch_factor, loader.pin_memory])
        return [*out, torch.cuda.is_available()]

    plain, workers, has_cuda = run(body, 1, process_group=False)[0]
    expect_equal(plain[:2], [0, None], what="num_workers, prefetch_factor without workers")
    expect_equal(workers[:2], [2, 3], what="num_workers, prefetch_factor with 2 workers")
    for _, _, pinned in (plain, workers):
        expect_equal(
            pinned, has_cuda, what="pin_memory for device 'cuda' on this machine", cause="pinned"
        )


@trace("1.1")
@trace("1.2")
def trace_loading(impl):
    """Every rank loads two epochs of images in its own order."""
    digits()

    def body(ctx):
        loader = impl.build_loader(
            digits(), rank=ctx.rank, world_size=ctx.world_size, global_batch_size=256
        )
        ctx.start_picture()
        return [len(labels) for _ in range(2) for _, labels in loader]

    return body
