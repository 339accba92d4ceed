"""What the checks of exercise 2.28 share: rows of each rank, and the batch norm of one process."""

from __future__ import annotations

import torch
from torch import nn

from tests.phase2.parallel_values import values

CHANNELS = 5
INNER = ((), (3,), (2, 3), (2, 1, 2))  # what follows rows and channels
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def rows_of(rank: int, world_size: int) -> int:
    """Uneven, and none on rank 1 of several."""
    return 3 if world_size == 1 else (3, 0, 5, 1)[rank]


def input_of(seed: int, rank: int, rows: int, *inner: int, channels: int = CHANNELS):
    """A rank's rows: other means and variances on each rank and in each channel."""
    x = values(seed, 10 + rank, rows, channels, *inner)
    place = torch.arange(1.0, channels + 1, dtype=torch.float64).view(-1, *[1] * len(inner))
    return x * (0.5 + rank) * place + rank - 2 * place


def given_to(layer: nn.Module, seed: int) -> nn.Module:
    """The layer with weights, biases and running statistics that every rank draws alike."""
    kept = [(name, t) for name, t in layer.named_parameters()] + [
        (name, t) for name, t in layer.named_buffers() if t.is_floating_point()
    ]
    for salt, (name, tensor) in enumerate(sorted(kept), 50):
        tensor.data.copy_(values(seed, salt, *tensor.shape).abs() + 0.5 * ("mean" not in name))
    return layer


class OneProcess:
    """The batch norm of one process in float64, which gets the rows of all ranks at once."""

    def __init__(self, seed: int, channels: int = CHANNELS, **options) -> None:
        class Any(nn.modules.batchnorm._BatchNorm):
            def _check_input_dim(self, input):
                pass

        self.layer = given_to(Any(channels, **options).double(), seed)

    def __call__(self, xs: list[torch.Tensor], grads: list[torch.Tensor] | None = None):
        """Output and gradient of ``x`` per rank, gradients of the parameters; all in float64."""
        xs = [x.double().detach().requires_grad_() for x in xs]
        self.layer.zero_grad()
        ys = self.layer(torch.cat(xs)).split([len(x) for x in xs])
        if grads is not None:
            sum((y * g.double()).sum() for y, g in zip(ys, grads, strict=True)).backward()
        return [y.detach() for y in ys], [x.grad for x in xs]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The parameters' gradients by name."""
        return {n: p.grad.clone() for n, p in self.layer.named_parameters() if p.grad is not None}

    def running(self) -> dict[str, torch.Tensor]:
        """Copies of the running statistics by name."""
        return {n: b.clone() for n, b in self.layer.named_buffers()}


def running_of(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a layer's buffers, on the CPU."""
    return {name: b.detach().cpu().clone() for name, b in layer.named_buffers()}
