# Exercises 2.18: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.18
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Sequence parallelism: a transformer block that also shares out what tensor parallelism repeats.

With tensor parallelism alone every rank computes norms and residual stream for all positions, and
keeps them for backward. Sequence parallelism cuts these tensors along the time axis. Only the
communication at the borders of the block changes:

    tensor      norm (T) ──── copy ──────── column ─ f ─ row ── all-reduce ────── + residual (T)
    sequence    norm (T/W) ── all-gather ── column ─ f ─ row ── reduce-scatter ── + residual (T/W)

An all-reduce is a reduce-scatter and an all-gather, so the bytes stay the same. But a norm and the
bias of a row-parallel layer now see T/W positions only: their gradients must be summed over the
ranks, once per step.

Activations kept for backward per rank, in units of batch·time·width elements (norm inputs 2, column
inputs 2; q, k, v 3, attention output 1, inner width before and after GELU 8):

    one process        16              sequence parallel, gathered inputs kept       2 + 14/W
    tensor parallel    4 + 12/W        sequence parallel, gathered again (regather)  16/W

Korthikanti et al. count bytes: s·b·h times 34 + 5as/h, 10 + 24/t + 5as/(ht) and (34 + 5as/h)/t.
An element has two bytes. The units above leave out two dropout masks (one byte per element) and the
attention matrices (5as/h; fused attention never keeps them). Their last formula assumes
``regather``: one more all-gather per column-parallel layer, 5/4 of the bytes. That gather can run
during a matrix product.

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
        # Step 4: like copy_to_ranks, but every rank must first get the other ranks' positions
        raise NotImplementedError("exercise 2.18")

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        # Step 5: sum the gradients, and keep only this rank's positions
        raise NotImplementedError("exercise 2.18")


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: Group) -> Tensor:
        # Step 6: like sum_over_ranks, but this rank goes on with its own positions only
        raise NotImplementedError("exercise 2.18")

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor | None, ...]:
        # Step 7: every rank's term had all positions, so it needs the gradients of all positions
        raise NotImplementedError("exercise 2.18")


def gather_sequence(x_BtD: Tensor, group: Group = None) -> Tensor:
    """All positions (B, T, D) from each rank's (B, T/W, D), for ranks that use them differently.

    Forward: one all-gather; backward: one reduce-scatter, the sum of all ranks' gradients. Any
    strides and dtype. ValueError if this process is not in ``group``.
    """
    # Step 8: refuse a process outside of the group
    raise NotImplementedError("exercise 2.18")


def scatter_sequence(x_BTD: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, T/W, D) of the sum of all ranks' ``x`` (B, T, D).

    Forward: one reduce-scatter; backward: one all-gather. Any strides and dtype; ``x`` is not
    changed. ValueError, before anything is sent, if T does not divide by W, or if this process is
    not in ``group``.
    """
    # Step 9: refuse positions that don't divide
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
        # Step 11: gather while you compute the gradient of x; reduce-scatter that gradient while
        #          you compute the gradient of the weight
        raise NotImplementedError("exercise 2.18")


class SequenceColumnLinear(ColumnParallelLinear):
    """A column-parallel layer whose input is cut along the time axis: gathers it by itself.

    ``regather``: keep only this rank's positions for backward and gather all of them again there.
    With and without it values and gradients are those of the whole layer. ``gather_output`` is not
    used.
    """

    regather = False

    def forward(self, x_BtD: Tensor) -> Tensor:
        """This rank's positions (B, T/W, D) to its features of all positions (B, T, F/W).

        Forward: one all-gather; backward: one reduce-scatter, with ``regather`` one more
        all-gather. ValueError, before anything is sent, if the last dimension is not D.
        """
        # Step 12: use the product that gathers its input
        raise NotImplementedError("exercise 2.18")


class SequenceRowLinear(RowParallelLinear):
    """A row-parallel layer whose output is cut along the time axis; ``split_input`` is not used."""

    def forward(self, x_BTd: Tensor) -> Tensor:
        """This rank's features of all positions (B, T, D/W) to (B, T/W, F) of its positions.

        Forward: one reduce-scatter; backward: one all-gather. ValueError, before anything is sent,
        if T does not divide by W or the last dimension is not D/W.
        """
        # Step 13: reduce-scatter the terms; add the bias once, after the sum
        raise NotImplementedError("exercise 2.18")


class SequenceParallelBlock(ParallelBlock):
    """A ``ParallelBlock`` from and to this rank's positions (B, T/W, D): only the borders differ.

    Two all-gathers and two reduce-scatters forward, and as many backward. ``regather`` adds two
    all-gathers in backward and keeps 16/W units instead of 2 + 14/W (see the module). After
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
    per dtype, however many there are; without parameters nothing is sent.
    """
    # Step 16: send all gradients of one dtype in one message
    raise NotImplementedError("exercise 2.18")
