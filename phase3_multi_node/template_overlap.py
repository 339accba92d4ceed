# Exercises 3.10: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.10
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Overlap: gradients leave in buckets while backward still computes.

Every rank holds the model and trains on its own samples; after backward every rank has the mean of
the ranks' gradients. Backward takes T and the B buckets take c_1 … c_B on the wire. One after the
other that is T + Σ c_k. If bucket k is complete at time t_k and leaves then, it has arrived at

    f_k = max(t_k, f_{k-1}) + c_k        (f_0 = 0),

and f_B - T is all that is left to wait for: the last bucket at least, everything if the wire is
slower than backward.

Per step and rank, P bytes of trainable parameters: 2(W-1)/W·P bytes in B all-reduces (ring).
Gradients and buckets together hold P bytes.
Invariants: all ranks send the same buckets in the same order, whichever gradient comes first;
nothing is in flight when backward returns; equal weights before a step give equal weights after it.
The mean of the ranks is that of the samples only if all ranks have equally many: uneven last
batches are out of scope here (exercise 1.4 weighs them).
Source: Li et al. 2020 (arXiv 2006.15704), sections 3.2.3, 4.2 and 6.2.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from given.agreement import Group, expect_alike, rank_in
from given.bucket_hooks import Handle, Hook
from given.hooks import claim, weakly

from .template_buckets import broadcast_tensors, make_buckets, order_of_first_rank
from .template_comm_hooks import all_reduce

MIB = 1 << 20


