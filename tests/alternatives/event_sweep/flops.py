# for: 4.17
"""Written differently: FLOPs by a table, on a copy of the model."""

from __future__ import annotations

import copy
import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def product(a, b):
    return 2 * math.prod(a.shape) * b.shape[-1]


def filters(positions, weight):
    return 2 * positions.numel() * math.prod(weight.shape[1:])


TABLE = {
    "aten.mm": lambda out, a, b: product(a, b),
    "aten.bmm": lambda out, a, b: product(a, b),
    "aten.addmm": lambda out, c, a, b, **_: product(a, b),
    "aten.baddbmm": lambda out, c, a, b, **_: product(a, b),
    "aten.convolution": lambda out, x, w, *rest: filters(x if rest[4] else out, w),
    "aten.convolution_backward": lambda out, g, x, w, *rest: (
        filters(x if rest[4] else g, w) * (rest[7][0] + rest[7][1])
    ),
}


def operator_flops(operator, args, out):
    rule = TABLE.get(str(operator))
    return rule(out, *args) if rule else 0


def count_flops(model, *inputs):
    counted = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            counted.append(operator_flops(func.overloadpacket, args, out))
            return out

    gradients = {p: p.grad for p in model.parameters()}
    for p in gradients:
        p.grad = None
    bare = copy.deepcopy(model)._apply(shape_of)
    for p, gradient in gradients.items():
        p.grad = gradient
    shapes = tree_map(lambda x: shape_of(x) if torch.is_tensor(x) else x, inputs)
    random = torch.get_rng_state()
    try:
        _both_ways(bare, shapes, Mode())
    finally:
        torch.set_rng_state(random)
    return sum(counted)


def shape_of(tensor):
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


@torch.enable_grad()
def _both_ways(bare, shapes, mode):
    with mode, sdpa_kernel(SDPBackend.MATH):
        found = [out for out in tree_leaves(bare(*shapes)) if torch.is_tensor(out)]
        sums = [out.sum().double() for out in found if out.requires_grad]
        if sums:
            torch.stack(sums).sum().backward()
