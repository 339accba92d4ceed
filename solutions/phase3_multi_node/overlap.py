"""Overlap: gradients leave in buckets while backward still computes.

Every rank holds the model and trains on its own samples. After backward every rank has the mean of
the ranks' gradients. Backward takes T, and the B buckets take c_1 … c_B on the wire. One after the
other that is T + Σ c_k. If bucket k is complete at time t_k and leaves then, it has arrived at

    f_k = max(t_k, f_{k-1}) + c_k        (f_0 = 0),

and a rank waits only for the remaining f_B - T. That is the last bucket at least, and more if the
wire is slower than backward.

Per step and rank, P bytes of trainable parameters: 2(W-1)/W·P bytes in B all-reduces (ring).
Gradients and buckets together hold P bytes.
Invariants: all ranks send the same buckets in the same order, whichever gradient comes first.
Nothing is in flight when backward returns. Equal weights before a step give equal weights after it.
The mean of the ranks is that of the samples only if all ranks have equally many samples. Uneven
last batches are out of scope here (exercise 1.4 weighs them).
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

from .buckets import broadcast_tensors, make_buckets, order_of_first_rank
from .comm_hooks import all_reduce

MIB = 1 << 20


class BucketedDDP(nn.Module):
    """``module`` on every rank of ``group``; after backward ``p.grad`` is the mean over the ranks.

    Starts with the parameters and buffers of the group's first rank. ``bucket_bytes`` limits a
    bucket, and ``first_bucket_bytes`` the first one, which is small so that it leaves early. A
    bucket leaves as soon as it is complete and all buckets before it have left. Backward goes on
    meanwhile. It waits for no bucket before its own end, and returns when all have arrived. The
    first backward uses the reverse of the order of registration, later ones the order in which the
    first rank's gradients came. The ranks learn that order once, by a broadcast of 8 bytes per
    parameter.

    After backward, also of ``wrapped.module(…)``, the gradient of every trainable parameter is a
    view into a bucket, in the parameter's dtype. There is no other copy. A gradient that a rank
    lacks counts as zero. On every rank backward must reach at least one parameter. Frozen
    parameters are not sent and keep their gradients, and tied ones are sent once. Freeze parameters
    before you wrap the module. A gradient that is there before backward takes part in the mean.
    Both ways of ``zero_grad`` work, ``create_graph`` does not. A backward that raises leaves the
    wrapper unusable. The values that a hook leaves in a bucket's buffer are the gradient. A wrapper
    that is dropped is freed and reduces no more. From the third backward on the host never waits
    for a GPU.

    Raises ValueError, before any communication, on a rank that is not in ``group``, and for a
    module without trainable parameters, with some on several devices, or with sparse gradients of
    embeddings. It does so, too, for bucket sizes that are not positive, and for parameters that
    another living wrapper reduces. Raises ValueError on every rank, after one all-reduce of 48
    bytes, if the ranks' modules differ in shapes, dtypes, order of strides, or in which parameters
    are frozen.
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
        # --- exercise 3.10: start
        # Step 1: buckets for the reverse of the order of registration (`_use_order`)
        # Step 2: make sure that parameters and buffers are alike on all ranks (`expect_alike`
        #         raises on all). Then broadcast their values
        # Step 3: let autograd call `_ready(index, p)` whenever a gradient is complete. Use
        #         `weakly`: parameters keep their hooks, and would keep this wrapper and its group
        self._use_order(reversed(range(len(self.trainable))))
        state = [*module.parameters(), *module.buffers()]
        expect_alike(state, group)
        broadcast_tensors(state, bucket_bytes, group)
        for index, p in enumerate(self.trainable):
            p.register_post_accumulate_grad_hook(functools.partial(weakly(self._ready), index))
        # --- exercise 3.10: end

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``module``."""
        return self.module(*args, **kwargs)

    def register_comm_hook(self, hook: Hook) -> None:
        """From now on ``hook(bucket)`` reduces a bucket: it replaces the one before.

        It is called once per bucket and backward, in the order of ``bucket.index``, the same on all
        ranks. ``comm_hooks`` says what it must do. ``wait`` of its handle is called in the same
        order before backward returns, and may communicate as well. A hook that keeps state keeps it
        by ``bucket`` object. All buckets are made anew once, after the first backward, and by
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

        It belongs into a checkpoint: gradients that are added up in other buckets have other last
        bits, and gradients that are compressed in other buckets lose other digits.
        """
        if not self.order_known:
            return None
        indices = {p: index for index, p in enumerate(self.trainable)}
        return [indices[p] for bucket in self.buckets for p in bucket.parameters]

    def set_bucket_order(self, order: Sequence[int] | None) -> None:
        """Go on with the buckets of an earlier run, by its ``bucket_order``, on all ranks.

        Call it on a new wrapper. Raises ValueError for an order of other parameters.
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
        # --- exercise 3.10: start
        # Step 4: make the buckets, and note for each index its bucket and its index in there
        self.buckets = make_buckets([self.trainable[i] for i in order], *self.limits)
        homes = {p: (b, k) for b in self.buckets for k, p in enumerate(b.parameters)}
        self.home = [homes[p] for p in self.trainable]
        self._reset()
        # --- exercise 3.10: end

    def _reset(self) -> None:
        """Be ready for the next backward."""
        self.running = False
        self.arrived: dict[int, None] = {}  # indices of gradients, in the order in which they came
        self.missing = [len(bucket.parameters) for bucket in self.buckets]
        self.handles: list[Handle | None] = []  # of the buckets that have left

    def _begin(self) -> None:
        """Let ``_finish`` be called at the end of the backward that is running; once is enough."""
        # --- exercise 3.10: start
        # Step 5: autograd's engine calls a queued function when backward is done, on the caller's
        #         streams and before `backward()` returns
        if not self.running:
            self.running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        # --- exercise 3.10: end

    def _ready(self, index: int, p: nn.Parameter) -> None:
        """``p.grad``, of ``trainable[index]``, is complete on this rank."""
        # --- exercise 3.10: start
        # Step 6: the first gradient begins the pass; each gradient goes into its bucket
        self._begin()
        self._take(index)
        # --- exercise 3.10: end

    def _take(self, index: int) -> None:
        """Put a gradient into its bucket, divided by W, and let the buckets leave that can."""
        # --- exercise 3.10: start
        # Step 7: note the arrival and fill the gradient's view
        # Step 8: buckets leave in their order, the same on every rank, also if a later one is
        #         complete first. `self.hook(bucket)` begins the reduction and does not wait
        self.arrived[index] = None
        bucket, k = self.home[index]
        bucket.take(k, self.share)
        self.missing[bucket.index] -= 1
        while len(self.handles) < len(self.buckets) and not self.missing[len(self.handles)]:
            self.handles.append(self.hook(self.buckets[len(self.handles)]))
        # --- exercise 3.10: end

    def _flush(self) -> None:
        """Let every bucket leave that has not: no further gradient will come on this rank."""
        # --- exercise 3.10: start
        # Step 9: a parameter that has not come has no gradient here. But another rank may have one,
        #         and waits
        for index in reversed(range(len(self.trainable))):
            if index not in self.arrived:
                self._take(index)
        # --- exercise 3.10: end

    def _finish(self) -> None:
        """Backward is done: wait for everything. Then the gradients are the means."""
        # --- exercise 3.10: start
        # Step 10: let everything leave, then wait for all of it, in order
        # Step 11: the first time, change to the order that the first rank has seen
        self._flush()
        for handle in self.handles:
            if handle is not None:
                handle.wait()
        if self.order_known:
            self._reset()
            return
        device = self.trainable[0].device
        self._use_order(order_of_first_rank(list(self.arrived), device, self.group))
        self.order_known = True
        # --- exercise 3.10: end


def trainable_parameters(module: nn.Module, group: Group) -> list[nn.Parameter]:
    """The parameters to reduce, each once; ValueError if DDP can't serve module or rank."""
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