class BucketedDDP(nn.Module):
    """``module`` on every rank of ``group``; after backward ``p.grad`` is the mean over the ranks.

    Starts with the parameters and buffers of the group's first rank. ``bucket_bytes`` limits a
    bucket, ``first_bucket_bytes`` the first one, which is small so that something leaves early. A
    bucket leaves as soon as it is complete and those before it have left. Backward goes on beside
    it, waits for none before its own end, and returns when all have arrived. The first backward
    uses the reverse of the order of registration, later ones the order in which the first rank's
    gradients came. That order is learned once, by a broadcast of 8 bytes per parameter.

    After backward, also of ``wrapped.module(…)``, the gradient of every trainable parameter is a
    view into a bucket, in the parameter's dtype; there is no other copy. Where a rank has no
    gradient it counts as zero; on every rank backward must reach at least one parameter. Frozen
    ones are not sent and keep their gradients, tied ones are sent once; what is frozen must be so
    before. A gradient that is there before backward takes part in the mean. Both ways of
    ``zero_grad`` work, ``create_graph`` does not. A backward that raises leaves the wrapper
    unusable. What a hook leaves in a bucket's buffer is the gradient. A wrapper that is dropped is
    freed and reduces no more. From the third backward on the host never waits for a GPU.

    Raises ValueError on a rank that is not in ``group``, for a module without trainable
    parameters or with some on several devices, for embeddings with sparse gradients, for bucket
    sizes that are not positive, and for parameters that another living wrapper reduces; before any
    communication. Raises ValueError on every rank, after one all-reduce of 48 bytes, if the ranks'
    modules differ in shapes, dtypes, order of strides, or in what is frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
    ) -> None:
        super().__init__()
        self.trainable = trainable_parameters(module, group)
        claim(self.trainable, self)
        self.module, self.group = module, group
        self.limits = bucket_bytes, first_bucket_bytes
        self.share = 1 / dist.get_world_size(group)
        self.hook: Hook = functools.partial(all_reduce, group=group)
        self.order_known = False  # the order in which gradients come has been seen
        # Step 1: buckets for the reverse of the order of registration (`_use_order`)
        # Step 2: parameters and buffers alike on all ranks, or all raise (`expect_alike`): then
        #         they become equal
        # Step 3: let autograd call `_ready(index, p)` whenever a gradient is complete; `weakly`,
        #         because parameters keep their hooks, and would keep this wrapper and its group
        raise NotImplementedError("exercise 3.10")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``module`` gives."""
        return self.module(*args, **kwargs)

    def register_comm_hook(self, hook: Hook) -> None:
        """From now on ``hook(bucket)`` reduces a bucket: it replaces the one before.

        It is called once per bucket and backward, in the order of ``bucket.index``, the same on all
        ranks; see ``comm_hooks`` for what it must do. ``wait`` of its handle is called in the same
        order before backward returns, and may communicate as well. State of a hook goes by
        ``bucket`` object: all are made anew once, after the first backward, and by
        ``set_bucket_order``.

        Raises TypeError if ``hook`` can't be called, RuntimeError while backward is running.
        """
        if not callable(hook):
            raise TypeError(f"a communication hook is called with a bucket; got {hook!r}")
        if self.running:
            raise RuntimeError("a communication hook can't change while backward is running")
        self.hook = hook

    def bucket_order(self) -> list[int] | None:
        """Indices into ``trainable`` in the order of the buckets; None before the first backward.

        It belongs into a checkpoint: what is added up in other buckets has other last bits, and
        what is compressed in other buckets is compressed otherwise.
        """
        if not self.order_known:
            return None
        indices = {p: index for index, p in enumerate(self.trainable)}
        return [indices[p] for bucket in self.buckets for p in bucket.parameters]

    def set_bucket_order(self, order: Sequence[int] | None) -> None:
        """Go on with the buckets of an earlier run: what its ``bucket_order`` gave, on all ranks.

        For a new wrapper. Raises ValueError for an order of other parameters.
        """
        if order is None:
            return
        if sorted(order) != [*range(len(self.trainable))]:
            raise ValueError(
                f"an order of {len(order)} parameters, but {len(self.trainable)} are trained: "
                f"{list(order)}"
            )
        self._use_order(order)
        self.order_known = True

    def _use_order(self, order: Iterable[int]) -> None:
        """Put the gradients into new buckets; ``order``: indices into ``trainable``."""
        # Step 4: make the buckets, and know for each index its bucket and its index in there
        raise NotImplementedError("exercise 3.10")

    def _reset(self) -> None:
        """Be ready for the next backward."""
        self.running = False
        self.arrived: dict[int, None] = {}  # indices of gradients, in the order in which they came
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        self.handles: list[Handle | None] = []  # of the buckets that have left

    def _begin(self) -> None:
        """Have ``_finish`` called at the end of the backward that is running; once is enough."""
        # Step 5: autograd's engine calls what is queued when backward is done, on the caller's
        #         streams and before `backward()` returns
        raise NotImplementedError("exercise 3.10")

    def _ready(self, index: int, p: nn.Parameter) -> None:
        """``p.grad``, of ``trainable[index]``, is complete on this rank."""
        # Step 6: the first one begins; each one goes into its bucket
        raise NotImplementedError("exercise 3.10")

    def _take(self, index: int) -> None:
        """Put a gradient into its bucket, divided by W, and let go what can leave."""
        # Step 7: note the arrival and fill the gradient's view
        # Step 8: buckets leave in their order, the same on every rank, also if a later one is
        #         complete first; `self.hook(bucket)` begins the reduction and does not wait
        raise NotImplementedError("exercise 3.10")

    def _flush(self) -> None:
        """Let every bucket leave that has not: no further gradient will come on this rank."""
        # Step 9: what has not come has no gradient here; but another rank may have one, and waits
        raise NotImplementedError("exercise 3.10")

    def _finish(self) -> None:
        """Backward is done: wait for everything; the gradients are the means."""
        # Step 10: let everything leave, then wait for all of it, in order
        # Step 11: the first time, go over to the order that the first rank has seen
        raise NotImplementedError("exercise 3.10")


def trainable_parameters(module: nn.Module, group: Group) -> list[nn.Parameter]:
    """What is to be reduced, each once; ValueError if DDP can't serve ``module`` or this rank."""
    rank_in(group)
    found = [p for p in module.parameters() if p.requires_grad]
    if not found:
        raise ValueError(f"{type(module).__name__} has no trainable parameter: nothing to reduce")
    devices = sorted({str(p.device) for p in found})
    if len(devices) > 1:
        raise ValueError(f"trainable parameters on {' and '.join(devices)}: one device per rank")
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise ValueError(f"{name or 'the module'} has sparse gradients: use sparse=False")
    return found
