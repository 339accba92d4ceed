# Exercises 2.19: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.19
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Random streams: dropout that is equal where tensors are replicated and different where sharded.

If two ranks drop different elements of a *replicated* tensor, it is replicated no more, and every
later all-reduce mixes different tensors. If two ranks drop the same elements of their *shards*, one
pattern repeats W times: less noise than one process would have. So each rank needs two independent
streams of random numbers, and must say which one it draws from. Functions such as dropout know only
the device's default generator. So a stream is a state that is put into that generator for a while:

    default generator   ─ a ─┐               ┌─ a ─       a: the caller's own numbers
    stream                   └─ b ─ b ─ b ─ b ┘           b: replicated, or this rank's own

Activation checkpointing runs forward twice and must drop the same elements again. PyTorch puts back
the default generator's state, but does not know of streams. So ``contexts`` puts the streams back
to where forward began, and after the recomputation to where they were before it. Invariant:
whatever happens in between, the k-th number that is drawn from a stream is the same in every run.
No communication.

Sources: Shoeybi et al. 2019 (arXiv 1909.08053), appendix B.2 (model parallel random numbers);
Korthikanti et al. 2022 (arXiv 2205.05198), section 5 (recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from given.agreement import Group

States = list[Tensor]  # of the CPU's generator and, with CUDA, of the device's
REPLICATED, SHARDED, CALLER = "replicated", "sharded", "caller"


class RandomStreams:
    """Two streams of random numbers for the default generators of this rank.

    ``seed``: not negative; equal on all ranks of ``group``, different on data-parallel replicas and
    pipeline stages. ``device``: with a CUDA device its generator takes part beside the CPU's.

    The streams depend on the seed and on the rank in ``group`` only. The streams of different
    seeds, or of different ranks, are independent of each other: none is a part of another. They are
    also independent of numbers that the caller draws with the same seed. Making and using them
    draws none of the caller's numbers. Several objects may be in use at once. Their contexts nest,
    but a context of object a must not be inside of one of b that is inside of one of a. Sends
    nothing. Raises ValueError for a negative seed, or if this process is not in ``group``.
    """

    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", group: Group = None
    ) -> None:
        # Step 1: list the generators that dropout draws from: the CPU's, and the CUDA device's
        # Step 2: mix the seeds from (seed, 0) for the replicated stream and (seed, 1 + rank) for
        #         the sharded one: seed + rank would meet the streams of neighbouring seeds. Pass
        #         the number as spawn_key: a list [seed, number] lets large seeds collide
        # Step 3: remember which stream the generators hold; at first the caller's own numbers
        raise NotImplementedError("exercise 2.19")

    def replicated(self) -> AbstractContextManager[None]:
        """Draw the same numbers on every rank of the group inside the context."""
        return self._drawing_from(REPLICATED)

    def sharded(self) -> AbstractContextManager[None]:
        """Draw numbers of this rank's own inside the context."""
        return self._drawing_from(SHARDED)

    def _save(self) -> dict[str, States]:
        """All states as they are now, with that of the stream in use."""
        # Step 4: only the generators know how far the stream in use has moved on
        raise NotImplementedError("exercise 2.19")

    def _switch(self, name: str) -> None:
        """Put the state of stream ``name`` into the generators."""
        # Step 5: note that from now on the generators hold this stream
        raise NotImplementedError("exercise 2.19")

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        """Use stream ``name``, then go back to the one before; nests, also in itself.

        Each stream goes on where it was left, also after an exception.
        """
        # Step 6: save the stream in use, switch; at the end, also after an error, save, switch back
        raise NotImplementedError("exercise 2.19")

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``checkpoint(…, use_reentrant=False, context_fn=streams.contexts)``.

        The first context goes around the forward pass, the second around each recomputation of it.
        The recomputation draws the numbers of forward and leaves all streams as it found them.
        """
        # Step 7: checkpoint asks for the contexts when forward begins. Forward itself needs no
        #         context: only remember where the streams are
        raise NotImplementedError("exercise 2.19")

    def state_dict(self) -> dict[str, States]:
        """Both streams' states (uint8 tensors), for a checkpoint of this rank.

        They are copies, which do not move on; inside of a context they are the states of that
        moment.
        """
        # Step 11: take the states as they are now, without the caller's own numbers
        raise NotImplementedError("exercise 2.19")

    def load_state_dict(self, states: dict[str, States]) -> None:
        """Go on where ``state_dict`` was taken, outside of the contexts.

        Raises ValueError inside of a context, or for states of another number of generators; then
        nothing changes.
        """
        # Step 12: check first, then take over the states of both streams
        raise NotImplementedError("exercise 2.19")


class _Rewound(AbstractContextManager[None]):
    """Inside, as often as it is entered, all streams are where they were when it was made."""

    def __init__(self, streams: RandomStreams) -> None:
        # Step 8: remember all states as they are now, and which stream is in use
        raise NotImplementedError("exercise 2.19")

    def __enter__(self) -> None:
        # Step 9: start from those states; checkpoint has put back the generators themselves
        raise NotImplementedError("exercise 2.19")

    def __exit__(self, *exc: object) -> None:
        # Step 10: let every stream go on where it was before the recomputation
        raise NotImplementedError("exercise 2.19")
