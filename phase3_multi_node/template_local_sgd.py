# Exercises 3.25: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.25
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Local SGD and DiLoCo: communicate once in H steps instead of in every step.

Every rank takes H steps of its own optimizer on its own data: a *round*. Its *inner* optimizer and
that optimizer's state stay local. Then the ranks agree on one model again. θ are the last common
parameters, and θ_r are those of rank r after the round:

    local SGD    θ ← 1/W Σ_r θ_r
    DiLoCo       Δ = 1/W Σ_r (θ - θ_r),   v ← μ·v + Δ,   θ ← θ - η·(Δ + μ·v)

All ranks together want to subtract Δ. DiLoCo treats it as the gradient of an *outer* SGD with
Nesterov momentum. With η = 1 and μ = 0 that is local SGD. Local SGD with H = 1 and a plain SGD
inside is synchronous data parallelism: the mean of θ - lr·g_r is θ - lr·(mean of g_r).

With P bytes of trainable parameters a rank has one all-reduce per round, 2(W-1)/W·P bytes. Per step
that is a factor H less than data parallelism.
Invariant: after each round the model, and in DiLoCo θ and v, are equal on all ranks. The price is
drift: within a round the ranks walk apart. They drift farther with a larger H, a larger learning
rate, and data that differ more.
Sources: Stich 2019 (arXiv 1805.09767), algorithm 1. Lin et al. 2020 (arXiv 1808.07217). Douillard
et al. 2023 (DiLoCo, arXiv 2311.08105), algorithm 1 (η = 0.7, μ = 0.9).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group, expect_alike, rank_in


def mean_over_ranks(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """New tensors with the mean of every tensor over the ranks of ``group``; inputs are kept.

    The means have the shapes and dtypes of the inputs, the same bits on all ranks, and no autograd
    history. In float16 the sum may overflow, but a mean up to 60000 does not. All ranks pass the
    same shapes and dtypes, real or complex. Cost: one all-reduce for each dtype, of all tensors of
    that dtype together, and none without tensors. Raises ValueError, before any communication, for
    integers, and on a rank that is no member of ``group``.
    """
    # Step 1: refuse integers, and a rank that is no member (`rank_in`): PyTorch would only warn
    #         there
    # Step 2: join the tensors of a dtype, so that a message does not cost its latency per tensor
    # Step 3: divide by the number of ranks, then sum over them; split in the order asked for
    raise NotImplementedError("exercise 3.25")


class LocalSGD:
    """Let every rank take ``every`` steps of its own, then give all ranks the mean of the models.

    Call ``step()`` after each step of the inner optimizer, and ``finish()`` at the end. Every rank
    calls them equally often; a rank that has no data for a step calls ``step()`` all the same.

    A new object gives all ranks the model of the group's rank 0, bit for bit, and begins a round.
    It sends all parameters and buffers, also frozen ones and those that ``state_dict`` leaves out.
    The parameters that are trainable then travel in every round. Tensors are written in place, so
    the inner optimizer goes on with the right ones, and keeps its own state. Raises ValueError,
    before any communication, if ``every`` < 1, and on a rank that is no member of ``group``. Raises
    ValueError on every rank, after one all-reduce of 48 bytes, if the ranks' models differ in
    shapes, dtypes, or in which parameters are frozen.
    """

    def __init__(self, model: nn.Module, *, every: int, group: Group = None) -> None:
        # Step 4: refuse a round without steps, and models that differ (`expect_alike`). Then start
        #         from one model on all ranks
        # Step 5: remember the tensors that a round sends: trainable parameters, and buffers by kind
        raise NotImplementedError("exercise 3.25")

    def _take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of the group's rank 0; one broadcast per tensor."""
        # Step 6: send a contiguous copy of each and write it back in place
        raise NotImplementedError("exercise 3.25")

    def step(self) -> bool:
        """Note that the inner optimizer has stepped; True if this step ended a round, else False.

        For each dtype the end of a round costs one all-reduce of the trainable parameters and one
        of the floating-point buffers. Each other buffer costs a broadcast. Other steps communicate
        nothing.
        """
        # Step 7: count; the last step of a round makes the ranks agree
        raise NotImplementedError("exercise 3.25")

    def finish(self) -> bool:
        """End a round that has had a step, however short; True if there was one, else False.

        Afterwards all ranks have the same bits in parameters, floating-point buffers (their mean)
        and other buffers (those of the group's rank 0). The next round begins. Without a step since
        the last round no message is sent.
        """
        # Step 8: without a step since the last round there is nothing to agree on
        # Step 9: parameters, then running statistics, then counters, and begin a new round
        raise NotImplementedError("exercise 3.25")

    def _agree(self) -> None:
        """Make the trainable parameters of all ranks their mean, in place."""
        # Step 10: the parameters themselves travel, not their gradients
        raise NotImplementedError("exercise 3.25")


class DiLoCo(LocalSGD):
    """Local SGD whose rounds end with a step of SGD with Nesterov momentum on the mean difference.

    ``lr`` (η) and ``momentum`` (μ) are the outer optimizer's; few rounds need less momentum. The
    lists ``common`` (θ) and ``velocity`` (v) hold its state in the parameters' dtypes. They have no
    autograd history and the same bits on all ranks, and take 2P bytes more than local SGD. Raises
    ValueError, before any communication, if ``lr`` is not positive or ``momentum`` not in [0, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        lr: float = 0.7,
        momentum: float = 0.9,
        group: Group = None,
    ) -> None:
        # Step 11: θ is a copy (the inner optimizer writes into the parameters), v begins with zeros
        raise NotImplementedError("exercise 3.25")

    def _agree(self) -> None:
        """Average the differences to the common parameters and take the outer step from there."""
        # Step 12: take each rank's difference to θ; the mean of the differences is the outer
        #          gradient Δ
        # Step 13: take the same outer step on every rank, from θ: it replaces the local parameters
        raise NotImplementedError("exercise 3.25")


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    rounds: LocalSGD,
) -> tuple[float, int]:
    """Train on this rank's batches of (inputs, targets) and synchronise as ``rounds`` says.

    All ranks have equally many batches. For an empty batch the inner optimizer takes no step, but
    ``rounds`` does. Each step starts from gradients of its own. The last round is ended, however
    short. Returns (mean cross-entropy over all samples of all ranks of the group, their number), a
    float and an int, the same on every rank. Without samples it is (0.0, 0).

    Cost per rank: that of the rounds, and one all-reduce of two numbers at the end.
    """
    # Step 14: take the rank's own steps; every batch counts for the round, also an empty one
    # Step 15: end the last round, then add up losses and samples over the ranks
    raise NotImplementedError("exercise 3.25")
