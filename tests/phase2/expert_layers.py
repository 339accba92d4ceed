"""What the checks of expert parallelism share: the layer of one process, token by token."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.phase2.parallel_values import values
from tests.phase2.routed import balance, load_of, route, tokens_of

WIDTH, INNER, EXPERTS = 6, 5, 12  # divides by 1, 2, 3 and 4 ranks
UNLOVED = 3  # an expert that no token chooses


def weights_of(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Of the router, and of all experts: up and down."""
    shapes = (EXPERTS, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH)
    return [values(seed, salt, *shape).to(dtype) for salt, shape in enumerate(shapes, 1)]


def bias_of() -> Tensor:
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    bias[UNLOVED] = -9
    return bias


def layer_of(impl: Any, seed: int, device: Any = "cpu", group: Any = None, **options: Any) -> Any:
    """This rank's layer with those weights, in float64."""
    router, up, down = (t.to(device) for t in weights_of(seed))
    made = impl.Router(WIDTH, EXPERTS, group=group, **options).double().to(device)
    made.weight.data.copy_(router)
    made.bias_E.copy_(bias_of())
    return impl.ExpertParallel(made, up.requires_grad_(), down.requires_grad_())


def one_process(
    weights: list[Tensor], xs: list[Tensor], top_k: int, factor: float | None
) -> tuple[list[Tensor], list[Tensor], Tensor, list[int]]:
    """Every rank's y and kept choices, the balance loss, and the rows of each expert."""
    router, up, down = weights
    routed = [route(x, router, bias_of(), top_k, factor) for x in xs]
    loss = balance([p for *_, p in routed], load_of([c for c, *_ in routed], EXPERTS))
    outputs, rows = [], [0] * EXPERTS
    for x, (chosen, weighed, kept, _) in zip(xs, routed, strict=True):
        ys = [x[:0].sum() + torch.zeros(0, x.shape[1], dtype=x.dtype)]
        for token, experts in enumerate(chosen.tolist()):
            y = torch.zeros(1, x.shape[1], dtype=x.dtype)
            for place, e in enumerate(experts):
                if kept[token, place]:
                    rows[e] += 1
                    y = y + weighed[token, place] * (F.gelu(x[token : token + 1] @ up[e]) @ down[e])
            ys.append(y)
        outputs.append(torch.cat(ys))
    return outputs, [kept for _, _, kept, _ in routed], loss, rows


def tokens(seed: int, rank: int) -> Tensor:
    """One rank's tokens, behind strides of their own; rank 1 has none."""
    return tokens_of(seed, rank, 2 * WIDTH)[:, ::2]
