# Exercises 4.6, 4.7: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase4.py 4.6
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, distributed checkpoint, model averaging,
# communication hooks, collectives with gradients, synchronisation of module states, the key-value
# store.
"""Send few of the entries, and keep the others for later: Top-K and random-K with error feedback.

A hook (exercise 3.12) gets a bucket with this rank's gradients g_r, divided by W. It leaves the
same approximation of Σ g_r on every rank. An entry that it leaves out is not lost but late:

    v_r ← v_r + g_r          the residual takes what is new
    send s_r = C(v_r)        few entries of it
    v_r ← v_r - s_r          what was sent is no longer owed
    bucket ← Σ_r s_r

Invariant: (sum of all that was sent) + Σ_r v_r = (sum of all gradients), so that no direction is
lost for ever. All ranks end with the same bits.

Bytes that a rank sends, of n entries with k = ratio·n chosen, in b bytes each:

    all-reduce   2(W-1)/W·n·b
    Top-K        (W-1)·k·(b + 4)      all-gather: every rank chooses its own positions, names them
    random-K     2(W-1)/W·k·b         all-reduce: the positions follow from a seed, and never travel

Sources: Stich et al. 2018 (arXiv 1809.07599), algorithm 1 for error feedback; Lin et al. 2018,
"Deep Gradient Compression" (arXiv 1712.01887), sections 3.1 and 3.2 for momentum correction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from given.agreement import Group
from given.bucket_hooks import Bucket, Handle, Then

State = dict[str, Any]  # nested dicts and lists of tensors and numbers


class PerParameter:
    """One tensor for every parameter, zeros at first, that lies like the buckets do.

    DDP makes its buckets anew after the first backward, and so does a job that resumes. So the
    tensors belong to the parameters, whichever buckets they were in meanwhile. They are numbered as
    the parameters were given, like an optimizer's state. Frozen parameters have none. Buckets are
    not kept alive, and each parameter has one tensor at any time.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parts = {p: p.detach().new_zeros(p.numel()) for p in parameters if p.requires_grad}
        self.joined: dict[tuple[nn.Parameter, ...], Tensor] = {}  # each parameter once at most

    def beside(self, bucket: Bucket) -> Tensor:
        """(n,) like ``bucket.buffer``: the tensor of its parameters, to be written to.

        Raises ValueError, and changes nothing, for a parameter that is not one of those given.
        """
        # Step 1: look first whether all parameters are known
        # Step 2: join the parameters' tensors to one, which replaces them. When another bucket has
        #         one of these parameters, this joined tensor is out of date
        raise NotImplementedError("exercise 4.6")

    def state_dict(self) -> list[Tensor]:
        """A copy of each parameter's tensor (numel,), in the order in which they were given."""
        # Step 3: copies, because training goes on
        raise NotImplementedError("exercise 4.6")

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Go on from ``state``; ValueError, and no change, if it is of other sizes."""
        # Step 4: compare everything first, then write into the parts
        raise NotImplementedError("exercise 4.6")


def check_sizes(saved: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    """ValueError unless the two have tensors of the same sizes."""
    sizes, wanted = ([t.numel() for t in tensors] for tensors in (saved, here))
    if sizes != wanted:
        raise ValueError(f"saved for parameters of {sizes} elements, but there are {wanted}")


def count_for(ratio: float, numel: int) -> int:
    """k: how many of ``numel`` entries travel; at least one, if there is one."""
    return min(numel, max(1, round(ratio * numel)))


def check_ratio(ratio: float) -> None:
    """ValueError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"the ratio of entries to send must be in (0, 1], got {ratio}")


