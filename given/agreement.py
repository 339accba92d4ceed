"""Agreement before ranks communicate: which ranks take part, and that all bring the same.

A rank that raises because of a value that it alone has leaves the others waiting for it. So there
are two kinds of errors. Every rank finds the error by itself, from arguments that are equal
everywhere. Or the ranks tell each other first and then raise together.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None


def rank_in(group: Group) -> int:
    """This rank's number in ``group``. Raises ValueError if it is no member.

    torch's own collectives only warn there and do nothing: the rank would go on with its own value.
    """
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"global rank {dist.get_rank()} is no member of the group")
    return rank


def takes_cpu(group: Group) -> bool:
    """Whether tensors on the CPU can travel in ``group``: NCCL alone takes none."""
    return "cpu:" in dist.get_backend_config(group)


def device_in(group: Group) -> torch.device:
    """Where a number of this rank has to be, so that ``group`` can add it up: the CPU, if possible.

    With NCCL it is the GPU, also if the counted objects are on the CPU, or if there are none.
    """
    return torch.device("cpu" if takes_cpu(group) else f"cuda:{torch.cuda.current_device()}")


def expect_alike(tensors: Sequence[Tensor], group: Group = None) -> None:
    """Raise the same ValueError on every rank unless all pass tensors alike, in the same order.

    Alike means: of one shape and dtype, with dimensions in one order in memory, and trainable on
    all ranks or on none. Cost: one all-reduce of 48 bytes, for the most and the least of three
    numbers: tensors, elements, and a checksum of the rest. Raises ValueError, and sends nothing, on
    a rank that is no member of ``group``.
    """
    rank_in(group)
    kinds = [(tuple(t.shape), str(t.dtype), order_in_memory(t), t.requires_grad) for t in tensors]
    facts = [len(tensors), sum(t.numel() for t in tensors), zlib.crc32(str(kinds).encode())]
    known = torch.tensor([*facts, *(-fact for fact in facts)], device=device_in(group))
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    most, least = known[:3].tolist(), (-known[3:]).tolist()
    if most != least:
        raise ValueError(
            "the ranks pass tensors that differ in number, shape, dtype, order of strides or "
            f"requires_grad: {least[0]} to {most[0]} tensors of together {least[1]} to {most[1]} "
            "elements"
        )


def order_in_memory(tensor: Tensor) -> list[int]:
    """The dimensions of ``tensor`` that have a length, outermost in memory first."""
    longer = [d for d in range(tensor.dim()) if tensor.shape[d] > 1]
    return sorted(longer, key=tensor.stride, reverse=True)
