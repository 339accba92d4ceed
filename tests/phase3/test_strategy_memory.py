"""Checks of exercise 3.27: the predicted memory of strategies, against the measured memory."""

from __future__ import annotations

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank

from distlab.grading import (
    exercise,
    fail,
    trace,
)
from given.step_profile import Phase, Profile
from tests.phase3.strategy_models import (
    BUCKET,
    CASES,
    LOCAL,
    NAMES,
    NODES,
    expect_near,
    measured,
    profiles,
)


def needed(impl, seed: int) -> list[dict[str, float]]:
    """The implementation's estimate before anything runs."""
    found, options = profiles(seed, CASES), {"bucket_bytes": BUCKET}
    return [vars(impl.memory_of(found[n], name, NODES, LOCAL, **options)) for name, n in CASES]


@exercise("3.27", "virtual", asserts="kept peak")
def test_memory_is_what_the_ledger_measures(impl, run, seed):
    """Parameters, gradients, optimizer, host and peak of every strategy, within 10 %."""

    def body(ctx):
        return needed(impl, seed)

    def reference(ctx):
        return [measured(impl, ctx, name, seed, size) for name, size in CASES]

    estimates = run.simulate(body, 1)[0]
    results = run.simulate(reference, NODES * LOCAL, timeout=40)
    for number, (name, size) in enumerate(CASES):
        said = estimates[number]
        for kind in results[0][number]:
            most = max(got[number][kind] for got in results)
            where = f"{name}, batch of {size}: {kind}"
            expect_near(where, said[kind], most, f"memory-{kind}")


def three_phases(saved: int) -> Profile:
    """Three units of 40, 30 and 20 kB and no root, half of the second frozen."""
    sizes, trained = (0, 40_000, 30_000, 20_000), (0, 40_000, 15_000, 20_000)
    phases = [Phase(k, False, saved * k, 0) for k in (1, 2, 3)]
    phases += [Phase(k, True, saved * k + trained[k], 0) for k in (3, 2, 1)]
    return Profile(sizes, trained, trained, 0, 2.0, 3 * saved, tuple(phases))


