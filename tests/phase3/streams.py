"""What the checks of Streaming DiLoCo share: a model, and a simulation in one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import expect_close
from tests.phase3.rounds import CLASSES, OUTER, SIZE, Values, batches, explains

BLOCK = 32


class Scale(nn.Module):
    """A parameter in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.rand(SIZE, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


class Stack(nn.Module):
    """Five units, the second frozen, the third tied to the first; a transposed weight; a buffer.

    ``dtype``: that of the fourth unit; the others are in float64.
    """

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first, third = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2))
            frozen = nn.Linear(SIZE, SIZE, dtype=torch.float64).requires_grad_(False)
            third.weight = first.weight
            head = nn.Linear(SIZE, CLASSES, dtype=torch.float64)
            head.weight = nn.Parameter(head.weight.detach().t().contiguous().t())
            self.units = nn.ModuleList([first, frozen, third, Scale(dtype), head])
            self.register_buffer("seen", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        first, frozen, third, scale, head = self.units
        return head(scale(torch.tanh(third(torch.tanh(first(frozen(x)))))))

    def parts(self, fragments: int) -> list[list[nn.Parameter]]:
        """Its trainable parameters in 1 to 3 fragments of unequal sizes."""
        first, _, third, scale, head = self.units
        own = [first.weight, first.bias], [third.bias, scale.factors], [head.weight, head.bias]
        cut = {1: [(0, 1, 2)], 2: [(1, 2), (0,)], 3: [(0,), (1,), (2,)]}[fragments]
        return [[p for k in chosen for p in own[k]] for chosen in cut]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run: ``segments`` are numbers of steps, after each of which ``finish()`` is called."""

    ranks: int
    segments: tuple[int, ...]
    fragments: int
    every: int
    delay: int
    mix: float
    bits: int = 32
    dtype: torch.dtype = torch.float32
    outer: dict[str, float] = field(default_factory=lambda: dict(OUTER))
    at_once: bool = False  # a mistake: no fragment has a turn of its own

    @property
    def settings(self) -> dict[str, float]:
        """What ``StreamingDiLoCo`` gets besides the model, its parts and the group."""
        own = {"every": self.every, "delay": self.delay, "mix": self.mix, "bits": self.bits}
        return own | self.outer

    def turn(self, k: int) -> int:
        """The step after which fragment k is sent first."""
        return self.every if self.at_once else (k + 1) * self.every // self.fragments

    def sends(self, step: int) -> list[int]:
        """The fragments that are sent after a step, counted from 1 in each segment."""
        return [k for k in range(self.fragments) if step % self.every == self.turn(k) % self.every]

    def receives(self, step: int) -> list[int]:
        """The fragments that are received after a step."""
        return self.sends(step - self.delay) if step > self.delay else []

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {' + '.join(map(str, self.segments))} steps, F={self.fragments}, "
            f"H={self.every}, τ={self.delay}, α={self.mix}, {self.bits} bits"
        )


def coarse(x: Tensor) -> Tensor:
    """What e3m0 makes of (n,) float32, by looking for the nearest value among all that exist."""
    powers = (2.0 ** torch.arange(-126, 128, dtype=torch.float64)).flip(0)
    levels = torch.tensor([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 0], dtype=torch.float64)
    found = []
    for block in x.double().split(BLOCK) if len(x) else ():
        scale = powers[(block.abs().max() - powers).abs().argmin()]  # the larger one comes first
        places = (block.abs()[:, None] - scale * levels).abs().argmin(1)
        found.append(block.sign() * scale * levels[places])
    return torch.cat(found).float() if found else x.float()


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The inner optimizer."""
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.3, momentum=0.5)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> None:
    """A step of the rank's own."""
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def values_of(model: nn.Module) -> Values:
    """Copies of its parameters, by name, on the CPU."""
    return {name: p.detach().clone().cpu() for name, p in model.named_parameters()}


MISTAKES = {
    "mixed-the-other-way": "α is the share of the rank's own values, not that of θ",
    "not-mixed": "the steps since the message was sent are lost: the share α of them is kept",
    "late-difference": "the difference was taken when the message was received, not when it left",
    "mixed-common": "θ became the mixed values: only parameters are mixed, θ never",
    "classic-momentum": "the outer step is v alone: Nesterov's is Δ + μ·v",
    "outer-momentum-lost": "the outer velocity does not last from round to round",
    "uphill": "the model moved away from where the ranks went: the difference has the wrong sign",
    "summed": "the differences were added up, and not divided by the number of ranks",
    "common-shares-memory": "θ follows the parameters: it has to be a copy of them",
    "all-at-once": "all fragments were sent at the end of the round: they take turns",
    "in-full": "the differences were not rounded to 4 bits",
}


