"""Trees to save, and what a store makes of them; for checks of several exercises."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def fresh(folder: Path, device: torch.device | str = "cpu") -> Path:
    """A new folder below ``folder`` that all ranks agree on."""
    number = torch.tensor(int.from_bytes(os.urandom(6), "little"), device=device)
    if dist.is_initialized():
        dist.broadcast(number, 0)
    return folder / str(int(number))


def store_in(impl: Any, folder: Path, **options: Any) -> Any:
    """A ``CheckpointStore`` (exercise 4.1), for the checks of later exercises."""
    return impl.module("fault_tolerance").CheckpointStore(folder, **options)


def every_kind(seed: int, rank: int = 0) -> dict[str, Any]:
    """A tree with whatever training saves."""
    draw = torch.Generator().manual_seed(seed + rank)
    weight = torch.randn(5, 7, generator=draw)
    return {
        "model": {
            "embedding": weight,
            "head": weight,  # tied
            "transposed": weight.t(),
            "column": weight[:, 2],
            "parameter": torch.nn.Parameter(torch.randn(3, generator=draw)),
            "scalar": torch.tensor(2.5 + rank, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "half": torch.randn(9, generator=draw).bfloat16(),
            "float16": torch.randn(2, 2, generator=draw).half(),
            "tokens": torch.tensor(1 << 40),
            "bytes": torch.arange(11, dtype=torch.uint8),
            "mask": torch.tensor([True, False, True]),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {"step": torch.tensor(4.0)}},
            "groups": [{"lr": 0.1 + rank, "betas": (0.9, 0.999), "name": None, "fused": False}],
        },
        "1": math.inf,
        "epoch": 3,
        "tiny": 5e-324,
    }


def difference(got: object, want: object, path: str = "") -> str:
    """Where the trees differ first; empty if they are equal to the last bit."""
    if isinstance(want, Tensor):
        what = (want.dtype, want.shape, want.device)
        if not isinstance(got, Tensor) or (got.dtype, got.shape, got.device) != what:
            return f"{path}: expected {want.dtype} {list(want.shape)}, got {got!r}"
        return "" if torch.equal(got, want) else f"{path}: values differ"
    if type(got) is not type(want):
        return f"{path}: expected {want!r}, got {got!r}"
    if isinstance(want, dict):
        if got.keys() != want.keys():
            return f"{path}: expected the keys {[*want]}, got {[*got]}"
        return next(filter(None, (difference(got[k], want[k], f"{path}/{k}") for k in want)), "")
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{path}: expected {len(want)} entries, got {len(got)}"
        pairs = enumerate(zip(got, want, strict=True))
        return next(filter(None, (difference(g, w, f"{path}/{i}") for i, (g, w) in pairs)), "")
    return "" if got == want else f"{path}: expected {want!r}, got {got!r}"


def loaded(store: Any) -> list[Any] | None:
    """What ``load`` finds, as plain data: step, the shared value, the own values, what it skipped;
    a failure: the kind and the sentence."""
    try:
        saved = store.load()
        if saved is None:
            return None
        own = [saved.own(r)["own"] for r in range(saved.world_size)]
        return [saved.step, saved.shared["shared"], own, list(saved.skipped)]
    except Exception as error:
        return [type(error).__name__, str(error)]


def save(store: Any, step: int, rank: int, **options: Any) -> str:
    """Save a small checkpoint that can be recognised; the failure's sentence, or nothing."""
    try:
        store.save(step, {"shared": step, "w": torch.ones(3)}, {"own": step + rank}, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
