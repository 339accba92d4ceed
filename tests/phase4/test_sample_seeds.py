"""Checks of exercise 4.16: streams go on where they were, and each sample has its own numbers."""

from __future__ import annotations

import copy
import random
import time

import numpy as np
import torch

from distlab.grading import exercise, expect_equal, fail, refusal, trace
from given.safe_format import read_tree, write_trees
from tests.phase4.small_training import first_draws, next_draws, seed_streams


@exercise("4.16", "gloo cuda")
def test_streams_go_on_where_they_were(impl, run, seed, folder):
    """torch, numpy with the normal value that it keeps back, random, the GPU: through a file."""

    def body(ctx):
        if ctx.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        seed_streams(seed)
        next_draws(ctx.device)  # numpy has drawn an odd number of normal values
        write_trees(folder, {"state": copy.deepcopy(impl.random_state(ctx.device))})
        before = next_draws(ctx.device)
        seed_streams(seed + 1)
        impl.set_random_state(read_tree(folder / "state"), ctx.device)
        return before, next_draws(ctx.device)

    [[before, got]] = run(body, 1, process_group=False)
    for stream, numbers in before.items():
        if got[stream] != numbers:
            message = f"{stream} goes on with {got[stream]}, not with {numbers}"
            fail(message, cause="random")


@exercise("4.16", "gloo")
def test_each_sample_has_its_own_numbers(impl, run, seed):
    """They follow from seed, epoch and index, and loading leaves no trace in the streams."""

    def body(ctx):
        def noise(data_seed: int, epoch: int, index: int) -> list:
            dataset = impl.SampleSeeds(Draws(), data_seed)
            dataset.set_epoch(epoch)
            return dataset[index]

        seed_streams(seed)
        noise(1, 2, 3)
        refused = refusal(impl.SampleSeeds(Draws(), 1).__getitem__, 99)
        got = next_draws(torch.device("cpu"))
        keys = [(s, e, i) for s in (0, 1) for e in (0, 1, 2) for i in (0, 1, 2)]
        numbers = [noise(*key) for key in keys]
        return got, refused, numbers, noise(1, 2, 1)

    [[got, refused, numbers, again]] = run(body, 1, process_group=False)
    expect_equal(refused, "no sample 99", what="the data set's own error")
    what = "the process's own streams after loading a sample, and after one that failed"
    expect_equal(got, first_draws(seed), what=what, cause="trace-in-streams")
    for place, library in enumerate(("torch", "numpy", "random")):
        drawn = [n[place] for n in numbers]
        if len(set(drawn)) < len(drawn):
            fail(f"{library}: two of (seed, epoch, index) draw the same", cause="same-numbers")
    expect_equal(again, numbers[-2], what="the same sample once more", cause="not-repeatable")


class Draws(torch.utils.data.Dataset):
    """One number of each library."""

    def __getitem__(self, index: int) -> list[float]:
        torch.rand(1), np.random.rand(), random.random()
        if index > 9:
            raise ValueError(f"no sample {index}")
        return [torch.rand(()).item(), np.random.rand(), random.random()]


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
