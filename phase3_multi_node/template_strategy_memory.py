# Exercises 3.27: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.27
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""The memory that a strategy needs per rank: the bytes it keeps, and the peak of a step.

For T bytes of parameters on W ranks, nodes of L ranks, and an optimizer that keeps s·T bytes (Adam:
s = 2):

========  ================================  ===========================================
strategy  parameters, gradients, optimizer  on the way, beside activations
========  ================================  ===========================================
ddp       T + T + sT                        -
zero1     T + T + sT/W                      -
zero2     T + T/W + sT/W                    up to 3 buckets
fsdp      (2+s)T/W                          root, units u-1, u in full,
                                            gradients of u, u+1
hybrid    (2+s)T/L                          the same
offload   0; (2+s)T/W on the host           the same
========  ================================  ===========================================

The bytes on the way are largest at another moment than the activations. So the peak is the largest
sum of a moment, not the sum of the largest. The moments come from ``step_profile``.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 3 and 5. Zhao et al. 2023
(PyTorch FSDP, arXiv 2304.11277), section 3.2. Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840).
"""

from __future__ import annotations

from dataclasses import dataclass

from given.step_profile import Profile

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid", "offload")  # the simplest first


@dataclass(frozen=True)
class Memory:
    """The memory that a strategy needs per rank, in bytes.

    ``parameters``, ``gradients``, ``optimizer``: kept on the device between backward and step.
    ``peak``: the most on the device at any moment of a step. ``host``: in the CPU's memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    host: int


def memory_of(
    profile: Profile,
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    bucket_bytes: int = 25 * 2**20,
) -> Memory:
    """The memory of ``strategy`` (one of STRATEGIES) per rank, rounded down. No communication.

    T_k and G_k are the bytes of unit k's parameters and gradients, T and G those of all units, and
    s·G those of the optimizer's state. S is the number of ranks that divide a unit: L for hybrid,
    else W. The table at the head of the file has the bytes that are kept, but with G for T in
    gradients and state.

    ``peak`` is the sum of parameters, state and the model's buffers, plus the largest of:

    - the moments of the step: ``sharded_moments`` for fsdp, hybrid and offload, ``reduced_moments``
      for zero2, and for ddp and zero1 the activations of each phase + G.
    - the optimizer's step, with two temporary copies of its largest tensor. That is G/S +
      2·max(T_k)/S for fsdp and hybrid, and nothing for offload. For zero2 it is G/W + 2·min(largest
      gradient, G/W), and for ddp and zero1 G + 2·min(largest gradient, state kept).
    - for ddp and zero1 the first backward, before there is a state: 2·G - state kept.

    Padding, and the buffers that ddp sends, are left out.
    """
    # Step 1: how many ranks divide a unit; the rule for each kind of memory
    # Step 2: the peak: the largest sum over the moments of a step
    raise NotImplementedError("exercise 3.27")


def sharded_moments(profile: Profile, shards: int, strategy: str) -> list[int]:
    """For each phase, and for the end of backward, the bytes that FSDP with prefetching has beside
    its shards and their state.

    In forward of unit u: activations + T_0 + T_u + T_(u+1). In backward of unit u: activations +
    T_0 + T_u + T_(u-1), and the gradients of_root + (G_u - largest_u) + G_(u+1) + (G_(u+1) + ... +
    G_last)/S. Hybrid is without the G_(u+1) that is not divided; offload has only G_(u+1)/S of the
    last term, the rest is on the host. The root's phases of forward are those of u = 0, all with
    T_1. Its phase of backward is that of u = last + 1. Units that do not exist count nothing, and
    no unit counts twice. At the end: 2·G_0 + (G_1 + ... + G_last)/S, for offload 2·G_0.
    """
    # Step 3: forward has the root, the unit at work and the next one in full. Where backward
    #         begins, the root and the last unit are in full
    # Step 4: backward has the root, the unit at work and the one before in full. It has the unit's
    #         gradients (the largest is among the activations) and the root's. Those of the unit
    #         after are on their way: the joined vector (hybrid has freed it), and the chunk that
    #         comes back
    # Step 5: at the end the root's gradients are joined: they are in memory twice, for a moment
    raise NotImplementedError("exercise 3.27")


def reduced_moments(profile: Profile, shards: int, bucket_bytes: int) -> list[int]:
    """For each phase, and for the end of backward, the bytes that ZeRO-2 has beside parameters and
    state.

    In forward: activations. In backward of unit u the gradients a = of_root + G_u + ... + G_last
    have arrived: activations + min(a, 3·bucket) - largest_u + a/W. In the root's phase a = of_root,
    and largest_u counts nothing. A bucket has ``bucket_bytes``, or G if that is less, and at least
    the largest gradient. At the end: min(2·G, 3·bucket) + G/W.
    """
    # Step 6: at most three buckets: two on their way, one to be joined
    # Step 7: at the end of backward the other gradients are joined: they are in memory twice
    raise NotImplementedError("exercise 3.27")
