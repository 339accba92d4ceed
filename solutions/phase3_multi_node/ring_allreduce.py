"""Ring all-reduce: every rank sends to its right neighbour only, and no byte more than it must.

The tensor is cut into W chunks. In the reduce-scatter each chunk travels once around the ring, in
W-1 steps, and collects every rank's part. Then rank r has chunk r complete. In the all-gather, W-1
more steps, the complete chunks travel around the ring. In every step each rank sends one chunk to
its right and receives another from its left. So all links are busy all the time:

    reduce-scatter + all-gather = 2(W-1) messages of N/W bytes per rank,  time 2(W-1)·(α + N/W·β)

for N bytes over W ranks, α seconds per message and β per byte. No algorithm sends fewer than
2(W-1)/W·N bytes per rank. The price of the ring is latency: 2(W-1) messages follow one another.
``segmented_ring`` hides most of it.

Invariants: after step s of the reduce-scatter the chunk that a rank received holds the parts of s+2
ranks. Every chunk is summed in one fixed order, so all ranks end with the same bits. A rank starts
both directions together and then waits for both, so no send waits for a receive that never starts.
NCCL has no messages of int16. All ranks bring the same length and dtype. If not, gloo ends the
process or a rank waits for ever. ``agree``, called before any of the all-reduces, makes that one
error on all ranks.
Sources: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations". Thakur, Rabenseifner & Gropp 2005 (cost model). Hensgen, Finkel & Manber 1988
(dissemination, here the agreement).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group, rank_in

Op = Literal["sum", "mean", "max"]

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # into the first, in place
    "sum": Tensor.add_,
    "mean": Tensor.add_,  # divided by W once, where the sum is complete
    "max": lambda ours, theirs: torch.maximum(ours, theirs, out=ours),
}
DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


def check_arguments(tensor: Tensor, op: str, group: Group) -> tuple[int, int]:
    """(rank in the group, world size of the group), if ``tensor`` can be reduced.

    Raises ValueError, before anything is sent, for an unknown ``op``, for the mean of integers, or
    if this rank is no member of ``group``.
    """
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, not {op!r}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")
    return rank_in(group), dist.get_world_size(group)


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of ``tensor`` in one dimension, to change: ``with flattened(tensor) as flat``.

    Of a contiguous tensor ``flat`` is a view. Of any other tensor it is a contiguous copy, which is
    written back at the end. Autograd records nothing: a leaf that requires gradients stays one.
    """
    # --- exercise 3.1: start
    # Step 1: no copy if the tensor is contiguous: detach, view
    # Step 2: a strided tensor can't be sent: yield a contiguous copy, then copy the result back
    flat = tensor.detach().contiguous().view(-1)
    yield flat
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))
    # --- exercise 3.1: end


def exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group
) -> list[dist.Work]:
    """Start to send ``outgoing`` and to receive ``incoming`` at the same time; wait for neither.

    Returns the handles, that of the receive first (NCCL has one for both). Wait once for each.
    ``to`` and ``source`` are ranks of ``group``. Both tensors are contiguous, and must be left
    alone until the wait has returned. An empty tensor is neither sent nor received, and has no
    handle: both ends know its length.
    """
    # --- exercise 3.1: start
    # Step 3: start both before you wait for either: a send may return only when it has been
    #         received. NCCL runs messages one after another unless they are one batch. With gloo a
    #         batch is not needed, and takes longer to start
    if outgoing.is_cuda:
        ops = [dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)]
        ops += [dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)]
        ops = [op for op in ops if op.tensor.numel()]
        return dist.batch_isend_irecv(ops) if ops else []
    handles = [dist.irecv(incoming, group=group, group_src=source)] if incoming.numel() else []
    if outgoing.numel():
        handles.append(dist.isend(outgoing, group=group, group_dst=to))
    return handles
    # --- exercise 3.1: end


def wait(handles: Sequence[dist.Work]) -> None:
    """Wait for every handle."""
    for handle in handles:
        handle.wait()


