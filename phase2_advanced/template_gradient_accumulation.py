# Exercises 2.1, 2.2, 2.3: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.1
"""Gradient accumulation: one optimizer step and one reduction for several micro-batches.

A batch that does not fit into memory is divided into micro-batches; their gradients add up in
``p.grad`` until the optimizer steps once. For a window of micro-batches whose losses are means over
n_1 … n_m tokens, the gradient of the whole batch is

    g = Σ_i n_i·g_i / Σ_i n_i      (g_i: gradient of micro-batch i's own mean)

so the mean of the means is right only if all n_i are equal. Dividing each *sum* of losses by the
total before its backward gives g without any of them being known in advance, and with W ranks the
total is that of all ranks.

Per optimizer step and rank, with P bytes of trainable parameters and m micro-batches: a ring
all-reduce sends 2(W-1)/W·P bytes once, whatever m; a reduction after every micro-batch would send m
times that. Activations of one micro-batch are alive at a time. The norm for clipping is that of the
reduced, unscaled gradient: it is the same on all ranks, so clipping costs no communication.
Sources: Goyal et al. 2017 (arXiv 1706.02677), section 2.3 (what the mean must be over); Pascanu et
al. 2013 (arXiv 1211.5063), section 3.2 (clipping by the global norm); Micikevicius et al. 2018
(arXiv 1710.03740), section 3.2 (unscale before clipping).
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

    The last list is shorter if they don't divide; none is empty and none is lost. Lazy: reads no
    micro-batch beyond the list that it gives. Raises ValueError, before reading, if ``steps`` < 1.
    """
    # Step 1: refuse a bad number of steps when called, not at the first window
    # Step 2: take up to `steps` micro-batches at a time until there are none
    raise NotImplementedError("exercise 2.1")


def accumulate(model: nn.Module, window: Iterable[MicroBatch], total: float) -> float:
    """Add the gradient of (sum of the window's losses) / ``total`` to every ``p.grad``.

    ``model(inputs)`` gives logits (n, classes); the loss of a target is its cross-entropy, targets
    that equal IGNORED have none. Gradients that are there already stay in the sum. A micro-batch
    without any counted target adds nothing. Returns the sum of the losses (not divided).

    The activations of one micro-batch are freed before the next one runs.
    """
    # Step 3: the sum of a micro-batch's losses over the total of the window: no mean of its own
    # Step 4: backward at once, so that its activations can go; autograd adds to p.grad
    raise NotImplementedError("exercise 2.1")


def accumulate_and_reduce(
    model: nn.Module,
    window: Sequence[MicroBatch],
    *,
    loss_scale: float = 1.0,
    group: Group = None,
) -> tuple[float, int]:
    """Leave ``loss_scale`` times the gradient of the global mean loss in every rank's ``p.grad``.

    The mean is over the counted targets of all micro-batches of all ranks of ``group``; ranks may
    have different numbers of micro-batches, some none. Gradients from before are forgotten. A
    trainable parameter without gradient counts as zero; frozen ones are neither sent nor changed,
    tied ones are sent once. Returns (global mean loss, number of counted targets), the same on
    every rank; (0.0, 0) and zero gradients if no rank has a target.

    Cost per rank: one all-reduce of the trainable parameters' bytes, and two of single numbers,
    whatever the number of micro-batches.
    """
    # Step 1: all ranks need the global number of counted targets before the first backward
    # Step 2: accumulate locally: nothing is sent between micro-batches
    # Step 3: one all-reduce of all gradients of a dtype together, missing ones as zeros; the sum is
    #         the mean already, because every loss was divided by the global number
    # Step 4: sum the losses over the ranks for the return value
    raise NotImplementedError("exercise 2.2")


def clip_by_global_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients by one factor so that their joint 2-norm is at most ``max_norm``.

    Returns the norm before. In place; gradients within the limit are not touched, a tied parameter
    counts once, one without gradient not at all. A norm that is not finite changes nothing: the
    caller decides. No communication. Raises ValueError if ``max_norm`` is not positive.
    """
    # Step 1: the norm of all gradients together, in float64, as if they were one vector
    # Step 2: one factor for all, and only if the norm is beyond the limit
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

    Equals the step of one process on all targets of all ranks. ``max_norm``: limit of the true
    (unscaled) gradient's norm, None for no clipping. ``loss_scale`` keeps small gradients from
    vanishing in 16 bits; it cancels. Returns (global mean loss, norm before clipping), the same on
    every rank. Without any target on any rank nothing is stepped; returns (0.0, 0.0).
    """
    # Step 3: reduce first (exercise 2.2), then unscale, then clip, then step: a local or a scaled
    #         gradient has another norm, and each rank would clip differently
    raise NotImplementedError("exercise 2.3")
