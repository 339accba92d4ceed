"""Checks of exercise 3.6: halving and doubling (values, messages, time)."""

from __future__ import annotations

import torch

from distlab.grading import exercise, expect_equal, trace
from tests.phase3.reductions import (
    ALPHA,
    BETA,
    bad_arguments,
    check_all_reduce,
    check_bytes,
    check_layouts,
    check_memory,
    check_not_finite,
    check_refusals,
    check_subgroup,
    check_time,
    on_the_wire,
    warm_and_drawn,
    whole,
)

LARGE = 10_080
TENSOR = ALPHA + 4 * LARGE * BETA  # one message of the whole tensor


@exercise(
    "3.6", "virtual gloo cuda", nccl=True, asserts="reduction same-bits any-tensor dtype alone"
)
def test_halving_doubling_on_every_rank(impl, run, seed, cases):
    """All operators, any length and W, also no power of two, the same bits on every rank."""
    call = lambda tensor, op: impl.halving_doubling_all_reduce(tensor, op)
    check_all_reduce(run, seed, cases(3, 4, 1, 2, 6), call)


@exercise("3.6", "virtual gloo cuda", asserts="bytes messages partners cost")
def test_halving_doubling_costs_what_the_formula_says(impl, run, cases):
    """P ranks send 2(P-1)/P of the bytes in 2·log₂ P messages; a rank that
    serves another sends N more."""
    n = 960  # divides by 2, 4 and 8
    call = lambda ctx, tensor: impl.halving_doubling_all_reduce(tensor[:n])
    for w, size, log in on_the_wire(run, cases(3, 4, 2, 8), call):
        core = 1 << (w.bit_length() - 1)
        mine, messages = 2 * (core - 1) * n // core, 2 * (core.bit_length() - 1)
        partners = {log.rank ^ (1 << k) for k in range(core.bit_length() - 1)}
        if log.rank >= core:
            mine, messages, partners = n, 1, {log.rank - core}
        elif log.rank + core < w:
            mine, messages, partners = mine + n, messages + 1, partners | {log.rank + core}
        text = "2(P-1)/P·N, N more with a rank above P to serve, N above P"
        check_bytes(log, mine, messages, text, size)
        what = f"the partners of rank {log.rank} of {w}"
        got = {event.peer for event in log.events}
        expect_equal(got, partners, what=what, rank=log.rank, cause="other-partners")


@exercise("3.6", "virtual", asserts="time memory cost resources")
def test_halving_doubling_takes_two_log_w_rounds(impl, run):
    """2·log₂ P·α + 2(P-1)/P·Nβ of virtual time, 2(α + Nβ) more for other W; half N of memory."""

    def body(ctx):
        impl.halving_doubling_all_reduce(torch.ones(LARGE))

    for w in (2, 4, 8, 6):
        core = 1 << (w.bit_length() - 1)
        seconds = 2 * (core.bit_length() - 1) * ALPHA + 2 * (core - 1) / core * 4 * LARGE * BETA
        seconds += 2 * TENSOR if w != core else 0
        check_time(run, body, w, seconds, "2·log₂ P·α + 2(P-1)/P·Nβ (+ 2(α + Nβ))")
    call = lambda tensor: impl.halving_doubling_all_reduce(tensor)
    check_memory(run, 4, LARGE, call, 2 * LARGE, "half the tensor")
    check_memory(run, 3, LARGE, call, 8 * LARGE, "twice the tensor")


@exercise("3.6", "virtual", asserts="any-tensor layout leaf nan")
def test_halving_doubling_on_views(impl, run, seed):
    """Any strides: reduced in place, and nothing beside the tensor changes."""
    call = lambda t, *more: impl.halving_doubling_all_reduce(t, *more)
    check_layouts(run, seed, call, whole)
    check_not_finite(run, call, whole)


@exercise("3.6", "virtual", asserts="group refused refusals life")
def test_halving_doubling_in_groups(impl, run, seed):
    """Ranks are the group's; bad arguments are refused before anything is sent."""
    call = lambda t, *more: impl.halving_doubling_all_reduce(t, *more)
    check_subgroup(run, seed, call, whole)
    check_refusals(run, bad_arguments(call))


@trace("3.6")
def trace_halving_doubling(impl):
    """Halving and doubling of 8 MB."""

    def body(ctx):
        tensor = torch.ones(2_000_000)
        for _ in warm_and_drawn(ctx):
            impl.halving_doubling_all_reduce(tensor)

    return body
