"""What the tests of a GPT on a mesh share: a small model, its training, one process's results."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo  # torch.optim imports it: once here, not in every rank
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.reference.workloads import GPT
from solutions.phase2_advanced.gradient_accumulation import clip_by_global_norm
from solutions.phase2_advanced.parallel_transformer import rows_by_rank
from solutions.phase3_multi_node import mesh_checkpoint
from solutions.phase3_multi_node.mesh_gpt import MeshGPT, train_step
from solutions.phase3_multi_node.mesh_specs import MeshLayout
from solutions.phase3_multi_node.mixture_gpt import MixtureGPT, update_biases

WORDS, LENGTH, BATCH, STEPS, NORM, RATE = 24, 8, 24, 2, 0.5, 1e-2
HEADS = 2
Fields = dict[str, Any]


def whole(mixed: bool = True) -> nn.Module:
    """Two blocks, of which the second has experts; or four blocks without any."""
    sizes = {"width": 8, "heads": HEADS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if not mixed:
            return GPT(WORDS, LENGTH, layers=4, **sizes).double()
        return MixtureGPT(WORDS, LENGTH, layers=2, **sizes, experts=4, top_k=2).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


@functools.cache
def one_process(mixed: bool = True) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms, and at the end all tensors of the model and the optimizer."""
    model = whole(mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), targets.flatten())
        loss.backward()
        norms.append(clip_by_global_norm(model.parameters(), NORM))
        optimizer.step()
        update_biases(model)
        losses.append(loss.item())
    found = {}
    for name, p in model.named_parameters():
        for kind, kept in {"values": p.detach(), **optimizer.state[p]}.items():
            if kind != "step":
                found[f"{name}: {kind}"] = by_head(kept) if "qkv" in name else kept
    found |= {f"{n}: values": b for n, b in model.named_buffers() if n.endswith("bias_E")}
    return losses, norms, found


def by_head(rows: Tensor) -> Tensor:
    """The rows of a fused projection in the order of a mesh's."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(rows)
    return rows_by_rank(layer, HEADS).weight.detach()


def train(fields: Fields, steps: Iterable[int], parts: list[Any] | None = None, **more: Any) -> Any:
    """On a rank: losses, norms, and its part of a checkpoint; it goes on from ``parts``."""
    layout = MeshLayout(**fields)
    model = MeshGPT(whole(more.pop("mixed", True)), layout, **more)
    pipeline = model.pipeline(BATCH, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if parts is not None:
        mesh_checkpoint.load(model, optimizer, parts)
    losses, norms = [], []
    for step in steps:
        tokens, targets = map(model.own, batch_of(step))
        loss, norm = train_step(model, pipeline, optimizer, tokens, targets, max_norm=NORM)
        losses.append(loss)
        norms.append(norm)
    return losses, norms, mesh_checkpoint.saved(model, optimizer)


def joined(parts: Iterable[dict[str, Any]]) -> dict[str, Tensor]:
    """All pieces of all ranks put together; each element must come once."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for kind, pieces in part["pieces"].items():
            for piece in pieces:
                name = f"{piece['name']}: {kind}"
                values = piece["values"]
                blank = torch.full(piece["shape"], torch.nan, dtype=values.dtype)
                ends = zip(piece["first"], values.shape, strict=True)
                block = found.setdefault(name, blank)[tuple(slice(f, f + n) for f, n in ends)]
                assert block.isnan().all(), f"{name}: elements in two pieces"
                block.copy_(values)
    return found
