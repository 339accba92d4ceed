# Exercises 3.17: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.17
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Mixed precision with sharded master weights: compute in 16 bits, remember in 32.

Matrix products in bfloat16 are several times as fast as in float32 and need half the memory. But a
bfloat16 has 8 bits of mantissa. An update below 1/512 of a weight is rounded away, and for most
weights a larger one as well (up to 1/256). So the optimizer steps on float32 shards (master
weights), and only the gathered copies are bfloat16:

    shard fp32 ──to bf16──▶ all-gather bf16 ▶ forward, backward in bf16 ▶ gradients bf16
      ▲                                                                        │ to reduce_dtype
      └── optimizer fp32 ◀── mean, in fp32 ◀── reduce-scatter in reduce_dtype ◀┘

Each rank casts its own shard, once, before it travels. For Ψ elements a rank sends per step
(W-1)/W·Ψ·(2·2 + 4) bytes with an fp32 reduction, and (W-1)/W·Ψ·(2·2 + 2) with a bf16 one, instead
of (W-1)/W·Ψ·12. Memory: 16Ψ/W bytes as before, and half for full parameters and gradients. Summing
W gradients in bf16 adds a rounding error of about 2^-9 per addition: reduce in fp32 unless the
network is the bottleneck.

Sources: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.1 (master weights). Zhao et al. 2023
(PyTorch FSDP, arXiv 2304.11277), section 4.4 (mixed precision).
"""

from __future__ import annotations

import torch
from torch import Tensor

from given.agreement import Group
from given.fsdp_units import Parameters

from .template_fsdp import FlatParameter


class MixedPrecisionFlat(FlatParameter):
    """A flat parameter whose shard has the parameters' own dtype, and its full vector another one.

    Use it as ``FSDP(…, flat_type=partial(MixedPrecisionFlat, compute_dtype=torch.bfloat16))``. The
    modules see parameters in ``compute_dtype``, frozen ones too, and need inputs in it. Parameters
    that are not floating point, complex ones too, keep their dtype, and so do their gradients. The
    other gradients travel and are summed over the ranks in ``reduce_dtype``. The sum is converted
    to the shard's dtype, then divided. Raises ValueError, before anything is sent, if one of the
    two is not a real floating-point dtype.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.bfloat16,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        """As ``FlatParameter``."""
        for dtype in (compute_dtype, reduce_dtype):
            if not dtype.is_floating_point:
                raise ValueError(f"mixed precision needs floating-point dtypes, got {dtype}")
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        super().__init__(parameters, group, device)

    def make_full(self, dtype: torch.dtype, device: torch.device) -> None:
        """As ``FlatParameter``, but with ``compute_dtype`` if ``dtype`` is floating point."""
        # Step 1: change the dtype of the gathered vector, and so of the leaves and their gradients
        raise NotImplementedError("exercise 3.17")

    def gather_input(self) -> Tensor:
        """The padded shard in the full vector's dtype, rounded before it travels."""
        # Step 2: cast before the shard travels, not after: half the bytes
        raise NotImplementedError("exercise 3.17")

    def reduce_input(self) -> Tensor:
        """The joined gradients in ``reduce_dtype``, if they are floating point."""
        # Step 3: cast before the ranks' values are added
        raise NotImplementedError("exercise 3.17")

    def mean(self, chunk: Tensor) -> Tensor:
        """The mean over the ranks in the shard's dtype."""
        # Step 4: widen first, so that the division adds no second rounding
        raise NotImplementedError("exercise 3.17")
