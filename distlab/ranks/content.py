"""A rank's result on its way to the grader: JSON, and behind it the memory of the tensors.

The bytes come from a process that runs code nobody trusts. JSON can only become plain data,
whoever wrote it, and memory only tensors. Other types are written as an object with one entry,
whose name is that of the type. Equal results have equal bytes. What was one object or one piece of
memory in the rank is several here: a check that asks for that asks in the rank.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

HEAD = 8  # bytes: the length of the JSON
ALLOWED = "tensors, numbers, strings, None, lists, tuples and dicts"
_dumps = json.dumps  # bound before learner code runs, which may replace it
_AS_IT_IS = frozenset({bool, int, float, str, type(None)})
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


# -- in the rank ----------------------------------------------------------------------------------
def packed(value: Any) -> bytes:
    """``value`` as bytes. Raises TypeError if it has something else than plain data and tensors."""
    memory = bytearray()
    text = _dumps(_plain(value, memory)).encode()
    return len(text).to_bytes(HEAD, "little") + text + memory


def _plain(value: Any, memory: bytearray) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is list:
        if _AS_IT_IS.issuperset(map(type, value)):
            return value
        return [_plain(each, memory) for each in value]
    if kind in (tuple, torch.Size, set):
        return {kind.__name__: [_plain(each, memory) for each in value]}
    if kind in (dict, OrderedDict):
        pairs = [[_plain(key, memory), _plain(each, memory)] for key, each in value.items()]
        return {kind.__name__: pairs}
    if kind in (torch.dtype, torch.device):
        return {kind.__name__: str(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if isinstance(value, Tensor):
        return _tensor(value, memory)
    raise TypeError(f"a rank may return {ALLOWED} only: not {kind.__name__}")


def _tensor(value: Tensor, memory: bytearray) -> dict[str, Any]:
    """The entry of a tensor; its memory goes behind that of the others."""
    kind, begin = type(value), len(memory)
    if kind not in (Tensor, nn.Parameter):
        raise TypeError(f"a rank may return {ALLOWED} only: not {kind.__name__}")
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        what = f"a tensor with {value.layout}, on {value.device}, of {value.dtype}"
        raise TypeError(f"a rank may not return {what}")
    own = value.detach().resolve_conj().resolve_neg().cpu()
    reach = 1 + sum((n - 1) * s for n, s in zip(own.shape, own.stride(), strict=True))
    flat = own.as_strided((reach if own.numel() else 0,), (1,), own.storage_offset())
    memory += flat.view(torch.uint8).numpy().tobytes()
    about = [str(own.dtype), list(own.shape), list(own.stride()), value.requires_grad]
    return {kind.__name__: [begin, len(memory) - begin, *about]}


# -- in the grader --------------------------------------------------------------------------------
def unpacked(content: bytes) -> Any:
    """The value that was packed. Raises ValueError if ``packed`` has not made these bytes."""
    end = HEAD + int.from_bytes(content[:HEAD], "little")
    memory = memoryview(content)[end:]
    try:
        return json.loads(content[HEAD:end], object_hook=lambda entry: _read(entry, memory))
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"no result of a rank: {error}") from None


def _read(entry: dict[str, Any], memory: memoryview) -> Any:
    ((kind, told),) = entry.items()
    if kind in ("Tensor", "Parameter"):
        begin, length, *about = told
        part = bytearray(memory[begin : begin + length])
        if begin < 0 or len(part) != length:
            raise ValueError("a tensor's memory is not there")
        own = _strided(part, *about)
        return nn.Parameter(own, own.requires_grad) if kind == "Parameter" else own
    return _MADE[kind](told)


_MADE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "dtype": _DTYPES.__getitem__,
    "device": torch.device,
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
}


def _strided(
    part: bytearray, dtype: str, shape: list[int], stride: list[int], requires_grad: bool
) -> Tensor:
    kind = _DTYPES[dtype]
    flat = torch.frombuffer(part, dtype=kind) if part else torch.empty(0, dtype=kind)
    return flat.as_strided(shape, stride).requires_grad_(requires_grad)
