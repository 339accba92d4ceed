"""Checks of exercises 1.1 and 1.2: sharded sampling and loading."""

from __future__ import annotations

import builtins
import json
import random
from collections import Counter
from itertools import product

import torch

from distlab.grading import exercise, expect_equal, expect_refusals, fail, refusal, trace
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
            out.append([[len(s), s.num_real, list(s)] for s in ranks])
        return out

    return run(body, 1, process_group=False, timeout=LIMIT)[0]


def explain_shards(n: int, w: int, got: list[list[int]], remainder: str) -> tuple[str, str]:
    """(cause, sentence): the mistake in the shards of all ranks."""
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
                kinds = {type(i).__name__ for i in indices}
                if kinds - {"int"}:
                    fail(f"an index is no int: {kinds}", cause="type", rank=rank)
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


@exercise("1.1", asserts="order deal pad sizes one-index alone")
def test_padded_shards_cover_the_data(impl, run, seed):
    """Padded shards are disjoint, equally long and cover the data."""
    check_remainder(run, impl, seed, "pad")


@exercise("1.1", asserts="order deal drop keep sizes one-index alone cost")
def test_dropped_and_kept_remainders(impl, run, seed):
    """Dropping leaves whole rounds, keeping leaves no sample out or twice."""
    check_remainder(run, impl, seed, "drop")
    check_remainder(run, impl, seed, "keep")


def random_states() -> tuple:
    """The global random states of torch, numpy and random, comparable."""
    import numpy as np

    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


@exercise("1.1", asserts="order epochs seed no-global-random randomness resources")
def test_epochs_differ_and_repeat(impl, run, seed):
    """Every epoch has its own order, the same on all ranks and in every run."""
    large = 2**40 + seed

    def body(ctx):
        def epochs(new_seed):
            out = []
            samplers = [
                impl.ShardedSampler(40, rank=r, world_size=2, seed=new_seed) for r in range(2)
            ]
            for s in samplers:
                passes = [list(s)]
                for epoch in (1, 2, 0):
                    s.set_epoch(epoch)
                    torch.rand(3)  # the global generator must not matter
                    passes.append(list(s))
                out.append(passes)
            return out

        before = random_states()
        list(impl.ShardedSampler(40, rank=0, world_size=2, seed=seed))
        untouched = random_states() == before
        return epochs(seed), epochs(seed), epochs(seed + 1000), epochs(large), untouched

    first, again, other, beyond, untouched = run(body, 1, process_group=False, timeout=LIMIT)[0]
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
        for name, got in ((seed, first), (large, beyond)):
            for rank in range(2):
                want = order_of(40, name + epoch)[rank::2]
                what = f"order of epoch {epoch} with seed {name}"
                expect_equal(got[rank][epoch], want, what=what, rank=rank, cause="wrong-order")
    if first == other:
        fail("another seed gives the same orders", cause="seed-ignored")
    if not untouched:
        fail("the pass changes the global random state", cause="global-random-state")


