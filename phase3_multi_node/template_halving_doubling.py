# Exercises 3.6: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.6
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Recursive halving and doubling: all-reduce in few messages of few bytes.

Two partners that hold the same piece share the work. Each gives one half away, and is from then on
responsible for the other half. At distance 1 the pieces are complete, and the results go back the
same way. With N bytes, W ranks, α seconds per message and β per byte, these messages follow one
another:

    2 log₂ P (+ 2) messages, 2(P-1)/P·N (+ 2N) bytes;  all ranks send 2P log₂ P (+ 2(W-P)) messages

P is the largest power of two that is at most W, and the brackets say what W ≠ P adds.
Invariant: each round of the halving makes a rank's piece half as long, and the piece holds the
parts of twice as many ranks. Every element is combined in one order only, so all ranks end with the
same bits. On a GPU every rank begins with a batch, also a rank above P: NCCL waits for all ranks
before the first batch of a group.

Sources: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in
MPICH". Rabenseifner 2004, "Optimization of collective reduction operations" (other W).
"""

from __future__ import annotations

from torch import Tensor

from given.agreement import Group

from .template_ring_allreduce import COMBINE, Op, check_arguments, exchange, flattened, wait


def halving_doubling_all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None) -> None:
    """Combine ``tensor`` over the ranks of ``group``, in place on every rank, bit for bit equal.

    Let P be the largest power of two in W. P ranks exchange halves of their pieces with partners at
    distance P/2, P/4 … 1, in any order, and then the results the same way back. Each of the other
    W-P ranks sends its tensor to rank - P first, and gets the result at the end. Any dtype, length,
    strides and W are allowed, as in ``ring_reduce_scatter``.

    A rank below P sends 2 log₂ P messages and 2(P-1)/P·N bytes (rounded for odd pieces), and N more
    to serve a rank above P. The ranks above send N. The time is 2 log₂ P·α + 2(P-1)/P·Nβ, plus
    2(α + Nβ) if W is not P. It takes half a tensor of extra memory (up to two to serve a rank, and
    a copy of a tensor that is not contiguous), and keeps none. With W ≠ P it can't be NCCL's first
    collective of a group without ``device_id``: all must join. Raises as ``check_arguments`` does.
    """
    # Step 1: the ranks from P on send their tensor, by `exchange` as well, and wait for the result
    # Step 2: both partners know the same piece. The lower rank keeps its first half and gives the
    #         second away. Each combines the incoming half with its own
    # Step 3: on the way back exchange the results with the same partners in reverse order
    raise NotImplementedError("exercise 3.6")
