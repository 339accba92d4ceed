"""The player of memory over time: DDP, ZeRO-1, ZeRO-2 and FSDP of the solutions, one step each."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it, and can't inside a dispatch mode
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.observe.operators import tensors_in
from distlab.picture import Span, spans_of
from distlab.player.scene import Choice, Scene, document
from distlab.player.timeline import Bar, Moment, Panel, Row, Timeline, scene_of_timeline
from distlab.player.words import amount, duration
from distlab.ranks.context import RankContext
from distlab.virtual.isolation import entered
from distlab.virtual.reports import VirtualResults
from distlab.virtual.run import run_virtual

from .collectives import module_of

WIDE, BLOCKS, SAMPLES = 1024, 4, 256
RANKS = (2, 4, 8)
LATE = 1e-7  # reading the clock takes time, too: the first sample is a little late
KINDS = ("parameters", "states", "gradients", "gathered", "activations")
WORDS = {
    "parameters": "parameters",
    "gathered": "gathered for a block",
    "gradients": "gradients",
    "states": "optimizer state",
    "activations": "activations and buffers",
}
LEGEND = [
    ("forward", "forward"),
    ("backward", "backward"),
    ("collective", "communication"),
]
Trained = tuple[nn.Module, Any, Callable[[], dict[str, list[Tensor | None]]]]


def model_of() -> nn.Sequential:
    """Blocks of two wide layers each."""
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE))
            for _ in range(BLOCKS)
        ]
    return nn.Sequential(*blocks)


def replicated() -> Trained:
    """Exercise 3.10 with Adam."""
    model = model_of()
    wrapped = module_of(3, "overlap").BucketedDDP(model, bucket_bytes=8 * WIDE * WIDE + 8 * WIDE)
    optimizer = torch.optim.Adam(model.parameters())
    return wrapped, optimizer, lambda: held(model.parameters(), optimizer)


def zero(stage: int) -> Trained:
    """Exercises 3.13 (beside 3.10) and 3.14."""
    model = model_of()
    size = 8 * WIDE * WIDE + 8 * WIDE
    if stage == 1:
        wrapped: nn.Module = module_of(3, "overlap").BucketedDDP(model, bucket_bytes=size)
        kind = module_of(3, "zero").ZeroOptimizer
    else:
        wrapped, kind = model, module_of(3, "zero_gradients").Zero2Optimizer
    optimizer = kind(model.parameters(), torch.optim.Adam, bucket_bytes=size)

    def holds() -> dict[str, list[Tensor | None]]:
        found = held(model.parameters(), optimizer)
        found["gradients"] += [getattr(v, "gradient", None) for v in optimizer.vectors]
        return found

    return wrapped, optimizer, holds


def fully_sharded() -> Trained:
    """Exercise 3.15, a unit for each block."""
    model = model_of()
    wrapped = module_of(3, "fsdp").FSDP(model, list(model))
    optimizer = torch.optim.Adam(wrapped.parameters())

    def holds() -> dict[str, list[Tensor | None]]:
        found = held(wrapped.parameters(), optimizer)
        flats = [flat for unit in wrapped.units for flat in unit.flats]
        found["gathered"] = [flat.full for flat in flats]
        found["gradients"] += [leaf.grad for flat in flats for leaf in flat.leaves]
        return found

    return wrapped, optimizer, holds


STRATEGIES: dict[str, Callable[[], Trained]] = {
    "DDP": replicated,
    "ZeRO-1": lambda: zero(1),
    "ZeRO-2": lambda: zero(2),
    "FSDP (ZeRO-3)": fully_sharded,
}


def held(parameters: Iterable[nn.Parameter], optimizer: Any) -> dict[str, list[Tensor | None]]:
    """What is known of a rank's tensors, by kind."""
    whole = list(parameters)
    states = [t for each in optimizer.state.values() for t in tensors_in(list(each.values()))]
    return {
        "parameters": [*whole],
        "gathered": [],
        "gradients": [p.grad for p in whole],
        "states": [t for t in states if t.numel() > 1],
    }


class Samples(TorchDispatchMode):
    """The bytes of each kind after every operator: (seconds, bytes in the order of ``KINDS``)."""

    def __init__(self, holds: Callable[[], dict[str, list[Tensor | None]]]) -> None:
        super().__init__()
        self.holds, self.memory = holds, entered().mine.model.memory
        self.taken: list[tuple[float, list[int]]] = []

    def take(self) -> None:
        """One sample, unless nothing has changed."""
        kinds, known, holds = [], set[int](), self.holds()
        for kind in KINDS[:-1]:
            tensors = [t for t in holds[kind] if t is not None]
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
            kinds.append(sum(s.nbytes() for key, s in storages.items() if key not in known))
            known |= {*storages}
        kinds.append(self.memory.current - sum(kinds))
        if not self.taken or self.taken[-1][1] != kinds:
            self.taken.append((time.monotonic(), kinds))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.take()
        return out