@exercise("3.27", "virtual", asserts="kept parameters")
def test_kept_memory_is_the_table(impl, run):
    """Parameters, gradients, optimizer and host on nodes of any number and size: the table."""
    shapes = ((1, 1), (1, 4), (2, 3), (3, 1))

    def body(ctx):
        return [
            [vars(impl.memory_of(three_phases(1_000), name, *shape)) for name in NAMES]
            for shape in shapes
        ]

    total, trained, state = 90_000, 75_000, 150_000
    for (nodes, local), found in zip(shapes, run(body, 1)[0], strict=True):
        w = nodes * local
        want = {
            "ddp": (total, trained, state, 0),
            "zero1": (total, trained, state // w, 0),
            "zero2": (total, trained // w, state // w, 0),
            "fsdp": (total // w, trained // w, state // w, 0),
            "hybrid": (total // local, trained // local, state // local, 0),
            "offload": (0, 0, 0, (total + trained + state) // w),
        }
        for name, said in zip(NAMES, found, strict=True):
            for kind, nbytes in zip(
                ("parameters", "gradients", "optimizer", "host"), want[name], strict=True
            ):
                if abs(said[kind] - nbytes) > 4:  # rounded down or up
                    fail(
                        f"{name} on {nodes} nodes of {local}: {kind} of {nbytes:,} B, got "
                        f"{said[kind]:,} B",
                        cause=f"memory-{kind}",
                    )


FROZEN = 2


def step_of(activations: dict[int, int], root: int = 9_000, frozen: bool = False) -> Profile:
    """Four units and a root, and phases without activations but for those given by number."""
    sizes = (root, 40_000, 31_000, 50_000, 23_000)
    trained = tuple(0 if frozen and k == FROZEN else n for k, n in enumerate(sizes))
    largest = tuple(n // 3 for n in trained)
    order = [(0, False), *((k, False) for k in (1, 2, 3, 4)), (0, True)]
    order += [(k, True) for k in (4, 3, 2, 1)]
    order.insert(5, (0, False))  # what of the root comes after the units
    phases = tuple(
        Phase(unit, backward, activations.get(number, 0) + largest[unit] * backward, 500 * backward)
        for number, (unit, backward) in enumerate(order)
    )
    return Profile(sizes, trained, largest, 777, 1.5, 0, phases)


def moments(p: Profile, strategy: str, shards: int, bucket_bytes: int) -> list[float]:
    """By the docstrings: the bytes of each phase, and of the end of backward."""
    last, whole = len(p.parameters) - 1, sum(p.gradients)
    if strategy in ("ddp", "zero1"):
        return [phase.activations + whole for phase in p.phases]
    found: list[float] = []
    bucket = max(min(bucket_bytes, whole), *p.largest)
    for phase in p.phases:
        u = last + 1 if phase.backward and not phase.unit else phase.unit
        beside = {0, u, u - 1 if phase.backward else u + 1}
        here = float(phase.activations)
        if strategy != "zero2":
            here += sum(p.parameters[k] for k in beside if k <= last)
        if phase.backward:
            mine = p.gradients[u] - p.largest[u] if u <= last else 0
            after = p.gradients[u + 1] if u < last else 0
            reduced = sum(p.gradients[u + 1 :])
            if strategy == "zero2":
                arrived = phase.of_root + sum(p.gradients[u:])
                here += min(arrived, 3 * bucket) + arrived / shards
                here -= p.largest[u] if u <= last else 0
            else:
                here += phase.of_root + mine + (0 if strategy == "hybrid" else after)
                here += (after if strategy == "offload" else reduced) / shards
        found.append(here)
    if strategy == "zero2":
        return [*found, min(2 * whole, 3 * bucket) + whole / shards]
    end = 0 if strategy == "offload" else sum(p.gradients[1:]) / shards
    return [*found, 2 * p.gradients[0] + end]


def peak(p: Profile, strategy: str, nodes: int, local: int, bucket_bytes: int) -> tuple[float, str]:
    """By the docstring of ``memory_of``, and which moment it is."""
    shards = local if strategy == "hybrid" else nodes * local
    whole = sum(p.gradients)
    state = p.state * whole / (1 if strategy == "ddp" else shards)
    sharded = strategy in ("fsdp", "hybrid", "offload")
    kept = sum(p.parameters) / (shards if sharded else 1) + state
    names = ["the optimizer's step", "the first backward, before there is a state"]
    step = [whole + 2 * min(max(p.largest), state), 2 * whole - state]
    if strategy == "zero2":
        step = [whole / shards + 2 * min(max(p.largest), whole / shards)]
    if sharded:
        step = [whole / shards + 2 * max(p.parameters) / shards]
    if strategy == "offload":
        kept, step = 0, [0.0]
    every = moments(p, strategy, shards, bucket_bytes)
    names = [
        *(f"{'backward' if x.backward else 'forward'} of unit {x.unit}" for x in p.phases),
        *["the end of backward"] * (len(every) - len(p.phases)),
        *names,
    ]
    every += step
    largest = max(every)
    return p.buffers + kept + largest, names[every.index(largest)]


@exercise(
    "3.27",
    "virtual",
    asserts="peak moments zero2-moments optimizer-step buffers parameters silent cost",
)
def test_peak_is_the_largest_moment(impl, run, seed):
    """Every moment in turn made the largest, frozen units, several buckets and nodes: the peak."""
    shapes, buckets = ((1, 1), (1, 4), (2, 3)), (10_000, 25_000, 10**9)
    cases = [
        (number, frozen, root, nodes, local, bucket)
        for number in range(-1, 11)
        for frozen in (False, True)
        for root in ((9_000, 200_000) if number < 0 else (9_000,))
        for nodes, local in shapes
        for bucket in buckets
    ]

    cases += [(-2, False, 0, 1, 1, 10**9), (-3, True, 0, 1, 1, 10**9), (-3, True, 0, 1, 4, 10**9)]
    cases += [(-4, False, 0, 1, 1, 10**9), (-4, False, 0, 2, 2, 10_000)]

    def profile_of(number: int, frozen: bool, root: int) -> Profile:
        if number == -2:  # one unit without activations: the optimizer's step is the peak
            phases = Phase(1, False, 0, 0), Phase(1, True, 0, 0)
            return Profile((0, 60_000), (0, 60_000), (0, 60_000), 777, 1.5, 0, phases)
        if number == -4:  # a root alone, and an optimizer without state
            phases = Phase(0, False, 4_000, 0), Phase(0, True, 30_000, 15_000)
            return Profile((60_000,), (45_000,), (15_000,), 777, 0.0, 0, phases)
        if number == -3:  # the same with a second unit, the larger one frozen
            phases = Phase(2, False, 0, 0), Phase(2, True, 0, 0)
            trained = (0, 0, 9_000)
            return Profile((0, 60_000, 9_000), trained, trained, 777, 1.5, 0, phases)
        return step_of({number: 500_000 + seed}, root, frozen)

    def body(ctx):
        return [
            [
                impl.memory_of(profile_of(*case[:3]), n, *case[3:5], bucket_bytes=case[5]).peak
                for n in NAMES
            ]
            for case in cases
        ]

    results = run(body, 1)
    if results.logs[0].events:
        fail("estimating sent messages", cause="communicated")
    for case, found in zip(cases, results[0], strict=True):
        number, frozen, _, nodes, local, bucket = case
        p = profile_of(*case[:3])
        for name, got in zip(NAMES, found, strict=True):
            want, moment = peak(p, name, nodes, local, bucket)
            if not isinstance(got, int) or abs(got - want) > 12:  # divisions rounded down
                fail(
                    f"{name} on {nodes} nodes of {local} ranks, buckets of {bucket:,} B, units of "
                    f"{p.parameters} B with gradients of {p.gradients} B. The peak is at "
                    f"{moment}, {want:,.0f} B, got {got!r}",
                    cause="memory-peak",
                )


@trace("3.27")
def trace_memory(impl):
    """Two steps of FSDP; rank 0 tells the predicted bytes before, and the measured bytes after."""

    def body(ctx):
        torch.manual_seed(0)
        said = impl.memory_of(profiles(0, CASES)[256], "fsdp", NODES, LOCAL)
        ctx.start_picture()
        got = measured(impl, ctx, "fsdp", 0, 256)
        if ctx.rank == 0:
            print(f"peak: estimated {said.peak:,} B, measured {got['peak']:,} B")

    return body
