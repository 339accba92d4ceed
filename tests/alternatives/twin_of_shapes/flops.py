# for: 4.17
"""Written differently: a deep copy of the model whose tensors have no storage is run."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class FlopCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += operator_flops(func.overloadpacket, args, out)
        return out


def operator_flops(operator: Any, args: Sequence[Any], out: Any) -> int:
    name = str(operator).rsplit(".", 1)[-1]
    a = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
    if name in a:
        return 2 * math.prod(out.shape) * args[a[name]].shape[-1]
    if name == "convolution":
        met = args[0] if args[6] else out
        return 2 * math.prod(met.shape) * math.prod(args[1].shape[1:])
    if name == "convolution_backward":
        met = args[1] if args[7] else args[0]
        each = 2 * math.prod(met.shape) * math.prod(args[2].shape[1:])
        return each * (int(args[10][0]) + int(args[10][1]))
    return 0


def count_flops(model: nn.Module, *inputs: Any) -> int:

    def stand_in(t: Tensor) -> Tensor:
        like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        if isinstance(t, nn.Parameter):
            return nn.Parameter(like, requires_grad=t.requires_grad)
        return like

    memo: dict[int, Any] = {}
    for module in model.modules():
        held = tree_leaves([module._parameters, module._buffers, vars(module)])
        for t in held:
            if isinstance(t, Tensor) and id(t) not in memo:
                memo[id(t)] = stand_in(t)
    twin = copy.deepcopy(model, memo)
    shapes = tree_map_only(Tensor, lambda t: stand_in(t.detach()), inputs)
    trains = any(p.requires_grad for p in twin.parameters())
    counter = FlopCounter()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with torch.enable_grad(), torch.device("meta"), sdpa_kernel([SDPBackend.MATH]), counter:
            outs = twin(*shapes)
            total = None
            for t in tree_leaves(outs):
                if trains and isinstance(t, Tensor) and t.requires_grad:
                    one = (t.abs() if t.is_complex() else t).sum().double()
                    total = one if total is None else total + one
            if total is not None:
                total.backward()
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    return counter.flops
