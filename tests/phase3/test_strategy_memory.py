"""Checks of exercise 3.27: what strategies are said to need, against what they then need."""

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
    """What the implementation says before anything runs."""
    found, options = profiles(seed, CASES), {"bucket_bytes": BUCKET}
    return [vars(impl.memory_of(found[n], name, NODES, LOCAL, **options)) for name, n in CASES]


@exercise("3.27", "virtual")
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
    """Three units of 40, 30 and 20 kB and no root: a step that can be added up on paper."""
    sizes = (0, 40_000, 30_000, 20_000)
    phases = [Phase(k, False, saved * k, 0) for k in (1, 2, 3)]
    phases += [Phase(k, True, saved * k + sizes[k], 0) for k in (3, 2, 1)]
    return Profile(sizes, sizes, sizes, 0, 2.0, 3 * saved, tuple(phases))


@exercise("3.27", "virtual")
def test_kept_memory_is_the_table(impl, run):
    """Parameters, gradients, optimizer and host on nodes of any number and size: the table."""
    shapes = ((1, 1), (1, 4), (2, 3), (3, 1))

    def body(ctx):
        return [
            [vars(impl.memory_of(three_phases(1_000), name, *shape)) for name in NAMES]
            for shape in shapes
        ]

    total, state = 90_000, 180_000
    for (nodes, local), found in zip(shapes, run(body, 1)[0], strict=True):
        w = nodes * local
        want = {
            "ddp": (total, total, state, 0),
            "zero1": (total, total, state // w, 0),
            "zero2": (total, total // w, state // w, 0),
            "fsdp": (total // w, total // w, state // w, 0),
            "hybrid": (total // local, total // local, state // local, 0),
            "offload": (0, 0, 0, 4 * total // w),
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


@trace("3.27")
def trace_memory(impl):
    """Two steps of FSDP; rank 0 says what it should need before, what it needed after."""

    def body(ctx):
        torch.manual_seed(0)
        said = impl.memory_of(profiles(0, CASES)[256], "fsdp", NODES, LOCAL)
        ctx.start_picture()
        got = measured(impl, ctx, "fsdp", 0, 256)
        if ctx.rank == 0:
            print(f"peak: estimated {said.peak:,} B, measured {got['peak']:,} B")

    return body
