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

from .pipeline_parallel import Pipeline, one_f_one_b
from .pipeline_schedules import Step


def zero_bubble(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps in ZB-H1: 1F1B with B split into B (inputs) and W (weights).

    No step waits for a W: it fills time in which a rank would be idle. No rank keeps more than
    min(m, p) micro-batches (until their W), as many as 1F1B keeps on rank 0. With F, B and W of
    equal length a step takes 3m + p-1 if m >= p, and no longer than 1F1B's otherwise. Stage r is on
    rank r. Raises ValueError if a number is below 1.
    """
    # --- exercise 2.13: start
    # Step 1: begin with the order of 1F1B
    # Step 2: after each B take the oldest W that waits, if more than r are waiting
    # Step 3: at the end take the W that are left
    order = []
    for rank, steps in enumerate(one_f_one_b(ranks, micro_batches)):
        mine: list[Step] = []
        waiting: deque[Step] = deque()
        for step in steps:
            mine.append(step)
            if step.kind == "B":
                waiting.append(step._replace(kind="W"))
                if len(waiting) > rank:
                    mine.append(waiting.popleft())
        order.append([*mine, *waiting])
    return order
    # --- exercise 2.13: end


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
    # --- exercise 2.13: start
    # Step 4: let every layer compute on a detached input, so that it has a graph of its own
    # Step 5: put `Split` in place of that graph: its backward computes the input's gradient and
    #         notes what W has left to do
    later: list[Any] = []
    outer: list[Tensor | None] = []

    def isolate(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            outer.append(None)  # whatever these are, they stay in one graph
            return args, kwargs
        outer.append(args[0])
        return (args[0].detach().requires_grad_(args[0].requires_grad),), kwargs

    def join(layer: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> Tensor:
        x = outer.pop()
        trainable = [p for p in layer.parameters() if p.requires_grad]
        return output if x is None else Split.apply(later, (args[0], output), x, *trainable)

    handles = []
    for layer in module.modules():
        trainable = any(p.requires_grad for p in layer.parameters())
        if trainable and not list(layer.children()):
            handles += [
                layer.register_forward_pre_hook(isolate, with_kwargs=True),
                layer.register_forward_hook(join, with_kwargs=True),
            ]
    try:
        return module(x), later
    finally:
        for handle in handles:
            handle.remove()
    # --- exercise 2.13: end


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
        # --- exercise 2.13: start
        # Step 6: torch.autograd.grad computes only what it is asked for; W still needs the graph
        x, output = ctx.graph
        ctx.later.append((output, gradient, ctx.parameters))
        of_input = None
        if x.requires_grad:
            keep = {"retain_graph": True, "allow_unused": True}
            (of_input,) = torch.autograd.grad(output, x, gradient, **keep)
        return None, None, of_input, *(None for _ in ctx.parameters)
        # --- exercise 2.13: end


def weight_gradients(later: list[Any]) -> None:
    """Add the gradients of the weights that ``split_forward`` left out to ``p.grad``.

    Empties ``later``, and so frees the tensors that the layers kept.
    """
    # --- exercise 2.13: start
    # Step 7: one backward per layer, from its output to its parameters only
    while later:
        output, gradient, parameters = later.pop()
        if output.requires_grad:  # not if the layer uses none of its parameters
            torch.autograd.backward(output, gradient, inputs=parameters)
    # --- exercise 2.13: end


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
        # --- exercise 2.13: start
        # Step 8: keep the work that is left for W, if this schedule has W steps
        if all(step.kind != "W" for step in self.steps):
            return super().call(stage, i, x)
        output, self.later[stage, i] = split_forward(self.chunks[stage], x)
        return output
        # --- exercise 2.13: end

    def take(self, step: Step) -> None:
        """Do one step of the schedule."""
        # --- exercise 2.13: start
        # Step 9: do W here, all other steps as in Pipeline
        if step.kind == "W":
            weight_gradients(self.later.pop((step.stage, step.micro_batch)))
        else:
            super().take(step)
        # --- exercise 2.13: end
