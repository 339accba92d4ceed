"""Naive: values on two ranks alone."""

import torch
import torch.nn.functional as F
from torch import nn

from distlab.grading import expect_close


def test_embedding_and_loss_of_two(impl, run):
    """Vectors and losses are those of one process."""
    torch.manual_seed(0)
    whole, words = nn.Embedding(6, 3), torch.tensor([0, 5, 2])
    logits = torch.randn(3, 6)

    def body(ctx):
        got = impl.VocabParallelEmbedding(whole)(words)
        first, end = impl.vocabulary_range(6)
        loss = impl.vocab_parallel_cross_entropy(logits[:, first:end], words, 6)
        return got.detach(), loss

    for rank, (got, loss) in enumerate(run(body, 2)):
        expect_close(got, whole(words), what="the vectors", rank=rank)
        want = F.cross_entropy(logits, words, reduction="none")
        expect_close(loss, want, what="the losses", rank=rank)
