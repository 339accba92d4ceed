# Exercises 3.27: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.27
"""What a strategy needs per rank: what is kept, and the most at any moment of a step.

T bytes of parameters on W ranks, nodes of L ranks, an optimizer that keeps s·T bytes (Adam: s = 2):

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

What is on the way is largest at another moment than activations are, so the peak is the largest sum
of a moment, not the sum of the largest. The moments come from ``step_profile``.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 3 and 5; Zhao et al. 2023
(PyTorch FSDP, arXiv 2304.11277), section 3.2; Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840).
"""

from __future__ import annotations

from dataclasses import dataclass

from given.step_profile import Profile

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hybrid", "offload")  # the simplest first


@dataclass(frozen=True)
class Memory:
    """What a strategy needs per rank, in bytes.

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
    """What ``strategy`` (one of STRATEGIES) needs per rank. No communication.

    Padding, and the buffers that ddp sends, are left out.
    """
    # Step 1: who shares a shard; the rule for each kind of memory
    # Step 2: the peak: the largest sum over the moments of a step
    raise NotImplementedError("exercise 3.27")


def sharded_moments(profile: Profile, shards: int, strategy: str) -> list[int]:
    """For each phase the bytes that FSDP with prefetching has beside its shards and their state.

    Units gathered, gradients not yet reduced, the shards of reduced ones (offload has them on the
    host), and activations.
    """
    # Step 3: forward has the root, the unit at work and the next one in full; where backward
    #         begins, the root and the last unit
    # Step 4: backward has the root, the unit at work and the one before in full; its gradients (the
    #         largest is among the activations), the root's, and those of the unit after, which are
    #         on their way: joined (hybrid has let go of that), and the chunk that comes back
    # Step 5: at the end the root's gradients are joined: twice in memory, for a moment
    raise NotImplementedError("exercise 3.27")


def reduced_moments(profile: Profile, shards: int, bucket_bytes: int) -> list[int]:
    """For each phase the bytes that ZeRO-2 has beside parameters and state.

    Gradients that wait for their bucket or are on their way, the reduced ones' part, activations.
    """
    # Step 6: at most three buckets: two on their way, one to be joined
    # Step 7: at the end of backward what is left is joined: twice in memory, for a moment
    raise NotImplementedError("exercise 3.27")
