"""Checks of exercise 4.16: streams go on where they were, and each sample has its own numbers."""

from __future__ import annotations

import builtins
import contextlib
import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from distlab.grading import exercise, expect_equal, fail, refusal, trace
from given.safe_format import read_tree, write_trees
from tests.phase4.small_training import first_draws, next_draws, raw_bits, seed_streams


@exercise("4.16", "gloo cuda", asserts="where put-back tree draws-none life resources")
def test_streams_go_on_where_they_were(impl, run, seed, folder):
    """torch, numpy with the normal value that it keeps back, random, the GPU: through a file."""

    def body(ctx):
        if ctx.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        seed_streams(seed)
        next_draws(ctx.device)  # numpy has drawn an odd number of normal values
        state = impl.random_state(ctx.device)
        written = write_trees(folder, {"state": state})
        before, out = next_draws(ctx.device), []
        for again in (state, read_tree(folder / "state"), state):
            seed_streams(seed + 1)
            impl.set_random_state(again, ctx.device)
            out.append(next_draws(ctx.device))
        same = write_trees(folder, {"again": state})["again"] == written["state"]
        return before, out, same

    [[before, out, same]] = run(body, 1, process_group=False)
    for stream, numbers in draws_after(seed).items():
        if before[stream] != numbers:
            message = f"random_state moved {stream}: {before[stream]} came next, not {numbers}"
            fail(message, cause="moved")
    for what, got in zip(("", ", from a file", ", a second time"), out, strict=True):
        for stream, numbers in before.items():
            if got[stream] != numbers:
                message = f"put back{what}: {stream} goes on with {got[stream]}, not with {numbers}"
                fail(message, cause="random")
    expect_equal(same, True, what="the state is as before after it was put back", cause="changed")


