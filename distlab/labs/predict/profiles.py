"""The prediction for a profile: how much of the all-gathers no compute hides."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist

from given.profile_files import Lane, Span, Trace

from ...grading.implementation import Implementation
from ...ranks.context import RankContext
from .case import Case, draws
from .models import FLOAT, MICRO
from .scene import ASKED, Found, Scene, Work, half_seconds, held

HOST, COMPUTE, LINK = (1, 1), (0, 7), (0, 20)
LAYER = "layer"
SHARE = 0.1  # of the window: less is no bottleneck
TOLERATED: dict[str, Any] = {"tolerance": 0.03, "why": "3 %: a rank needs time to read its clock"}


def _ahead(ctx: RankContext, impl: Implementation, case: Case) -> Work:
    mine = torch.ones(case["n"])
    whole = [torch.empty(case["W"] * case["n"]) for _ in range(2)]

    def gather(layer: int) -> dist.Work:
        handle = dist.all_gather_into_tensor(whole[layer % 2], mine, async_op=True)
        assert handle is not None
        return handle

    def work() -> Found:
        coming = gather(0)
        for layer in range(case["L"]):
            coming.wait()
            if layer + 1 < case["L"]:
                coming = gather(layer + 1)
            with ctx.span(LAYER):
                time.sleep(case["c"] * MICRO)
        return _read(impl, _trace(ctx))

    return work


def _trace(ctx: RankContext) -> Trace:
    """The profile of a step, from the rank's recorder: to look at the clock would take time."""
    assert ctx.ledger is not None
    asked = [event for event in ctx.ledger.events if event.region == ASKED]
    layers = [(begin, end) for name, begin, end in ctx.ledger.raw_spans if name == LAYER]

    def span(kind: str, name: str, lane: Lane, begin: float, end: float) -> Span:
        first, last = (round(seconds * 1e9) for seconds in (begin, end))
        return Span(kind, name, lane, first, last, first)

    spans = [span("compute", LAYER, COMPUTE, *times) for times in layers]
    for event in asked:
        end = event.end or layers[-1][1]
        spans.append(span("communication", "gloo:all_gather", LINK, event.start, end))
    return Trace((span("step", "ProfilerStep#1", HOST, asked[0].start, layers[-1][1]), *spans))


def _read(impl: Implementation, trace: Trace) -> Found:
    """What the exercise's functions find in the profile."""
    exposed = impl.parts(trace)["communication"]
    sent = sum(span.end - span.begin for span in trace.of("communication"))
    found = impl.bottleneck(trace, share=SHARE)
    return {
        "exposed": exposed / 1e9,
        "hidden": (sent - exposed) / 1e9,
        "bound": float(found.part == "communication"),
    }


def _gather(case: Case) -> float:
    """Seconds of one all-gather."""
    return half_seconds(case, case["W"] * case["n"] * FLOAT)


def _exposed(case: Case) -> float:
    """Seconds of all all-gathers that run beside no layer."""
    each = _gather(case)
    return each + (case["L"] - 1) * max(0.0, each - case["c"] * MICRO)


def _without_bytes(case: Case) -> Case:
    """The same on links on which a byte takes no time."""
    return dataclasses.replace(case, quick=True)


SCENES = (
    Scene(
        exercise="4.19",
        tells="W = {W} ranks run L = {L} layers, one after the other. A layer computes for "
        "c = {c} µs. Of each layer a rank has n = {n:,} float32 numbers ({N:,} bytes), and an "
        "all-gather gives it those of all ranks. The first all-gather begins with the step. Each "
        "later one begins when the layer before it begins to compute. The exercise's functions "
        "read the profile of this step.",
        draw=draws(
            "4.19", (2, 4, 8), L=[4, 8, 12], n=[1024, 16_384, 65_536], c=[20, 50, 100, 200, 500]
        ),
        prepare=_ahead,
        quantities=(
            held(
                "exposed",
                _exposed,
                "g + (L-1)·max(0, g - c), g = launch + (W-1)·(α + 4n·β)",
                asks="seconds of the window that belong to communication",
                unit="seconds",
                answers={
                    "profile": lambda seen: seen.found("exposed"),
                    "clock": lambda seen: seen.seconds - seen.case["L"] * seen.case["c"] * MICRO,
                },
                **TOLERATED,
            ),
            held(
                "hidden",
                lambda c: (c["L"] - 1) * min(_gather(c), c["c"] * MICRO),
                "(L-1)·min(g, c)",
                by="profile",
                asks="seconds of all-gathers that compute hides",
                unit="seconds",
                **TOLERATED,
            ),
            held(
                "latency",
                lambda c: _exposed(_without_bytes(c)),
                "the same with g = launch + (W-1)·α",
                asks="seconds of communication that stay on links where a byte takes no time",
                unit="seconds",
                answers={
                    "profile": lambda seen: seen.other(_without_bytes(seen.case)).found("exposed")
                },
                **TOLERATED,
            ),
            held(
                "bound",
                lambda c: float(_exposed(c) >= SHARE * (_exposed(c) + c["L"] * c["c"] * MICRO)),
                "yes, if communication has a tenth of L·c and itself, or more",
                by="profile",
                asks="does the reading name communication as the bottleneck",
                unit="yes or no",
                why="none, it is one of two",
            ),
        ),
        doubled="An all-gather takes more than twice as long. Compute hides at most c of each "
        "one, so all that is longer than c is exposed.",
    ),
)
