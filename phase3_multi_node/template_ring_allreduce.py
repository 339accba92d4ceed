# Exercises 3.1, 3.2, 3.3: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.1
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Ring all-reduce: every rank talks to its two neighbours only, and sends the least possible.

The tensor is cut into W chunks. In W-1 steps each chunk travels once around the ring and collects
every rank's part (reduce-scatter: rank r ends up with chunk r complete), in W-1 more steps the
complete chunks travel round (all-gather). In every step each rank sends one chunk to its right and
receives another from its left, so all links are busy all the time:

    reduce-scatter + all-gather = 2(W-1) messages of N/W bytes per rank,  time 2(W-1)·(α + N/W·β)

for N bytes over W ranks, α seconds per message and β per byte. No algorithm sends fewer than
2(W-1)/W·N bytes per rank; what the ring pays is latency, 2(W-1) messages one after another.
``segmented_ring`` pays less of it.

Invariants: after step s of the reduce-scatter the chunk that a rank received holds the parts of s+2
ranks. Every chunk is summed in one fixed order, so all ranks end with the same bits. Nobody sends
before its neighbour can receive: both directions are started together, then waited for.
NCCL has no messages of int16.
All ranks bring the same length and dtype. If not, gloo ends the process or a rank waits for ever;
``agree``, called before any of the all-reduces, makes that one error on all ranks.
Sources: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", sections 3 and 4; Thakur, Rabenseifner & Gropp 2005, section 4 (cost model); Hensgen,
Finkel & Manber 1988 (dissemination, here the agreement).
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
    """(rank in the group, world size of the group), after refusing what can't be reduced.

    Raises ValueError, before anything is sent, for an unknown ``op``, the mean of integers, or a
    group that this rank is no member of.
    """
    if op not in COMBINE:
        raise ValueError(f"op must be one of {', '.join(COMBINE)}, not {op!r}")
    if op == "mean" and not tensor.is_floating_point():
        raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert the tensor first")
    return rank_in(group), dist.get_world_size(group)


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of ``tensor`` in one row, to be changed: ``with flattened(tensor) as flat``.

    Of a contiguous tensor ``flat`` is a view. Of any other it is a contiguous copy, which is
    written back at the end. Autograd records nothing: a leaf that requires gradients stays one.
    """
    # Step 1: no copy if the tensor is contiguous: detach, view
    # Step 2: a strided tensor can't be sent: give a contiguous copy, then copy the result back
    raise NotImplementedError("exercise 3.1")


def exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group
) -> list[dist.Work]:
    """Start to send ``outgoing`` and to receive ``incoming`` at once; wait for neither.

    Returns the handles, receive first (NCCL has one for both), each to be waited for once. ``to``
    and ``source`` are ranks of ``group``. Both tensors are contiguous and must be left alone until
    then. An empty tensor is neither sent nor received and has no handle: both ends know its length.
    """
    # Step 3: start both before either is waited for: a send may return only when it has been
    #         received. NCCL runs messages one after another unless they are one batch; with gloo a
    #         batch is not needed and takes longer to start
    raise NotImplementedError("exercise 3.1")


def wait(handles: Sequence[dist.Work]) -> None:
    """Wait for every handle."""
    for handle in handles:
        handle.wait()


def reduce_scatter_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(chunk to send, chunk to receive) in each of the W-1 steps of the reduce-scatter.

    What a rank receives in one step it sends in the next; the last one that it receives is chunk
    ``rank``. Chunk ``rank`` itself is never sent.
    """
    # Step 4: go backwards from the end: which chunk arrives last, and which one just before it?
    raise NotImplementedError("exercise 3.1")


