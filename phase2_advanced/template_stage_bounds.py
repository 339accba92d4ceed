# Exercises 2.20: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.20
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Where to divide a model's layers into stages: what each layer costs, and the best bounds.

A pipeline is as fast as its slowest stage, and the largest stage decides how much memory a rank
needs. So the bounds 0 = b_0 < b_1 < … < b_S = L of L layers in S stages are chosen to minimise

    max over s of (cost[b_s] + … + cost[b_{s+1} - 1])

Costs are bytes of parameters (known without running anything) or measured seconds. Over all ways to
choose the bounds the minimum is found by dynamic programming, O(S·L²):

    best(1, n) = cost[0] + … + cost[n-1]
    best(s, n) = min over b of max( best(s-1, b),  cost[b] + … + cost[n-1] )

Communication: one broadcast of 8 bytes per layer, where costs are measured. Invariant: all ranks
have the same costs and so the same bounds.
Sources: Huang et al. 2019 (GPipe, arXiv 1811.06965), section 2.1; Narayanan et al. 2019 (PipeDream,
SOSP), section 3.1.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group


def parameter_costs(layers: Sequence[nn.Module]) -> list[int]:
    """Bytes of each layer's parameters; one that several layers share counts in the first.

    Frozen parameters count as well, each in the bytes of its own dtype.
    """
    # Step 1: remember which parameters were counted already
    raise NotImplementedError("exercise 2.20")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it (CUDA runs behind the program)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_costs(
    layers: Sequence[nn.Module], example: Tensor, *, repeats: int = 5, group: Group = None
) -> list[float]:
    """Seconds of each layer's forward and backward, as rank 0 of ``group`` measured them.

    ``example`` is an input of the first layer; every further layer gets what the one before it
    gives. Of ``repeats`` runs, after one that warms up and does not count, the median. The backward
    includes that of ``example`` where it is floating; a layer in which nothing needs a gradient has
    a forward only. Every rank returns the same numbers: two measurements differ, and ranks with
    different bounds would send each other what nobody expects. The other ranks run no layer.

    Weights, gradients, buffers, ``example`` and PyTorch's random state stay as they are, though
    layers may work in place. One broadcast of 8 bytes per layer. An error of a layer comes out on
    rank 0, and the other ranks raise RuntimeError: none of them waits. Raises ValueError on every
    rank, before anything runs or is sent, if ``repeats`` < 1.
    """
    # Step 2: one rank measures, on copies of the layers, with random numbers of its own
    # Step 3: that rank's medians for all; NaN tells them that there are none
    raise NotImplementedError("exercise 2.20")


def timed(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """(seconds of forward and backward of ``layer`` on ``x``, its output without graph).

    The backward includes the gradient of ``x``, if there can be one. Leaves gradients in ``layer``.
    """
    # Step 4: a layer that works in place gets a copy, which is no leaf
    # Step 5: the device must be idle when the clock starts, and done when it stops
    raise NotImplementedError("exercise 2.20")


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Divide the layers into contiguous stages so that the most expensive stage costs least.

    ``costs``: one number per layer, not negative, in any unit. Returns stages + 1 bounds from 0 to
    len(costs), strictly increasing: stage s has the layers bounds[s] … bounds[s+1]-1, at least one.
    The same bounds for the same costs. Of all bounds, none has a smaller largest sum (but for
    rounding, in proportion).
    Changes no cost. Takes O(stages · layers²) steps or less. Raises ValueError if there are fewer
    layers than stages, for less than one stage, and for a cost that is negative or not finite.
    """
    # Step 6: with one stage the first n layers cost their sum; with one stage more, try every layer
    #         at which the last stage may begin: the larger of what comes before it and its own sum
    # Step 7: remember the best begin for each n, and follow these back from the end
    raise NotImplementedError("exercise 2.20")
