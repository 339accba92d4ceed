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

from .parallel_transformer import ParallelBlock
from .tensor_parallel import (
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
    # --- exercise 2.18: start
    # Step 1: gather contiguous blocks along the first dimension, asynchronously
    # Step 2: after waiting, put them together along the time axis
    x_BtD, world_size = x_BtD.contiguous(), dist.get_world_size(group)
    blocks = x_BtD.new_empty(world_size * x_BtD.shape[0], *x_BtD.shape[1:])
    work = dist.all_gather_into_tensor(blocks, x_BtD, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return torch.cat(blocks.chunk(world_size), TIME)

    return finish
    # --- exercise 2.18: end


def start_scatter(x_BTD: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to sum over the ranks, return at once: a function that waits for (B, t, D).

    ``x_BTD`` has all positions, this rank keeps its own of the sum; any strides, the dtype stays.
    """
    # --- exercise 2.18: start
    # Step 3: block r goes to rank r: the blocks one after another in a contiguous tensor
    world_size = dist.get_world_size(group)
    blocks = torch.cat(x_BTD.chunk(world_size, TIME))
    mine_BtD = blocks.new_empty(blocks.shape[0] // world_size, *blocks.shape[1:])
    work = dist.reduce_scatter_tensor(mine_BtD, blocks, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return mine_BtD

    return finish
    # --- exercise 2.18: end


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: Group) -> Tensor:
        # --- exercise 2.18: start
        # Step 4: like copy_to_ranks, but every rank must first get the other ranks' positions
        ctx.group = group
        return start_gather(x_BtD, group)()
        # --- exercise 2.18: end

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.18: start
        # Step 5: sum the gradients, and keep only this rank's positions
        return scatter_sequence(grad_BTD, ctx.group), None
        # --- exercise 2.18: end


class _ScatterSequence(Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: Group) -> Tensor:
        # --- exercise 2.18: start
        # Step 6: like sum_over_ranks, but this rank goes on with its own positions only
        ctx.group = group
        return start_scatter(x_BTD, group)()
        # --- exercise 2.18: end

    @staticmethod
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.18: start
        # Step 7: every rank's term had all positions, so it needs the gradients of all positions
        return gather_sequence(grad_BtD, ctx.group), None
        # --- exercise 2.18: end


def gather_sequence(x_BtD: Tensor, group: Group = None) -> Tensor:
    """All positions (B, T, D) from each rank's (B, T/W, D), for ranks that use them differently.

    Forward: one all-gather; backward: one reduce-scatter, the sum of all ranks' gradients. Any
    strides and dtype. ValueError if this process is not in ``group``.
    """
    # --- exercise 2.18: start
    # Step 8: refuse a process outside of the group
    place_in(group)
    return _GatherSequence.apply(x_BtD, group)
    # --- exercise 2.18: end


def scatter_sequence(x_BTD: Tensor, group: Group = None) -> Tensor:
    """This rank's positions (B, T/W, D) of the sum of all ranks' ``x`` (B, T, D).

    Forward: one reduce-scatter; backward: one all-gather. Any strides and dtype; ``x`` is not
    changed. ValueError, before anything is sent, if T does not divide by W, or if this process is
    not in ``group``.
    """
    # --- exercise 2.18: start
    # Step 9: refuse positions that don't divide
    block_of(x_BTD.shape[TIME], "positions", group)
    return _ScatterSequence.apply(x_BTD, group)
    # --- exercise 2.18: end


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, weight_fD: Tensor, bias_f: Tensor, regather: bool, group: Group
    ) -> Tensor:
        # --- exercise 2.18: start
        # Step 10: gather, multiply, and keep either the whole input or only this rank's positions
        x_BTD = start_gather(x_BtD, group)()
        ctx.save_for_backward(x_BtD if regather else x_BTD, weight_fD)
        ctx.regather, ctx.group = regather, group
        return F.linear(x_BTD, weight_fD, bias_f)
        # --- exercise 2.18: end

    @staticmethod
    def backward(ctx: Any, grad_BTf: Tensor) -> tuple[Tensor | None, ...]:
        # --- exercise 2.18: start
        # Step 11: gather while you compute the gradient of x; reduce-scatter that gradient while
        #          you compute the gradient of the weight
        x, weight_fD = ctx.saved_tensors
        finish_gather = start_gather(x, ctx.group) if ctx.regather else lambda: x
        finish_scatter = start_scatter(grad_BTf @ weight_fD, ctx.group)
        grad_Nf, x_ND = grad_BTf.flatten(0, 1), finish_gather().flatten(0, 1)
        _, of_weight, of_bias, _, _ = ctx.needs_input_grad
        grad_weight_fD = grad_Nf.T @ x_ND if of_weight else None
        grad_bias_f = grad_Nf.sum(0) if of_bias else None
        return finish_scatter(), grad_weight_fD, grad_bias_f, None, None
        # --- exercise 2.18: end


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
        # --- exercise 2.18: start
        # Step 12: use the product that gathers its input
        check_width(x_BtD, self.weight.shape[1], self)
        return _GatherLinear.apply(x_BtD, self.weight, self.bias, self.regather, self.group)
        # --- exercise 2.18: end


class SequenceRowLinear(RowParallelLinear):
    """A row-parallel layer whose output is cut along the time axis; ``split_input`` is not used."""

    def forward(self, x_BTd: Tensor) -> Tensor:
        """This rank's features of all positions (B, T, D/W) to (B, T/W, F) of its positions.

        Forward: one reduce-scatter; backward: one all-gather. ValueError, before anything is sent,
        if T does not divide by W or the last dimension is not D/W.
        """
        # --- exercise 2.18: start
        # Step 13: reduce-scatter the terms; add the bias once, after the sum
        check_width(x_BTd, self.weight.shape[1], self)
        y_BtF = scatter_sequence(F.linear(x_BTd, self.weight), self.group)
        return y_BtF if self.bias is None else y_BtF + self.bias
        # --- exercise 2.18: end


class SequenceParallelBlock(ParallelBlock):
    """A ``ParallelBlock`` from and to this rank's positions (B, T/W, D): only the borders differ.

    Two all-gathers and two reduce-scatters forward, and as many backward. ``regather`` adds two
    all-gathers in backward and keeps 16/W units instead of 2 + 14/W (see the module). After
    backward, the gradients of ``replicated()`` still have to be summed over the ranks.
    """

    column, row = SequenceColumnLinear, SequenceRowLinear

    def __init__(self, block: Any, group: Group = None, *, regather: bool = False) -> None:
        super().__init__(block, group)
        # --- exercise 2.18: start
        # Step 14: tell both column-parallel layers
        self.qkv.regather = self.up.regather = regather
        # --- exercise 2.18: end

    def replicated(self) -> Iterator[nn.Parameter]:
        """The parameters that every rank holds in full but uses on its own positions only.

        Those of both norms, and the biases of ``out`` and ``down`` where there are any, each once.
        """
        # --- exercise 2.18: start
        # Step 15: the norms, and the biases that are added after the reduce-scatter
        yield from self.norm_attention.parameters()
        yield from self.norm_mlp.parameters()
        yield from (layer.bias for layer in (self.out, self.down) if layer.bias is not None)
        # --- exercise 2.18: end


def sum_replicated_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Sum ``p.grad`` of replicated ``parameters`` over the ranks, in place; once per step.

    A missing gradient counts as zero, a tied parameter once, a frozen one not at all. Any strides
    and dtypes; all ranks of ``group`` pass them in the same order. One all-reduce of their bytes
    per dtype, however many there are; without parameters nothing is sent.
    """
    # --- exercise 2.18: start
    # Step 16: send all gradients of one dtype in one message
    trainable = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    for dtype in dict.fromkeys(p.dtype for p in trainable):
        same = [p for p in trainable if p.dtype == dtype]
        for p in same:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.flatten() for p in same])
        dist.all_reduce(flat, group=group)
        for p, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
            p.grad.copy_(part.view(p.shape))
    # --- exercise 2.18: end