def ring_reduce_scatter(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine chunk r of ``tensor`` over all ranks into rank r's chunk r, in place.

    Ranks are those of ``group``. The chunks are those of ``tensor.flatten().tensor_split(W)``:
    lengths differ by one at most, the longer ones first, empty ones last. The other chunks of
    ``tensor`` hold unspecified values afterwards. Any real dtype, length (0 too), strides and W;
    length, dtype and ``op`` are the same on all ranks. A leaf that requires gradients stays one.
    What is nan on one rank is nan in the result, of "max" too.

    Per rank: W-1 messages to its right neighbour in the group, every chunk but its own is sent
    once: (W-1)/W·N bytes, in the tensor's dtype. Time (W-1)·(α + N/W·β). One chunk of extra memory
    (for a tensor that is not contiguous a copy, too), which is not kept. Raises ValueError as
    ``check_arguments`` does.
    """
    # Step 5: in each step exchange with the neighbours; when the receive is complete combine what
    #         came into your chunk; then wait for the send, too, before the buffer is used again.
    #         One buffer of the longest chunk's size is enough
    # Step 6: for the mean divide your own chunk, once
    raise NotImplementedError("exercise 3.1")


def all_gather_steps(rank: int, world_size: int) -> list[tuple[int, int]]:
    """(chunk to send, chunk to receive) in each of the W-1 steps of the all-gather.

    The first chunk that a rank sends is chunk ``rank``; what it receives it sends in the next step.
    """
    # Step 1: the same walk, shifted: it begins where the reduce-scatter ends
    raise NotImplementedError("exercise 3.2")


def ring_all_gather(tensor: Tensor, group: Group = None) -> None:
    """Give every rank chunk r of rank r's ``tensor``, for all r, in place.

    Chunks, tensors and messages as in ``ring_reduce_scatter``. Per rank every chunk but that of its
    right neighbour is sent once: (W-1)/W·N bytes. Time (W-1)·(α + N/W·β). No extra memory if
    ``tensor`` is contiguous. Raises ValueError, before anything is sent, if this rank is no member
    of ``group``.
    """
    # Step 2: receive straight into the chunk: nothing is combined any more
    raise NotImplementedError("exercise 3.2")


def agree(tensor: Tensor, op: str, group: Group = None) -> None:
    """Raise ValueError on every rank unless all pass equally many elements, one dtype and one op.

    A rank that finds a difference alone could not tell the others, which would wait for it for
    ever. So everybody learns the least and the most of what is passed: in round k a rank tells
    rank + 2^k what it knows. At most ⌈log₂ W⌉ messages of at most 48 bytes per rank, one after
    another, and on a GPU a wait for the device. ``op`` may be any text: one that is unknown on some
    ranks is a difference. Raises ValueError, and sends nothing, on a rank that is no
    member of ``group``.
    """
    # Step 1: three numbers for length, dtype and op; with their negatives one maximum tells the
    #         most and the least
    # Step 2: ⌈log₂ W⌉ rounds with distances 1, 2, 4 …: knowing something twice does not change a
    #         maximum, so any W will do
    # Step 3: compare most and least: all ranks find the same
    raise NotImplementedError("exercise 3.3")


def ring_all_reduce(
    tensor: Tensor, op: Op = "sum", group: Group = None, *, check: bool = False
) -> None:
    """Combine ``tensor`` over the ranks of ``group``, in place on every rank, bit for bit equal.

    Tensors, neighbours and memory as in ``ring_reduce_scatter``. Per rank: 2(W-1) messages (fewer
    if chunks are empty) and 2(W-1)/W·N bytes: N twice, without its own and its right neighbour's
    chunk. Time 2(W-1)·(α + N/W·β).

    All ranks must pass the same length, dtype and ``op``. ``check`` makes sure of it first, see
    ``agree``, for ⌈log₂ W⌉ more messages: use it until your program runs. Without it gloo ends the
    process at a difference, NCCL may hang. Raises ValueError as ``check_arguments`` does, before
    anything is sent but what ``check`` sends.
    """
    # Step 4: agree first if asked to, then the two halves on the same flat tensor, so that a
    #         strided one is copied only once
    raise NotImplementedError("exercise 3.3")
