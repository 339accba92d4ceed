# Exercises 2.25: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.25
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Expert parallelism: each of W ranks computes E/W experts, and tokens travel to their experts.

The router (2.24) says which experts a token needs. A rank sends one row for each choice that is
kept, and gets one back. How many rows go from which rank to which expert changes in every step, so
the sizes travel first:

    sizes      all-to-all of E counts              8·E bytes
    dispatch   all-to-all of M rows out, R in      M·D·b bytes     b: bytes of a number
    compute    one product per expert on its own rows, sorted by expert
    combine    all-to-all of R rows out, M in      R·D·b bytes
    y          the weighted sum of a token's rows; zero for a token without a kept choice

A rank brings 8·E + (M + R)·D·b bytes in forward, its own rows included. In backward combine and
dispatch run with exchanged sizes: (R + M)·D·b bytes more. Five messages in all, whatever W is.

The host must know the sizes to issue the calls. So it waits for its device once per forward, and
never in backward. Invariant: output and gradients are those of one process that drops the same
choices.

An expert sees the tokens of all W ranks. So its gradient is that of the sum of W losses, and is
divided by W. Replicated parameters, such as the router, see the tokens of their own rank. Their
gradients are averaged over the ranks (1.4). Copies of an expert in other groups average their
divided gradients over the copies alone.

Shapes: N tokens of this rank (any leading dimensions), D width, F inner width, E experts, e = E/W
this rank's, K choices of a token, M rows that this rank sends, R rows that it computes.
Sources: Lepikhin et al. 2020 (GShard, arXiv 2006.16668), section 3 (all-to-all between the ranks);
Gale et al. 2022 (MegaBlocks, arXiv 2211.15841), sections 2 (rows sorted by expert) and 4 (uneven
groups instead of padding).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from given.agreement import Group

from .template_mixture_of_experts import Router, Routing
from .template_tensor_parallel import block_of, shard


class Plan(NamedTuple):
    """Which choices travel, and how many rows each rank gives and gets."""

    order_M: Tensor  # int64: kept choices, as positions in the flattened (N, K), by expert
    gives: list[int]  # rows to each rank
    gets: list[list[int]]  # rows from each rank, for each of this rank's experts: W lists of e


def plan_dispatch(routing: Routing, group: Group = None) -> Plan:
    """Sort the kept choices by expert, and exchange the sizes with all ranks of ``group``.

    Expert j lives on rank ⌊j/e⌋. The choices of one expert stay in row-major order: by token, then
    by choice. One all-to-all of 8·E bytes. The host reads from the device once.
    """
    # Step 1: give dropped choices a number behind all experts; a stable sort puts them last
    # Step 2: count each expert's kept choices, exchange the counts, read both on the host at once
    raise NotImplementedError("exercise 2.25")


class _MoveRows(Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MD: Tensor, gives: list[int], gets: list[int], group: Group
    ) -> Tensor:
        # Step 3: remember both sizes; receive into a tensor with room for all that comes
        raise NotImplementedError("exercise 2.25")

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        # Step 4: each row's gradient goes the way back
        raise NotImplementedError("exercise 2.25")


def move_rows(rows_MD: Tensor, gives: list[int], gets: list[int], group: Group = None) -> Tensor:
    """The first ``gives[0]`` rows to rank 0, the next to rank 1 …: the rows that arrive, by rank.

    ``gets``: how many rows each rank sends here. Any number of rows, also none; any strides and
    dtype. Forward: one all-to-all of the bytes of ``rows_MD``. Backward: one of the bytes of the
    result.
    """
    # Step 5: let autograd see the journey
    raise NotImplementedError("exercise 2.25")


def compute_experts(
    rows_RD: Tensor, gets: list[list[int]], up_eDF: Tensor, down_eFD: Tensor
) -> Tensor:
    """Each row through its expert, gelu(x·up)·down: rows (R, D) in the order in which they came.

    They came by rank, and in a rank's rows by expert: ``gets`` has the sizes. One pair of products
    per expert, on all its rows at once. An expert without rows has a gradient of zeros.
    """
    # Step 6: bring the rows of an expert together, from all ranks
    # Step 7: one pair of products per expert; unbind gives all experts' weights in one step of
    #         autograd, indexing would make a gradient of full size for each
    # Step 8: put the results where their rows came from
    raise NotImplementedError("exercise 2.25")


class ExpertParallel(nn.Module):
    """A mixture of experts of which this rank holds E/W; tokens travel to their experts and back.

    ``router`` chooses, in its group. ``up_EDF`` and ``down_EFD``: the weights of all experts, equal
    on all ranks, in one dtype; they are neither changed nor kept. ``up`` (e, D, F) and ``down``
    (e, F, D) are this rank's: parameters of their own, in the dtype of the whole, trainable if the
    whole one is. ``rows``: how many rows each of this rank's experts computed in the last forward,
    from all ranks.

    ValueError if E does not divide by W, or if the weights do not fit the router's D and E, or each
    other.
    """

    def __init__(self, router: Router, up_EDF: Tensor, down_EFD: Tensor) -> None:
        super().__init__()
        experts, width = router.weight.shape
        inner = up_EDF.shape[-1]
        if up_EDF.shape != (experts, width, inner) or down_EFD.shape != (experts, inner, width):
            raise ValueError(
                f"weights {tuple(up_EDF.shape)} and {tuple(down_EFD.shape)} for {experts} experts "
                f"of width {width}"
            )
        self.router, self.group = router, router.group
        # Step 9: this rank's block of both
        raise NotImplementedError("exercise 2.25")

    def forward(self, x_ND: Tensor) -> tuple[Tensor, Routing]:
        """y (…, D) for this rank's tokens (…, D) in the experts' dtype, and their routing.

        y is the sum of the kept experts' rows times their weights, added up in the weights' dtype
        and rounded once to that of ``x``. A token without a kept choice gets zeros. Every rank of
        the group calls forward and backward, also a rank without tokens, and on all ranks the same
        tensors require gradients. Beside the router's message: three messages forward, and two
        backward (one if ``x`` needs no gradient).
        """
        # Step 10: there, compute, and back with exchanged sizes
        # Step 11: every row at the position of its choice, zeros elsewhere; then the weighted sum
        raise NotImplementedError("exercise 2.25")


def divide_expert_gradients(parameters: Iterable[nn.Parameter], group: Group = None) -> None:
    """Divide ``p.grad`` of experts by W, in place; once per step, before clipping. Sends nothing.

    The gradient is then that of the mean of the ranks' losses. A missing gradient stays missing, a
    frozen parameter's gradient stays as it is, a tied parameter is divided once.
    """
    # Step 12: the sum over the ranks has happened already, in the experts' rows
    raise NotImplementedError("exercise 2.25")
