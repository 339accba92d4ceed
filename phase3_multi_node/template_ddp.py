# Exercises 3.11: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase3.py 3.11
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""DistributedDataParallel: overlapped reduction, extended for the hard cases of real training.

All ranks must send the same buckets, but what one rank's backward does is its own affair: a branch
not taken, a layer used twice, a window of micro-batches, an exception. The answer is always the
same: decide nothing from what this rank alone knows, and never leave a message out.

    rank 0   [bucket 0] [bucket 1]        [bucket 2]  [who has what?]  wait for all
    rank 1   [bucket 0]      (no gradient) [bucket 1] [bucket 2] [who has what?]  wait for all

Per step and rank beyond ``overlap``: one all-reduce of 4 bytes per parameter with ``agree``; one
broadcast per dtype of the buffers before forward, if there are any; nothing inside ``no_sync``.
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

    Without a gradient, on some ranks or on all: with ``agree`` the ranks tell each other at the end
    of backward who has which, in one collective of at most 4 bytes per trainable parameter and 4
    more. What nobody has stays None, so that momentum and weight decay leave the parameter alone,
    as in one process. A gradient from before this backward counts. One that backward leaves
    undefined (a function returned None for it) does not. Without ``agree`` a missing gradient
    becomes zero, and the message is saved.

    Buffers, of any dtype and also those that ``state_dict`` leaves out: while ``module.training``
    is set every forward begins with those of the group's first rank, never with a mean. Autograd
    does not notice, so several forwards may come before one backward, through BatchNorm too.
    BatchNorm normalises by the rank's own samples, and its running statistics are those of the
    first rank's samples. Each forward then changes the rank's own copy, so evaluate and save the
    first rank's.

    From the third backward on the host never waits for a GPU without ``agree``, and with it at
    most twice per backward, at its end.

    Several backward passes one after the other: each adds its mean to the gradient. One backward
    may go through several wrappers, and through one wrapper's forwards of several calls. Nothing of
    a step stays alive but its gradients, which lie in the buckets.

    A rank whose step fails: ``abort()``. The next forward calls it if nobody has, and if a backward
    had reached an output of the module before it raised.

    Raises RuntimeError for a gradient that is complete twice in one backward that sends, on the
    rank where it happens: a parameter that two segments of reentrant checkpointing use does that,
    and its first part may have left already.
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
        """What ``module`` gives; while it is training all ranks call it equally often.

        Sends the buffers while ``module.training`` is set (the wrapper's own mode does not count)
        and outside of ``no_sync``: one broadcast for each ``bucket_bytes`` of a dtype. Without
        buffers it sends nothing. A backward ends when the outermost one does that reaches an
        output, also one in lists, tuples and mappings: a reentrant checkpoint runs others inside.
        """
        # Step 1: a backward that raised is still open, and the other ranks wait for its buckets
        # Step 2: forward reads buffers, so make them equal before it; in evaluation ranks may have
        #         different numbers of batches, so send nothing
        # Step 3: the gradient of an output comes from the outermost backward: let that one begin,
        #         because a reentrant checkpoint runs others inside it, whose end is not the end
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
        nested. When one ends, also by an exception, what was before is back.
        """
        # Step 4: put back what was before, also if the body raises; contexts may be nested
        raise NotImplementedError("exercise 3.11")

    def _ready(self, index: int, p: nn.Parameter) -> None:
        """``p.grad``, of ``trainable[index]``, is complete on this rank."""
        # Step 5: without sync a local gradient goes into its bucket all the same: no second copy
        # Step 6: torch calls this for an undefined gradient, too: that is none
        # Step 7: nothing can be added to a bucket that may have left
        raise NotImplementedError("exercise 3.11")

    def _finish(self) -> None:
        """Backward is done: wait for everything, then learn what the other ranks have.

        Raises StepAborted, on every rank of the group, if one has given up the step and the ranks
        ``agree``. Then no gradient is left, nothing is in flight, and the next step is as ever.
        """
        # Step 8: who has a gradient? One from before counts, also if this backward brought none
        # Step 9: first every bucket, then the message about them: the same order on every rank
        # Step 10: a maximum over the ranks tells what anyone has, and which rank (plus 1) gave up
        # Step 11: wait for everything before anything raises
        raise NotImplementedError("exercise 3.11")

    def abort(self) -> None:
        """This rank gives up a step: after forward, and before backward or when that has raised.

        All its trainable gradients are None afterwards, accumulated ones too. It raises nothing
        itself. It sends what the other ranks wait for, so that they don't hang and the next step
        begins in order. If the ranks ``agree``, backward raises StepAborted on the others. If not,
        they find NaN in every gradient that had not come on this rank in this backward; had all
        come, they have the mean. Stands for a backward that sends: don't call it for one inside
        ``no_sync``, which nobody waits for.
        """
        # Step 12: NaN for what has not come (what has come is in its bucket already), then the same
        #          messages as every other rank
        # Step 13: this rank knows already that it gave up: nothing is raised here
        raise NotImplementedError("exercise 3.11")


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_in(each)
