"""What the checks of the pipeline exercises share: schedules, models, meters, and one process.

Nothing here calls the implementation under test: the schedules are made, walked and timed by code
of its own.
"""

from __future__ import annotations

import contextlib
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.diagnose import Case, Diagnosis
from distlab.grading import expect_close, fail

WORDS = 11  # of the embedding on the first stage
Plain = tuple[str, int, int]  # kind, stage, micro-batch


# -- schedules ------------------------------------------------------------------------------------
def plain(schedule: Any) -> list[list[Plain]]:
    """A schedule as plain data, as it comes back from a rank."""
    return [[(str(k), int(s), int(i)) for k, s, i in steps] for steps in schedule]


def as_steps(impl: Any, schedule: Sequence[Sequence[Plain]]) -> Any:
    """Plain data as the implementation's own steps."""
    step = impl.module("pipeline_schedules").Step
    return [[step(*each) for each in steps] for steps in schedule]


def placement(kind: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage: ``"round"`` (0, 1, 0, 1), ``"v"`` (0, 1, 1, 0), ``"block"``."""
    if kind == "block":
        return [s // chunks for s in range(ranks * chunks)]
    rounds = [list(range(ranks)) for _ in range(chunks)]
    if kind == "v":
        rounds = [r[::-1] if c % 2 else r for c, r in enumerate(rounds)]
    return [rank for each in rounds for rank in each]


def needs(step: Plain, last: int) -> list[Plain]:
    """What must have been computed before."""
    kind, s, i = step
    if kind == "F":
        return [("F", s - 1, i)] if s else []
    if kind == "W":
        return [("B", s, i)]
    return [("F", s, i)] + ([("B", s + 1, i)] if s < last else [])


def any_order(seed: int, rank_of: list[int], m: int, kinds: str = "FB") -> list[list[Plain]]:
    """A possible order of compute steps in which every choice was made by chance."""
    draws = random.Random(seed)
    last = len(rank_of) - 1
    left = {(k, s, i) for k in kinds for s in range(last + 1) for i in range(m)}
    done: set[Plain] = set()
    order: list[list[Plain]] = [[] for _ in range(max(rank_of) + 1)]
    while left:
        ready = sorted(step for step in left if done.issuperset(needs(step, last)))
        step = draws.choice(ready)
        left.remove(step)
        done.add(step)
        order[rank_of[step[1]]].append(step)
    return order


def early_receives(ranks: int, m: int) -> list[list[Plain]]:
    """All forwards first, with messages: each receive is posted one compute step early."""
    schedule = []
    for r in range(ranks):
        steps: list[Plain] = []
        for kind, source, target in (("F", r > 0, r < ranks - 1), ("B", r < ranks - 1, r > 0)):
            receives: list[Plain] = [(f"recv {kind}", r, i) for i in range(m) if source]
            steps += receives[:1]
            for i in range(m):
                steps += receives[i + 1 : i + 2]
                steps.append((kind, r, i))
                steps += [(f"send {kind}", r, i)] if target else []
        schedule.append(steps)
    return schedule


def one_after_another(ranks: int, m: int) -> list[list[Plain]]:
    """Every micro-batch goes forward and backward before the next one starts."""
    return [[(k, r, i) for i in range(m) for k in "FB"] for r in range(ranks)]


def messages(order: Sequence[Sequence[Plain]]) -> dict[Plain, tuple[Plain, int, int]]:
    """Every send that an order needs: (its receive, sending rank, receiving rank)."""
    rank_of = {s: rank for rank, steps in enumerate(order) for _, s, _ in steps}
    found = {}
    for steps in order:
        for kind, s, i in steps:
            to = {"F": s + 1, "B": s - 1}.get(kind, -1)
            if rank_of.get(to, rank_of[s]) != rank_of[s]:
                found[f"send {kind}", s, i] = (f"recv {kind}", to, i), rank_of[s], rank_of[to]
    return found


def completed(seed: int, order: Sequence[Sequence[Plain]]) -> list[list[Plain]]:
    """A valid schedule with the order's messages: each as late as chance wants, both ends at once.

    Messages of one direction between two ranks keep their order.
    """
    draws = random.Random(seed)
    crossing = messages(order)
    last = max(s for steps in order for _, s, _ in steps)
    rank_of = {s: rank for rank, steps in enumerate(order) for _, s, _ in steps}
    left = [list(reversed(steps)) for steps in order]
    out: list[list[Plain]] = [[] for _ in order]
    waiting: list[Plain] = []
    there: set[Plain] = set()  # computed, and known where it is needed

    def out_rank(steps: list[Plain]) -> int:
        return rank_of[steps[-1][1]]

    def flush() -> None:
        send = waiting.pop(0)
        receive, source, target = crossing[send]
        out[source].append(send)
        out[target].append(receive)
        there.add((send[0][-1], send[1], send[2]))

    while any(left) or waiting:
        ready = [
            steps
            for steps in left
            if steps
            and all(
                need in there or (need in done_on(out) and rank_of[need[1]] == out_rank(steps))
                for need in needs(steps[-1], last)
            )
        ]
        if waiting and (not ready or draws.random() < 0.5):
            flush()
            continue
        step = draws.choice(ready).pop()
        out[rank_of[step[1]]].append(step)
        send = (f"send {step[0]}", step[1], step[2])
        if send in crossing:
            waiting.append(send)
    return out


def done_on(out: list[list[Plain]]) -> set[Plain]:
    """All compute steps so far."""
    return {step for steps in out for step in steps if len(step[0]) == 1}


def problem_of(schedule: Sequence[Sequence[Plain]], stages: int, m: int) -> tuple[str, str]:
    """(cause, sentence) of what is wrong with a schedule with messages; ("", "") if nothing is."""
    have = Counter(step for steps in schedule for step in steps)
    kinds = "FBW" if any(step[0] == "W" for step in have) else "FB"
    every = {(k, s, i) for k in kinds for s in range(stages) for i in range(m)}
    if not have:
        return "empty", "the schedule has no steps at all"
    compute = {step: n for step, n in have.items() if len(step[0]) == 1}
    for step in sorted(every - set(compute)):
        return "incomplete", f"{_name(step)} is nowhere in the schedule"
    for step, count in sorted(compute.items()):
        if step not in every or count > 1:
            return "too-often", f"{_name(step)} is there {count} times"
    crossing = messages([[x for x in steps if len(x[0]) == 1] for steps in schedule])
    want = {*crossing, *(receive for receive, _, _ in crossing.values())}
    moved = {step: n for step, n in have.items() if len(step[0]) > 1}
    for step in sorted(want - set(moved)):
        return "message-missing", f"{_name(step)} is missing"
    for step, count in sorted(moved.items()):
        if step not in want or count > 1:
            return "message-too-often", f"{_name(step)} is there {count} times"
    return _walk(schedule, crossing, stages - 1)


def _walk(schedule: Any, crossing: Any, last: int) -> tuple[str, str]:
    """Take all steps with rendezvous sends."""
    left = [list(reversed(steps)) for steps in schedule]
    known: list[set[Plain]] = [set() for _ in schedule]  # computed or received, per rank
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(left):
            while steps and not steps[-1][0].startswith("recv"):
                step = steps[-1]
                own = (step[0][-1], step[1], step[2])
                before = [own] if step in crossing else needs(step, last)
                for need in before:
                    if need not in known[rank]:
                        text = f"rank {rank} comes to {_name(step)} before it has {_name(need)}"
                        return "too-early", text
                if step in crossing:
                    receive, _, target = crossing[step]
                    if not left[target] or left[target][-1] != receive:
                        break
                    left[target].pop()
                    known[target].add(own)
                else:
                    known[rank].add(step)
                steps.pop()
                moved = True
    if any(left):
        stuck = [f"rank {r} at {_name(steps[-1])}" for r, steps in enumerate(left) if steps]
        return "deadlock", f"with sends that wait for their receive it stops: {', '.join(stuck)}"
    return "", ""


def _name(step: Plain) -> str:
    return f"{step[0]}({step[1]}, {step[2]})"


def times(order: Any, costs: dict[str, float], message: float = 0.0) -> dict[Plain, float]:
    """When each compute step ends, if nobody waits for anything but what it needs."""
    last = max(step[1] for steps in order for step in steps)
    rank_of = {step[1]: rank for rank, steps in enumerate(order) for step in steps}
    left = [[x for x in reversed(steps) if len(x[0]) == 1] for steps in order]
    ends: dict[Plain, float] = {}
    free = [0.0] * len(order)
    while any(left):
        rank, step = next(
            (r, steps[-1])
            for r, steps in enumerate(left)
            if steps and all(need in ends for need in needs(steps[-1], last))
        )
        arrivals = [
            ends[n] + (message if rank_of[n[1]] != rank else 0.0) for n in needs(step, last)
        ]
        free[rank] = ends[step] = max([free[rank], *arrivals]) + costs[step[0]]
        left[rank].pop()
    return ends


def bubble(order: Any, costs: dict[str, float], message: float = 0.0) -> float:
    """The idle share of all ranks' time."""
    ends = times(order, costs, message)
    busy = sum(costs[step[0]] for step in ends)
    return 1 - busy / (len(order) * max(ends.values()))


def peaks(order: Any) -> list[int]:
    """Per rank, the most forwards whose last backward step has not come."""
    found = []
    for steps in order:
        last = "W" if any(step[0] == "W" for step in steps) else "B"
        live = [0]
        for kind, _, _ in steps:
            live.append(live[-1] + (kind == "F") - (kind == last))
        found.append(max(live))
    return found


# -- models ---------------------------------------------------------------------------------------
class Frozen(nn.Linear):
    """A layer that does not learn."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)


def layers(seed: int, frozen: bool = False) -> list[nn.Module]:
    """Eight layers in float64; the first takes integers, every boundary has another width.

    ``frozen``: the first two do not learn, so that a first stage may have nothing to do backward.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [3, 5, 4, 6, 3, 5, 4]
        found: list[nn.Module] = [nn.Embedding(WORDS, widths[0])]
        for a, b in pairwise(widths):
            found.append(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.Tanh()))
        found.append(nn.Linear(widths[-1], 3))
    if frozen:
        found[0].requires_grad_(False)
        found[1].requires_grad_(False)
    return [layer.double() for layer in found]


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Words (size,) and classes (size,), both int64."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (size,), generator=generator)
    return words, torch.randint(0, 3, (size,), generator=generator)


