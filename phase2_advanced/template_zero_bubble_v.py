# Exercises 2.26: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.26
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Zero bubble with several stages per rank: interleaved, ZB-V and DualPipe-V, as plans of names.

ZB-H1 still waits for the first gradient, as long as a forward needs through all ranks. Smaller
stages make that wait shorter, and the place of the stages decides where a rank waits. In a *V* rank
r has the stages r and 2p-1-r: micro-batches go down to the last rank and come back. The turn at the
last rank sends nothing, and the loss is on rank 0. With p ranks, m micro-batches, v stages per rank
and F, B and W of one stage of one length each:

=======================  ==========  =================  ==================  =============
schedule                 stages of   a step takes       stages' activations  messages per
                         rank r                         kept by a rank       micro-batch
=======================  ==========  =================  ==================  =============
interleaved zero bubble  r, r+p, …   3vm + p-1          v·p                  2(v·p - 1)
ZB-V, m >= 2p-1          r, 2p-1-r   6m + p-1           2p                   4(p-1)
DualPipe-V, m >= 2p      r, 2p-1-r   6m + p-1           2p + 1               4(p-1)
=======================  ==========  =================  ==================  =============

A rank with v stages works for 3vm, so the bubble is (p-1) / (3vm + p-1). No schedule has less: the
last rank can't begin before p-1 forwards are done. A rank of interleaved zero bubble waits at its
first backward. A rank of ZB-V never waits between its first step and its last one. It may begin the
next batch at once, and then there is no bubble. DualPipe-V puts each forward beside the backward of
another micro-batch: a GPU can compute the one while messages of the other are under way.

Invariant: gradients as without the split, whatever the place of the stages. Sources: Qi et al. 2023
(arXiv 2401.10241), sections 2 and 6. Qi et al. 2024 (arXiv 2405.15362), sections 2 and 3.
DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .template_pipeline_parallel import alternate, check_sizes, interleaved
from .template_pipeline_schedules import Step


def written_out(plan: Iterable[str], stages: Sequence[int]) -> list[Step]:
    """The steps of a rank with these ``stages``, from a plan of short names.

    ``"F0"`` is the next forward of ``stages[0]``, ``"B1"`` the next backward of ``stages[1]``.
    Micro-batches are counted from 0, for each name. ``"W"`` is the oldest W that waits: it waits
    from its B on. W that wait after the plan follow, the oldest first. Raises ValueError at a
    ``"W"`` for which none waits.
    """
    # Step 1: count each name: the count so far is the micro-batch
    # Step 2: a B puts its W at the end of a queue, a "W" takes the first of the queue
    raise NotImplementedError("exercise 2.26")


def interleaved_zero_bubble(ranks: int, micro_batches: int, chunks: int) -> list[list[Step]]:
    """Every rank's compute steps: interleaved 1F1B with B and W, and ZB-H1's way to delay W.

    Rank r has the stages r, r+p, … of v·p. With F, B and W of equal length a step takes 3vm + p-1
    times a stage's forward. No rank keeps more than v·p activations of a stage (until their W).
    Raises ValueError if a number is below 1 or p does not divide m.
    """
    # Step 3: take forwards and backwards in the order of interleaved 1F1B. B is only as long as F
    #         here, so the first gradient comes earlier: rank r needs p-r-1 forwards less before it
    #         takes turns
    # Step 4: rank r lets r of its W wait, as in ZB-H1
    raise NotImplementedError("exercise 2.26")


def zero_bubble_v(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps in ZB-V: rank r has the stages r and 2p-1-r.

    With F, B and W of equal length a step takes 6m + p-1 times a stage's forward, or 4(m+p) - 2
    where that is more. With m >= 2p-1 no rank waits between its first step and its last one. No
    rank keeps more than min(2m, 2p) activations of a stage (until their W). Raises ValueError if a
    number is below 1.
    """
    # Step 5: the first micro-batch is 2p-1-r forwards away from rank r's second stage and its first
    #         backward. Fill this time with forwards of the first stage, and then take turns
    # Step 6: a rank in its rhythm takes F, B, W of one stage and F, B, W of the other
    # Step 7: at the end a B comes before a W, so that no rank waits for it
    # Step 8: with few micro-batches take the plan of 2p-1, without those that there are not
    raise NotImplementedError("exercise 2.26")


def dual_pipe_v(ranks: int, micro_batches: int) -> list[list[Step]]:
    """Every rank's compute steps in DualPipe-V: rank r has the stages r and 2p-1-r.

    A *pair* is a forward, and right behind it the B and the W of another micro-batch in the rank's
    other stage. Rank r has at least 2m - 3p + r + 1 pairs. With F, B and W of equal length a step
    takes 6m + p-1 times a stage's forward. No rank keeps more than 2p + 1 activations of a stage
    (until their W). Raises ValueError if a number is below 1, or m below 2p.
    """
    # Step 9: forwards of the first stage, then of both in turn: one more than in ZB-V
    # Step 10: B1 and W until the first stage has a backward, too. Then pairs: F0 and B1, F1 and B0
    # Step 11: the backwards that are left, and W where a rank would wait for the next rank's B
    raise NotImplementedError("exercise 2.26")
