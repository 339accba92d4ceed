"""A language model: the next byte of a text, by a GPT. What the trainer does with text alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.reference.workloads import GPT
from solutions.phase2_advanced.gradient_accumulation import IGNORED

from .task import Evaluation, Task
from .text_data import VOCABULARY, SyntheticText, TextBlocks, open_text
from .trainer_config import Config


@dataclass(frozen=True, kw_only=True)
class TextEvaluation(Evaluation):
    """Loss per token, and e to that power: among so many tokens the model is undecided."""

    perplexity: float
    tokens: int

    @property
    def score(self) -> float:
        return -self.val_loss

    def __str__(self) -> str:
        return f"perplexity {self.perplexity:.3f} over {self.tokens:,} tokens"


class TextTask(Task):
    """A GPT of the configuration's size on the bytes of ``config.data``."""

    unit = "sequences"
    counts_tokens = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.targets_per_sample = config.length
        self.train_set: SyntheticText | TextBlocks
        self.val_set: TextBlocks | None = None
        if config.data == "synthetic":
            self.train_set = SyntheticText(config.length)
        else:
            self.train_set = open_text(config.data, "train", config.length)
            self.val_set = open_text(config.data, "val", config.length)

    @property
    def described(self) -> str:
        count, config = len(self.train_set), self.config
        return f"{count:,} sequences of {config.length} bytes in {config.data}"

    def build_model(self) -> nn.Module:
        config = self.config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return GPT(VOCABULARY, config.length, config.layers, config.width, config.heads)

    def blank(self) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(self.config.length, dtype=torch.int64)
        return tokens, torch.full_like(tokens, IGNORED)

    def example(self, samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(samples, self.config.length, dtype=torch.int64, device=device)
        return tokens, torch.zeros_like(tokens)

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy and the number of tokens."""
        targets = targets.flatten()
        loss = F.cross_entropy(logits.double(), targets, reduction="sum", ignore_index=IGNORED)
        return torch.stack([loss, (targets != IGNORED).sum()])

    def evaluation(self, sums: Sequence[float]) -> TextEvaluation:
        loss, count = sums
        mean = loss / count
        return TextEvaluation(val_loss=mean, perplexity=math.exp(mean), tokens=int(count))
