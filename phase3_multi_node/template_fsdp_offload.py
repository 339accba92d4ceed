# Exercises 3.18: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.18
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Offloading: shards, their gradients and the optimizer live in the CPU's memory.

The optimizer touches every element once per step, and computes little. A GPU's memory is too dear
for state that waits there the rest of the time. Only the unit at work is on the device:

    CPU      shard (pinned)                                       grad ▶ optimizer ▶ shard
               ▼ copy, 4Ψ/W bytes                                  ▲ copy, 4Ψ/W bytes
    device   shard ▶ all-gather ▶ full ▶ compute ▶ reduce-scatter ▶ mean

Device memory: nothing per element, two or three units in full. Per step 4Ψ/W bytes cross the bus
for each of two gathers and one gradient. The messages of exercise 3.15 stay the same. The optimizer
runs at the speed of the CPU's memory: it reads and writes 28Ψ/W bytes per step with Adam.

If the model is on the CPU anyway nothing moves, and the results have the same bits.
Source: Ren et al. 2021 (ZeRO-Offload, arXiv 2101.06840), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from given.agreement import Group
from given.fsdp_units import Parameters

from .template_fsdp import FlatParameter


class OffloadFlat(FlatParameter):
    """A flat parameter whose shard is on the CPU and whose full vector is on the device.

    Use it as ``FSDP(…, flat_type=OffloadFlat)``, and make the optimizer afterwards: its state is
    where the shards are. ``shard.grad`` is on the CPU, and complete when ``backward()`` returns.
    Between steps nothing is on the device. Values, dtypes and messages are those of FlatParameter.
    In a step only shards cross the bus: two to the device, for the gathers, and one gradient back.
    """

    def __init__(self, parameters: Parameters, group: Group, device: torch.device) -> None:
        """As ``FlatParameter``, but the shard is cut on the CPU; ``device`` is that of ``full``.

        For a CUDA device the shard is pinned, so that copies can overlap.
        """
        super().__init__(parameters, group, torch.device("cpu"))
        # Step 1: the shard is on the CPU already: pin it. Make the full vector on the device
        raise NotImplementedError("exercise 3.18")

    def gather_input(self) -> Tensor:
        """The padded shard, on the device."""
        # Step 2: from pinned memory the copy is asynchronous, and the all-gather runs after it
        raise NotImplementedError("exercise 3.18")

    def mean(self, chunk: Tensor) -> Tensor:
        """The mean over the ranks, on the CPU."""
        # Step 3: divide on the device; then block on the copy, because the optimizer reads it next
        raise NotImplementedError("exercise 3.18")
