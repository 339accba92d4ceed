"""Checks of exercise 3.6: halving and doubling (values, messages, time)."""

from __future__ import annotations

import torch

from distlab.grading import exercise, fail, trace
from distlab.observe.memory import PeakMemory
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_refusals,
    check_strided,
    check_subgroup,
    check_time,
    distinct,
    warm_and_drawn,
    whole,
)

LARGE = 10_080
TENSOR = ALPHA + 4 * LARGE * BETA  # one message of the whole tensor


@exercise("3.6", "virtual gloo cuda")
def test_halving_doubling_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, also no power of two, the same bits on every rank."""
    call = lambda tensor, op: impl.halving_doubling_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 4, 1, 2, 6), call)


@exercise("3.6", "virtual gloo cuda")
def test_halving_doubling_costs_what_the_formula_says(impl, run, cases):
    """P ranks send 2(P-1)/P of the bytes in 2·log₂ P messages; who serves another N more."""
    n = 960  # divides by 2, 4 and 8

    def body(ctx):
        impl.halving_doubling_all_reduce(distinct(ctx)[:n])

    worlds = cases(3, 4, 2, 8)
    for w, results in zip(worlds, run.worlds(body, worlds, delays=True), strict=True):
        core = 1 << (w.bit_length() - 1)
        for log in results.logs:
            mine, messages = 2 * (core - 1) * n // core, 2 * (core.bit_length() - 1)
            if log.rank >= core:
                mine, messages = n, 1
            elif log.rank + core < w:
                mine, messages = mine + n, messages + 1
            text = "2(P-1)/P·N, N more with a rank above P to serve, N above P"
            check_bytes(log, mine, messages, text)


@exercise("3.6", "virtual")
def test_halving_doubling_takes_two_log_w_rounds(impl, run):
    """2·log₂ P·α + 2(P-1)/P·Nβ of virtual time, 2(α + Nβ) more for other W; half N of memory."""

    def body(ctx):
        tensor = torch.ones(LARGE)
        with PeakMemory() as memory:
            impl.halving_doubling_all_reduce(tensor)
        return memory.peak

    for w in (2, 4, 8, 6):
        core = 1 << (w.bit_length() - 1)
        seconds = 2 * (core.bit_length() - 1) * ALPHA + 2 * (core - 1) / core * 4 * LARGE * BETA
        seconds += 2 * TENSOR if w != core else 0
        check_time(run, body, w, seconds, "2·log₂ P·α + 2(P-1)/P·Nβ (+ 2(α + Nβ))")
    for rank, peak in enumerate(run(body, 4)):
        if peak > 2 * LARGE + 1000:
            text = f"rank {rank} allocated {peak:,} bytes, half the tensor ({2 * LARGE:,}) will do"
            fail(text, cause="too-much-memory", rank=rank)


@exercise("3.6", "virtual")
def test_halving_doubling_on_views_and_in_groups(impl, run, seed):
    """Strided views and sub-groups; bad arguments are refused before anything is sent."""
    call = lambda t, **more: impl.halving_doubling_all_reduce(t, **more)
    check_strided(run, seed, call, whole)
    check_subgroup(run, seed, lambda t, g: call(t, group=g), whole)
    check_refusals(run, bad_arguments(lambda t, op: call(t, op=op)))


@trace("3.6")
def trace_halving_doubling(impl):
    """Halving and doubling of 8 MB."""

    def body(ctx):
        tensor = torch.ones(2_000_000)
        for _ in warm_and_drawn(ctx):
            impl.halving_doubling_all_reduce(tensor)

    return body