def resumed_passes(impl, seed: int) -> dict:
    """The indices of a sampler that was resumed in several ways."""

    def sampler(its_seed: int = seed, **options):
        return impl.ShardedSampler(37, rank=1, world_size=3, seed=its_seed, **options)

    def resumed(state, s=None):
        s = s or sampler()
        own = dict(state)
        s.load_state_dict(own)
        states.append((own, dict(state)))
        return s

    def after(s, *epochs):
        for epoch in epochs:
            s.set_epoch(epoch)
        return list(s)

    got: dict = {}
    states: list = []
    running = sampler()
    running.set_epoch(2)
    ahead = iter(running)
    head = [next(ahead) for _ in range(9)]  # a loader with workers reads ahead of the training
    state = running.state_dict(5)
    running.set_epoch(4)
    running.state_dict(11)  # another one: the first stays as it is
    beside = iter(running)
    second = [next(beside)]
    head.append(next(ahead))
    running.load_state_dict(sampler().state_dict(3))
    got["running"] = head + list(ahead)
    got["running, next"] = second + list(beside)
    got["running, resumed"] = list(running)
    got["plain"] = isinstance(state, dict) and all(type(v) in (int, float) for v in state.values())
    if not got["plain"]:
        return got
    state = json.loads(json.dumps(state))
    s = resumed(state)
    got["sizes"] = [len(s), s.num_real]
    got["rest"] = list(s)
    got["second"] = list(s)
    got["same epoch named"] = after(resumed(state), 2)
    got["next epoch"] = after(resumed(state), 3)
    got["epoch before"] = after(resumed(state), 1)
    got["there and back"] = after(resumed(state), 3, 2)
    s = resumed(state)
    left = iter(s)
    got["left early"] = [next(left), next(left)]
    got["after it was left"] = list(s)
    got["rest of what was left"] = list(left)
    got["resumed again"] = list(resumed(s.state_dict(8)))
    got["resumed into a used one"] = list(resumed(state, s))
    got["of an epoch that has not begun"] = list(resumed(s.state_dict(0)))
    pending = resumed(state)
    got["pending, saved again"] = [list(resumed(pending.state_dict(7))), list(pending)]
    got["only padding left"] = list(resumed(s.state_dict(12)))
    got["of an ended epoch"] = list(resumed(s.state_dict(13)))
    got["after state_dict"] = list(s)
    other = sampler(seed + 5)
    got["other seed"] = list(resumed(state, other))
    got["other seed, saved again"] = list(resumed(other.state_dict(6)))
    got["other seed, next epoch"] = after(other, 3)
    kept = sampler(remainder="keep", shuffle=False)
    got["kept"] = list(resumed(kept.state_dict(5), kept))
    dropped = sampler(remainder="drop")
    got["dropped"] = list(resumed(dropped.state_dict(5), dropped))
    got["unshuffled, epoch 3"] = after(kept, 3)
    first, later = (impl.ShardedSampler(37, rank=0, world_size=3, seed=seed) for _ in range(2))
    first.set_epoch(1234)
    got["rank 0"] = list(resumed(first.state_dict(5), later))
    got["state"] = all(own == state for own, state in states)
    return got


@exercise("1.1", asserts="resume read-ahead sizes forgotten running seed-of-state life")
def test_resume_continues_where_training_was(impl, run, seed):
    """An interrupted epoch continues exactly where training was; later epochs are whole."""

    def body(ctx):
        return resumed_passes(impl, seed)

    got = run(body, 1, process_group=False, timeout=LIMIT)[0]
    epoch0, epoch1, epoch2, epoch3, epoch4 = (
        expected_shard(37, 3, 1, "pad", order_of(37, seed + epoch)) for epoch in range(5)
    )
    of_rank0 = expected_shard(37, 3, 0, "pad", order_of(37, seed + 1234))
    unshuffled = expected_shard(37, 3, 1, "keep", list(range(37)))
    expect_equal(got["plain"], True, what="state_dict is a dict of plain numbers", cause="state")
    rest = got["rest"]
    if rest == epoch2[9:]:
        fail(
            "the resumed epoch skips samples that the loader had only read ahead. Count the "
            "samples trained on (`consumed`), not those that the sampler handed out",
            cause="read-ahead-skipped",
        )
    cause = "starts-over" if rest == epoch2 else "wrong-position"
    expect_equal(rest, epoch2[5:], what="the rest of the resumed epoch", cause=cause)
    position, every, kept = "wrong-position", "skips-every-epoch", "position-kept"
    order = "wrong-order"
    for key, want, what, cause in (
        ("running", epoch2, "a pass, amid it other calls and another pass", "running"),
        ("running, next", epoch4, "that other pass, of epoch 4", "running"),
        ("kept", unshuffled[5:], "resumed with remainder='keep', shuffle=False", position),
        ("dropped", epoch0[:12][5:], "resumed with remainder='drop'", position),
        ("sizes", [13, 12], "len and num_real of a resumed sampler, of the whole epoch", "length"),
        ("second", epoch2, "a second pass after resuming", every),
        ("same epoch named", epoch2[5:], "set_epoch names the resumed epoch: its rest", position),
        ("next epoch", epoch3, "set_epoch names the epoch after: all of it", every),
        ("epoch before", epoch1, "set_epoch names the epoch before: all of it", kept),
        ("unshuffled, epoch 3", unshuffled, "epoch 3 with shuffle=False: as every epoch", order),
        ("rank 0", of_rank0[5:], "resumed in epoch 1234 on rank 0 of 3", position),
        ("there and back", epoch2, "another epoch is named, then the resumed one: all of it", kept),
        ("left early", epoch2[5:7], "two entries of a resumed pass", position),
        ("after it was left", epoch2, "the pass after a resumed one that was left early", every),
        ("rest of what was left", epoch2[7:], "the rest of the pass that was left", "running"),
        ("resumed again", epoch2[8:], "resumed twice, consumed 8 from the beginning", position),
        ("resumed into a used one", epoch2[5:], "resumed after other passes", position),
        ("after state_dict", epoch2, "a pass after state_dict was called", every),
        ("of an ended epoch", [], "resumed at the end of the epoch", position),
        ("pending, saved again", [epoch2[7:], epoch2[5:]], "saved before the pass, both", position),
        ("only padding left", epoch2[12:], "resumed where only padding is left", position),
        ("other seed, saved again", epoch2[6:], "saved after another seed came", "seed-of-state"),
        ("of an epoch that has not begun", epoch2, "resumed at the beginning", position),
        ("other seed", epoch2[5:], "resumed by a sampler with another seed", "seed-of-state"),
        ("other seed, next epoch", epoch3, "the epoch after that", "seed-of-state"),
        ("state", True, "the state stays as it was, also after the pass", "state"),
        ("running, resumed", epoch0[3:], "resumed amid a pass, the next pass", position),
    ):
        expect_equal(got[key], want, what=what, cause=cause)


