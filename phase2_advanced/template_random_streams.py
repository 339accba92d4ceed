# Exercises 2.19: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.19
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Random streams: dropout that is equal where tensors are replicated and different where sharded.

A rank that drops other elements of a *replicated* tensor than its neighbour leaves the ranks with
different tensors, and every later all-reduce mixes them up. A rank that drops the same elements of
its *shard* as its neighbour drops everything in W-fold patterns: less noise than one process would
have. So each rank needs two independent streams of random numbers and must say which one it draws
from. Functions such as dropout only know the device's default generator; a stream is a state that
is put into that generator for a while:

    default generator   ─ a ─┐               ┌─ a ─       a: the caller's own numbers
    stream                   └─ b ─ b ─ b ─ b ┘           b: replicated, or this rank's own

Activation checkpointing runs forward twice and must drop the same elements again. PyTorch puts back
the default generator's state, but does not know of streams: ``contexts`` rewinds them for the
recomputation and puts them forward again afterwards. Invariant: whatever happens in between, the
k-th number that is drawn from a stream is the same in every run. No communication.

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

    The streams depend on the seed and on the rank in ``group`` only. Those of different seeds, or
    of different ranks, are independent of each other and of numbers that the caller draws, also
    with the same seed: none is a part of another. Making and using them draws none of the caller's
    numbers. Several objects may be in use at once. Their contexts nest, but not one of a in one of
    b in one of a. Sends nothing. Raises ValueError for a negative seed, or if this process is not
    in ``group``.
    """

    def __init__(
        self, seed: int, *, device: torch.device | str = "cpu", group: Group = None
    ) -> None:
        # Step 1: the generators that dropout draws from: the CPU's, and that of the CUDA device
        # Step 2: seeds from (seed, 0) for what is replicated and (seed, 1 + rank) for the shards;
        #         mixed, because seed + rank would meet the streams of neighbouring seeds, and with
        #         the number as spawn_key: [seed, number] joins their words, so large seeds collide
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
        # Step 4: the stream in use has moved on in the generators only
        raise NotImplementedError("exercise 2.19")

    def _switch(self, name: str) -> None:
        """Put the state of stream ``name`` into the generators."""
        # Step 5: what the generators hold from now on is this stream
        raise NotImplementedError("exercise 2.19")

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        """Use stream ``name``, then go back to the one before; nests, also in itself.

        Each stream goes on where it was left, also after an exception.
        """
        # Step 6: save what is in use, switch, and in any case save and switch back
        raise NotImplementedError("exercise 2.19")

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``checkpoint(…, use_reentrant=False, context_fn=streams.contexts)``.

        The first context goes around the forward pass, the second around each recomputation of it,
        which draws what forward drew and leaves all streams as it found them.
        """
        # Step 7: checkpoint asks for the contexts when forward begins: nothing to do for it but
        #         to remember where the streams are
        raise NotImplementedError("exercise 2.19")

    def state_dict(self) -> dict[str, States]:
        """Both streams' states (uint8 tensors), for a checkpoint of this rank.

        They are copies, which do not move on; inside of a context they are those of that moment.
        """
        # Step 11: as they are now; the caller's own numbers are not ours to save
        raise NotImplementedError("exercise 2.19")

    def load_state_dict(self, states: dict[str, States]) -> None:
        """Go on where ``state_dict`` was taken, outside of the contexts.

        Raises ValueError inside of one, or for states of another number of generators; then nothing
        changes.
        """
        # Step 12: the states of both streams, for the same generators
        raise NotImplementedError("exercise 2.19")


class _Rewound(AbstractContextManager[None]):
    """Inside, as often as it is entered, all streams are where they were when this was made."""

    def __init__(self, streams: RandomStreams) -> None:
        # Step 8: all states as they are now, and which stream is in use
        raise NotImplementedError("exercise 2.19")

    def __enter__(self) -> None:
        # Step 9: start from those; the generators themselves have been put back by checkpoint
        raise NotImplementedError("exercise 2.19")

    def __exit__(self, *exc: object) -> None:
        # Step 10: every stream goes on where it was before the recomputation
        raise NotImplementedError("exercise 2.19")
