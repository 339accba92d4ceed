# Exercises 2.18: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.18
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Sequence parallelism: a transformer block that also shares out what tensor parallelism repeats.

With tensor parallelism alone every rank computes norms and residual stream for all positions, and
keeps them for backward. Sequence parallelism cuts that part along the time axis; only the borders
of the block change:

    tensor      norm (T) ──── copy ──────── column ─ f ─ row ── all-reduce ────── + residual (T)
    sequence    norm (T/W) ── all-gather ── column ─ f ─ row ── reduce-scatter ── + residual (T/W)

An all-reduce is a reduce-scatter and an all-gather, so the bytes stay the same. But a norm and the
bias of a row-parallel layer now see T/W positions only: their gradients must be summed over the
ranks, once per step.

Activations kept for backward per rank, in units of batch·time·width elements (norm inputs 2, column
inputs 2; q, k, v 3, attention output 1, inner width before and after GELU 8):

    one process        16              sequence parallel, gathered inputs kept       2 + 14/W
    tensor parallel    4 + 12/W        sequence parallel, gathered again (regather)  16/W

These are Korthikanti et al.'s s·b·h times 34 + 5as/h, 10 + 24/t + 5as/(ht) and (34 + 5as/h)/t bytes
without their dropout masks (2, one byte each) and attention matrices (5as/h; fused attention never
keeps them), at two bytes per element. ``regather`` is what their last formula assumes: one more
all-gather per column-parallel layer, 5/4 of the bytes, which can hide behind a matrix product.

Shapes: B batch, T time, t = T/W this rank's positions, D width, f and d a rank's features.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), sections 4.1 (formula), 4.2.1 and 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group

from .template_parallel_transformer import ParallelBlock
from .template_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    block_of,
    check_width,
    place_in,
)

TIME = 1  # the dimension of the positions


def start_gather(x_BtD: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to gather all ranks' positions, return at once: a function that waits for (B, T, D).

    Positions are in the order of the ranks of ``group``; any strides, the dtype stays.
    """
    # Step 1: gather contiguous blocks along the first dimension, asynchronously
    # Step 2: after waiting, put them together along the time axis
    raise NotImplementedError("exercise 2.18")


def start_scatter(x_BTD: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to sum over the ranks, return at once: a function that waits for (B, t, D).

    ``x_BTD`` has all positions, this rank keeps its own of the sum; any strides, the dtype stays.
    """
    # Step 3: block r goes to rank r: the blocks one after another in a contiguous tensor
    raise NotImplementedError("exercise 2.18")


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: Group) -> Tensor:
        # Step 4: like copy_to_ranks, but every rank has to be given the other positions first …
        raise NotImplementedError("exercise 2.18")

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        # Step 5: … and of the summed gradient only this rank's positions are wanted
        raise NotImplementedError("exercise 2.18")


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: Group) -> Tensor:
        # Step 6: like sum_over_ranks, but this rank goes on with its own positions only
        raise NotImplementedError("exercise 2.18")

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor | None, ...]:
        # Step 7: every rank's term had all positions: it needs the gradients of all
        raise NotImplementedError("exercise 2.18")


def gather_sequence(x_BtD: Tensor, group: Group = None) -> Tensor:
    """All positions (B, T, D) from each rank's (B, T/W, D), for ranks that use them differently.

    Forward: one all-gather; backward: one reduce-scatter, the sum of all ranks' gradients. Any
    strides and dtype. ValueError if this process is not in ``group``.
    """
    # Step 8: refuse a process outside of the group, …
    raise NotImplementedError("exercise 2.18")


def scatter_sequence(x_BTD: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, T/W, D) of the sum of all ranks' ``x`` (B, T, D).

    Forward: one reduce-scatter; backward: one all-gather. Any strides and dtype; ``x`` is not
    changed. ValueError, before anything is sent, if T does not divide by W, or if this process is
    not in ``group``.
    """
    # Step 9: … and positions that don't divide
    raise NotImplementedError("exercise 2.18")


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, weight_fD: Tensor, bias_f: Tensor, regather: bool, group: Group
    ) -> Tensor:
        # Step 10: gather, multiply, and keep either the whole input or only this rank's positions
        raise NotImplementedError("exercise 2.18")

    @staticmethod
    def backward(ctx: Any, grad_BTf: Tensor) -> tuple[Tensor | None, ...]:
        # Step 11: the gather runs while the gradient of x is computed, and that one's
        #         reduce-scatter while the gradient of the weight is
        raise NotImplementedError("exercise 2.18")


class SequenceColumnLinear(ColumnParallelLinear):
    """A column-parallel layer whose input is cut along the time axis: gathers it by itself.

    ``regather``: keep this rank's positions for backward and gather them again there; of all
    positions nothing stays in memory. Values and gradients are the same either way, and those of
    the whole layer. ``gather_output`` is not used.
    """

    regather = False

    def forward(self, x_BtD: Tensor) -> Tensor:
        """This rank's positions (B, T/W, D) to its features of all positions (B, T, F/W).

        Forward: one all-gather; backward: one reduce-scatter, with ``regather`` one more
        all-gather. ValueError, before anything is sent, if the last dimension is not D.
        """
        # Step 12: the gathering product
        raise NotImplementedError("exercise 2.18")


class SequenceRowLinear(RowParallelLinear):
    """A row-parallel layer whose output is cut along the time axis; ``split_input`` is not used."""

    def forward(self, x_BTd: Tensor) -> Tensor:
        """This rank's features of all positions (B, T, D/W) to (B, T/W, F) of its positions.

        Forward: one reduce-scatter; backward: one all-gather. ValueError, before anything is sent,
        if T does not divide by W or the last dimension is not D/W.
        """
        # Step 13: reduce-scatter the terms; the bias once, after the sum
        raise NotImplementedError("exercise 2.18")


class SequenceParallelBlock(ParallelBlock):
    """A ``ParallelBlock`` from and to this rank's positions (B, T/W, D): only the borders differ.

    Two all-gathers and two reduce-scatters forward, and again backward; ``regather`` makes that two
    more all-gathers in backward and keeps 16/W instead of 2 + 14/W (see the module). After
    backward, the gradients of ``replicated()`` still have to be summed over the ranks.
    """

    column, row = SequenceColumnLinear, SequenceRowLinear

    def __init__(self, block: Any, group: Group = None, *, regather: bool = False) -> None:
        super().__init__(block, group)
        # Step 14: tell both column-parallel layers
        raise NotImplementedError("exercise 2.18")

    def replicated(self) -> Iterator[nn.Parameter]:
        """The parameters that every rank holds in full but uses on its own positions only.

        Those of both norms, and the biases of ``out`` and ``down`` where there are any, each once.
        """
        # Step 15: the norms, and the biases that are added after the reduce-scatter
        raise NotImplementedError("exercise 2.18")


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Sum ``p.grad`` of replicated ``parameters`` over the ranks, in place; once per step.

    A missing gradient counts as zero, a tied parameter once, a frozen one not at all. Any strides
    and dtypes; all ranks of ``group`` pass them in the same order. One all-reduce of their bytes
    per dtype, however many there are; nothing for no parameters.
    """
    # Step 16: all gradients of a dtype in one message
    raise NotImplementedError("exercise 2.18")
