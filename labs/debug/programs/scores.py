"""A classifier is trained for 2 epochs of 22 samples, and evaluated before and after each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Layers(nn.Module):
    """Two layers whose input is divided by 4 in training mode, and in no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 12).double(), nn.Linear(12, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x / 4 if self.training else x)))


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """Mean loss and accuracy of each evaluation, and whether the model is in training mode then."""
    trainer, data_loader = code.solution(1, "trainer"), code.solution(1, "data_loader")
    draw = torch.Generator().manual_seed(ctx.seed)
    inputs = torch.randn(22, 5, generator=draw, dtype=torch.float64)
    inputs[:8] *= 3
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    options = {"rank": ctx.rank, "world_size": ctx.world_size, "global_batch_size": 9}
    loader = data_loader.build_loader(data, **options, device="cpu")
    measured = data_loader.build_loader(data, **options, shuffle=False, remainder="keep")
    torch.manual_seed(ctx.seed)
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found: dict[str, Any] = {}
    for epoch in range(3):
        with ctx.region(f"evaluation {epoch}"):
            loss, accuracy = code.evaluate(model, measured)
        found[f"loss of evaluation {epoch}"] = loss
        found[f"accuracy of evaluation {epoch}"] = accuracy
        found[f"training mode after evaluation {epoch}"] = model.training
        for batch in loader:
            trainer.train_step(model, optimizer, *batch)
    return found
