"""What the checks of the pipeline exercises share: models, meters, and what one process gives."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import expect_close, fail

WORDS = 11  # of the embedding on the first stage
Gradients = dict[str, Tensor]  # by layer and name


# -- models ---------------------------------------------------------------------------------------
class Turned(nn.Module):
    """The same values behind other strides; has a parameter that is not used, and counts calls."""

    def __init__(self, straight: bool) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2))
        self.straight, self.calls = straight, 0

    def forward(self, x: Tensor) -> Tensor:
        """The values."""
        self.calls += 1
        return x if self.straight else x.t().contiguous().t()


def calls_of(parts: Sequence[nn.Module]) -> set[int]:
    """How often the layers of a rank's stages were called."""
    return {m.calls for part in parts for m in part.modules() if isinstance(m, Turned)}


def stale_of(parts: Sequence[nn.Module]) -> set[float]:
    """The gradients that frozen parameters have; they had ``STALE`` before."""
    every = [p for part in parts for p in part.parameters() if not p.requires_grad]
    return {math.nan if p.grad is None else float(x) for p in every for x in p.grad.flatten()}


STALE = 7.0


def layers(seed: int, frozen: bool | str = False, straight: bool = False) -> list[nn.Module]:
    """Eight layers in float64; the first takes integers, every boundary has another width.

    A weight is used twice, one not at all. ``frozen``: the first two layers do not learn, so that a
    first stage may have nothing to do backward, and others in part; they have a stale gradient.
    ``"all"``: nothing learns. ``straight``: contiguous outputs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        widths = [3, 5, 4, 6, 3, 5, 4]
        found: list[nn.Module] = [nn.Embedding(WORDS, widths[0])]
        for a, b in pairwise(widths):
            twice = nn.Linear(b, b)
            middle = nn.Linear(a, b), nn.LayerNorm(b), twice, nn.Tanh(), twice
            found.append(nn.Sequential(*middle, Turned(straight)))
        found.append(nn.Linear(widths[-1], 3))
    for k, layer in enumerate(found):
        for name, p in layer.double().named_parameters():
            if frozen == "all" or (frozen and (k < 2 or name.endswith("0.weight"))):
                p.requires_grad_(False)
                p.grad = torch.full_like(p, STALE)
    return found


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


def gradients(found: list[nn.Module], mine: Sequence[nn.Module] = ()) -> Gradients:
    """Gradients by layer and name: of all layers, or of those in the parts ``mine``."""
    own = {id(p) for part in mine for p in part.parameters()}
    return {
        f"layer {k} {name}": p.grad.clone()
        for k, layer in enumerate(found)
        for name, p in layer.named_parameters()
        if p.grad is not None and p.requires_grad and (not mine or id(p) in own)
    }


def one_process(
    seed: int, size: int, m: int, frozen: bool | str = False
) -> tuple[list[Gradients], float]:
    """The gradient of each micro-batch's share of the batch's mean loss, and that loss."""
    words, classes = batch(seed, size)
    parts, total = [], 0.0
    for x, y in zip(words.chunk(m), classes.chunk(m), strict=True):
        found = layers(seed, frozen)
        loss = F.cross_entropy(nn.Sequential(*found)(x), y) / m
        if loss.requires_grad:
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


def compare(
    results: Sequence[tuple[Gradients, float]],
    parts: list[Gradients],
    loss: float,
    what: str,
    times: float = 1.0,
    rtol: float = 1e-10,
) -> None:
    """Fail unless the ranks' (gradients, loss) are those of one process, ``times`` over."""
    everybody: Gradients = {}
    for rank, (got, _) in enumerate(results):
        for name in got:
            if name in everybody:
                fail(f"{what}: two ranks have {name}", cause="wrong", rank=rank)
            if name not in parts[0] and got[name].any():
                fail(f"{what}: {name} is not used and has a gradient", cause="wrong", rank=rank)
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
            rtol=rtol,
            atol=rtol / 100,
        )
    for rank, (_, got) in enumerate(results):
        if not isinstance(got, float) or abs(got - loss) > 10 * rtol:
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
    def forward(
        ctx: Any,
        x: Tensor,
        forward: Callable[[], None],
        backward: Callable[[], None],
        meter: Meter | None,
    ) -> Tensor:
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
