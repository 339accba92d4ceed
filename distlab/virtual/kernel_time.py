"""Seconds of one operator on a GPU whose kernels were measured (``hardware/kernels.py``).

The operator's arguments give what its formula asks for: FLOPs, bytes, and the sizes of attention
and of convolutions. A GPU without measured kernels has the roofline of ``compute.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..hardware.clusters import Gpu
from ..hardware.kernels import Convolution, Kernels

# operators that read only the rows that they are asked for, not all of their first argument
LOOKUPS = {"embedding", "index_select", "gather", "index"}
TENSOR_FLOAT_32 = "tfloat32"


class Cost(NamedTuple):
    """What an operator takes: ``part`` is a kind of kernel, as in ``hardware/kernels.py``."""

    part: str
    seconds: float


NOTHING = Cost("memory", 0.0)


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def dtype_of(tensor: Tensor) -> str:
    """Its dtype as in a cluster's file; float32 is tfloat32 where torch allows that."""
    if tensor.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return TENSOR_FLOAT_32
    return str(tensor.dtype).removeprefix("torch.")


def kernel_cost(
    kernels: Kernels, gpu: Gpu, func: Any, args: Any, kwargs: Any, out: Any, flops: float
) -> Cost:
    """The cost of the operator; ``flops`` is 0 for one that is bound by memory."""
    name = func._schema.name.split("::")[1]
    tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
    if "attention" in name and flops:
        cost = Cost("attention", _attention(kernels, gpu, name, args, flops))
    elif name.startswith("convolution") and flops:
        cost = Cost("convolution", kernels.convolved(gpu, flops, _convolution(name, args)))
    elif flops:
        seconds = kernels.matrix_product(gpu, flops, nbytes_of(tensors), dtype_of(tensors[0]))
        cost = Cost("product", seconds)
    else:
        if name in LOOKUPS:
            tensors = [*tensors[1:], *tree_leaves(out)]
        cost = Cost("memory", kernels.moved(gpu, name, nbytes_of(tensors)))
    return Cost(cost.part, max(cost.seconds, kernels.kernel))


def _attention(kernels: Kernels, gpu: Gpu, name: str, args: Any, flops: float) -> float:
    backward = name.endswith("_backward")
    query, key = args[1:3] if backward else args[:2]
    at = 11 if backward else 4
    causal = bool(args[at]) if len(args) > at else False
    way = "backward" if backward else "forward"
    width, length = query.shape[-1], key.shape[-2]
    done = flops / 2 if causal else flops
    dtype = str(query.dtype).removeprefix("torch.")  # no attention kernel computes in tfloat32
    return kernels.fused_attention(gpu, way, done, width, length, causal, dtype)


def _convolution(name: str, args: Any) -> Convolution:
    backward = name.endswith("_backward")
    image, weight = args[1:3] if backward else args[:2]
    stride, groups = (args[4], args[9]) if backward else (args[3], args[8])
    return Convolution(
        way="backward" if backward else "forward",
        dtype=dtype_of(image),
        # on meta tensors results lose their layout, and only weights keep it
        channels_last=weight.stride(3) == weight.shape[1] > 1,
        into=image.shape[1],
        out=weight.shape[0],
        side=image.shape[-1],
        kernel=weight.shape[-1],
        stride=stride[0],
        groups=groups,
        share=0.0,
    )


def update_seconds(kernels: Kernels, gpu: Gpu, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of the step that ``optimizer`` has just done: all its tensors read, all but the
    gradients written."""
    nbytes = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                state = [t for t in optimizer.state[p].values() if isinstance(t, Tensor)]
                nbytes += 2 * nbytes_of([p, *state]) + nbytes_of([p.grad])
    how = "fused" if getattr(optimizer, "runs_fused", False) else "foreach"
    return kernels.updated(gpu, how, nbytes)