def draws_after(seed: int) -> dict[str, list[float]]:
    """The numbers of the CPU's streams after ``seed_streams`` and the first draws."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed_streams(seed)
    next_draws(torch.device("cpu"))
    draws = next_draws(torch.device("cpu"))
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])
    return draws


# pairs of keys that meet under sums, products, bits, digits put together, or remainders
FACTORS = (1, 10, 31, 97, 100, 997, 1000, 1009, 8191, 9973, 10_000, 10_007, 1 << 16, 100_003)
FACTORS += (1_000_000, 1_000_003, 1 << 20, 1 << 24, 1_000_000_007, (1 << 31) - 1)
PAIRS = [((0, 1, 0), (0, 0, f)) for f in FACTORS] + [((1, 0, 0), (0, f, 0)) for f in FACTORS]
PAIRS += [((1, 0, 0), (0, 0, f)) for f in FACTORS] + [((f, 0, 0), (0, 0, 0)) for f in FACTORS]
zeros = (0, 0)
MIXED = ((1, 3, 2), (2, 1, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2))
PAIRS += [((1, 2, 3), other) for other in MIXED]
PAIRS += [((1, 11, 1), (11, 1, 1)), ((1, 1, 11), (1, 11, 1)), ((5, 5, 0), (7, 7, 0))]
PAIRS += [((5, 0, 5), (7, 0, 7)), ((0, 5, 5), (0, 7, 7)), ((2, 3, 0), (3, 2, 0))]
BITS = [1 << bit for bit in (8, 16, 24, 30, 31)]  # a key cut to fewer bits does not tell them
PAIRS += [((*zeros[:at], f, *zeros[at:]), (0, 0, 0)) for f in BITS for at in range(3)]
LIBRARIES = ("torch", "numpy", "random")
MANY = 400  # samples of one epoch
WORDS = 60  # samples whose bits are compared


@exercise(
    "4.16", "gloo", asserts="no-trace follow-from-key own-numbers independent randomness life alone"
)
def test_each_sample_has_its_own_numbers(impl, run, seed):
    """They follow from seed, epoch and index, and loading leaves no trace in the streams."""
    pairs = [*PAIRS, *drawn_pairs(seed)]

    def body(ctx):
        def noise(data_seed: int, epoch: int, index: int) -> list:
            dataset = impl.SampleSeeds(Draws(), data_seed)
            dataset.set_epoch(epoch)
            return dataset[index]

        seed_streams(seed)
        noise(1, 2, 3)
        refused = refusal(impl.SampleSeeds(Broken(), 1).__getitem__, 99)
        with contextlib.suppress(KeyboardInterrupt):
            impl.SampleSeeds(Broken(KeyboardInterrupt), 1)[98]
        got = next_draws(torch.device("cpu"))
        keys = [(s, e, i) for s in (0, 1) for e in (0, 1, 2) for i in (0, 1, 2)]
        numbers = [noise(*key) for key in keys]
        again = [noise(1, 2, 1)]
        two = impl.SampleSeeds(Draws(), 1), impl.SampleSeeds(Draws(), 0)
        two[0].set_epoch(2)
        again += [two[1][2], two[0][1]]  # each has a seed and an epoch of its own
        two[0].set_epoch(0)
        again += [two[0][2], impl.SampleSeeds(two[0], 5)[2]]  # and one around another
        hashes, builtins.hash = builtins.hash, another_process(builtins.hash)
        again.append(noise(1, 2, 1))
        builtins.hash = hashes
        close = [(noise(*one), noise(*other)) for one, other in pairs]
        many = impl.SampleSeeds(Draws(), seed)
        drawn = [many[index] for index in range(MANY)]
        raw = impl.SampleSeeds(Words(), seed)
        words = [raw[index] for index in range(WORDS)]
        with FakeGpu() as gpu:
            raw[3]
        return got, refused, numbers, again, close, drawn, words, gpu.streams

    results = run(body, 2, process_group=False)
    for rank, (got, refused, numbers, again, close, many, words, gpu) in enumerate(results):
        expect_words(words, rank)
        what = "the GPU's stream after loading a sample, before it"
        expect_equal(gpu, {"cuda": "as it was"}, what=what, rank=rank, cause="trace-in-streams")
        expect_equal(refused, "no sample 99", what="the data set's own error")
        what = "the process's own streams after loading a sample, and after one that failed"
        expect_equal(got, first_draws(seed), what=what, cause="trace-in-streams")
        for position, library in enumerate(LIBRARIES):
            drawn = [n[position] for n in numbers]
            if len(set(drawn)) < len(drawn):
                fail(f"{library}: two of (seed, epoch, index) draw the same", cause="same-numbers")
            for (one, other), (first, second) in zip(pairs, close, strict=True):
                if first[position] == second[position]:
                    message = f"{library}: the keys (seed, epoch, index) {one} and {other} draw the"
                    fail(f"{message} same", cause="same-numbers", rank=rank)
        whats = {
            "the same sample once more": numbers[16],
            "seed 0, epoch 0, sample 2, beside another object": numbers[2],
            "seed 1, epoch 2, sample 1, beside another object": numbers[16],
            "seed 1, epoch 0 again, sample 2": numbers[11],
            "seed 1, sample 2, with another object around it": numbers[11],
            "the same sample in a process whose hashes of texts differ": numbers[16],
        }
        for (what, want), found in zip(whats.items(), again, strict=True):
            expect_equal(found, want, what=what, rank=rank, cause="not-repeatable")
        expect_equal(numbers, results[0][2], what="the samples", rank=rank, cause="not-repeatable")
        expect_independent(np.array(many))


def expect_words(words: list[list[list[int]]], rank: int) -> None:
    """No library draws the bits of another library, and seeds that can be seen have 32 bits."""
    for position, library in enumerate(LIBRARIES):
        for other, name in enumerate(LIBRARIES[:position]):
            if any(sample[position] == sample[other] for sample in words):
                message = f"{name} and {library} draw the same bits for a sample: they are the same"
                message += " generator, and were given the same seed"
                fail(message, cause="same-stream", rank=rank)
    for position, library in enumerate(LIBRARIES[:2], start=len(LIBRARIES)):
        seeds = [sample[position][0] for sample in words]
        if len({*seeds}) > 1:  # else it can't be seen
            fixed = [bit for bit in range(32) if len({seed >> bit & 1 for seed in seeds}) == 1]
            if fixed:
                message = f"{library}: of the 32 bits of the seed {len(fixed)} are the same for "
                message += f"all {len(seeds)} samples: two of many are given the same numbers"
                fail(message, cause="few-seeds", rank=rank)


def expect_independent(drawn: np.ndarray) -> None:
    """Uniform in [0, 1), no sample like the one before, no library like another."""
    for position, library in enumerate(LIBRARIES):
        column = drawn[:, position]
        if abs(column.mean() - 0.5) > 0.1 or len(set(column)) < MANY - 3:
            message = f"{library}: {MANY} samples have a mean of {column.mean():.3f}, "
            fail(f"{message}{len(set(column))} values; are they uniform?", cause="not-independent")
        for other, name in enumerate(LIBRARIES):
            shifts = (1, 2) if other == position else (0, 1)
            for shift in shifts:
                one, two = column[shift:], drawn[: MANY - shift, other]
                r = np.corrcoef(one, two)[0, 1]
                if abs(r) > 0.35:
                    message = f"{library} and {name}, {shift} samples apart, have a correlation of "
                    fail(f"{message}{r:.2f}, independent ones 0 ± 0.05", cause="not-independent")


def drawn_pairs(seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Keys of equal sums, and of equal digits put one after the other."""
    draw, pairs = random.Random(seed), []
    for _ in range(60):
        a, b, c = (draw.randrange(2000) for _ in range(3))
        d = draw.randrange(1, 50)
        pairs.append(((a, b + d, c), (a, b, c + d)))
        pairs.append(((a + d, b, c), (a, b + d, c)))
        pairs.append(((a, b, c), (a + d, b, c)))
    return pairs


