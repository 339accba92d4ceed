"""Models whose units change their order, mix dtypes or have branches: for 3.15, 3.16, 3.32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.phase3.fsdp_models import Net, batch, loss_of, values_of


class Changing(Net):
    """Runs the blocks in the given order, some perhaps not at all."""

    plan = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"head.weight": self.head.weight.detach().clone()}
        x = self.inside(x)
        for k in self.plan:
            x = self.blocks[k](x)
        return self.head(x) + self.offset


def changing(seed: int) -> Changing:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Changing().double()


PLANS = ((0, 1, 2), (2, 0), (1,), (0, 1, 1), (1, 2, 0), (0, 1, 2))  # a unit may run twice


def change_often(model: nn.Module, inner: Changing, seed: int, ranks: range) -> dict[str, Tensor]:
    """The values after a step with each of ``PLANS``, with an evaluation before each backward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number, plan in enumerate(PLANS):
        inner.plan = plan
        optimizer.zero_grad()
        pairs = [batch(seed, rank, number) for rank in ranks]
        loss = loss_of(model, tuple(map(torch.cat, zip(*pairs, strict=True))))
        inner.plan = PLANS[number - 1]
        values_of(model, inner)  # an evaluation
        loss.backward()
        optimizer.step()
    return values_of(model, inner)


class Mixed(nn.Module):
    """Layers of three dtypes in each unit, some frozen, and a branch that only some ranks take."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(3, 4).double(), nn.Linear(4, 3)
        self.coarse = nn.Linear(3, 3).bfloat16()
        self.still = nn.Linear(3, 3).double().requires_grad_(False)
        self.branch = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        y = self.narrow(torch.tanh(self.wide(self.still(x.double()))).float())
        y = y * self.branch if branch else y
        return x + self.coarse(y.bfloat16()).float()


def mixed(seed: int) -> nn.ModuleList:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleList([Mixed(), Mixed()])


class Chain(nn.Module):
    """Two mixed units, one after the other, the second one twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.parts = mixed(seed)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        for part in (*self.parts, self.parts[1]):
            x = part(x, branch)
        return x


def inputs_of(seed: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(seed * 7 + rank))
