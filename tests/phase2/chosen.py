"""What the checks of selective recomputation share: a layer, policies, and a count of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH = 8
F64 = torch.float64
PRODUCTS = ("aten.mm.default", "aten.addmm.default")
Policy = Callable[[Any], bool]


def drawn(seed: int, *shape: int, grad: bool = False, device: Any = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator, dtype=F64).to(device)
    return value.requires_grad_(grad)


class Layer(nn.Module):
    """Attention from products and a softmax, and an MLP."""

    def __init__(self, seed: int, device: Any = "cpu") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=F64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=F64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=F64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=F64)
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(drawn(seed + k, *p.shape) / 2)
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(q @ k.mT, -1) @ v
        return x + self.down(F.relu(self.up(x)))


def nothing(operation: Any) -> bool:
    return False


def everything(operation: Any) -> bool:
    return True


def these(*names: str) -> Policy:
    """Keep the operators of these names."""
    return lambda operation: str(operation.op) in names


def every_second() -> Policy:
    """Keep every second operator that the policy is asked about."""
    count = iter(range(10**6))
    return lambda operation: next(count) % 2 == 0


class Counting(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.order: list[str] = []  # those that make new tensors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(op)] += 1
        aliases = [a.alias_info for a in (*op._schema.arguments, *op._schema.returns)]
        if not any(aliases):
            self.order.append(str(op))
        return op(*args, **(kwargs or {}))


def gradients(*tensors: Tensor) -> list[Tensor | None]:
    return [None if t.grad is None else t.grad.detach().clone().cpu() for t in tensors]
