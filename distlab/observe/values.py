"""What a rank passed to a communication, small enough to be kept for each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST = 64  # elements that are kept as numbers
GIVEN_BY_ROOT = ("broadcast", "scatter")
NOTHING = ("recv", "barrier", "scatter")  # what is there at the call is overwritten, or is nothing


def passes_in(op: str, peer: int | None, rank: int) -> bool:
    """Whether the tensors of the call hold something: a buffer to be filled holds anything."""
    return op not in NOTHING and (op not in GIVEN_BY_ROOT or peer == rank)


def value_of(tensors: Sequence[Tensor]) -> dict[str, Any] | None:
    """``digest`` of all bytes, the ``first`` elements and the ``sum``; None without any bytes."""
    known = [t.detach() for t in tensors if not t.is_meta and t.numel()]
    if not known:
        return None
    digest, total = hashlib.blake2b(digest_size=8), 0.0
    first: list[float] = []
    for tensor in known:
        flat = tensor.cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy())
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        first += flat[: FIRST - len(first)].tolist()
        total += float(flat.double().sum())
    return {"digest": digest.hexdigest(), "first": first, "sum": total}