@exercise("1.1", asserts="bad-arguments refusals")
def test_bad_arguments_are_refused(impl, run):
    """A rank, a size or a remainder that can't be is refused with a ValueError."""
    wrong = [
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
        {"world_size": -2, "rank": -3},
        {"dataset_size": 0},
        {"dataset_size": -1},
        {"remainder": "cut"},
    ]

    def body(ctx):
        good = {"dataset_size": 8, "rank": 0, "world_size": 2}
        return [refusal(impl.ShardedSampler, **good | each) for each in wrong]

    refusals = run(body, 1, process_group=False, timeout=LIMIT)[0]
    expect_refusals(refusals, [str(each) for each in wrong], cause="not-refused")


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


@exercise("1.2", asserts="split refused refusals")
def test_batch_size_of_a_rank(impl, run):
    """The global batch is split evenly, or refused."""
    wrong = [(10, 4), (3, 4), (0, 2), (-4, 2), (4, 0), (4, -2)]
    bad = [
        {"global_batch_size": 7},
        {"global_batch_size": 0},
        {"rank": 2},
        {"remainder": "cut"},
    ]

    def body(ctx):
        good = {"rank": 0, "world_size": 2, "global_batch_size": 8}
        answers = [impl.split_batch(b, w) for b, w in ((8, 1), (8, 2), (12, 3), (64, 4))]
        refusals = [refusal(impl.split_batch, b, w) for b, w in wrong]
        refusals += [refusal(impl.build_loader, Numbers(8), **good | each) for each in bad]
        return answers, refusals

    answers, refusals = run(body, 1, process_group=False)[0]
    if answers == [8, 8, 12, 64]:
        fail("every rank gets the whole global batch", cause="global-batch-per-rank")
    expect_equal(answers, [8, 4, 4, 16], what="batch size per rank of 8/1, 8/2, 12/3, 64/4")
    what = [f"a global batch of {b} over {w} ranks" for b, w in wrong]
    what += [f"build_loader with {each} on 2 ranks" for each in bad]
    expect_refusals(refusals, what, cause="not-refused")


