"""A rank's share of a language model with tensor and pipeline parallelism, as a plan wants it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..virtual.isolation import entered
from .llama import Llama
from .models import blocks_of, model_spec
from .plan import Plan
from .recompute import compute_again
from .transformer import drop_out


def whole_model(plan: Plan) -> nn.Module:
    """The model that each rank cuts its share from, on the device that is the default.

    The solutions neither change nor keep it. So its equal blocks are one block: each rank makes
    the whole model, and 96 blocks take it half a second.
    """
    if plan.model_ranks == 1 or plan.impl != "solutions":
        return plan.spec.build()
    model = model_spec(plan.model, plan.length, layers=1).build()
    name = "layers" if isinstance(model, Llama) else "blocks"
    setattr(model, name, nn.ModuleList(blocks_of(model) * plan.spec.layers))
    return model


def as_planned(plan: Plan, share: Any) -> None:
    """Let a rank's share of a GPT recompute and drop out."""
    layers = [layer for chunk in share.chunks for layer in chunk]
    blocks = [layer for layer in layers if hasattr(layer, "qkv")]
    if plan.dropout:
        drop_out(share, plan.dropout, [each for each in layers if hasattr(each, "places")])
    if plan.recompute == "none":
        return
    for block in blocks if plan.sequence_parallel else ():  # exercise 2.18
        block.qkv.regather = block.up.regather = True
    if plan.recompute == "full":
        compute_again(blocks, plan.recompute, contextlib.nullcontext)


class Sent(GradientEdge):
    """In place of an output that is sent: backward needs its node only."""

    requires_grad = True


def follow(pipeline: Any, share: Any, free: bool) -> None:
    """Note in ``share.kept`` the most memory after a forward; ``free`` the outputs that are sent.

    Backward needs no output of a stage, only its node (arXiv 2205.05198, appendix B).
    """
    take = pipeline.take

    def taking(step: Any) -> None:
        take(step)
        key = step.stage, step.micro_batch
        if step.kind == "F":
            share.kept = max(share.kept, entered().mine.model.memory.current)
        elif step.kind == "send F" and free:
            x, output = pipeline.kept[key]
            pipeline.kept[key] = x, Sent(*get_gradient_edge(output))

    pipeline.take = taking
