"""Values of small meta tensors: a program must read them although nothing is computed.

A meta tensor has a shape and no data, but programs look at some values: the number of all samples,
the gradients that exist on some rank. So a small tensor that comes from the CPU or from a constant
keeps its values in a *shadow*, a CPU tensor beside the meta tensor. Operators on shadowed tensors
compute on the shadows as well, the transport moves them, and ``item()`` reads them. A value that no
shadow knows, a loss for example, reads as 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .internals import Unseen

READS_VALUES = {"_local_scalar_dense", "_to_copy", "copy_", "equal", "is_nonzero"}
CONSTANTS = {"zeros", "ones", "full", "arange", "scalar_tensor"}
KNOWN = 8192  # elements that a shadow may have


def shadow_of(tensor: Tensor) -> Tensor | None:
    """The shadow of a meta tensor; None if its values are unknown."""
    return getattr(tensor, "_shadow", None)


def shadow(tensor: Tensor) -> Tensor | None:
    """The values of a tensor: its own, or for a meta tensor its shadow's; None if unknown."""
    return shadow_of(tensor) if tensor.is_meta else tensor


def set_shadow(tensor: Tensor, values: Tensor | None) -> None:
    """Let a meta tensor have ``values``; a shadow that it has already is written in place."""
    now = shadow_of(tensor)
    if now is not None and values is not None and now.shape == values.shape:
        now.copy_(values)
    elif now is not values:
        tensor._shadow = values if values is None else values.clone()


def read_value(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that looks at values: on the shadows, if a meta tensor is given."""
    given = _tensors((args, kwargs))
    if not any(t.is_meta for t in given):
        return with_shadow(func, args, kwargs, func(*args, **kwargs))
    if func.overloadpacket is torch.ops.aten._to_copy:
        return _convert(args[0], kwargs)
    if func.overloadpacket is torch.ops.aten.copy_:
        return _copy(func, args, kwargs)
    if all(shadow(t) is not None for t in given):
        return func(*_shadowed(args), **kwargs)
    if func.overloadpacket is torch.ops.aten._local_scalar_dense:
        return 0.0 if args[0].dtype.is_floating_point else 0
    return func(*args, **kwargs)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """``copy_`` from or to a meta tensor."""
    target, source = args[:2]
    values = shadow(source)
    if not target.is_meta:
        return target.zero_() if values is None else target.copy_(values)
    if values is not None and values.numel() <= KNOWN and target.numel() <= KNOWN:
        set_shadow(target, values.to(target.dtype).expand(target.shape))
    else:
        set_shadow(target, None)
    return target


def _convert(tensor: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """A copy of a meta tensor with another dtype or device; unknown values become zeros."""
    known = shadow(tensor)
    dtype = kwargs.get("dtype") or tensor.dtype
    if torch.device(kwargs.get("device") or "meta").type != "meta":
        zeros = torch.zeros(tensor.shape, dtype=dtype)
        return zeros if known is None else known.to(dtype, copy=True)
    layout = kwargs.get("memory_format") or torch.preserve_format
    made = torch.empty_like(tensor, dtype=dtype, memory_format=layout)
    if known is not None:
        set_shadow(made, known.to(dtype))
    return made


def with_shadow(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Give ``out`` a shadow if all its inputs are known and small."""
    made = [t for t in _tensors(out) if t.is_meta]
    if not made:
        return out
    given = _tensors((args, kwargs))
    known = [shadow(t) for t in given]
    if any(t is None or t.numel() > KNOWN for t in known) or any(t.numel() > KNOWN for t in made):
        for tensor in (*made, *_written(func, args)):
            set_shadow(tensor, None)
    elif given or func.overloadpacket.__name__ in CONSTANTS:
        on_cpu = kwargs | ({"device": "cpu"} if kwargs.get("device") is not None else {})
        values = func(*_shadowed(args), **on_cpu)
        for tensor, value in zip(made, _tensors(values), strict=True):
            tensor._shadow = value
    return out


def _written(func: Any, args: Any) -> list[Tensor]:
    """The meta tensors that an operator changes."""
    pairs = zip(func._schema.arguments, args, strict=False)
    writes = [v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in _tensors(writes) if t.is_meta]


def _tensors(values: Any) -> list[Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, Tensor)]


def _shadowed(args: Any) -> Any:
    return tree_map(lambda t: shadow(t) if isinstance(t, Tensor) else t, args)


class HostOnMeta(TorchFunctionMode):
    """Numbers that a program keeps in the CPU's memory stay without data here.

    A tensor of a floating dtype that it makes there, or moves there, is a meta tensor, because
    simulated hosts share this machine's memory. Integers are real: headers, lengths, clocks.
    """

    MAKES = (torch.empty, torch.zeros, torch.ones, torch.full)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.MAKES and kwargs.get("device") is None:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            kwargs |= {"device": "meta"} if dtype.is_floating_point else {}
        elif func in (Tensor.cpu, Tensor.to) and args[0].is_meta and args[0].is_floating_point():
            with Unseen():  # as any copy between devices: no work of the GPU's
                return torch.empty_like(args[0], dtype=_dtype_in((*args, *kwargs.values())))
        return func(*args, **kwargs)


def _dtype_in(values: Any) -> torch.dtype | None:
    return next((v for v in values if isinstance(v, torch.dtype)), None)