class Mixed(torch.utils.data.Dataset):
    """One sample of a small image, a number and a weight."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int):
        if i:
            raise IndexError(i)
        return torch.zeros(2, 3, 4, dtype=torch.uint8), 7, 0.5


@exercise("1.2", asserts="empty-batch dtype layout alone")
def test_empty_batch_has_every_field(impl, run):
    """The empty batch of a rank has the fields of a real one, with dtypes and shapes."""

    def body(ctx):
        options = {"world_size": 2, "global_batch_size": 2, "remainder": "keep"}
        loaders = [impl.build_loader(Mixed(), rank=rank, **options) for rank in range(2)]
        return [
            [[(str(f.dtype), list(f.shape)) for f in batch] for batch in loader]
            for loader in loaders
        ]

    kinds = [("torch.uint8", [2, 3, 4]), ("torch.int64", []), ("torch.float64", [])]
    for rank, batches in enumerate(run(body, 1, process_group=False)[0]):
        want = [[(dtype, [1 - rank, *shape]) for dtype, shape in kinds]]
        what = f"(dtype, shape) of the fields of a batch of {1 - rank}"
        expect_equal(batches, want, what=what, rank=rank, cause="empty-batch")


def batches_of(run, impl, seed, cases, **options) -> list:
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
                    **options,
                )
                got = [[list(x.shape), str(x.dtype), y.tolist()] for x, y in loader]
                ranks.append([len(loader), got])
            out.append(ranks)
        return out

    return run(body, 1, process_group=False)[0]


def check_batches(run, impl, seed, cases, **options) -> None:
    found = batches_of(run, impl, seed, cases, **options)
    for (n, w, remainder), ranks in zip(cases, found, strict=True):
        where = f"{n} samples, {w} ranks, global batch {4 * w}, remainder={remainder!r}"
        steps = [len(batches) for _, batches in ranks]
        if len(set(steps)) > 1:
            fail(
                f"{where}: the ranks take {steps} steps: the ranks with more steps wait for ever",
                cause="uneven-steps",
                rank=steps.index(min(steps)),
            )
        order = order_of(n, seed) if options.get("shuffle", True) else list(range(n))
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


@exercise("1.2", asserts="batches fields alone")
def test_steps_consume_the_global_batches(impl, run, seed):
    """Step k of all ranks together is the k-th global batch; all take equally many steps."""
    cases = [
        (n, w, remainder)
        for remainder in ("pad", "drop", "keep")
        for w in (1, 2, 3, 4)
        for n in (w, 8 * w, 8 * w + 1, 29)
    ]
    check_batches(run, impl, seed, cases)
    check_batches(run, impl, seed, [(29, 2, "keep")], shuffle=False)


@exercise("1.2", asserts="batches")
def test_worker_processes_give_the_same_batches(impl, run, seed):
    """Loading in worker processes changes nothing about the batches."""
    check_batches(run, impl, seed, [(9, 2, "keep")], num_workers=2)  # rank 1 has an empty batch


REMAINDERS = ("keep", "pad", "drop")


@exercise("1.2", asserts="after-resume whole unread life")
def test_resumed_loader_stays_in_step(impl, run, seed):
    """After resuming, every rank has the same number of batches left, and the right ones."""

    def body(ctx):
        out = {}
        for remainder, rank in product(REMAINDERS, range(3)):
            passes = []
            for consumed in (0, 8, 4):
                loader = impl.build_loader(
                    Numbers(25),
                    rank=rank,
                    world_size=3,
                    global_batch_size=6,
                    seed=seed,
                    remainder=remainder,
                )
                if consumed:
                    sampler = loader.batch_sampler.sampler
                    sampler.load_state_dict(sampler.state_dict(consumed))
                loader.batch_sampler.set_epoch(0)
                length = len(loader)
                unread = iter(loader.batch_sampler)  # as a loader with workers does
                passes.append([y.tolist() for _, y in loader])
                del unread
                for _ in loader:  # left early
                    break
                again = [y.tolist() for _, y in loader]
            loader.batch_sampler.set_epoch(1)
            following = [y.tolist() for _, y in loader]
            out[f"{remainder} {rank}"] = [*passes, again, following, length]
        for rank in range(3):  # two entries each, the last one of ranks 1 and 2 is padding
            sampler = impl.ShardedSampler(4, rank=rank, world_size=3)
            sampler.load_state_dict(sampler.state_dict(2))
            out[f"ended {rank}"] = list(impl.ShardedBatchSampler(sampler, 1))
        return out

    every = run(body, 1, process_group=False)[0]
    for rank in range(3):
        what = "batches after resuming at the end of an epoch with padding"
        expect_equal(every[f"ended {rank}"], [], what=what, rank=rank, cause="wrong-position")
    for remainder, rank in product(REMAINDERS, range(3)):
        whole, late, resumed, again, following, length = every[f"{remainder} {rank}"]
        first, second = (
            expected_shard(25, 3, rank, remainder, order_of(25, seed + epoch)) for epoch in (0, 1)
        )
        starts = range(0, 8 if remainder == "drop" else 9, 2)
        want = [first[i : i + 2] for i in starts]
        ways = f", remainder={remainder!r}"
        what = f"batches of an epoch{ways}"
        expect_equal(whole, want, what=what, rank=rank, cause="wrong-batches")
        what = f"batches after resuming behind 2 of them (and iter() once without reading){ways}"
        expect_equal(resumed, want[2:], what=what, rank=rank, cause="wrong-position")
        what = f"batches after resuming behind 4 of them, all that some ranks have{ways}"
        expect_equal(late, want[4:], what=what, rank=rank, cause="wrong-position")
        what = f"batches of the pass after a resumed one and one that was left early{ways}"
        expect_equal(again, want, what=what, rank=rank, cause="wrong-position")
        what = f"len(loader) of a resumed loader, of the whole epoch{ways}"
        expect_equal(length, len(want), what=what, rank=rank, cause="length")
        want = [second[i : i + 2] for i in starts]
        what = f"batches of the epoch after{ways}"
        expect_equal(following, want, what=what, rank=rank, cause="wrong-batches")


def hash_elsewhere(value: object, known=hash) -> int:
    """The value of ``hash`` in a process with another seed: text has another hash there."""
    return known(value) ^ 4711 if any(quote in repr(value) for quote in "'\"") else known(value)


@exercise("1.2", asserts="seeds draws no-global-random randomness resources")
def test_ranks_and_workers_draw_different_numbers(impl, run, seed):
    """torch, numpy and random differ by rank, worker and epoch, and repeat with the seed."""

    def body(ctx):
        def draws(rank, new_seed, passes=(0, 1), workers=2):
            loader = impl.build_loader(
                Numbers(8, noisy=True),
                rank=rank,
                world_size=2,
                global_batch_size=4,
                seed=new_seed,
                shuffle=False,
                num_workers=workers,
            )
            epochs = []
            for epoch in passes:
                loader.batch_sampler.set_epoch(epoch)
                epochs.append([x[0].tolist() for x, _ in loader])  # batch i comes from worker i
            return epochs

        import numpy as np

        seeded, in_this_process = [], hash
        for new_seed, rank, worker in ((seed, 0, 0), (seed, 1, 0), (seed, 0, 1), (seed + 1, 0, 0)):
            impl.seed_everything(new_seed, rank, worker)
            row = [float(torch.rand(())), float(np.random.rand()), random.random()]
            builtins.hash = hash_elsewhere
            impl.seed_everything(new_seed, rank, worker)
            builtins.hash = in_this_process
            same = [float(torch.rand(())), float(np.random.rand()), random.random()]
            seeded.append([row, same])
        before = random_states()
        drawn = [draws(0, seed), draws(1, seed), draws(0, seed), draws(0, seed + 1, [0])]
        drawn += [draws(rank, seed, [0], workers=1) for rank in range(2)]
        options = {"rank": 0, "world_size": 2, "global_batch_size": 4, "seed": seed}
        list(impl.build_loader(Numbers(8), **options))  # without workers
        return drawn, seeded, random_states() == before

    (rank0, rank1, again, other, *single), seeded, untouched = run(body, 1, process_group=False)[0]
    for i, library in enumerate(("torch", "numpy", "random")):
        for row, same in seeded:
            if row[i] != same[i]:
                text = f"{library} draws other numbers with the same seed (or in another process)"
                fail(text, cause="not-repeatable")
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
        if single[0][0][0][i] == single[1][0][0][i]:
            fail(
                f"the only worker of ranks 0 and 1 draws the same from {library}", cause="same-seed"
            )
        if w0 == next_epoch[0]:
            fail(f"{library} draws the same in every epoch", cause="same-seed-each-epoch")
        if [[batch[i] for batch in epoch] for epoch in rank0] != [
            [batch[i] for batch in epoch] for epoch in again
        ]:
            fail(f"{library} is not repeatable in workers", cause="not-repeatable")
        if w0 == other[0][0][i]:
            text = f"{library} draws the same in the workers of loaders with seeds s and s+1"
            fail(text, cause="seed-ignored")
        every = [batch[i] for rank in (rank0, rank1) for epoch in rank for batch in epoch]
        if len(set(every)) < len(every):
            text = f"of 2 ranks, 2 epochs and 2 workers, two draw the same from {library}"
            fail(text, cause="same-seed")
    if not untouched:
        text = "loading, with or without workers, changes the global random state"
        fail(text, cause="global-random-state")


FACTORS = [11, 13, 17, 31, 37, 97, 101, 997, 1009, 1013, 1337, 7919, 9973, 10007, 12345, 65537]
FACTORS += [104729, 999983, 1000003]  # what people multiply a seed or a rank by


@exercise("1.2", asserts="seeds randomness")
def test_seeds_never_meet(impl, run, seed):
    """No two of many (seed, rank, worker) give one library the same numbers."""
    pick = random.Random(seed)
    triples = [(a, b, c) for a in range(9) for b in range(9) for c in range(5)]
    triples += [(seed + 2**32 * i, 1, 1) for i in range(1, 4)]
    triples += [(10**k, 0, 0) for k in range(2, 7)] + [(0, 10**k, 0) for k in range(2, 7)]
    triples += [(2**32 * a + b, c, 0) for a in range(3) for b in range(3) for c in range(3)]
    triples += [(1, 11, 1), (11, 1, 1), (1, 1, 11), (111, 0, 0), (11, 11, 1)]
    triples += [(0, 0, 10**k) for k in range(2, 7)]
    steps = [2**k for k in range(4, 25)] + FACTORS
    triples += [(m, 0, 0) for m in steps] + [(0, m, 0) for m in steps] + [(0, 0, m) for m in steps]
    triples += [tuple(pick.randrange(10, 2**16) for _ in range(3)) for _ in range(50)]
    triples = list(dict.fromkeys(triples))

    def body(ctx):
        import numpy as np

        out = []
        for triple in triples:
            impl.seed_everything(*triple)
            numbers = [int(torch.randint(2**62, ())), int(np.random.randint(2**62))]
            out.append([*numbers, random.getrandbits(62)])
        return out

    drawn = run(body, 1, process_group=False, timeout=60)[0]
    columns = zip(*drawn, strict=True)
    for library, numbers in zip(("torch", "numpy", "random"), columns, strict=True):
        first: dict[int, tuple] = {}
        for triple, number in zip(triples, numbers, strict=True):
            if number in first:
                text = f"(seed, rank, worker) {first[number]} and {triple} draw the same"
                fail(f"{text} from {library}", cause="same-seed")
            first[number] = triple


@exercise("1.2", asserts="settings cost")
def test_loader_settings_follow_workers_and_device(impl, run):
    """Prefetching only with workers; memory is pinned only for a CUDA device."""
    asked = [(0, 3, "cpu"), (2, 3, "cuda"), (1, 1, "cpu"), (0, 2, "cuda:0")]

    def body(ctx):
        out = []
        torch.cuda.is_available = lambda: True
        for workers, prefetch, device in asked:
            loader = impl.build_loader(
                Numbers(8),
                rank=0,
                world_size=1,
                global_batch_size=4,
                num_workers=workers,
                prefetch=prefetch,
                device=device if workers else torch.device(device),
            )
            out.append([loader.num_workers, loader.prefetch_factor, loader.pin_memory])
        return out

    found = run(body, 1, process_group=False)[0]
    for (workers, prefetch, device), (*ahead, pinned) in zip(asked, found, strict=True):
        what = f"num_workers, prefetch_factor with {workers} workers and prefetch={prefetch}"
        expect_equal(ahead, [workers, prefetch if workers else None], what=what, cause="settings")
        what = f"pin_memory for device {device!r} on a machine with a GPU"
        expect_equal(pinned, device != "cpu", what=what, cause="pinned")


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
