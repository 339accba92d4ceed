# Exercises 3.14: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.14
"""ZeRO-2: a rank keeps the gradients of those elements alone that it steps.

A rank that has optimizer state for one W-th of the elements needs only their gradients. So the
first half of the all-reduce is enough, and the optimizer gathers *parameters* in its second half:

    reduce-scatter in backward, free the rest | step own shard | all-gather parameters

Memory per rank in fp32 with Adam, Ψ parameters on W ranks: 4Ψ + 12Ψ/W, and in backward three
buckets: two on their way, one that is joined. Bytes sent per rank and step, for P bytes of
parameters: backward (W-1)/W·P and ``step`` (W-1)/W·P, together what data parallelism sends.
Messages: one per bucket and kind, and one of a byte per parameter. Invariant: all ranks send the
same vectors in the same order in every backward, whatever they have used.

Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), sections 5.2 and 7.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.hooks import weakly

from .template_zero import FlatVector, ZeroOptimizer


class Zero2Optimizer(ZeroOptimizer):
    """ZeRO-2: this rank also keeps only its part of the gradients.

    No other data parallelism: ``backward()`` itself brings the mean over the ranks of ``group``
    into the owners' pieces, added to what is there, and every parameter's ``grad`` is None again.
    Every rank must run backward equally often. A parameter without gradient on all ranks has none;
    on some, these count as zero. Clip with ``clip_by_global_norm``; ``zero_grad`` clears the parts.
    Raises as ZeroOptimizer does; RuntimeError if a gradient is complete twice in one backward.
    """

    running = False  # a backward is under way

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, and reduce its gradients from the next backward on."""
        before = len(self.vectors)
        super().add_param_group(param_group)
        for vector in self.vectors[before:]:
            for p in vector.parameters:
                ready = functools.partial(weakly(self._ready), vector)
                p.register_post_accumulate_grad_hook(ready)

    def _ready(self, vector: FlatVector, p: nn.Parameter) -> None:
        """``p.grad``, of ``vector``, is complete on this rank."""
        # Step 1: the first one of a backward has the end of backward announced
        # Step 2: vectors leave in their own order on all ranks, each when all of it has come
        raise NotImplementedError("exercise 3.14")

    def _leave(self, vector: FlatVector) -> None:
        """Issue the reduce-scatter of the vector's gradients, (W-1)·shard elements sent."""
        # Step 3: at most two are on their way: what has left takes memory until it is there
        # Step 4: joined in the order of `flat`, zeros where there is none; forget the originals
        raise NotImplementedError("exercise 3.14")

    def _arrive(self) -> None:
        """Wait for the oldest reduce-scatter, and add the mean to the vector's ``gradient``."""
        # Step 5: the sum over the ranks by their number; an earlier backward's stays in it
        raise NotImplementedError("exercise 3.14")

    def _finish(self) -> None:
        """Backward is done: everything else leaves, and the pieces get their gradients."""
        # Step 6: every rank sends every vector, whatever it has used
        # Step 7: a maximum over the ranks tells which parameters anyone has used
        # Step 8: in the order of `flat`, the pieces fill the shard from its beginning
        raise NotImplementedError("exercise 3.14")

    def give_gradients(self) -> None:
        """Backward has given them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients' memory go; ``set_to_none=False`` does the same here."""
        # Step 9: parts are views: both references must go
        raise NotImplementedError("exercise 3.14")

    @torch.no_grad()
    def clip_by_global_norm(self, limit: float) -> Tensor:
        """Scale the gradients so that their norm is at most ``limit``; returns the norm before.

        The norm () of the whole gradient, equal on all ranks, in float32, or float64 if a parameter
        has it; one all-reduce of 4 or 8 bytes.
        """
        # Step 10: the widest dtype of any vector, at least float32: squares overflow in float16
        # Step 11: sum the squares of the own elements, then over the ranks; only then the root
        raise NotImplementedError("exercise 3.14")
