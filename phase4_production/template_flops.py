# Exercises 4.17: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.17
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""FLOPs: a model's need, counted from its operators, and the share of the hardware that it uses.

    MFU  =  FLOPs of the model per sample · samples / seconds / peak FLOP/s

A matrix product of n results, each a sum of k products, costs 2·n·k. Its backward has two products
of the same size, so it costs twice as much. To count parameters instead (6·parameters·tokens)
leaves attention out and takes a convolution for a product.

Cost: one forward and backward without values; no message. Invariant: nothing of the model changes.
Sources: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B for MFU; Narayanan et al. 2021 (arXiv
2104.04473), appendix, for counted FLOPs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .template_monitoring import clock_of

aten = torch.ops.aten


class FlopCounter(TorchDispatchMode):
    """Adds up in ``flops`` the cost of matrix products and convolutions that run inside.

    A multiplication and an addition are two. Everything else counts as nothing: it is bound by
    memory, and the peak that MFU divides by is that of matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func.overloadpacket, args, out)
        return out


def operator_flops(operator: Any, args: Sequence[Any], out: Any) -> int:
    """FLOPs of one call of an ATen operator; 0 if it is neither a product nor a convolution.

    ``aten.mm(a, b)``, ``aten.addmm(c, a, b)``, ``aten.bmm(a, b)``, ``aten.baddbmm(c, a, b)``: 2·n·k
    for n elements of the result, sums of k terms. ``aten.convolution(x, w, bias, stride, padding,
    dilation, transposed, …)``: every element of the result (transposed: of x) meets one filter,
    ``w[0]``. ``aten.convolution_backward(grad_out, x, w, …, transposed, …,
    mask)``: as much for each gradient of x and of w that ``mask`` asks for. The gradient of the
    bias costs nothing.
    """
    # Step 1: products: 2 · elements of `out` · last dimension of `a`
    # Step 2: convolution: 2 · elements of `out` (transposed: of `x`) · elements of `w[0]`
    # Step 3: its backward: the same with `grad_out` for `out`, times the gradients asked for
    raise NotImplementedError("exercise 4.17")


def count_flops(model: nn.Module, *inputs: Any) -> int:
    """FLOPs of one forward and backward of ``model(*inputs)``, also inside ``torch.no_grad()``.

    It computes shapes only, no values. Parameters, gradients, buffers, inputs and torch's random
    state stay as they are, and it takes milliseconds for a model of any size. Tensors keep their
    shapes, strides and dtypes. ``inputs`` may hold them in lists and dicts, beside other values,
    and so may the model's result. Gradients are counted for parameters that have ``requires_grad``,
    and for no inputs. If no parameter has it, no gradient is counted. Attention counts as its two
    products. Work that activation checkpointing does again counts again. Give it the plain model:
    no wrapper that communicates. An exception of the model goes on.
    """

    # Step 4: the same shapes without storage, on the meta device. `torch.func.functional_call` runs
    #         a module on them in place of its own parameters and buffers
    # Step 5: run forward, and backward from a sum of the outputs, inside `FlopCounter`. Backward
    #         runs on the shapes as well: checkpointing calls the model's layers again there
    # Step 6: the caller may have switched gradients off; a model may draw numbers on the CPU
    raise NotImplementedError("exercise 4.17")


def matmul_peak(device: torch.device | str, dtype: torch.dtype, n: int = 1024) -> float:
    """FLOP/s of the best of ten n×n matrix products: a stand-in where no data sheet is at hand."""
    clock = clock_of(torch.device(device))
    a = torch.ones(n, n, device=device, dtype=dtype)
    marks = [clock.mark()]
    for _ in range(10):
        a @ a
        marks.append(clock.mark())
    clock.settle()
    return 2 * n**3 / min(clock.seconds(a, b) for a, b in itertools.pairwise(marks))
