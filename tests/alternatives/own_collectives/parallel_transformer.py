# for: 2.17
"""Written differently: rows by their numbers, one view of q, k and v."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, place_in


def rows_by_rank(qkv: nn.Linear, world_size: int) -> nn.Linear:
    third = qkv.out_features // 3
    share = third // world_size
    numbers = [
        part * third + rank * share + row
        for rank in range(world_size)
        for part in range(3)
        for row in range(share)
    ]
    index = torch.tensor(numbers, device=qkv.weight.device)
    new = nn.utils.skip_init(
        nn.Linear,
        qkv.in_features,
        qkv.out_features,
        bias=qkv.bias is not None,
        dtype=qkv.weight.dtype,
        device=qkv.weight.device,
    )
    with torch.no_grad():
        for name, whole in qkv.named_parameters():
            mine = new.get_parameter(name)
            mine.copy_(whole[index])
            mine.requires_grad_(whole.requires_grad)
    return new


class ParallelBlock(nn.Module):
    column, row = (ColumnParallelLinear, RowParallelLinear)

    def __init__(self, block: Any, group: Group = None) -> None:
        super().__init__()
        _, ranks = place_in(group)
        heads, width = (int(block.heads), block.qkv.weight.shape[1])
        inner = block.up.weight.shape[0]
        if heads % ranks or width % heads or inner % ranks:
            raise ValueError(
                f"{ranks} ranks can't share {heads} heads, a width of {width} and {inner} features"
            )
        self.heads = heads // ranks
        memo: dict[int, Any] = {}
        self.norm_attention = copy.deepcopy(block.norm_attention, memo)
        self.norm_mlp = copy.deepcopy(block.norm_mlp, memo)
        for norm in (self.norm_attention, self.norm_mlp):
            norm.zero_grad(set_to_none=True)
        self.qkv = self.column(rows_by_rank(block.qkv, ranks), group)
        self.out = self.row(block.out, group)
        self.up = self.column(block.up, group)
        self.down = self.row(block.down, group)

    def attention(self, x_BTD: Tensor) -> Tensor:
        joint = self.qkv(x_BTD)
        batch, time, features = joint.shape
        size = features // (3 * self.heads)
        q, k, v = joint.view(batch, time, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q.contiguous(), k.contiguous(), v.contiguous(), is_causal=True
        )
        return self.out(mixed.permute(0, 2, 1, 3).reshape(batch, time, self.heads * size))

    def mlp(self, x_BTD: Tensor) -> Tensor:
        inner = self.up(x_BTD)
        return self.down(F.gelu(inner))

    def forward(self, x_BTD: Tensor) -> Tensor:
        middle = torch.add(x_BTD, self.attention(self.norm_attention(x_BTD)))
        return torch.add(middle, self.mlp(self.norm_mlp(middle)))
