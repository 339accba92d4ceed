"""A classifier is trained for 3 epochs; after every 4th step it is left in eval mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Layers(nn.Module):
    """Two layers whose input is divided by 2 in training mode, and in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 12).double(), nn.Linear(12, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 2 if self.training else x
        return self.second(torch.tanh(self.first(x)))


class Batches:
    """The rank's batches of an epoch: another order in each epoch."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.epoch = rank, world_size, 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        order = torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for k in range(5):
            yield order[10 * k : 10 * k + 10][self.rank :: self.world_size]


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the sum of the weights at the end."""
    draw = torch.Generator().manual_seed(ctx.seed)
    inputs = torch.randn(50, 5, generator=draw, dtype=torch.float64)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    torch.manual_seed(ctx.seed + ctx.rank)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def evaluate(step: int, loss: float, samples: int) -> None:
        if step % 4 == 0:
            model.eval()

    loader = DataLoader(data, batch_sampler=Batches(ctx.rank, ctx.world_size))
    losses = code.train(model, loader, optimizer, epochs=3, on_step=evaluate)
    total = sum(p.sum().item() for p in model.parameters())
    return {"loss": losses, "sum of the weights": total}
