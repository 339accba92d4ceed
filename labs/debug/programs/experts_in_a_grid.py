"""Ranks in a grid train a gate, which all of them copy, and experts, which one axis cuts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

EXPERTS, WIDTH, TOKENS = 4, 5, 6  # tokens of a rank


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The norm of the gradients before each step, and the sums of the weights at the end."""
    grid = code.Grid({"data": 2, "expert": 2}, ["data", "expert"])
    layout = {
        "gate": code.Spec(shape=[EXPERTS, WIDTH]),
        "experts": code.Spec(shape=[EXPERTS, WIDTH, WIDTH], cut={"expert": 0}),
    }
    mesh = code.Mesh(grid, layout)
    draw = torch.Generator().manual_seed(ctx.seed)
    whole = {name: torch.randn(spec.shape, generator=draw) for name, spec in layout.items()}
    begin, end = layout["experts"].bounds(grid, ctx.rank)[0]
    gate, own = nn.Parameter(whole["gate"]), nn.Parameter(whole["experts"][begin:end].clone())
    parameters = {"gate": gate, "experts": own}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    norms = []
    for step in range(8):
        optimizer.zero_grad()
        tokens = torch.randn(ctx.world_size, TOKENS, WIDTH, generator=draw)
        here = ctx.rank - ctx.rank % 2  # the first rank with these experts' tokens
        with ctx.region(f"step {step + 1}"):
            for rank in (here, here + 1):
                weight = (tokens[rank] @ gate.detach().T).softmax(-1)[:, begin:end]
                said = torch.einsum("te,ti,eij->tj", weight, tokens[rank], own)
                said.square().mean().backward()  # of the tokens that come from both ranks
            (tokens[ctx.rank] @ gate.T).softmax(-1).square().mean().backward()
            mesh.reduce_gradients(parameters)
            norms.append(mesh.clip(parameters, 100.0))
        optimizer.step()
    return {
        "norm": norms,
        "sum of the gate": gate.sum().item(),
        "sum of the own experts": own.sum().item(),
    }
