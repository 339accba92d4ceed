"""How long an operator takes on the cluster's GPU: a roofline over counted FLOPs and bytes.

time = max(FLOPs / (FLOP/s of its dtype), bytes read and written / memory bandwidth, kernel)

FLOPs are counted for matrix products, convolutions and attention by torch's own table
(``torch.utils.flop_counter``); every other operator is bound by memory. Views cost nothing. Works
on meta tensors, which have shapes but no data: a model of any size then costs neither memory nor
arithmetic. Operators whose tensors' sizes say nothing about their work are counted as
``unmodelled``.

Programs look at some values all the same; see ``shadows.py``. Attention counts as the fused kernel
that GPUs run, which never writes its matrix of scores (Dao et al. 2022, arXiv 2205.14135).

Source: Williams, Waterman & Patterson 2009 (the roofline model).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..memory import PeakMemory
from .shadows import READS_VALUES, read_value, with_shadow

if TYPE_CHECKING:
    from .world import RankState, World

VIEWS = {"detach", "lift_fresh", "alias", "_unsafe_view"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# work that the sizes of inputs and outputs don't tell
UNKNOWN = {"nonzero", "unique", "_unique2", "sort", "topk", "multinomial", "linalg_svd", "bincount"}


class ComputeModel(TorchDispatchMode):
    """Moves one rank's clock by the modelled time of every operator; follows its memory."""

    def __init__(self, world: World, state: RankState) -> None:
        super().__init__()
        self.world, self.state, self.gpu = world, state, world.network.cluster.gpu
        self.memory = PeakMemory()
        self.unmodelled: Counter[str] = Counter()
        self.flops = 0.0
        self.kind: dict[Any, str] = {}
        _follow_phases(world)

    def __enter__(self) -> ComputeModel:
        self.fused = FusedAttention()
        self.fused.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self.fused.__exit__(*exc)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see Ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = self.kind.get(func)
        if kind is None:
            kind = self.kind[func] = _kind(func)
        if kind == "value":
            return read_value(func, args, kwargs)
        if kind == "view":
            return with_shadow(func, args, kwargs, func(*args, **kwargs))
        out = with_shadow(func, args, kwargs, self.memory.watch(func, args, kwargs))
        if kind == "free":
            return out
        self.world.compute(self.state, self._seconds(func, kind, args, kwargs, out))
        return out

    def _seconds(self, func: Any, kind: str, args: Any, kwargs: Any, out: Any) -> float:
        if kind == "unknown":
            self.unmodelled[str(func)] += 1
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        seconds = sum(_nbytes(t) for t in tensors) / self.gpu.bandwidth
        if kind == "flops":
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            self.flops += flops
            seconds = max(seconds, flops / self._rate(tensors[0].dtype))
        return max(seconds, self.gpu.kernel)

    def _rate(self, dtype: torch.dtype) -> float:
        name = str(dtype).removeprefix("torch.")
        return self.gpu.flops.get(name, self.gpu.flops["float32"])


class FusedAttention(TorchFunctionMode):
    """On meta tensors, attention becomes the one operator that a GPU would run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        attention = func is torch.nn.functional.scaled_dot_product_attention
        if not attention or not args[0].is_meta or kwargs.get("attn_mask") is not None:
            return func(*args, **kwargs)
        causal, dropout = kwargs.get("is_causal", False), kwargs.get("dropout_p", 0.0)
        out = torch.ops.aten._scaled_dot_product_flash_attention(*args[:3], dropout, causal)
        return out[0]


def _kind(func: Any) -> str:
    """How an operator is timed: value, view, free, flops, unknown or memory."""
    name = func._schema.name.split("::")[1]
    if func.namespace in ("c10d", "_c10d_functional", "profiler"):
        return "free"
    if name in READS_VALUES:
        return "value"
    if func.is_view or name in VIEWS:
        return "view"
    if name in FREE:
        return "free"
    if func.overloadpacket in flop_registry:
        return "flops"
    if name in UNKNOWN or not func._schema.returns:
        return "memory" if name.startswith("_foreach") else "unknown"
    return "memory"


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_followed: list[Any] = []


def _follow_phases(world: World) -> None:
    """Know forward and optimizer steps, once per process."""
    if _followed:
        return

    def module(step: int) -> Callable[..., None]:
        def call(*_: Any) -> None:
            ledger = world.mine.ledger
            ledger.depth += step
            ledger.phase = "forward" if ledger.depth > 0 else ""

        return call

    def optimizer(phase: str) -> Callable[..., None]:
        return lambda *_: setattr(world.mine.ledger, "phase", phase)

    _followed.append(register_module_forward_pre_hook(module(1)))
    _followed.append(register_module_forward_hook(module(-1), always_call=True))
    _followed.append(register_optimizer_step_pre_hook(optimizer("optimizer")))
    _followed.append(register_optimizer_step_post_hook(optimizer("")))
