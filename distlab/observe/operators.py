"""The names of torch's communication operators, and the meaning of their arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# dispatcher name -> canonical operator; trailing underscores and "_coalesced" are dropped first
CANONICAL = {
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_any_source": "recv",
    "recv_anysource": "recv",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "gather": "gather",
    "gather_into_tensor": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
# the argument with the tensors that this rank passes in (scatter: gets); the first match counts
PAYLOAD = ("input_tensors", "input_tensor", "input_list", "inputs", "input", "tensors", "tensor")
ROOT = ("root_rank", "dst", "src")
METHODS = [
    *sorted(set(CANONICAL) - {"isend", "irecv", "recv_any_source"}),
    "allreduce_coalesced",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
]


def canonical(name: str) -> str | None:
    """The canonical operator behind a dispatcher or method name, None if it is none."""
    name = name.split(".")[0].rstrip("_").removesuffix("_coalesced")
    return CANONICAL.get(name)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def payload_of(op: str, named: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that this rank passes in (for scatter: gets), from the named arguments."""
    if op == "scatter":
        return list(tensors_in(named["output_tensors"]))
    return list(tensors_in(next((named[k] for k in PAYLOAD if k in named), ())))


def root_of(named: dict[str, Any]) -> int | None:
    """The group rank of the root or peer, None if the operator has none."""
    return next((named[k] for k in ROOT if k in named), None)


def group_of(named: dict[str, Any]) -> dist.ProcessGroup:
    """The group that a dispatcher call names."""
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    group = named["group_name"]
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group


def group_of_backend(backend: Any) -> dist.ProcessGroup | None:
    """The group that a backend object belongs to."""
    return next((g for g in dist.distributed_c10d._world.pg_map if _backend(g) is backend), None)


def patience_of(group: dist.ProcessGroup, named: dict[str, Any]) -> float | None:
    """Seconds after which a wait for this call gives up by itself; None where torch can't tell."""
    own = named.get("timeout", -1)
    if isinstance(own, (int, float)) and own > 0:
        return own / 1000
    default = getattr(getattr(_backend(group), "options", None), "_timeout", None)
    return None if default is None else default.total_seconds()


def _backend(group: dist.ProcessGroup) -> Any:
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):
            return group._get_backend(torch.device(device))
    return None


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors have a byte in common."""
    if one.is_meta or other.is_meta:
        return False
    begin, end = one.data_ptr(), one.data_ptr() + one.nbytes
    return begin < other.data_ptr() + other.nbytes and other.data_ptr() < end


class Sending:
    """Bytes that a rank is sending: after the wait it tells whether they were written to.

    torch counts the writes to a tensor together with those to all its views. A pipelined algorithm
    writes to one part of a tensor while it sends another part, so the count alone would accuse the
    innocent. If the count has changed, the bytes decide. (A meta tensor has no bytes: there the
    count decides.)
    """

    __slots__ = ("bytes", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.bytes = None if tensor.is_meta else _bytes(tensor).clone()

    def overwritten(self) -> bool:
        """Whether the bytes have changed since."""
        if self.tensor._version == self.version:
            return False
        return self.bytes is None or not torch.equal(_bytes(self.tensor), self.bytes)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)
