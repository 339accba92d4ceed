"""Sums and means of tensors of three lengths over all ranks, by a tree; the last one is long."""

from __future__ import annotations

from typing import Any

import torch


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The first and the last entries of each result, and the sum of all."""
    found: dict[str, Any] = {}
    for length in (5, 13, 200_000):
        for op in ("sum", "mean"):
            tensor = (torch.arange(length) % 7 + 100.0 * ctx.rank + ctx.seed % 11).double()
            with ctx.region(f"{op} of {length}"):
                code.tree_all_reduce(tensor, op)
            found[f"{op} of {length}, first"] = tensor[:3].tolist()
            found[f"{op} of {length}, last"] = tensor[-3:].tolist()
            found[f"{op} of {length}, total"] = tensor.sum().item()
    return found