class Simulation:
    """W models in one process, each with its θ; torch's SGD steps each fragment of a θ."""

    def __init__(self, seed: int, plan: Plan, mistake: str = "") -> None:
        self.plan = dataclasses.replace(plan, at_once=mistake == "all-at-once")
        self.mistake = mistake
        self.models = [Stack(seed, plan.dtype) for _ in range(plan.ranks)]
        self.inner = [sgd([*model.parameters()]) for model in self.models]
        settings = dict(nesterov=mistake != "classic-momentum", **plan.outer)
        if mistake == "outer-momentum-lost" or not plan.outer["momentum"]:
            settings |= {"nesterov": False, "momentum": 0.0}
        self.parts = [model.parts(plan.fragments) for model in self.models]
        self.common = [Stack(seed, plan.dtype).parts(plan.fragments) for _ in self.models]
        self.outer = [[torch.optim.SGD(own, **settings) for own in theta] for theta in self.common]
        self.under_way: dict[int, list[Tensor]] = {}

    def send(self, k: int) -> None:
        """Note the mean difference of fragment k."""
        self.under_way[k] = self.mean(k)

    def mean(self, k: int) -> list[Tensor]:
        """The mean over the ranks of what they send."""
        vectors = []
        for theta, own in zip(self.common, self.parts, strict=True):
            pairs = zip(theta[k], own[k], strict=True)
            flat = torch.cat([(a.detach() - b.detach()).flatten().float() for a, b in pairs])
            full = self.plan.bits == 32 or self.mistake == "in-full"
            vectors.append(flat if full else coarse(flat))
        total = torch.stack(vectors).sum(0)
        total /= 1 if self.mistake == "summed" else self.plan.ranks
        return [*total.split([p.numel() for p in self.common[0][k]])]

    def receive(self, k: int) -> None:
        """The outer step of fragment k; all models mix."""
        means = self.under_way.pop(k)
        if self.mistake == "common-shares-memory":  # then every difference is zero
            return
        if self.mistake == "late-difference":
            means = self.mean(k)
        mix = self.plan.mix
        mix = {"mixed-the-other-way": 1 - mix, "not-mixed": 0.0}.get(self.mistake, mix)
        for theta, outer, own in zip(self.common, self.outer, self.parts, strict=True):
            for c, mean in zip(theta[k], means, strict=True):
                c.grad = mean.view(c.shape).to(c.dtype) * (-1 if self.mistake == "uphill" else 1)
            outer[k].step()
            for p, c in zip(own[k], theta[k], strict=True):
                p.data.copy_(mix * p.data + (1 - mix) * c.data)
                if self.mistake == "mixed-common":
                    c.data.copy_(p.data)

    def step(self, step: int, data: Sequence[Sequence[Tensor]]) -> list[Values]:
        """One step of each rank, counted from 1 in its segment; the models afterwards."""
        for model, optimizer, batch in zip(self.models, self.inner, data, strict=True):
            inner_step(model, optimizer, batch)
        for k in self.plan.sends(step):
            self.send(k)
        for k in self.plan.receives(step):
            self.receive(k)
        return [values_of(model) for model in self.models]

    def finish(self, steps: int) -> list[Values]:
        """What is under way, then what is behind, then θ for all."""
        for k in list(self.under_way):
            self.receive(k)
        for k in range(self.plan.fragments):
            if steps and k not in self.plan.sends(steps):
                self.send(k)
                self.receive(k)
        if steps and self.mistake != "common-shares-memory":
            for theta, own in zip(self.common, self.parts, strict=True):
                for p, c in zip(chain(*own), chain(*theta), strict=True):
                    p.data.copy_(c.data)
        return [values_of(model) for model in self.models]


def simulated(seed: int, plan: Plan, mistake: str = "") -> list[list[Values]]:
    """For each rank its parameters after each step, and after each ``finish()``."""
    simulation, found = Simulation(seed, plan, mistake), []
    data = [iter(batches(seed, rank, sum(plan.segments))) for rank in range(plan.ranks)]
    for steps in plan.segments:
        for step in range(1, steps + 1):
            batch_of = [next(own) for own in data]
            found.append(simulation.step(step, batch_of))
        found.append(simulation.finish(steps))
    return [list(own) for own in zip(*found, strict=True)]


def compare(
    got: list[Values], wanted: list[Values], *, seed: int, plan: Plan, rank: int, atol: float = 1e-5
) -> None:
    """Every parameter after every call; the mistake that predicts a difference explains it."""

    @functools.cache
    def known(mistake: str) -> list[Values]:
        return simulated(seed, plan, mistake)[rank]

    calls = [
        words
        for s in plan.segments
        for words in [*(f"step {n + 1} of {s}" for n in range(s)), f"finish() after {s} steps"]
    ]
    for place, (name_of_call, want) in enumerate(zip(calls, wanted, strict=True)):
        for name, value in want.items():

            def predicted(case: Case, n: int = place, key: str = name) -> Diagnosis | None:
                for cause, words in MISTAKES.items():
                    run = known(cause)
                    if case.fits(run[n][key]) and explains(got, run):
                        return Diagnosis(cause, words)
                return None

            expect_close(
                got[place][name],
                value,
                what=f"{plan}: {name} after {name_of_call}",
                rank=rank,
                rtol=atol,  # differences travel in float32
                atol=atol,
                rules=(predicted,),
            )
