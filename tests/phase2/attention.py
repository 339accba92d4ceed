"""What the checks of attention over ranks share: tensors, one process's result, parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.phase2.parallel_values import values

NAMES = ("result", "gradient of q", "gradient of k", "gradient of v")


class Work(TorchDispatchMode):
    """Counts the FLOPs of products inside the context, backward included, by torch's own table.

    ``FlopCounterMode`` counts the same, but imports a compiler first, in every rank.
    """

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def drawn(seed: int, length: int, heads: int = 4, groups: int = 2, batch: int = 2, width: int = 6):
    """q, k, v and the gradient of the result for ``length`` positions, in float64."""
    counts = (heads, groups, groups, heads)
    return [values(seed, n, batch, h, length, width) for n, h in enumerate(counts)]


def one_process(q, k, v, grad, lengths: Sequence[int], scale: float | None = None):
    """Result and gradients of q, k and v: causal attention in each document, in float64.

    The queries are scaled here: a scale of 0 or less gives nan in torch's own attention.
    """
    given = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scaled = given[0] * (q.shape[-1] ** -0.5 if scale is None else scale), *given[1:]
    parts = zip(*(t.split([*lengths], 2) for t in scaled), strict=True)
    each = [
        F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True, scale=1.0)
        for part in parts
    ]
    result = torch.cat(each, 2)
    return [result.detach(), *torch.autograd.grad(result, given, grad.double())]


def zigzag(lengths: Sequence[int], rank: int, world_size: int) -> torch.Tensor:
    """The positions of a rank: chunks r and 2W-1-r of each document, -1 for padding."""
    found, begin = list[int](), 0
    for length in lengths:
        size = -(-length // (2 * world_size))
        last = (2 * world_size - 1) * size
        for start in (rank * size, last - rank * size):
            found += [begin + i if i < length else -1 for i in range(start, start + size)]
        begin += length
    return torch.tensor(found)


def at(tensor: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A rank's rows of a tensor, and zeros for padding."""
    return tensor[:, :, positions] * (positions >= 0)[:, None]