def reduce_scatter_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(chunk to send, chunk to receive) in each of the W-1 steps of the reduce-scatter.

    A rank sends in one step what it received in the step before. The last chunk that it receives is
    chunk ``rank``. It never sends chunk ``rank`` itself.
    """
    # --- exercise 3.1: start
    # Step 4: start at the end: which chunk arrives last, and which one just before it?
    return [
        ((rank - step - 1) % world_size, (rank - step - 2) % world_size)
        for step in range(world_size - 1)
    ]
    # --- exercise 3.1: end


def ring_reduce_scatter(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine chunk r of ``tensor`` over all ranks into rank r's chunk r, in place.

    Ranks are those of ``group``. The chunks are those of ``tensor.flatten().tensor_split(W)``:
    lengths differ by one at most, the longer ones first, empty ones last. The other chunks of
    ``tensor`` hold unspecified values afterwards. Any real dtype, length (0 too), strides and W are
    allowed. Length, dtype and ``op`` are the same on all ranks. A leaf that requires gradients
    stays one. An element that is nan on one rank is nan in the result, also with "max".

    Per rank: W-1 messages to its right neighbour in the group, every chunk but its own once. These
    are (W-1)/W·N bytes, in the tensor's dtype. Time (W-1)·(α + N/W·β). It takes one chunk of extra
    memory (for a tensor that is not contiguous a copy, too), and keeps none of it. Raises
    ValueError as ``check_arguments`` does.
    """
    # --- exercise 3.1: start
    # Step 5: in each step exchange with the neighbours. When the receive is complete, combine what
    #         came with your chunk. Then wait for the send, too. One buffer of the longest
    #         chunk's size is enough
    # Step 6: for the mean divide your own chunk, once
    rank, world_size = check_arguments(tensor, op, group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with flattened(tensor) as flat:
        chunks = flat.tensor_split(world_size)
        buffer = torch.empty_like(chunks[0])
        for send, receive in reduce_scatter_steps(rank, world_size):
            incoming = buffer[: chunks[receive].numel()]
            handles = exchange(chunks[send], right, incoming, left, group)
            wait(handles[:1])
            COMBINE[op](chunks[receive], incoming)
            wait(handles[1:])
        if op == "mean":
            chunks[rank].div_(world_size)
    # --- exercise 3.1: end


def all_gather_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(chunk to send, chunk to receive) in each of the W-1 steps of the all-gather.

    The first chunk that a rank sends is chunk ``rank``. It sends in one step what it received in
    the step before.
    """
    # --- exercise 3.2: start
    # Step 1: the same steps, shifted by one chunk: they begin where the reduce-scatter ends
    return [
        ((rank - step) % world_size, (rank - step - 1) % world_size)
        for step in range(world_size - 1)
    ]
    # --- exercise 3.2: end


def ring_all_gather(tensor: Tensor, group: Group = None) -> None:
    """Give every rank chunk r of rank r's ``tensor``, for all r, in place.

    Chunks, tensors and messages are as in ``ring_reduce_scatter``. A rank sends every chunk but
    that of its right neighbour once: (W-1)/W·N bytes. Time (W-1)·(α + N/W·β). No extra memory if
    ``tensor`` is contiguous. Raises ValueError, before anything is sent, if this rank is no member
    of ``group``.
    """
    # --- exercise 3.2: start
    # Step 2: receive straight into the chunk: nothing is combined any more
    rank, world_size = check_arguments(tensor, "max", group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    with flattened(tensor) as flat:
        chunks = flat.tensor_split(world_size)
        for send, receive in all_gather_steps(rank, world_size):
            wait(exchange(chunks[send], right, chunks[receive], left, group))
    # --- exercise 3.2: end


def agree(tensor: Tensor, op: str, group: Group = None) -> None:
    """Raise ValueError on every rank unless all pass equally many elements, one dtype and one op.

    A rank that alone finds a difference could not tell the others, and they would wait for it for
    ever. So every rank learns the least and the most of what the ranks pass: in round k a rank
    tells rank + 2^k what it knows. A rank sends at most ⌈log₂ W⌉ messages of at most 48 bytes, one
    after another. On a GPU the host waits for the device. ``op`` may be any text. If only some
    ranks know it, that is a difference. Raises ValueError, and sends nothing, on a rank that is no
    member of ``group``.
    """
    # --- exercise 3.3: start
    # Step 1: three numbers for length, dtype and op; with their negatives one maximum gives the
    #         most and the least
    # Step 2: ⌈log₂ W⌉ rounds with distances 1, 2, 4 …: a number that counts twice does not change a
    #         maximum, so W need not be a power of two
    # Step 3: compare most and least: all ranks come to the same result
    rank, world_size = rank_in(group), dist.get_world_size(group)
    ops = [*COMBINE]
    facts = [tensor.numel(), DTYPES.index(str(tensor.dtype)), ops.index(op) if op in ops else -1]
    known = torch.tensor([*facts, *(-fact for fact in facts)], device=tensor.device)
    distance = 1
    while distance < world_size:
        to, source = (rank + distance) % world_size, (rank - distance) % world_size
        incoming = torch.empty_like(known)
        wait(exchange(known, to, incoming, source, group))
        known = torch.maximum(known, incoming)
        distance *= 2
    most, least = known[:3].tolist(), (-known[3:]).tolist()
    if most != least:
        raise ValueError(
            f"the ranks pass different tensors: {least[0]} to {most[0]} elements, "
            f"dtypes {DTYPES[least[1]]} and {DTYPES[most[1]]}, "
            f"operators {[*ops, 'unknown'][least[2]]} and {[*ops, 'unknown'][most[2]]}"
        )
    # --- exercise 3.3: end


def ring_all_reduce(
    tensor: Tensor, op: Op = "sum", group: Group = None, *, check: bool = False
) -> None:
    """Combine ``tensor`` over the ranks of ``group``, in place on every rank, bit for bit equal.

    Tensors, neighbours and memory are as in ``ring_reduce_scatter``. Per rank: 2(W-1) messages
    (fewer if chunks are empty) and 2(W-1)/W·N bytes: N twice, without its own and its right
    neighbour's chunk. Time 2(W-1)·(α + N/W·β).

    All ranks must pass the same length, dtype and ``op``. ``check`` makes sure of it first (see
    ``agree``), for ⌈log₂ W⌉ more messages: use it until your program runs. Without it gloo ends the
    process at a difference, and NCCL may hang. Raises ValueError as ``check_arguments`` does,
    before anything is sent but what ``check`` sends.
    """
    # --- exercise 3.3: start
    # Step 4: agree first if ``check`` is set. Then call the two halves on the same flat tensor, so
    #         that a strided tensor is copied only once
    if check:
        agree(tensor, op, group)
    with flattened(tensor) as flat:
        ring_reduce_scatter(flat, op, group)
        ring_all_gather(flat, group)
    # --- exercise 3.3: end
