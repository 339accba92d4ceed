"""Whole training steps on one GPU: seconds, and memory allocated and reserved.

The models are plain PyTorch, as published runs use them: GPTs with a fused attention kernel, and
torchvision's convolutional networks.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WARM_UP, TIMED = 4, 9
VOCABULARY = 50_304
# layers, hidden, heads, length, samples per step, recompute
GPTS = (
    (12, 768, 12, 1024, 16, False),
    (24, 1024, 16, 1024, 8, False),
    (24, 1024, 16, 1024, 16, True),
    (24, 2048, 16, 2048, 4, False),
    (24, 2048, 16, 2048, 8, True),
    (32, 2560, 32, 2048, 4, True),
)
IMAGES = (
    ("resnet50", 64),
    ("resnet50", 256),
    ("resnet101", 64),
    ("vgg16", 64),
    ("resnext101_32x8d", 32),
)


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """GPT-2 with tied embeddings; ``recompute`` keeps the inputs of layers only."""

    def __init__(self, layers: int, hidden: int, heads: int, length: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.positions = nn.Embedding(VOCABULARY, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def steps() -> Iterator[dict[str, Any]]:
    """A row for each model in each precision that fits the GPU."""
    for layers, hidden, heads, length, samples, recompute in GPTS:
        for precision in ("autocast", "bfloat16", "float32", "tfloat32", "compiled"):
            if precision in ("float32", "tfloat32") and hidden > 1024:
                continue
            sizes = {"layers": layers, "hidden": hidden, "heads": heads, "length": length}
            row = {
                "model": "gpt",
                **sizes,
                "samples": samples,
                "recompute": recompute,
                "precision": precision,
            }
            yield row | _measured(
                lambda: _gpt(layers, hidden, heads, length, samples, recompute, precision)
            )
    for name, samples in IMAGES:
        for precision in ("float32", "tfloat32", "autocast"):
            for layout in ("contiguous", "channels_last"):
                row = {"model": name, "samples": samples, "precision": precision, "layout": layout}
                yield row | _measured(lambda: _image(name, samples, precision, layout))


def _measured(make: Callable[[], Callable[[], None]]) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step = make()
        for _ in range(WARM_UP):
            step()
        times = [_timed(step) for _ in range(TIMED)]
    except torch.cuda.OutOfMemoryError:
        return {"seconds": None}
    return {
        "seconds": statistics.median(times),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _timed(step: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _gpt(
    layers: int, hidden: int, heads: int, length: int, samples: int, recompute: bool, precision: str
) -> Callable[[], None]:
    _tf32(precision == "tfloat32")
    model: nn.Module = GPT(layers, hidden, heads, length, recompute).cuda()
    if precision == "bfloat16":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    called = torch.compile(model) if precision == "compiled" else model
    tokens = torch.randint(VOCABULARY, (samples, length + 1), device="cuda")

    def step() -> None:
        with _context(precision):
            logits = called(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _image(name: str, samples: int, precision: str, layout: str) -> Callable[[], None]:
    _tf32(precision != "float32")
    torch.backends.cudnn.benchmark = True
    kept = getattr(torch, "channels_last" if layout == "channels_last" else "contiguous_format")
    model = torchvision.models.get_model(name).cuda().to(memory_format=kept)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    images = torch.randn(samples, 3, 224, 224, device="cuda").to(memory_format=kept)
    labels = torch.randint(1000, (samples,), device="cuda")

    def step() -> None:
        with _context(precision):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _context(precision: str) -> AbstractContextManager[object]:
    if precision in ("autocast", "compiled"):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


def _tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