def cut(found: list[nn.Module], stages: int) -> list[nn.Module]:
    """Consecutive parts, as equal as can be."""
    size, longer = divmod(len(found), stages)
    ends = [(s + 1) * size + min(s + 1, longer) for s in range(stages)]
    return [nn.Sequential(*found[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def boundaries(parts: list[nn.Module], x: Tensor) -> list[Tensor]:
    """What each stage but the last gives for one micro-batch, without data."""
    shapes = []
    for part in parts[:-1]:
        x = part(x)
        shapes.append(torch.empty(x.shape, dtype=x.dtype, device="meta"))
    return shapes


def gradients(found: list[nn.Module], mine: Sequence[nn.Module] = ()) -> dict[str, Tensor]:
    """Gradients by layer and name: of all layers, or of those in the parts ``mine``."""
    own = {id(p) for part in mine for p in part.parameters()}
    return {
        f"layer {k} {name}": p.grad.clone()
        for k, layer in enumerate(found)
        for name, p in layer.named_parameters()
        if p.grad is not None and (not mine or id(p) in own)
    }


def one_process(seed: int, size: int, m: int, **options: Any) -> tuple[list, float]:
    """The gradient of each micro-batch's share of the batch's mean loss, and that loss."""
    words, classes = batch(seed, size)
    parts, total = [], 0.0
    for x, y in zip(words.chunk(m), classes.chunk(m), strict=True):
        found = layers(seed, **options)
        loss = F.cross_entropy(nn.Sequential(*found)(x), y) / m
        loss.backward()
        parts.append(gradients(found))
        total += loss.item()
    return parts, total


def explain_micro_batches(parts: list[Tensor]) -> Callable[[Case], Diagnosis | None]:
    """What goes wrong with micro-batches, as formulas of their shares of the gradient."""
    m = len(parts)
    shares = [p.double() for p in parts]

    def rule(case: Case) -> Diagnosis | None:
        if m < 2:
            return None
        if case.fits(case.want * m):
            text = f"it is {m} times the right value: divide each micro-batch's loss by {m}"
            return Diagnosis("not-divided", text)
        for power in (1, 2, 3, 4):
            if case.fits(case.want / m**power):
                text = (
                    f"it is 1/{m**power} of the right value: the loss was divided by the {m} "
                    f"micro-batches {power} time{'s' if power > 1 else ''} too often; the last "
                    "stage does it once, for all stages"
                )
                return Diagnosis("divided-again", text)
        for i, share in enumerate(shares):
            if case.fits(share):
                text = f"only micro-batch {i} is in it: the others' gradients were lost"
                return Diagnosis("micro-batch-lost", text)
            if case.fits(case.want - share):
                return Diagnosis("micro-batch-lost", f"the gradient of micro-batch {i} is missing")
        return None

    return rule


def compare(results: Any, parts: list, loss: float, what: str, times: float = 1.0) -> None:
    """Fail unless the ranks' (gradients, loss) are those of one process, ``times`` over."""
    everybody: dict[str, Tensor] = {}
    for rank, (got, _) in enumerate(results):
        for name in got:
            if name in everybody:
                fail(f"{what}: two ranks have {name}", cause="wrong", rank=rank)
        everybody |= got
    for name in parts[0]:
        share = [part[name] * times for part in parts]
        owner = next((rank for rank, (got, _) in enumerate(results) if name in got), None)
        if owner is None:
            text = f"{what}: {name} has no gradient on any rank: does its stage's backward run"
            fail(f"{text}, and from what the next stage sent?", cause="no-gradient")
        expect_close(
            everybody[name],
            torch.stack(share).sum(0),
            what=f"{what}: gradient of {name}",
            rank=owner,
            rules=[explain_micro_batches(share)],
            rtol=1e-10,
            atol=1e-12,
        )
    for rank, (_, got) in enumerate(results):
        if not isinstance(got, float) or abs(got - loss) > 1e-9:
            factor = f" ({got / loss:.4g} times)" if isinstance(got, float) else ""
            text = f"{what}: every rank must return the batch's mean loss {loss:.6f}, got {got}"
            fail(text + factor, cause="loss-value", rank=rank)


# -- meters ---------------------------------------------------------------------------------------
class Meter:
    """How many forwards of a rank are still kept, the most there were, and its last work's end."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.end = 0.0

    def add(self, tensor: Tensor) -> None:
        """Count until ``tensor``, which the graph has saved, is freed."""
        self.live += 1
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self.remove)

    def remove(self) -> None:
        """One is freed."""
        self.live -= 1


class _Work(torch.autograd.Function):
    """The same values; calls ``forward`` and ``backward`` when these happen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, meter: Meter | None) -> Tensor:
        ctx.work = backward
        marker = torch.empty(1)
        ctx.save_for_backward(marker)
        if meter is not None:
            meter.add(marker)
        forward()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.work()
        return gradient.clone(), None, None, None


class _Weight(nn.Module):
    """A layer: its input times its weight; the gradient of the weight is work."""

    def __init__(self, work: Callable[[str, str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.work, self.label = work, ""

    def forward(self, x: Tensor) -> Tensor:
        label = self.label
        weight = _Work.apply(self.weight, lambda: None, lambda: self.work("weights", label), None)
        return x * weight


class Paced(nn.Module):
    """A stage whose steps take a given time (they sleep), whatever the machine.

    ``seconds``: of forward, of the gradient of the input, and of the weights'. Activations keep
    their value: that of micro-batch i is i. ``meter`` counts what is kept for backward, ``span``
    (see ``RankContext.span``) is told what is done; ``stage`` is put before the micro-batch's
    number.
    """

    def __init__(
        self,
        seconds: tuple[float, float, float],
        meter: Meter | None = None,
        span: Callable[[str, str], Any] | None = None,
        stage: str = "",
    ) -> None:
        super().__init__()
        self.stage = stage
        self.seconds = dict(zip(("forward", "backward", "weights"), seconds, strict=True))
        self.meter, self.span = meter, span
        self.layer = _Weight(self.work)

    def work(self, name: str, label: str) -> None:
        """One part of a step; nothing where it takes no time."""
        if not self.seconds[name]:
            return
        with self.span(name, label) if self.span else contextlib.nullcontext():
            time.sleep(self.seconds[name])
        if self.meter is not None:
            self.meter.end = time.perf_counter()

    def forward(self, x: Tensor) -> Tensor:
        """The same values."""
        label = self.layer.label = f"{self.stage}{round(float(x.detach().flatten()[0]))}"
        forward, backward = (lambda n=n: self.work(n, label) for n in ("forward", "backward"))
        return _Work.apply(self.layer(x), forward, backward, self.meter)


def paced_batch(m: int) -> tuple[Tensor, Tensor]:
    """One sample per micro-batch, with the value of its number."""
    return torch.arange(float(m)).view(m, 1), torch.zeros(m, 1)


def paced_boundaries(stages: int) -> list[Tensor]:
    """Of ``paced_batch`` through ``Paced`` stages."""
    return [torch.empty(1, 1, device="meta")] * (stages - 1)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """A loss."""
    return (output - target).square().mean()
