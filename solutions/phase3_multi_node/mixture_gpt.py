"""A GPT with mixtures of experts, as one process computes it: what the mesh must equal.

Every second block has a third residual step: each token also goes through K of E experts, beside
the MLP that all tokens go through. So the cost of a token does not grow with E.

A bias balances the load (exercise 2.24), and no loss does. The balance loss of a batch is no mean
over its micro-batches, so a pipeline would train something else. For the same reason no choice is
dropped.

Shapes: N tokens (any leading dimensions), D width, F inner width, E experts, K choices of a token.
Sources: DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437), section 2.1.2 (bias, and experts beside
an MLP for all tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distlab.reference.workloads import CHARACTERS, CONTEXT, GPT, Block, build_model
from solutions.phase2_advanced.mixture_of_experts import Router, choose

MODELS = ("tiny_gpt", "tiny_moe")
BIAS_RATE = 1e-3  # DeepSeek-V3, section 4.2


class WholeRouter(nn.Linear):
    """The router of exercise 2.24 without a group; parameters and buffers have the same names."""

    bias_E: Tensor
    counted_E: Tensor

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__(width, experts, bias=False)
        self.top_k = top_k
        self.register_buffer("bias_E", torch.zeros(experts))
        self.register_buffer("counted_E", torch.zeros(experts, dtype=torch.int64))

    def forward(self, x_ND: Tensor) -> Tensor:
        """The weight (N, E) of each expert for each token; zero for those not chosen."""
        probabilities_NE = super().forward(x_ND).softmax(-1)
        experts_NK, weights_NK = choose(probabilities_NE, self.bias_E, self.top_k)
        if self.training:
            self.counted_E += experts_NK.flatten().bincount(minlength=self.out_features)
        return torch.zeros_like(probabilities_NE).scatter(-1, experts_NK, weights_NK)

    @torch.no_grad()
    def update_bias(self, rate: float) -> None:
        """Move each bias by ``rate`` against the load since the last call; once per step."""
        above_E = self.counted_E * self.out_features - self.counted_E.sum()
        self.bias_E -= rate * above_E.sign()
        self.counted_E.zero_()


class Mixture(nn.Module):
    """E experts of which each token uses K: all of them compute every token, most for nothing."""

    def __init__(self, width: int, inner: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.router = WholeRouter(width, experts, top_k)
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(batch, time, width) to the same: the weighted sum of each token's experts."""
        x_ND = x_BTD.flatten(0, -2)
        weights_NE = self.router(x_ND)
        y_END = F.gelu(x_ND @ self.up) @ self.down
        return torch.einsum("end,ne->nd", y_END, weights_NE).view(x_BTD.shape)


class MixtureBlock(Block):
    """A block with a third residual step, the mixture of experts, after a norm of its own."""

    def __init__(self, width: int, heads: int, experts: int, top_k: int) -> None:
        super().__init__(width, heads)
        self.norm_experts = nn.LayerNorm(width)
        self.experts = Mixture(width, width, experts, top_k)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x_BTD = super().forward(x_BTD)
        return x_BTD + self.experts(self.norm_experts(x_BTD))


class MixtureGPT(GPT):
    """A ``GPT`` with experts in every second block, from the second on."""

    def __init__(
        self,
        vocabulary: int,
        length: int,
        layers: int,
        width: int,
        heads: int,
        *,
        experts: int,
        top_k: int,
    ) -> None:
        super().__init__(vocabulary, length, layers, width, heads)
        for number in range(1, layers, 2):
            block = MixtureBlock(width, heads, experts, top_k)
            block.load_state_dict(self.blocks[number].state_dict(), strict=False)
            self.blocks[number] = block


def update_biases(model: nn.Module) -> None:
    """Balance all routers of ``model``, whole or shared by ranks; once per step."""
    for module in model.modules():
        if isinstance(module, (Router, WholeRouter)):
            module.update_bias(BIAS_RATE)


def build_gpt(name: str, seed: int = 0) -> nn.Module:
    """The model called ``name`` with weights from ``seed``; the global generator is kept.

    Raises ValueError for a name that is none of ``MODELS``.
    """
    if name == "tiny_gpt":
        return build_model(name, seed)
    if name != "tiny_moe":
        raise ValueError(f"the model must be one of {MODELS}, not {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        words = len(CHARACTERS)
        return MixtureGPT(words, CONTEXT, layers=4, width=64, heads=4, experts=8, top_k=2)
