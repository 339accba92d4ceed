"""A tiny language model whose words are shared out over the ranks learns to repeat a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS = 20


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the loss of each word before the first step."""
    torch.manual_seed(ctx.seed)
    table = code.VocabParallelEmbedding(nn.Embedding(WORDS, 12).double())
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    every = torch.arange(WORDS)
    with torch.no_grad(), ctx.region("each word"):
        before = code.vocab_parallel_cross_entropy(table.logits(table(every)), every, WORDS)
    draw = torch.Generator().manual_seed(ctx.seed)
    losses = []
    for step in range(10):
        words = torch.randint(0, WORDS, (30,), generator=draw)
        optimizer.zero_grad()
        with ctx.region(f"step {step + 1}"):
            logits = table.logits(torch.tanh(table(words)) * 3)
            loss = code.vocab_parallel_cross_entropy(logits, words, WORDS).mean()
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return {"loss": losses, "loss of each word": before.tolist()}
