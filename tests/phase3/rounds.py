"""What the checks of local SGD share: a model, its data, and a simulation of the rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.explain.case import Case, Diagnosis
from distlab.grading import expect_close, expect_equal

Batch = tuple[Tensor, Tensor]  # inputs, targets
Values = dict[str, Tensor]  # parameters and buffers by name
OUTER = {"lr": 0.7, "momentum": 0.9}
SIZE, CLASSES = 5, 3


class Net(nn.Module):
    """Tied and frozen parameters, two dtypes, a transposed buffer and counters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(SIZE, SIZE)
            self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
            self.second = nn.Linear(SIZE, SIZE)
            self.second.weight = self.first.weight
            self.head = nn.Linear(SIZE, CLASSES)
            self.double()
            self.scale = nn.Parameter(torch.rand(SIZE))
            self.register_buffer("seen", torch.randn(SIZE, 2, dtype=torch.float64).t())
            self.register_buffer("steps", torch.tensor(seed))
            self.register_buffer("mask", torch.rand(SIZE) < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.frozen(x)))))
        return self.head(x * self.scale)

    def observe(self, x: Tensor) -> None:
        """What a layer with running statistics does."""
        self.seen.mul_(0.5).add_(x.mean())
        self.steps += 1


def batches(seed: int, rank: int, count: int, size: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return [
        (
            torch.randn(size, SIZE, generator=generator, dtype=torch.float64) * 2,
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def sgd(model: nn.Module, lr: float = 0.3, momentum: float = 0.0) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trainable, lr=lr, momentum=momentum)


def gradient_step(model: Net, optimizer: torch.optim.Optimizer, batch: Sequence[Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    model.observe(batch[0])


def tensors(model: nn.Module, device: str = "cpu") -> Values:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().clone().to(device) for name, t in named}


def simulated(
    seed: int,
    world_size: int,
    count: int,
    every: int,
    outer: dict[str, float] | None = None,
    *,
    data: list[list[Batch]] | None = None,
    mistake: str = "",
) -> list[Values]:
    """The common model after each round, from W models in one process and torch's own optimizers.

    ``data``: the batches of each rank, if not those of ``batches``; who has an empty one takes no
    step. ``mistake``: what a known wrong implementation would do instead.
    """
    models = [Net(seed) for _ in range(world_size)]
    inner = [sgd(model, momentum=0.9 if outer else 0.5) for model in models]
    common = Net(seed)
    shared = [p for p in common.parameters() if p.requires_grad]
    settings = {"nesterov": mistake != "classic-momentum", **(outer or {"lr": 1.0})}
    if not outer or mistake == "outer-momentum-lost":
        settings |= {"nesterov": False, "momentum": 0.0}
    step_outer = torch.optim.SGD(shared, **settings)
    data = data or [batches(seed, rank, count) for rank in range(world_size)]
    found, since = [], 0
    for number in range(count):
        for model, optimizer, own in zip(models, inner, data, strict=True):
            if len(own[number][1]):
                gradient_step(model, optimizer, own[number])
        since += 1
        if since < every + (mistake == "round-too-long") and number < count - 1:
            continue
        since = 0
        with torch.no_grad():
            trained = [[p for p in m.parameters() if p.requires_grad] for m in models]
            for place, p in enumerate(shared):
                p.grad = p - torch.stack([own[place] for own in trained]).mean(0)
                p.grad *= -1 if mistake == "uphill" else 1
            step_outer.step()
            known = models[:1] if mistake == "statistics-of-first" else models
            common.seen.copy_(torch.stack([m.seen for m in known]).mean(0))
            common.steps.copy_(models[0].steps)
            if mistake == "inner-state-averaged":
                _average_momentum(inner, trained)
            if mistake == "inner-state-reset":
                for optimizer in inner:
                    optimizer.state.clear()
            for model in models:
                model.load_state_dict(common.state_dict())
        found.append(tensors(common))
    return found


def _average_momentum(
    inner: list[torch.optim.Optimizer], trained: list[list[nn.Parameter]]
) -> None:
    for place in range(len(trained[0])):
        pairs = zip(inner, trained, strict=True)
        states = [optimizer.state[own[place]]["momentum_buffer"] for optimizer, own in pairs]
        mean = torch.stack(states).mean(0)
        for state in states:
            state.copy_(mean)


MISTAKES = {
    "statistics-of-first": "floating-point buffers are those of rank 0: their mean is asked for",
    "classic-momentum": "the outer step is v alone: Nesterov's is Δ + μ·v",
    "outer-momentum-lost": "the outer velocity does not last from round to round",
    "round-too-long": "a round has one step too many",
    "uphill": "the model moved away from where the ranks went: the difference has the wrong sign",
    "inner-state-averaged": "the inner optimizers' momentum was averaged too: it stays local",
    "inner-state-reset": "the inner optimizer's state was lost between rounds",
}


def explains(got: list[Values], rounds: list[Values]) -> bool:
    """Whether a mistake predicts all rounds: some of them begin alike."""
    pairs = [(a[n], b[n]) for a, b in zip(got, rounds, strict=False) for n in a]
    return all(torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-4) for a, b in pairs)


def compare(
    got: list[Values],
    wanted: list[Values],
    *,
    what: str,
    rank: int,
    mistakes: Sequence[str] = (),
    predict: Callable[[str], list[Values]] = lambda _: [],
    before: Values | None = None,
) -> None:
    """Every tensor after every round; a difference is explained by the mistake that predicts it."""
    expect_equal(len(got), len(wanted), what=f"{what}: rounds", rank=rank, cause="rounds")
    for number, want in enumerate(wanted):
        for name, value in want.items():

            def predicted(case: Case, n: int = number, key: str = name) -> Diagnosis | None:
                for cause in mistakes:
                    rounds = predict(cause)
                    if n < len(rounds) and case.fits(rounds[n][key]) and explains(got, rounds):
                        return Diagnosis(cause, MISTAKES[cause])
                return None

            expect_close(
                got[number][name],
                value,
                what=f"{what}: {name} after round {number + 1}",
                rank=rank,
                rtol=1e-5,  # one parameter is in float32, and the others feel it
                atol=1e-5,
                rules=(predicted,),
                before=before[name] if before and number == 0 else None,
            )
