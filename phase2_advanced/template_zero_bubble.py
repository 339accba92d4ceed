# Exercises 2.13: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.13
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Zero bubble (ZB-H1): the backward in two halves, and the second one where a rank would be idle.

A backward computes two things. The stage before waits for the gradient of the input. The gradients
of the weights are needed only by the optimizer. So they become separate steps B and W, each about
as long as a forward. The stage before starts one step earlier, and W fills time that would be
bubble. With p ranks and m >= p micro-batches, F, B and W of one length each:

===========  =====================  ====================  ===================================
schedule     a step takes           bubble                activations kept by rank r
===========  =====================  ====================  ===================================
1F1B         3(m + p-1)             (p-1) / (m + p-1)     min(m, p-r)
ZB-H1        3m + p-1               (p-1) / (3m + p-1)    min(m, p), until W
===========  =====================  ====================  ===================================

In general 1F1B idles for (p-1)(F + B + W), ZB-H1 for (p-1)(F + B - W). With m < p a step of ZB-H1
takes 2(m + p) - 1. (ZB-H2 keeps up to 2p-1 micro-batches, and has no bubble.) Messages and bytes
are those of 1F1B. A second backward over the whole stage would give the weights' gradients, too,
but it would propagate through the stage twice. Here every layer keeps a graph of its own, and B and
W together do the arithmetic of one backward. The price: the tensors that a layer's W reads stay in
memory until W.

Invariant: gradients as without the split. Source: Qi et al. 2023 (arXiv 2401.10241), section 2.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from .template_pipeline_parallel import Pipeline, one_f_one_b
from .template_pipeline_schedules import Step


def zero_bubble(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps in ZB-H1: 1F1B with B split into B (inputs) and W (weights).

    No step waits for a W: it fills time in which a rank would be idle. No rank keeps more than
    min(m, p) micro-batches (until their W), as many as 1F1B keeps on rank 0. With F, B and W of
    equal length a step takes 3m + p-1 if m >= p, and no longer than 1F1B's otherwise. Stage r is on
    rank r. Raises ValueError if a number is below 1.
    """
    # Step 1: begin with the order of 1F1B
    # Step 2: after each B take the oldest W that waits, if more than r are waiting
    # Step 3: at the end take the W that are left
    raise NotImplementedError("exercise 2.13")


def split_forward(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Any]]:
    """``module(x)``, whose backward leaves the weights out, and a list that is still empty.

    A backward from the output gives the gradients of inputs and fills the list;
    ``weight_gradients`` does the rest. It splits the layers: modules without children that have
    trainable parameters and are called with one tensor, by position. Each of them must also return
    one tensor, so a module with a GRU can't be given. Other parameters get their gradient in the
    backward already, frozen ones never. Both halves together do the arithmetic of an ordinary
    backward, no more; forward runs each layer once. The module is left as it was, also after an
    exception, and may be called again before the backward.
    """
    # Step 4: let every layer compute on a detached input, so that it has a graph of its own
    # Step 5: put `Split` in place of that graph: its backward computes the input's gradient and
    #         notes what W has left to do
    raise NotImplementedError("exercise 2.13")


class Split(torch.autograd.Function):
    """A layer's result whose backward computes the gradient of the input, and no weight's.

    The parameters are inputs, so that the result requires a gradient even if ``x`` does not.
    """

    @staticmethod
    def forward(ctx: Any, later: list[Any], graph: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        """``graph``: (input, output) of the layer's own graph."""
        ctx.later, ctx.graph, ctx.parameters = later, graph, parameters
        return graph[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The input's gradient now; (output, its gradient, parameters) for later."""
        # Step 6: torch.autograd.grad computes only what it is asked for; W still needs the graph
        raise NotImplementedError("exercise 2.13")


def weight_gradients(later: list[Any]) -> None:
    """Add the gradients of the weights that ``split_forward`` left out to ``p.grad``.

    Empties ``later``, and so frees the tensors that the layers kept.
    """
    # Step 7: one backward per layer, from its output to its parameters only
    raise NotImplementedError("exercise 2.13")


class ZeroBubblePipeline(Pipeline):
    """A ``Pipeline`` that also takes W steps: B then leaves the weights' gradients to them.

    Loss, gradients and messages are a ``Pipeline``'s, also for a schedule without any W. There B
    does it all. A micro-batch's activations are freed when its W is done.
    """

    kinds = "FBW"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later: dict[tuple[int, int], list[Any]] = {}  # by stage and micro-batch

    def call(self, stage: int, i: int, x: Tensor) -> Tensor:
        """The module of a stage, called so that its backward leaves the weights' gradients out."""
        # Step 8: keep the work that is left for W, if this schedule has W steps
        raise NotImplementedError("exercise 2.13")

    def take(self, step: Step) -> None:
        """Do one step of the schedule."""
        # Step 9: do W here, all other steps as in Pipeline
        raise NotImplementedError("exercise 2.13")
