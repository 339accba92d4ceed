"""What the checks of exercises 3.13 and 3.14 train: awkward parameters, and equal ones to weigh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading import expect_close, expect_equal, fail, refusal
from distlab.observe.log import Log
from distlab.ranks import RankContext

LIMIT = 0.05  # of the gradient's norm, where it is clipped
BUCKET = 300  # bytes: several buckets, whose borders are inside of parameters


class Undefined(torch.autograd.Function):
    """Uses a parameter, and leaves its gradient undefined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


STILL = ("unused", "undefined", "frozen.weight")  # parameters of Awkward that never move


class Awkward(nn.Module):
    """Odd sizes, a single element, a transposed and a tied weight, one of one rank only; and
    weights that never move: one unused, one with an undefined gradient, a frozen one with a stale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3, 7)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(5))
        self.undefined = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(2))
        self.zeros = nn.Parameter(torch.ones(4))  # its gradient is zero, and not None
        self.turned = nn.Parameter(torch.randn(2, 7).t())
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor, sometimes: bool = True) -> Tensor:
        h = self.frozen(self.inside(x))
        y = self.head(self.scale * self.second(torch.tanh(self.first(h)))) + h @ self.turned
        y = Undefined.apply(y, self.undefined) + 0.0 * self.zeros.sum()
        return y * self.sometimes if sometimes else y


def awkward(seed: int, device: torch.device | str = "cpu") -> Awkward:
    """The same on every rank; drawn on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Awkward().to(device, torch.float64)
    model.frozen.weight.grad = torch.ones_like(model.frozen.weight)
    return model


def groups_of(model: Awkward) -> list[dict[str, Any]]:
    """Two groups with different options."""
    biases = [p for p in model.parameters() if p.dim() < 2]
    weights = [p for p in model.parameters() if p.dim() == 2]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}]


def loss_of(
    model: nn.Module, seed: int, rank: int, step: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Mean squared error of two samples; rank 0 alone uses ``sometimes``, not in each step."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank * 100 + step)
    x, y = torch.randn(2, 5, generator=generator, dtype=torch.float64).to(device).split([3, 2], 1)
    return ((model(x, rank == 0 and step % 10 == 0) - y) ** 2).mean()


def mean_gradients(
    model: nn.Module, seed: int, world_size: int, step: int, device: torch.device | str = "cpu"
) -> None:
    """Add to ``grad`` the mean over the ranks, computed here for all of them."""
    losses = [loss_of(model, seed, rank, step, device) for rank in range(world_size)]
    (sum(losses) / world_size).backward()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters by name."""
    return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], what: str, rank: int) -> None:
    """All parameters, those of the end first."""
    for name, value in reversed(want.items()):
        expect_close(got[name], value, what=f"{what}: {name}", rank=rank, rtol=1e-9, atol=1e-10)


class Equal(nn.Module):
    """Twelve matrices of one size: whole ones can be dealt out evenly to 2, 3 and 4 ranks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(12))
        generator = torch.Generator().manual_seed(0)  # the same on every rank
        for layer in self.layers:
            nn.init.normal_(layer.weight, 0, width**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def clip(model: nn.Module, max_norm: float) -> float:
    """One process: clip the gradients of what is trained, and return their norm."""
    gradients = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    norm = float(torch.cat([g.flatten() for g in gradients]).norm())
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / norm))
    return norm


def loaded(log: Log, region: str) -> list[int]:
    """For each message of the region: how many earlier ones were still on their way."""
    events = log.select(region=region).events
    return [
        sum(e.end is None or e.end > event.start for e in events[:k])
        for k, event in enumerate(events)
    ]


MATRIX = 4 * 32 * 32
WHOLE = 12 * MATRIX  # bytes of Equal's parameters


def with_bystanders(model: nn.Module) -> list[nn.Parameter]:
    """The model's parameters, and two that nobody sends: a large frozen one, one without elements.

    ``judge_bystanders`` gets what ``bystanders_of`` finds after a step.
    """
    frozen = nn.Parameter(torch.ones(64, 32), requires_grad=False)
    empty = nn.Parameter(torch.ones(0, 3, dtype=torch.float64))
    return [empty, *model.parameters(), frozen]


def bystanders_of(parameters: list[nn.Parameter]) -> list[Any]:
    """What of the two may not change."""
    empty, frozen = parameters[0], parameters[-1]
    values = frozen.detach().clone()
    return [list(empty.shape), str(empty.dtype), values, frozen.requires_grad, frozen.grad is None]


