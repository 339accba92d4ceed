# Exercises 3.11: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.11
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""DistributedDataParallel: overlapped reduction, extended for the hard cases of real training.

All ranks must send the same buckets, but each rank's backward may differ: a branch not taken, a
layer used twice, a window of micro-batches, an exception. The answer is always the same: decide
nothing from what this rank alone knows, and never leave a message out.

    rank 0   [bucket 0] [bucket 1]        [bucket 2]  [who has what?]  wait for all
    rank 1   [bucket 0]      (no gradient) [bucket 1] [bucket 2] [who has what?]  wait for all

Per step and rank this costs more than ``overlap``. With ``agree`` it is one all-reduce of 4 bytes
per parameter. If there are buffers, it is one broadcast per dtype before forward. Inside
``no_sync`` it costs nothing.
Invariant: after a step all ranks have the same gradients, None included, or all raise.
Source: Li et al. 2020 (arXiv 2006.15704), sections 3.2.3, 3.2.4 and 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group

from .template_buckets import broadcast_tensors
from .template_overlap import MIB, BucketedDDP


class StepAborted(RuntimeError):
    """A rank gave up this step, so no rank has a gradient.

    ``rank``: its number in the group; if several gave up, the number of one of them.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the group gave up this step")
        self.rank = rank


class DDP(BucketedDDP):
    """``BucketedDDP``, with all that it promises, extended for the hard cases of real training.

    A gradient may be missing on some ranks or on all. With ``agree`` the ranks tell each other at
    the end of backward which gradients they have. That takes one collective of at most 4 bytes per
    trainable parameter and 4 more. A gradient that no rank has stays None, so that momentum and
    weight decay leave the parameter alone, as in one process. A gradient from before this backward
    counts. A gradient that backward leaves undefined (a function returned None for it) does not.
    Without ``agree`` a missing gradient becomes zero, and the message is saved.

    While ``module.training`` is set, every forward begins with the buffers of the group's first
    rank, never with a mean. That holds for any dtype, and also for buffers that ``state_dict``
    leaves out. Autograd does not notice, so several forwards may come before one backward, through
    BatchNorm too. BatchNorm normalises by the rank's own samples, and its running statistics are
    those of the first rank's samples. Each forward then changes the rank's own copy, so evaluate
    and save the first rank's.

    From the third backward on the host never waits for a GPU without ``agree``, and with it at
    most twice per backward, at its end.

    If several backward passes follow one another, each adds its mean to the gradient. One backward
    may go through several wrappers, and through several forwards of one wrapper. Nothing of a step
    stays alive but its gradients, which lie in the buckets.

    A rank whose step fails calls ``abort()``. The next forward calls it if the program has not, and
    if a backward had reached an output of the module before it raised.

    Raises RuntimeError for a gradient that is complete twice in one backward that sends, on the
    rank where it happens. That happens to a parameter that two segments of reentrant checkpointing
    use: its first part may have left already.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: Group = None,
        bucket_bytes: int = 25 * MIB,
        first_bucket_bytes: int = MIB,
        agree: bool = False,
    ) -> None:
        super().__init__(
            module, group=group, bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes
        )
        self.agree = agree
        self.sync = True  # False inside no_sync
        self.given_up = False  # this rank has no gradient to offer for this step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of ``module``; while it is training all ranks call it equally often.

        It sends the buffers while ``module.training`` is set (the wrapper's own mode does not
        count) and outside of ``no_sync``: one broadcast for each ``bucket_bytes`` of a dtype.
        Without buffers it sends nothing. A reentrant checkpoint runs a backward inside another one.
        The pass ends with the outermost backward that reaches an output, also an output in lists,
        tuples and mappings.
        """
        # Step 1: a backward that raised has not ended, and the other ranks wait for its buckets
        # Step 2: forward reads buffers, so make them equal before it. In evaluation ranks may have
        #         different numbers of batches, so send nothing
        # Step 3: the gradient of an output comes from the outermost backward: begin there. A
        #         reentrant checkpoint runs another backward inside, and the end of that one is not
        #         the end
        raise NotImplementedError("exercise 3.11")

    def _outermost(self, _: Tensor) -> None:
        """Backward has reached an output of the module."""
        if self.sync:
            self._begin()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in this context adds to the local gradients and sends nothing.

        They lie in the buckets: no second copy. The next backward outside sends the sum. For
        gradients it counts where backward runs, for buffers where forward runs. Contexts may be
        nested. When a context ends, also by an exception, the earlier setting is back.
        """
        # Step 4: restore the earlier setting, also if the body raises; contexts may be nested
        raise NotImplementedError("exercise 3.11")

    def _ready(self, index: int, p: nn.Parameter) -> None:
        """``p.grad``, of ``trainable[index]``, is complete on this rank."""
        # Step 5: without sync a local gradient goes into its bucket all the same: no second copy
        # Step 6: PyTorch calls this for an undefined gradient, too: that is no gradient
        # Step 7: nothing can be added to a bucket that may have left
        raise NotImplementedError("exercise 3.11")

    def _finish(self) -> None:
        """Backward is done: wait for everything, then learn which gradients the other ranks have.

        Raises StepAborted, on every rank of the group, if one has given up the step and the ranks
        ``agree``. Then no gradient is left, nothing is in flight, and the next step begins as
        usual.
        """
        # Step 8: which parameters have a gradient? One from an earlier backward counts, too
        # Step 9: first every bucket, then the message about them: the same order on every rank
        # Step 10: a maximum over the ranks tells what anyone has, and which rank (plus 1) gave up
        # Step 11: wait for everything before anything raises
        raise NotImplementedError("exercise 3.11")

    def abort(self) -> None:
        """This rank gives up a step: after forward, and before backward or when that has raised.

        All its trainable gradients are None afterwards, accumulated ones too. It raises nothing
        itself. It sends what the other ranks wait for, so that they don't hang and the next step
        begins in order. If the ranks ``agree``, backward raises StepAborted on the others. If not,
        they find NaN in every gradient that had not come on this rank in this backward. If all had
        come, they have the mean. It takes the part of a backward that sends. Don't call it for a
        backward inside ``no_sync``, for which no rank waits.
        """
        # Step 12: put NaN where no gradient has come (those that have come are in their buckets),
        #          then send the same messages as every other rank
        # Step 13: this rank knows already that it gave up: raise nothing here
        raise NotImplementedError("exercise 3.11")


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_in(each)
