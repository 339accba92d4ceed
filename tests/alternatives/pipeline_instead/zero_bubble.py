# for: 2.13
"""Written differently: each layer's forward is replaced for the call, W waits in a plain list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .pipeline_parallel import Pipeline, one_f_one_b
from .pipeline_schedules import Step


def zero_bubble(ranks: int, micro_batches: int) -> list[list[Step]]:
    order = one_f_one_b(ranks, micro_batches)
    for rank, steps in enumerate(order):
        split: list[Step] = []
        backwards = [step for step in steps if step.kind == "B"]
        number = 0
        for step in steps:
            split.append(step)
            if step.kind == "B":
                if number >= rank:
                    split.append(backwards[number - rank]._replace(kind="W"))
                number += 1
        given = max(number - rank, 0)
        split += [step._replace(kind="W") for step in backwards[given:]]
        order[rank] = split
    return order


def split_forward(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Any]]:
    later: list[Any] = []
    changed: list[tuple[nn.Module, bool, Any]] = []

    def instead(layer: nn.Module, usual: Any) -> Any:
        weights = tuple(p for p in layer.parameters() if p.requires_grad)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != 1 or (not isinstance(args[0], Tensor)):
                return usual(*args, **kwargs)
            inner = args[0].detach()
            if args[0].requires_grad:
                inner.requires_grad_()
            output = usual(inner)
            if not output.requires_grad:
                return output
            return Split.apply(later, (inner, output), args[0], *weights)

        return forward

    try:
        for layer in module.modules():
            if list(layer.children()) or not any(p.requires_grad for p in layer.parameters()):
                continue
            changed.append((layer, "forward" in vars(layer), layer.forward))
            layer.forward = instead(layer, layer.forward)
        return (module(x), later)
    finally:
        for layer, own, usual in changed:
            if own:
                layer.forward = usual
            else:
                del layer.forward


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, later: list[Any], graph: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.later, ctx.graph, ctx.parameters = (later, graph, parameters)
        return graph[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inner, output = ctx.graph
        wanted = None
        if inner.requires_grad:
            wanted = torch.autograd.grad(
                [output], [inner], [gradient], retain_graph=True, allow_unused=True
            )[0]
        ctx.later.append((output, gradient, ctx.parameters))
        return (None, None, wanted) + (None,) * len(ctx.parameters)


def weight_gradients(later: list[Any]) -> None:
    todo = list(later)
    later.clear()
    todo.reverse()
    while todo:
        output, gradient, parameters = todo.pop()
        found = torch.autograd.grad(output, parameters, gradient, allow_unused=True)
        with torch.no_grad():
            for parameter, part in zip(parameters, found, strict=True):
                if part is not None and parameter.grad is None:
                    parameter.grad = part.clone()
                elif part is not None:
                    parameter.grad += part


class ZeroBubblePipeline(Pipeline):
    kinds = "FBW"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.later: dict[tuple[int, int], list[Any]] = {}

    def call(self, stage: int, i: int, x: Tensor) -> Tensor:
        if "W" not in {each.kind for each in self.steps}:
            return self.chunks[stage](x)
        y, later = split_forward(self.chunks[stage], x)
        self.later[stage, i] = later
        return y

    def take(self, step: Step) -> None:
        kind, stage, i = step
        if kind != "W":
            return super().take(step)
        later = self.later.pop((stage, i))
        return weight_gradients(later)