def judge_bystanders(results: Sequence[list[Any]]) -> None:
    """They are as they were, on every rank."""
    for rank, (shape, dtype, values, *flags) in enumerate(results):
        expect_equal(
            [shape, dtype, torch.equal(values, torch.ones(64, 32)), *flags],
            [[0, 3], "torch.float64", True, False, True],
            what="shape and dtype of a parameter without elements; of a frozen one: whether it is "
            "as it was, requires_grad, whether grad is None",
            rank=rank,
            cause="moved",
        )


def refused_at_the_start(make: Callable[..., torch.optim.Optimizer]) -> list[str]:
    """What ``AT_THE_START`` names, on two ranks."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    foreign = groups[1 - dist.get_rank()]
    weights, sgd = [nn.Parameter(torch.ones(3))], torch.optim.SGD
    twice = [{"params": weights}, {"params": weights}]
    return [
        refusal(make, weights, sgd, group=foreign),
        refusal(make, weights, sgd, bucket_bytes=0),
        refusal(make, weights, sgd, bucket_bytes=-4),
        refusal(make, twice, sgd),
        refusal(make, weights * 2, sgd),
    ]


AT_THE_START = [
    "a group of other ranks",
    "bucket_bytes=0",
    "bucket_bytes=-4",
    "a parameter in two groups",
    "a parameter twice in one group",
]
Stepped = tuple[list[Tensor], list[list[str]], list[str]]  # values; dtypes of a step, and saved
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32)


def steps_in_three_dtypes(make: Callable[..., torch.optim.Optimizer], share: int) -> Stepped:
    """What two steps on the gradients ``share`` + 0, 1, 2, 0, 1 … make of small integers.

    Returns the values, the dtypes [of what is stepped, its gradient, its momentum], and those that
    the momenta have in ``state_dict``; each step goes on with what has been saved and loaded.
    """
    seen: set[tuple[str, ...]] = set()

    class Witness(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            out = super().step(closure)
            for p in (p for group in self.param_groups for p in group["params"]):
                if p.grad is not None:
                    stepped = p, p.grad, self.state[p]["momentum_buffer"]
                    seen.add(tuple(str(t.dtype).removeprefix("torch.") for t in stepped))
            return out

    weights = [
        nn.Parameter(torch.arange(5 + k).remainder(4).to(dtype)) for k, dtype in enumerate(DTYPES)
    ]
    optimizer = make(weights, Witness, lr=0.25, momentum=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        terms = [((torch.arange(len(p)) % 3 + share) * p.double()).sum() for p in weights]
        sum(terms).backward()
        optimizer.step()
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
    kept = [str(saved["state"][k]["momentum_buffer"].dtype)[6:] for k in range(len(DTYPES))]
    return [p.detach() for p in weights], sorted(map(list, seen)), kept


def judge_dtypes(results: Sequence[Stepped], share: int) -> None:
    """Exact values in each parameter's own dtype; all of its piece in this dtype too."""
    want, _, saved = steps_in_three_dtypes(plain, share)
    for rank, (got, seen, kept) in enumerate(results):
        for k, value in enumerate(want):
            if got[k].dtype != value.dtype:
                fail(
                    f"a {value.dtype} parameter is {got[k].dtype} after two steps: one vector "
                    "holds parameters of one dtype",
                    cause="wrong-dtype",
                    rank=rank,
                )
            expect_close(got[k], value, what=f"{value.dtype} parameter", rank=rank, rtol=0, atol=0)
        what = f"dtypes of the momenta in state_dict() of parameters of {saved}"
        expect_equal(kept, saved, what=what, rank=rank, cause="wrong-dtype")
        for stepped, gradient, momentum in seen:
            if not stepped == gradient == momentum:
                fail(
                    f"at step() a piece of {stepped} has a gradient of {gradient} and a momentum "
                    f"of {momentum}",
                    cause="wrong-dtype",
                    rank=rank,
                )
    stepped = sorted({dtypes[0] for _, seen, _ in results for dtypes in seen})
    expect_equal(
        stepped, ["bfloat16", "float32", "float64"], what="dtypes stepped", cause="wrong-dtype"
    )


def plain(
    params: list[nn.Parameter], kind: Callable[..., torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """One process's optimizer, called as the sharded ones are."""
    return kind(params, **options)


def traced(optimizer_type: Callable[..., torch.optim.Optimizer]) -> Callable[[RankContext], None]:
    """What a trace draws: two steps of twelve equal layers in four buckets."""

    def body(ctx: RankContext) -> None:
        model = Equal()
        optimizer = optimizer_type(model.parameters(), torch.optim.Adam, bucket_bytes=3 * MATRIX)
        for _ in ctx.steps(2):
            optimizer.zero_grad()
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()

    return body
