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
        # --- exercise 2.19: start
        # Step 1: list the generators that dropout draws from: the CPU's, and the CUDA device's
        # Step 2: mix the seeds from (seed, 0) for the replicated stream and (seed, 1 + rank) for
        #         the sharded one: seed + rank would meet the streams of neighbouring seeds. Pass
        #         the number as spawn_key: a list [seed, number] lets large seeds collide
        # Step 3: remember which stream the generators hold; at first the caller's own numbers
        rank = dist.get_rank(group)
        if seed < 0 or rank < 0:
            reason = f"seed {seed} is negative" if seed < 0 else "this process is not in the group"
            raise ValueError(f"no random streams: {reason}")
        self.generators = [torch.default_generator]
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            self.generators.append(torch.cuda.default_generators[index])
        self.current, self.states = CALLER, {}
        for name, number in ((REPLICATED, 0), (SHARDED, 1 + rank)):
            sequence = np.random.SeedSequence(seed, spawn_key=(number,))
            mixed = int(sequence.generate_state(1, np.uint64)[0])
            fresh = [torch.Generator(g.device).manual_seed(mixed) for g in self.generators]
            self.states[name] = [g.get_state() for g in fresh]
        # --- exercise 2.19: end

    def replicated(self) -> AbstractContextManager[None]:
        """Draw the same numbers on every rank of the group inside the context."""
        return self._drawing_from(REPLICATED)

    def sharded(self) -> AbstractContextManager[None]:
        """Draw numbers of this rank's own inside the context."""
        return self._drawing_from(SHARDED)

    def _save(self) -> dict[str, States]:
        """All states as they are now, with that of the stream in use."""
        # --- exercise 2.19: start
        # Step 4: only the generators know how far the stream in use has moved on
        self.states[self.current] = [g.get_state() for g in self.generators]
        return dict(self.states)
        # --- exercise 2.19: end

    def _switch(self, name: str) -> None:
        """Put the state of stream ``name`` into the generators."""
        # --- exercise 2.19: start
        # Step 5: note that from now on the generators hold this stream
        self.current = name
        for generator, state in zip(self.generators, self.states[name], strict=True):
            generator.set_state(state)
        # --- exercise 2.19: end

    @contextmanager
    def _drawing_from(self, name: str) -> Iterator[None]:
        """Use stream ``name``, then go back to the one before; nests, also in itself.

        Each stream goes on where it was left, also after an exception.
        """
        # --- exercise 2.19: start
        # Step 6: save the stream in use, switch; at the end, also after an error, save, switch back
        before = self.current
        self._save()
        self._switch(name)
        try:
            yield
        finally:
            self._save()
            self._switch(before)
        # --- exercise 2.19: end

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``checkpoint(…, use_reentrant=False, context_fn=streams.contexts)``.

        The first context goes around the forward pass, the second around each recomputation of it.
        The recomputation draws the numbers of forward and leaves all streams as it found them.
        """
        # --- exercise 2.19: start
        # Step 7: checkpoint asks for the contexts when forward begins. Forward itself needs no
        #         context: only remember where the streams are
        return nullcontext(), _Rewound(self)
        # --- exercise 2.19: end

    def state_dict(self) -> dict[str, States]:
        """Both streams' states (uint8 tensors), for a checkpoint of this rank.

        They are copies, which do not move on; inside of a context they are the states of that
        moment.
        """
        # --- exercise 2.19: start
        # Step 11: take the states as they are now, without the caller's own numbers
        states = self._save()
        return {name: states[name] for name in (REPLICATED, SHARDED)}
        # --- exercise 2.19: end

    def load_state_dict(self, states: dict[str, States]) -> None:
        """Go on where ``state_dict`` was taken, outside of the contexts.

        Raises ValueError inside of a context, or for states of another number of generators; then
        nothing changes.
        """
        # --- exercise 2.19: start
        # Step 12: check first, then take over the states of both streams
        if self.current != CALLER:
            raise ValueError(f"the {self.current} stream is in use: load outside of its context")
        here = len(self.generators)
        if any(len(states[name]) != here for name in (REPLICATED, SHARDED)):
            raise ValueError(f"the streams were saved for other generators, here there are {here}")
        self.states |= {name: list(states[name]) for name in (REPLICATED, SHARDED)}
        # --- exercise 2.19: end


class _Rewound(AbstractContextManager[None]):
    """Inside, as often as it is entered, all streams are where they were when it was made."""

    def __init__(self, streams: RandomStreams) -> None:
        # --- exercise 2.19: start
        # Step 8: remember all states as they are now, and which stream is in use
        self.streams = streams
        self.begun = streams.current, streams._save()
        # --- exercise 2.19: end

    def __enter__(self) -> None:
        # --- exercise 2.19: start
        # Step 9: start from those states; checkpoint has put back the generators themselves
        streams, (current, states) = self.streams, self.begun
        self.now = streams.current, streams.states
        streams.current, streams.states = current, dict(states)
        # --- exercise 2.19: end

    def __exit__(self, *exc: object) -> None:
        # --- exercise 2.19: start
        # Step 10: let every stream go on where it was before the recomputation
        self.streams.current, self.streams.states = self.now
        # --- exercise 2.19: end
