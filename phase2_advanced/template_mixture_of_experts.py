# Exercises 2.24: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.24
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""A router for a mixture of experts: which K of E experts compute a token, with which weights.

A layer with E experts has E times the parameters of one, but each token uses K of them. So the
model grows, and the work per token does not. The router is one small product. Its difficulty is
balance:

    capacity       an expert takes at most C = ⌈c·K·n/E⌉ of a rank's n·K choices
    balance loss   E·Σ_e f_e·P_e    f_e: share of choices, P_e: mean probability; 1 if balanced
    bias           b_e is added for choosing alone, and moves by ±rate against the load

f_e counts, so it has no gradient. P_e has one, and it is larger for busy experts. The loss pulls at
the router's weights, against the loss of the task. A bias pulls at nothing.

Load and both kinds of balance are over all ranks of the group: one all-reduce of 8·E bytes in
forward, none in backward. Invariant: load and bias are equal on all ranks. Capacity is each rank's
own, so no rank needs to know which tokens another rank has. The host never reads from the device.

Shapes: N tokens of this rank (any leading dimensions), D width, E experts, K choices of a token.
Sources: Lepikhin et al. 2020 (GShard, arXiv 2006.16668), section 2.2 and algorithm 1 (capacity);
Fedus et al. 2021 (Switch Transformer, arXiv 2101.03961), sections 2.2 (balance loss) and 2.4
(float32), appendix C (jitter); DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437), section 2.1.2
(bias).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, rank_in


class Routing(NamedTuple):
    """Where the tokens of this rank go; rows are the tokens in row-major order."""

    experts_NK: Tensor  # int64: the chosen experts, best first
    weights_NK: Tensor  # what the experts' outputs are multiplied with; zero where dropped
    kept_NK: Tensor  # bool: whether the expert has room
    load_E: Tensor  # int64: choices of each expert over the group, dropped ones as well
    loss: Tensor  # the balance loss, without dimensions


