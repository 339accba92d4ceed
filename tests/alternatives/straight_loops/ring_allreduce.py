# for: 3.1, 3.2, 3.3
"""Written from the docstrings alone."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in

Op = Literal["sum", "mean", "max"]
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,
    "max": lambda ours, theirs: torch.maximum(ours, theirs, out=ours),
}
DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


def check_arguments(tensor: Tensor, op: str, group: Group) -> tuple[int, int]:
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, not {op!r}")
    if op == "mean" and (not tensor.is_floating_point()):
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")
    return (rank_in(group), dist.get_world_size(group))


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    with torch.no_grad():
        if tensor.is_contiguous():
            yield tensor.detach().reshape(tensor.numel())
            return
        row = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        row.view(tensor.shape).copy_(tensor.detach())
    yield row
    with torch.no_grad():
        tensor.detach().copy_(row.view(tensor.shape))


def exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group
) -> list[dist.Work]:
    receive = [dist.P2POp(dist.irecv, incoming, None, group, 0, source)] if incoming.numel() else []
    send = [dist.P2POp(dist.isend, outgoing, None, group, 0, to)] if outgoing.numel() else []
    both = receive + send
    return list(dist.batch_isend_irecv(both)) if both else []


def wait(handles: Sequence[dist.Work]) -> None:
    for handle in handles:
        handle.wait()


def reduce_scatter_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    walk = [(rank - distance) % world_size for distance in range(1, world_size + 1)]
    return list(itertools.pairwise(walk))


def ring_reduce_scatter(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    rank, size = check_arguments(tensor, op, group)
    with flattened(tensor) as flat:
        parts = flat.tensor_split(size)
        for outgoing, arriving in reduce_scatter_steps(rank, size):
            came = torch.empty_like(parts[arriving])
            wait(
                exchange(parts[outgoing], (rank + 1) % size, came, (rank + size - 1) % size, group)
            )
            parts[arriving].copy_(COMBINE[op](came, parts[arriving]))
            del came
        if op == "mean" and size > 1:
            torch.div(parts[rank], size, out=parts[rank])


def all_gather_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    walk = [(rank + world_size - distance) % world_size for distance in range(world_size)]
    return list(itertools.pairwise(walk))


def ring_all_gather(tensor: Tensor, group: Group = None) -> None:
    rank = rank_in(group)
    size = dist.get_world_size(group)
    with flattened(tensor) as flat:
        parts = list(flat.tensor_split(size))
        pending: list[dist.Work] = []
        for outgoing, arriving in all_gather_steps(rank, size):
            handles = exchange(
                parts[outgoing], (rank + 1) % size, parts[arriving], (rank - 1) % size, group
            )
            if parts[arriving].numel():
                handles.pop(0).wait()
            pending += handles
        wait(pending)


def agree(tensor: Tensor, op: str, group: Group = None) -> None:
    rank, size = (rank_in(group), dist.get_world_size(group))
    kind = zlib.crc32(f"{tensor.dtype} {op!r}".encode())
    most = torch.tensor([tensor.numel(), kind, -tensor.numel(), -kind], device=tensor.device)
    heard = torch.empty_like(most)
    for k in range((size - 1).bit_length()):
        wait(exchange(most, (rank + 2**k) % size, heard, (rank - 2**k) % size, group))
        torch.maximum(most, heard, out=most)
    numbers = most.tolist()
    if numbers[0] + numbers[2] or numbers[1] + numbers[3]:
        raise ValueError(
            "not all ranks of the group bring equally many elements, one dtype, one op"
        )


def ring_all_reduce(
    tensor: Tensor, op: Op = "sum", group: Group = None, *, check: bool = False
) -> None:
    if check:
        agree(tensor, op, group)
    rank, size = check_arguments(tensor, op, group)
    with flattened(tensor) as flat:
        parts = flat.tensor_split(size)
        spare = flat.new_empty(parts[0].numel() if size > 1 else 0)
        for step in range(2 * (size - 1)):
            outgoing, arriving = ((rank - step - 1) % size, (rank - step - 2) % size)
            if step >= size - 1:
                outgoing, arriving = ((outgoing + 0) % size, (arriving + 0) % size)
            reducing = step < size - 1
            into = spare[: parts[arriving].numel()] if reducing else parts[arriving]
            wait(exchange(parts[outgoing], (rank + 1) % size, into, (rank - 1) % size, group))
            if reducing:
                COMBINE[op](parts[arriving], into)
            if step == size - 2 and op == "mean":
                parts[rank].div_(size)
