"""Checkpoints of a GPT on a mesh, which any other mesh can load.

A rank writes the blocks that it counts for the norm (3.33), of the parameters and of all tensors
that the optimizer keeps for them. A block says where in the whole parameter it lies. So nothing in
a checkpoint depends on the mesh that has written it. To load it is to copy what two blocks share,
without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .mesh_gpt import MeshGPT

VALUES = "values"  # parameters and routers' biases; the other kinds are the optimizer's


def saved(model: MeshGPT, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's part of a checkpoint: ``pieces`` by kind, and the optimizer's ``numbers``.

    ``numbers``: what the optimizer keeps for a parameter that has no shape of its own, such as
    Adam's step. They are equal for all parameters.
    """
    kinds: dict[str, dict[str, Tensor]] = {VALUES: model.state()}
    numbers: dict[str, float] = {}
    for name, p in model.trained().items():
        for kind, kept in optimizer.state[p].items():
            if torch.is_tensor(kept) and kept.shape == p.shape and kept.dim():
                kinds.setdefault(kind, {})[name] = kept
            elif kept is not None:
                numbers[kind] = float(kept)
    pieces = {kind: model.mesh.pieces(tensors) for kind, tensors in kinds.items()}
    return {"pieces": pieces, "numbers": numbers}


def load(model: MeshGPT, optimizer: torch.optim.Optimizer, parts: Sequence[dict[str, Any]]) -> None:
    """Make ``model`` and ``optimizer`` what they were when all ranks of any mesh saved ``parts``.

    Raises ValueError, before anything changes, if elements of this rank are lacking, or if they
    are of another model.
    """
    trained = model.trained()
    kinds = sorted({kind for part in parts for kind in part["pieces"]} - {VALUES})
    fresh = {kind: {n: torch.empty_like(p.data) for n, p in trained.items()} for kind in kinds}
    for kind, tensors in [*fresh.items(), (VALUES, model.state())]:
        pieces = (piece for part in parts for piece in part["pieces"].get(kind, ()))
        model.mesh.load(tensors, pieces)
    numbers = {kind: value for part in parts for kind, value in part["numbers"].items()}
    optimizer.state.clear()
    for name, p in trained.items():
        kept = {kind: tensors[name] for kind, tensors in fresh.items()}
        kept |= {kind: torch.tensor(value) for kind, value in numbers.items()}
        if kept:
            optimizer.state[p] = kept
