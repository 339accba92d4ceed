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

Costs are bytes of parameters (known without running anything) or measured seconds. Dynamic
programming finds the minimum over all possible bounds, in O(S·L²) steps:

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
    """Bytes of each layer's parameters; a parameter of several layers counts in the first one.

    Frozen parameters count as well, each in the bytes of its own dtype.
    """
    # Step 1: remember which parameters were counted already
    raise NotImplementedError("exercise 2.20")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work (CUDA runs behind the program)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_costs(
    layers: Sequence[nn.Module], example: Tensor, *, repeats: int = 5, group: Group = None
) -> list[float]:
    """Seconds of each layer's forward and backward, as rank 0 of ``group`` measured them.

    ``example`` is an input of the first layer; every further layer gets the output of the one
    before it. The time of a layer is the median of ``repeats`` runs; one run before them warms up
    and does not count. The backward includes that of ``example`` where it is floating; a layer in
    which nothing needs a gradient has a forward only. Every rank returns the same numbers: two
    measurements differ, and ranks with different bounds would send each other activations that the
    receiver does not expect. The other ranks run no layer.

    Weights, gradients, buffers, ``example`` and PyTorch's random state stay as they are, though
    layers may work in place. One broadcast of 8 bytes per layer. An error of a layer comes out on
    rank 0, and the other ranks raise RuntimeError: none of them waits. Raises ValueError on every
    rank, before anything runs or is sent, if ``repeats`` < 1.
    """
    # Step 2: one rank measures, on copies of the layers, with random numbers of its own
    # Step 3: send that rank's medians to all; NaN tells the others that the measurement failed
    raise NotImplementedError("exercise 2.20")


def timed(layer: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """(seconds of forward and backward of ``layer`` on ``x``, its output without graph).

    The backward includes the gradient of ``x``, if there can be one. Leaves gradients in ``layer``.
    """
    # Step 4: pass the layer a copy that is no leaf: a layer that works in place can't change a leaf
    # Step 5: the device must be idle when the clock starts, and done when it stops
    raise NotImplementedError("exercise 2.20")


def partition(costs: Sequence[float], stages: int) -> list[int]:
    """Divide the layers into contiguous stages so that the most expensive stage costs least.

    ``costs``: one number per layer, not negative, in any unit. Returns stages + 1 bounds from 0 to
    len(costs), strictly increasing: stage s has the layers bounds[s] … bounds[s+1]-1, at least one.
    The same costs give the same bounds. No other bounds have a smaller largest sum (but for
    rounding, in proportion).
    Changes no cost. Takes O(stages · layers²) steps or less. Raises ValueError if there are fewer
    layers than stages, for less than one stage, and for a cost that is negative or not finite.
    """
    # Step 6: with one stage the first n layers cost their sum. With one stage more, try every layer
    #         at which the last stage may begin. The cost is then the larger of two numbers: the
    #         best of the layers before the last stage, and the last stage's own sum
    # Step 7: remember for each n where the best last stage begins; follow these back from the end
    raise NotImplementedError("exercise 2.20")