def body(ctx: RankContext, strategy: str) -> list[Any]:
    """Two steps, of which the second is shown: then the optimizer has its state."""
    wrapped, optimizer, holds = STRATEGIES[strategy]()
    inputs = torch.empty(SAMPLES, WIDE, device="meta")
    memory = entered().mine.model.memory
    begin, taken = 0.0, []
    for step in ctx.steps(2):
        optimizer.zero_grad()
        if step:
            memory.peak = memory.current
        begin, samples = time.monotonic(), Samples(holds)
        with samples if step and ctx.rank == 0 else contextlib.nullcontext():
            samples.take()
            wrapped(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            samples.take()
        taken = samples.taken
    times = [when for when, _ in taken]
    return [begin, time.monotonic(), times, [kinds for _, kinds in taken], memory.peak]


def recorded(strategy: str, ranks: int, top: float) -> Scene:
    """The scene of one run; ``top``: the most bytes of the axis, alike for all strategies."""
    results = run(strategy, ranks)
    begin, end, times, samples, peak = results[0]
    spans = [s for s in spans_of(results.logs) if s.rank == 0 and s.start >= begin - 1e-12]
    compute = [Bar(s.start, s.end, s.name, s.name) for s in spans if s.name in PHASES]
    moving = [Bar(s.start, s.end, "collective") for s in spans if _moves(s)]
    curves: dict[str, list[tuple[float, float]]] = {}
    for number, kind in enumerate(KINDS):
        curves[kind] = [
            (t, float(sum(s[: number + 1]))) for t, s in zip(times, samples, strict=True)
        ]
    marks = [(top, amount(top)), (top / 2, amount(top / 2))]
    panel = Panel("memory of rank 0", curves, top, marks, stacked=True, height=150.0)
    rows = [Row("rank 0", [compute, moving])]
    texts = [("time", "time"), ("peak", "peak so far"), ("held", "held now")]
    moments = _moments(spans, begin, end, times, samples)
    legend = [*LEGEND, *((kind, WORDS[kind]) for kind in KINDS)]
    made = Timeline(rows, moments, begin, end, panel=panel, texts=texts, legend=legend)
    scene = scene_of_timeline(made)
    scene.ended = {"time": duration(end - begin), "peak": amount(peak)}
    return scene


PHASES = ("forward", "backward", "optimizer")
OPERATORS = {
    "all_gather": ("All-gather", "these parameters are whole on every rank"),
    "reduce_scatter": ("Reduce-scatter", "each rank has its part of the mean gradient"),
    "all_reduce": ("All-reduce", "every rank has the mean of these gradients"),
}


def _moves(span: Span) -> bool:
    return span.name in OPERATORS


def run(strategy: str, ranks: int) -> VirtualResults:
    """One run."""
    return run_virtual(body, ranks, strategy, cluster="dgx-h100", compute="roofline")


def _moments(
    spans: list[Span],
    begin: float,
    end: float,
    times: list[float],
    samples: list[list[int]],
) -> list[Moment]:
    """A step for each phase and each communication."""
    found = [(begin, "Start of a step: what stays in memory all the time.")]
    for name in PHASES:
        of_phase = [s for s in spans if s.name == name]
        if of_phase:
            ends = max(s.end for s in of_phase)
            found.append((ends, f"{name.capitalize()} is done."))
    for span in filter(_moves, spans):
        what, means = OPERATORS[span.name]
        found.append((span.end, f"{what} of {amount(span.nbytes)}: {means}."))
    found.append((end, "The step is done, and zero_grad was called."))
    totals = [sum(kinds) for kinds in samples]
    moments: list[Moment] = []
    for moment, say in sorted(found, key=lambda each: each[0]):
        before = [n for t, n in zip(times, totals, strict=True) if t <= moment + LATE]
        before = before if moments else before[:1]  # nothing has begun
        held_now = before[-1]
        texts = {
            "time": duration(moment - begin),
            "peak": amount(max(before)),
            "held": amount(held_now),
        }
        moments.append(Moment(moment, f"{say} Rank 0 holds {amount(held_now)}.", texts))
    return moments


def player() -> dict[str, Any]:
    """With strategy and ranks to choose."""
    top = max(run("DDP", ranks)[0][4] for ranks in RANKS) * 1.02
    scenes: dict[tuple[str, ...], Scene] = {
        (strategy, str(ranks)): recorded(strategy, ranks, top)
        for strategy in STRATEGIES
        for ranks in RANKS
    }
    choices = [
        Choice("strategy", tuple(STRATEGIES)),
        Choice("ranks", tuple(map(str, RANKS))),
    ]
    return document(
        "Memory of sharded training",
        "What one rank holds during a training step with Adam. DDP keeps everything on every rank; "
        "ZeRO and FSDP divide it.",
        choices,
        scenes,
        ("FSDP (ZeRO-3)", "4"),
    )
