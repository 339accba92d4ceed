"""A tiny language model whose words are shared out over the ranks learns to repeat a word."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WORDS = 20


def program(ctx: Any, code: Any) -> dict[str, Any]:
    """The loss of each step, and the loss of each word before the first and after the last one."""
    torch.manual_seed(ctx.seed)
    table = code.VocabParallelEmbedding(nn.Embedding(WORDS, 12).double())
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    every = torch.arange(WORDS)

    def of_each_word() -> dict[str, float]:
        with torch.no_grad(), ctx.region("each word"):
            logits = table.logits(torch.tanh(table(every)) * 3)
            losses = code.vocab_parallel_cross_entropy(logits, every, WORDS)
        return {f"word {word}": loss for word, loss in enumerate(losses.tolist())}

    before = of_each_word()
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
    words_now = {"loss of each word, before": before, "loss of each word, after": of_each_word()}
    return {"loss": losses} | words_now
