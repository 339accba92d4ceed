# Exercises 2.1, 2.2, 2.3: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.1
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Gradient accumulation: one optimizer step and one reduction for several micro-batches.

A batch that does not fit into memory is divided into micro-batches. Their gradients add up in
``p.grad`` until the optimizer steps once. For a window of micro-batches whose losses are means over
n_1 … n_m tokens, the gradient of the whole batch is

    g = Σ_i n_i·g_i / Σ_i n_i      (g_i: gradient of micro-batch i's own mean)

So the mean of the means is right only if all n_i are equal. To get g, divide each *sum* of losses
by the total before its backward. The total must therefore be known before the first backward. With
W ranks it is the total of all ranks. g equals the gradient of the whole batch under two conditions:
the model treats each sample by itself, and it draws no random numbers. BatchNorm breaks
the first, because it sees one micro-batch at a time. Dropout breaks the second.

Cost per optimizer step and rank, with P bytes of trainable parameters and m micro-batches: a ring
all-reduce sends 2(W-1)/W·P bytes once, whatever m is. A reduction after every micro-batch would
send m times as much. The activations of one micro-batch are alive at a time. Clipping uses the norm
of the reduced, unscaled gradient. All ranks have this norm, so clipping costs no communication.
Sources: Goyal et al. 2017 (arXiv 1706.02677), section 3, Remark 3 (which number divides the sum).
Pascanu et al. 2013 (arXiv 1211.5063), section 3.2 (clipping by the global norm). Micikevicius et
al. 2018 (arXiv 1710.03740), section 3.2 (unscale before clipping).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from given.agreement import Group

T = TypeVar("T")
MicroBatch = tuple[Tensor, Tensor]  # inputs; targets (n,) int64, IGNORED where there is none
IGNORED = -100


def windows(micro_batches: Iterable[T], steps: int) -> Iterator[list[T]]:
    """Divide a stream of micro-batches into lists of ``steps``, one per optimizer step.

    Returns an iterator. The last list is shorter if ``steps`` does not divide the number of
    micro-batches. No list is empty, and no micro-batch is lost, whatever object it is. Every list
    is a new one. The call reads nothing. Asking for a list reads the micro-batches of that list,
    and no further ones. Raises ValueError if ``steps`` < 1: when called, before anything is read.
    """
    # Step 1: refuse a bad number of steps when called, not at the first window
    # Step 2: take up to `steps` micro-batches at a time until there are none
    raise NotImplementedError("exercise 2.1")


def accumulate(model: nn.Module, window: Iterable[MicroBatch], total: float) -> float:
    """Add the gradient of (sum of the window's losses) / ``total`` to every ``p.grad``.

    ``model(inputs)`` gives logits (n, classes). The loss of a target is its cross-entropy; a target
    that equals IGNORED has no loss. Gradients that are there already stay in the sum. A micro-batch
    without any counted target adds nothing. Frozen parameters and their gradients stay as they are.
    Returns the sum of the losses (not divided) as a float, 0.0 for an empty window.

    Reads the window once, in order. Every micro-batch goes through the model by itself, and its
    activations are freed before the next one runs. The host waits for a GPU once at most, for the
    losses.
    """
    # Step 3: divide the sum of a micro-batch's losses by `total`, never by its own target count
    # Step 4: call backward at once: it adds to p.grad and frees the micro-batch's activations
    # Step 5: read the losses once, at the end: while the host reads, the GPU has nothing to do
    raise NotImplementedError("exercise 2.1")


def accumulate_and_reduce(
    model: nn.Module,
    window: Sequence[MicroBatch],
    *,
    loss_scale: float = 1.0,
    group: Group = None,
) -> tuple[float, int]:
    """Leave ``loss_scale`` times the gradient of the global mean loss in every rank's ``p.grad``.

    The mean is over the counted targets of all micro-batches of all ranks of ``group`` (None: of
    all ranks), which all call it. Ranks may have different numbers of micro-batches, some none.
    Gradients from before are forgotten. A trainable parameter that got no gradient counts as zero,
    and gets zeros. A frozen parameter is not changed, and neither it nor its gradient is sent; an
    old gradient of it may stay. A tied parameter is sent once. ``p.grad`` has the dtype of ``p``.
    Parameters may have several dtypes and any memory layout; at least one is trainable.

    Returns (global mean loss, number of counted targets), a float and an int, the same on every
    rank. The losses of micro-batches and ranks are added in float64. If no rank has a target, it
    returns (0.0, 0), and all gradients are zero.

    Cost per rank, whatever the number of micro-batches: one all-reduce of the trainable parameters'
    bytes (one per dtype that they have), and at most two of single numbers. The host waits for a
    GPU four times at most. As in ``accumulate``, activations are freed after each micro-batch.
    """
    # Step 1: all ranks need the global number of counted targets before the first backward
    # Step 2: accumulate locally: nothing is sent between micro-batches
    # Step 3: one all-reduce for all gradients of one dtype; a missing gradient is sent as zeros.
    #         The sum is the mean already, because every loss was divided by the global number
    # Step 4: sum the losses over the ranks for the return value
    raise NotImplementedError("exercise 2.2")


def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients by one factor so that their joint 2-norm is at most ``max_norm``.

    Returns the norm before, as a float; it is computed in float64, whatever dtypes the gradients
    have. A larger norm becomes ``max_norm``. In place: every ``p.grad`` remains the same tensor.
    Gradients within the limit are not touched. A parameter that is listed twice counts once, and a
    parameter without gradient does not count. Without any gradient the norm is 0.0. A norm that is
    not finite changes nothing: the caller decides what follows. No communication. The host waits
    for a GPU once, for the norm. Raises ValueError if ``max_norm`` is not positive or is NaN,
    before anything is changed. ``max_norm`` may be infinity, which means no limit.
    """
    # Step 1: the norm of all gradients together, in float64, as if they were one vector
    # Step 2: one factor for all gradients, and only if the norm is above the limit
    raise NotImplementedError("exercise 2.3")


def train_window(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    window: Sequence[MicroBatch],
    *,
    max_norm: float | None = None,
    loss_scale: float = 1.0,
    group: Group = None,
) -> tuple[float, float]:
    """One optimizer step from a window of micro-batches, clipped by the global norm.

    Equals the step of one process on all targets of all ranks of ``group``. ``optimizer.step()`` is
    called once. ``max_norm``: limit of the true (unscaled) gradient's norm, over all trainable
    parameters of the model; None for no clipping. Raises ValueError on every rank if there is a
    target and ``max_norm`` is not positive or is NaN. A frozen parameter does not move and does not
    count, even if it has an old gradient and is one of ``optimizer``'s parameters. ``loss_scale``
    keeps small gradients from vanishing in 16 bits; it cancels.

    Returns (global mean loss, norm before clipping), two floats, the same on every rank. Without
    any target on any rank it steps nothing and returns (0.0, 0.0). Cost: that of
    ``accumulate_and_reduce``, nothing more. The result of a gradient that is not finite is
    left open (exercise 2.6 skips such a step).
    """
    # Step 3: keep this order: reduce (exercise 2.2), unscale, clip, step. A local or a scaled
    #         gradient has another norm, and with a local one each rank would clip differently
    # Step 4: no old gradient of a frozen parameter may reach the norm or the optimizer
    raise NotImplementedError("exercise 2.3")
