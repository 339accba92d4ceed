"""What the checks of exercises 3.15, 3.20 and 3.28 share: training, wrapping, comparing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it when an optimizer is made: once here, not per rank
from torch import Tensor, nn

from distlab.grading import expect_close, fail
from tests.phase3.fsdp_models import Net, batch, loss_of, net


def refused(call: Callable[[], object]) -> bool:
    """Whether ``call()`` raises ValueError."""
    try:
        call()
    except ValueError:
        return True
    return False


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, numbers: range
) -> None:
    """Training steps with these numbers; half of the samples of a rank of two."""
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, batch(seed, rank, number)).backward()
        optimizer.step()


def wrapped(
    impl: Any, seed: int, offset: float = 1.0
) -> tuple[nn.Module, Net, torch.optim.Optimizer]:
    """A sharded model, its inside, and AdamW for it."""
    inner = net(seed)
    inner.offset.fill_(offset)
    model = impl.module("fsdp").FSDP(inner, inner.units())
    return model, inner, torch.optim.AdamW(model.parameters(), lr=0.05)


def compare(
    got: Mapping[str, Tensor],
    want: Mapping[str, Tensor],
    what: str,
    rank: int | None = None,
    rtol: float = 0.0,
) -> None:
    """The same names, and values that are equal, or near where there is a tolerance."""
    names = sorted(want.keys() ^ got.keys())
    if names:
        fail(f"{what}: the names {names} differ from the plain module's", cause="names", rank=rank)
    for name, value in want.items():
        expect_close(got[name], value, what=f"{what}: {name}", rank=rank, rtol=rtol, atol=rtol)
