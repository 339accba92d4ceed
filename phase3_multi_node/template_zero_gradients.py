# Exercises 3.14: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.14
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""ZeRO-2: a rank keeps only the gradients of the elements that it steps.

A rank that has optimizer state for one W-th of the elements needs only their gradients. So the
first half of the all-reduce is enough, and the optimizer gathers *parameters* in its second half:

    reduce-scatter in backward, free the rest | step own shard | all-gather parameters

Memory per rank in fp32 with Adam, for Ψ parameters on W ranks: 4Ψ + 12Ψ/W bytes. In backward there
are three buckets more: two on their way, and one that is being joined. For P bytes of parameters a
rank sends (W-1)/W·P bytes in backward and (W-1)/W·P in ``step``, together as many as data
parallelism. Messages: one per bucket and kind, and one of a byte per parameter tensor.
Invariant: all ranks send the same vectors in the same order in every backward, whichever parameters
they have used.

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
    """ZeRO-2: ZeroOptimizer, with all its promises, that keeps only its part of the gradients.

    Use no other data parallelism: ``backward()`` itself adds the mean over the ranks of ``group``
    to the owners' pieces, and every parameter's ``grad`` is None again. Parameters must come
    without a gradient. Every rank must run backward equally often, each time with a gradient of one
    parameter at least. A parameter without gradient on all ranks has none, also where backward
    leaves it undefined (a function returned None). Where only some ranks have a gradient, the
    others count as zero. Clip with ``clip_by_global_norm``.

    Backward sends (W-1)/W·P bytes per rank, a message of at most ``bucket_bytes`` for each bucket
    or parameter. At the end it sends one byte per parameter. A bucket leaves when its last gradient
    has come, and its gradients are freed then. Backward goes on while it travels. At most two
    buckets are on their way. In a backward the host waits for a GPU twice at most, at the end.

    A parameter that is given to a second Zero2Optimizer belongs to the second one alone from then
    on.

    Raises as ZeroOptimizer does; RuntimeError if a gradient is complete twice in one backward. If a
    backward raised, call ``zero_grad`` on that rank. It ends the other ranks' backward, with NaN in
    the buckets that had not left. The next step begins as usual.
    """

    running = False  # a backward is under way

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shard one more group, and reduce its gradients from the next backward on."""
        before = len(self.vectors)
        super().add_param_group(param_group)
        for vector in self.vectors[before:]:
            for p in vector.parameters:
                ready = functools.partial(weakly(self._ready), vector)
                if hasattr(p, "_zero2_hook"):
                    p._zero2_hook.remove()  # another optimizer's
                p._zero2_hook = p.register_post_accumulate_grad_hook(ready)

    def _ready(self, vector: FlatVector, p: nn.Parameter) -> None:
        """``p.grad``, of ``vector``, is complete on this rank."""
        # Step 1: the first gradient of a backward registers ``_finish`` for the end of backward
        # Step 2: vectors leave in the same order on all ranks, each when all its gradients have
        #         come
        raise NotImplementedError("exercise 3.14")

    def _leave(self, vector: FlatVector) -> None:
        """Issue the reduce-scatter of the vector's gradients, (W-1)·shard elements sent."""
        # Step 3: at most two are on their way: a vector that has left takes memory until it arrives
        # Step 4: join in the order of `flat`, zeros where there is no gradient; forget the
        #         originals
        raise NotImplementedError("exercise 3.14")

    def _arrive(self) -> None:
        """Wait for the oldest reduce-scatter, and add the mean to the vector's ``gradient``."""
        # Step 5: divide the sum by the number of ranks; add it to an earlier backward's mean
        raise NotImplementedError("exercise 3.14")

    def _finish(self) -> None:
        """Backward is done: the other vectors leave, and the pieces get their gradients."""
        # Step 6: every rank sends every vector, whichever parameters it has used
        # Step 7: a maximum over the ranks tells which parameters any rank has used
        # Step 8: in the order of `flat`, the pieces fill the shard from its beginning
        raise NotImplementedError("exercise 3.14")

    def give_gradients(self) -> None:
        """Nothing is to do: backward has given them."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the gradients' memory go; ``set_to_none=False`` does the same here.

        After a backward that raised it first sends the messages for which the other ranks wait,
        with NaN in every bucket that had not left.
        """
        # Step 9: a backward that raised is still under way: let its other vectors leave
        # Step 10: parts are views: drop both references
        raise NotImplementedError("exercise 3.14")

    @torch.no_grad()
    def clip_by_global_norm(self, max_norm: float) -> float:
        """Scale the parts by one factor: the whole gradient's 2-norm becomes at most ``max_norm``.

        Returns the norm before, the same on every rank. Gradients within the limit are not touched,
        and a norm that is not finite changes nothing. The sum of squares is taken in float64, so
        float16 does not overflow. One all-reduce of 8 bytes. The host waits for a GPU once, to read
        the norm. Raises ValueError on every rank, before the message, if ``max_norm`` is not
        positive (NaN is not).
        """
        # Step 11: sum the squares of the own elements, then over the ranks, then take the root
        raise NotImplementedError("exercise 3.14")