class TopK:
    """A hook that sends of each bucket the k entries with the largest absolute value.

    ``parameters``: those of the model, on the device where they will stay, as for an optimizer. In
    a bucket of n entries k = max(1, round(ratio·n)). Each rank chooses by its own residual.

    ``momentum`` m > 0 is momentum correction. A late entry must not miss the momentum that it would
    have had, so momentum is taken *before* the choice, by each rank for itself:

        u ← m·u + g,  v ← v + u,  send the top k of v,  v and u ← 0 where it was sent

    Then the optimizer must have no momentum, or it would be taken twice. The velocity u is cleared,
    too ("momentum factor masking"): it must not push along a direction that has just been served.

    Cost: (W-1)·k·(itemsize + 4) bytes per bucket and rank, in two messages. Indices are int32, so
    one bucket holds up to 2^31 entries. Memory: a copy of the gradients, two with momentum. W
    counts the ranks of ``group``, and no other rank takes part. Raises ValueError for a ratio
    outside (0, 1], or a momentum outside [0, 1).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ratio: float = 0.01,
        momentum: float = 0.0,
        group: Group = None,
    ) -> None:
        check_ratio(ratio)
        if not 0 <= momentum < 1:
            raise ValueError(f"the momentum must be in [0, 1), got {momentum}")
        self.ratio, self.momentum, self.group = ratio, momentum, group
        parameters = [*parameters]
        self.residual = PerParameter(parameters)
        self.velocity = PerParameter(parameters if momentum else [])

    def __call__(self, bucket: Bucket) -> Handle | None:
        """Begin to send; once ``wait`` is done the buffer holds Σ of all ranks' messages.

        The sum has the same bits on all ranks. All messages are under way when it returns. Several
        buckets may be under way. They are waited for in the order in which they were begun. An
        empty bucket sends nothing. Random numbers and parameters stay as they are.
        """
        # Step 5: add the new gradient to the residual, with momentum through the velocity
        # Step 6: choose, and clear the chosen entries, in the velocity as well
        # Step 7: begin to gather values and indices (int32) of all ranks; an empty bucket is ready
        # Step 8: then add them up in the order of the ranks: the same bits everywhere
        raise NotImplementedError("exercise 4.6")

    def state_dict(self) -> State:
        """A copy of this rank's state; every rank has its own."""
        # Step 9: everything that the next step depends on
        raise NotImplementedError("exercise 4.6")

    def load_state_dict(self, state: State) -> None:
        """Go on from a ``state_dict`` of this rank, to the bit; ``state`` stays as it is.

        Raises ValueError, and changes nothing, if it is of other parameters, or if only one of the
        two has momentum.
        """
        # Step 10: the same in the other direction. Refuse a wrong velocity first, so that nothing
        #          is half loaded
        raise NotImplementedError("exercise 4.6")


class RandomK:
    """A hook that sends k random entries of each bucket: the same positions on all ranks.

    ``parameters``: those of the model, on the device where they will stay, as for an optimizer. k =
    max(1, round(ratio·n)) distinct positions are drawn from ``seed``. They are the same on all
    ranks, which call the hook in the same order. Any k positions are as likely as any others,
    independent of earlier draws, other buckets and other seeds. So values are summed by an
    all-reduce and positions cost nothing: 2(W-1)/W·k·itemsize bytes per bucket and rank, in one
    message. Other entries stay in the residual. Values are not scaled up by n/k, because error
    feedback sends the others later. Memory: a copy of the gradients. W counts the ranks of
    ``group``, and no other rank takes part. Raises ValueError for a ratio outside (0, 1].
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        ratio: float = 0.01,
        seed: int = 0,
        group: Group = None,
    ) -> None:
        check_ratio(ratio)
        self.ratio, self.group = ratio, group
        self.generator = torch.Generator().manual_seed(seed)
        self.residual = PerParameter(parameters)

    def __call__(self, bucket: Bucket) -> Handle | None:
        """Begin to send; once ``wait`` is done the buffer holds the sum at the positions drawn.

        Elsewhere it is zero. All ranks get the same bits. The message is under way when it returns.
        Several buckets may be under way. They are waited for in the order in which they were begun.
        An empty bucket sends nothing. Global random numbers and parameters stay as they are.
        """
        # Step 1: add the new gradient to the residual
        # Step 2: draw k distinct positions; hooks are called in the same order on all ranks, so one
        #         generator per rank, seeded alike, stays in step with the others
        # Step 3: take the values out of the residual and begin to sum them over the ranks
        # Step 4: then put them into a buffer that is zero everywhere else
        raise NotImplementedError("exercise 4.7")

    def state_dict(self) -> State:
        """A copy of this rank's state; every rank has its own."""
        # Step 5: the residual, and where the generator is
        raise NotImplementedError("exercise 4.7")

    def load_state_dict(self, state: State) -> None:
        """Go on from a ``state_dict`` of this rank, to the bit; ``state`` stays as it is.

        Raises ValueError, and changes nothing, if it is of other parameters.
        """
        # Step 6: the same in the other direction
        raise NotImplementedError("exercise 4.7")