def another_process(real: Callable[[Any], int]) -> Callable[[Any], int]:
    """``hash`` of a process with another PYTHONHASHSEED: texts have other hashes."""

    def has_text(value: Any) -> bool:
        if isinstance(value, (tuple, frozenset)):
            return any(map(has_text, value))
        return isinstance(value, (str, bytes))

    return lambda value: real(value) ^ 0x5DEECE66D if has_text(value) else real(value)


class Draws(torch.utils.data.Dataset):
    """One number of each library."""

    def __getitem__(self, index: int) -> list[float]:
        torch.rand(1), np.random.rand(), random.random()
        return [torch.rand(()).item(), np.random.rand(), random.random()]


class Broken(Draws):
    """Draws, and raises."""

    def __init__(self, kind: type[BaseException] = ValueError) -> None:
        self.kind = kind

    def __getitem__(self, index: int) -> list[float]:
        super().__getitem__(index)
        raise self.kind(f"no sample {index}")


class Words(torch.utils.data.Dataset):
    """The numbers of each library's generator, in bits, and the seeds of torch and numpy.

    numpy's generator has its seed as its first word, if it was given one of 32 bits.
    """

    def __getitem__(self, index: int) -> list[list[int]]:
        seeds = [[torch.initial_seed() & 0xFFFFFFFF], [int(np.random.get_state()[1][0])]]
        return [*raw_bits().values(), *seeds]


class FakeGpu:
    """Takes the place of one GPU's random stream in ``torch.cuda``."""

    def __init__(self) -> None:
        self.streams: dict[str, object] = {"cuda": "as it was"}

    def __enter__(self) -> FakeGpu:
        def put(state: object, *_: object, **__: object) -> None:
            self.streams["cuda"] = state

        functions = {
            "device_count": lambda: 1,
            "_is_in_bad_fork": lambda: False,
            "get_rng_state": lambda *_, **__: self.streams["cuda"],
            "get_rng_state_all": lambda: [self.streams["cuda"]],
            "set_rng_state": put,
            "set_rng_state_all": lambda states: put(*states),
            "manual_seed": put,
            "manual_seed_all": put,
        }
        self.patch = mock.patch.multiple("torch.cuda", **functions)
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


@trace("4.16")
def trace_samples(impl):
    """Every rank loads the same samples in another order: their numbers are the same."""

    def body(ctx):
        dataset = impl.SampleSeeds(Draws(), 0)
        ctx.start_picture()
        for place in range(4):
            index = (place + ctx.rank) % 4
            with ctx.span("sample", str(index)):
                dataset[index]
                time.sleep(0.005)

    return body
