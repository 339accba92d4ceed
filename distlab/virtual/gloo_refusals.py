"""Calls that gloo refuses, and tensors that it moves wrongly: virtual ranks refuse both.

All of it is ``c10d/ProcessGroupGloo.cpp`` of torch 2.8 to 2.15, which raises RuntimeError:

- a dtype that gloo lacks, in collectives (``GENERATE_ALL_TYPES``); messages are bytes to it.
  Complex numbers are pairs of real ones, but not in ``gather`` (torch 2.8: nor in ``broadcast``,
  ``reduce`` and ``reduce_scatter``, which is forgiven here);
- BAND, BOR, BXOR of other numbers than integers, AVG (``toFunction``);
- a message with gaps (``checkSingleTensor``), and one of a GPU: its address is no memory of the
  host, so the process ends.

Six operators move memory as it lies (``getDataPointer``). There gloo reports neither gaps nor
strides that differ between ranks: values arrive in other places. The other operators copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..observe.log import P2P
from .part import Part
from .shards import wholes_of

AS_IT_LIES = {"all_reduce", "broadcast", "reduce", "scatter", "reduce_scatter"}
INTEGERS = {torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64}
DTYPES = INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
BITWISE = {"BAND": ReduceOp.BAND, "BOR": ReduceOp.BOR, "BXOR": ReduceOp.BXOR}


def refuse(part: Part) -> None:
    """Raise RuntimeError for a call that gloo refuses, ValueError for one whose data
    it would move wrongly."""
    if part.op in P2P:
        _refuse_message(part)
        return
    for tensor in (*wholes_of(part.gives), *wholes_of(part.gets)):
        dtype = tensor.dtype
        if dtype not in DTYPES and not (dtype.is_complex and part.op != "gather"):
            raise RuntimeError(
                f"Invalid scalar type: gloo's {part.op} takes no {_name(dtype)}; it takes the "
                "bytes of one (.view(torch.uint8)) where nothing is reduced"
            )
    _refuse_reduction(part)
    if part.op == "all_reduce" and len(part.gives) > 1 and part.gives[0].is_cuda:
        raise RuntimeError("ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda")
    tensors = _memory(part)
    for tensor in tensors:
        ordered = tensor.is_contiguous() if part.op == "gather" else _is_dense(tensor)
        if not ordered or _layout(tensor) != _layout(tensors[0]):
            raise ValueError(
                f"{part.op} was given tensors with strides {tensors[0].stride()} and "
                f"{tensor.stride()} (shape {tuple(tensor.shape)}): gloo moves memory as it lies, "
                "so values would arrive in other places; use .contiguous()"
            )


def other_strides(first: Part, second: Part) -> str:
    """How the memory of two ranks' parts of one collective differs; empty if it does not."""
    one, other = _memory(first), _memory(second)
    if not one or not other or _layout(one[0]) == _layout(other[0]):
        return ""
    return (
        f"ranks pass tensors with other strides to {first.op}: {one[0].stride()} on rank "
        f"{first.rank.index}, {other[0].stride()} on rank {second.rank.index}; gloo moves memory "
        "as it lies, so values would arrive in other places"
    )


def _memory(part: Part) -> Sequence[Tensor]:
    """The tensors whose memory is moved as it lies."""
    joined = part.op == "all_reduce" and len(part.gives) > 1
    cut = part.op == "reduce_scatter" and len(part.payload) < len(part.gives)
    if part.op == "gather":
        return part.gives  # up to torch 2.8; arriving data are copied
    return () if part.op not in AS_IT_LIES or joined or cut else (*part.gives, *part.gets)


def _refuse_message(part: Part) -> None:
    (tensor,) = part.gives or part.gets
    if tensor.is_cuda:
        raise RuntimeError(
            f"{part.op} of a tensor on {tensor.device} in a group of gloo, which passes messages "
            "between CPUs only: use .cpu(), or a group of NCCL"
        )
    if not tensor.is_contiguous():
        raise RuntimeError(
            f"input tensor has to be contiguous: a message of shape {tuple(tensor.shape)} has "
            f"strides {tensor.stride()}"
        )


def _refuse_reduction(part: Part) -> None:
    op, dtypes = part.reduce_op, {tensor.dtype for tensor in wholes_of(part.gets)}
    if op is None:
        return
    name = next((name for name, each in BITWISE.items() if op == each), None)
    if name and not dtypes <= INTEGERS:
        raise RuntimeError(f"Cannot use ReduceOp.{name} with non-integral dtype")
    if op == ReduceOp.AVG and not any(tensor.is_meta for tensor in part.gets):
        raise RuntimeError("Cannot use ReduceOp.AVG with Gloo (torch 2.8): sum, then divide")
    if op != ReduceOp.SUM and any(dtype.is_complex for dtype in dtypes):
        raise RuntimeError(f"{part.op} does not support {op} on complex tensors")


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one piece of memory, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _layout(tensor: Tensor) -> Any:
    """The order of its elements in memory; tensors without gaps, of one shape."""
    if tensor.is_contiguous():
        return "contiguous"
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
