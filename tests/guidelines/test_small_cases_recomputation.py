"""The answer to phase 2's small case of selective recomputation, from a block on meta tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from given.operators import Operation
from scripts.diagrams import phase2_recomputation as drawn
from solutions.phase2_advanced.selective_recomputation import Keeping, at_least
from tests.guidelines.folded import says

D, HEADS, S = 512, 8, 1024
META = {"device": "meta", "dtype": torch.bfloat16}


class Parts(nn.Module):
    """A transformer block of one sequence, its attention from two products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D, **META) for _ in range(2))
        sizes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
        self.products = nn.ModuleDict({k: nn.Linear(*v, **META) for k, v in sizes.items()})

    def forward(self, x_SD: Tensor) -> Tensor:
        """(S, D) to the same."""
        parts = self.products["qkv"](self.norms[0](x_SD)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in parts)
        mixed = torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)
        x_SD = x_SD + self.products["out"](mixed.transpose(0, 1).flatten(1))
        inner = nn.functional.gelu(self.products["up"](self.norms[1](x_SD)))
        return x_SD + self.products["down"](inner)


def test_2_27() -> None:
    block, x = Parts(), torch.empty(S, D, **META).requires_grad_()
    known = {p.untyped_storage()._cdata for p in block.parameters()}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # a storage that is gone could give its address to another one
    seen: list[Operation] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    def note(operation: Operation) -> bool:
        seen.append(operation)
        return False

    with saved_tensors_hooks(pack, lambda tensor: tensor), Keeping(note):
        block(x)
    products = [each for each in seen if each.flops]
    per_byte = [each.flops // each.nbytes for each in products]
    assert per_byte == [512, 64, 1024, 512, 512, 2048]
    assert per_byte == [2 * inner // 2 for _, inner, _, _ in drawn.OPERATORS if inner]
    says(2, "2.27", "2·512/2 = 512", "2·64/2 = 64", "so 1024", "Down: 2048")
    unit, forward = x.nbytes, sum(each.flops for each in products)
    assert sum(saved.values()) // unit == 32 == 1 + sum(n for *_, n in drawn.OPERATORS)
    kept = [each for each in products[:-1] if at_least(100)(each)]
    assert sum(each.nbytes for each in kept) == 9 * unit
    says(2, "2.27", "Without a segment 32 A", "A + K = 10 A, with K = 3 + 1 + 1 + 4")
    again = sum(each.flops for each in products[:-1])
    left = again - sum(each.flops for each in kept)
    says(2, "2.27", f"{100 * again / forward:g} % of the FLOPs", f"{100 * left / forward:g} % of")