def choose(probabilities_NE: Tensor, bias_E: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The K experts (N, K) of each token by probability plus bias, best first, and their weights.

    Of equal sums the expert with the smaller number is better. ``top_k`` 1: the weight is the
    probability itself. More: the probabilities of the K experts, divided by their sum; zeros if
    that sum is zero. The bias is not in the weights, and gradients pass through them as usual.
    """
    # Step 1: sort in a way that keeps the order of equal elements, on every device
    # Step 2: take the weights from the probabilities; with one expert a quotient would always be 1
    raise NotImplementedError("exercise 2.24")


def keep_first(experts_NK: Tensor, experts: int, capacity: int) -> Tensor:
    """Whether each choice finds room (N, K), bool: an expert takes the first ``capacity`` choices.

    The first choices of all tokens come first, in the order of the tokens. Then come all second
    choices in that order, and so on. ``experts``: their number E. Any number of tokens, also none.
    """
    # Step 3: put the choices in that order, and number those of each expert from one
    raise NotImplementedError("exercise 2.24")


def count_choices(experts_NK: Tensor, experts: int, group: Group = None) -> Tensor:
    """How many choices each of the E experts has on all ranks of ``group``: (E,) int64.

    One all-reduce of 8·E bytes. The ranks may have different numbers of tokens, also none.
    """
    # Step 4: count without a look at values: the host must not wait for the device
    raise NotImplementedError("exercise 2.24")


def balance_loss(
    probabilities_NE: Tensor, load_E: Tensor, top_k: int, group: Group = None
) -> Tensor:
    """This rank's balance loss; the mean over the ranks is E·Σ_e f_e·P_e of one process.

    f_e = load_e / Σ load is over the group. P_e is the mean probability of the group's tokens, of
    which a rank has its own: it adds them up, divides by the tokens of all ranks, and multiplies by
    W. So ranks with more tokens count for more. Zero if the group has no tokens. The gradient goes
    through P_e alone, and the average of ``weight``'s gradients over the ranks (1.4) is that of one
    process. Sends nothing.
    """
    # Step 5: the load tells how many tokens the group has
    raise NotImplementedError("exercise 2.24")


class Router(nn.Module):
    """Chooses ``top_k`` of ``experts`` for each token; all ranks of ``group`` call it together.

    ``weight`` (E, D) float32 is drawn from ``seed`` alone, so it is equal on all ranks.
    ``capacity_factor``: c in C = ⌈c·K·n/E⌉ for a rank's n tokens; None: nothing is dropped.
    ``jitter``: ε. In training each element of the router's input is multiplied by a number of its
    own from the uniform distribution on [1-ε, 1+ε). These numbers come from a generator of the
    router, which depends on ``seed`` and on the rank in ``group`` only. Ranks and seeds have
    independent numbers, and each forward goes on where the one before ended. PyTorch's default
    generators are neither read nor changed, also when the router is made.

    ``bias_E`` (float32 buffer, at first zero) and ``counted_E`` (int64 buffer, load of the training
    forwards since ``update_bias``) are in the state_dict. The generator is not. ValueError for
    ``top_k`` outside of 1 … E, a capacity factor that is not positive, a jitter outside of [0, 1),
    a negative seed, or if this process is not in ``group``.
    """

    bias_E: Tensor
    counted_E: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        *,
        top_k: int = 1,
        capacity_factor: float | None = None,
        jitter: float = 0.0,
        seed: int = 0,
        group: Group = None,
    ) -> None:
        super().__init__()
        rank = rank_in(group)
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k={top_k} of {experts} experts")
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"the capacity factor must be positive, got {capacity_factor}")
        if not 0 <= jitter < 1 or seed < 0:
            raise ValueError(f"jitter={jitter} is not in [0, 1), or seed={seed} is negative")
        self.top_k, self.capacity_factor, self.group = top_k, capacity_factor, group
        self.jitter, self.generator = jitter, None
        # Step 6: draw the weight from stream 0 of the seed; the jitter of rank r has stream 1 + r,
        #         as in 2.19
        # Step 7: register both buffers
        raise NotImplementedError("exercise 2.24")

    def jittered(self, x_ND: Tensor) -> Tensor:
        """``x`` times the random numbers, in training and with a jitter above zero; else ``x``.

        The generator lives on the device of ``x``.
        """
        # Step 8: make the generator at the first use; eval and a jitter of zero draw nothing
        raise NotImplementedError("exercise 2.24")

    def forward(self, x_ND: Tensor) -> Routing:
        """Routes this rank's tokens (…, D), also none: one all-reduce of 8·E bytes.

        Probabilities are the softmax of x·weightᵀ, in float32 or wider, also under autocast: 16
        bits are too few for them. Weights and loss have their dtype. Gradients reach ``weight`` and
        ``x``, in their own dtypes: through the weights of choices that are kept, and through the
        loss. In training the load is added to ``counted_E``. The host never waits for the device.
        ValueError, before anything is sent, if the last dimension is not D.
        """
        # Step 9: probabilities in float32, choices, load of the group
        # Step 10: drop what is over this rank's capacity: a weight of zero
        raise NotImplementedError("exercise 2.24")

    @torch.no_grad()
    def update_bias(self, rate: float = 1e-3) -> None:
        """Move each bias by ``rate`` against the load since the last call; once per step.

        Up for an expert with less load than the mean of all experts, down for one with more, not at
        all for one with the mean. Then ``counted_E`` is zero again. Equal on all ranks; sends
        nothing.
        """
        # Step 11: compare whole numbers: E times the load with the sum of all loads
        raise NotImplementedError("exercise 2.24")


def mixed(seed: int, stream: int) -> int:
    """The seed of a generator: independent for all pairs of ``seed`` and ``stream`` (2.19)."""
    sequence = np.random.SeedSequence(seed, spawn_key=(stream,))
    return int(sequence.generate_state(1, np.uint64)[0])
