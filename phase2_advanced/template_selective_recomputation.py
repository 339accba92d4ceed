# Exercises 2.27: replace every `raise NotImplementedError` by your code.
# The docstrings say what is asked for. Test with: python test_phase2.py 2.27
# It counts as a shortcut to call PyTorch's own DistributedSampler, DistributedDataParallel, FSDP,
# ZeroRedundancyOptimizer, pipelining, DTensor, activation checkpointing, distributed checkpoint,
# model averaging, communication hooks, collectives with gradients, synchronisation of module
# states, the key-value store.
"""Selective recomputation: keep the outputs of chosen operators, compute the other ones again.

Full checkpointing (2.7) keeps the inputs of a segment and computes everything twice. But operators
differ in what a kept byte saves. Take T tokens of width D, sequences of S tokens, heads of width d,
and b bytes per number:

    operator                      FLOPs        output bytes     FLOPs saved per kept byte
    T×D by D×F, a layer's product 2·T·D·F      T·F·b            2·D/b
    scores of a head, S×d by d×S  2·S·S·d      S·S·b            2·d/b
    softmax, GELU, norm, sum      about its bytes               about 1

So a segment keeps products with weights, and computes the rest again. Let A be the bytes of the
inputs, K those of the kept outputs, L those that autograd saves without checkpointing, C the FLOPs
of a forward and C_K those of the kept operators:

                   held after forward    computed again in backward, at most
    no segment     L                     0
    full (2.7)     A                     C
    selective      A + K                 C - C_K

K counts the kept outputs up to the last tensor that backward needs: there the second forward ends.
A + K may exceed L: autograd saves no output that backward never reads.

Invariant: outputs, gradients and random states equal the plain call's. Collectives run again.
Sources: Chen et al. 2016 (arXiv 1604.06174), section 4, for dropping cheap results. Korthikanti et
al. 2022 (arXiv 2205.05198), section 5, for attention.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from given.operators import (
    NOT_COUNTED,
    Keep,
    Mode,
    Operation,
    RandomStates,
    detached,
    random_states,
    saved_by,
    set_random_states,
    storage_of,
    written_by,
)

from .template_activation_checkpointing import Surroundings, put_in, take_out


# -- what to keep ---------------------------------------------------------------------------------
@cache
def makes_new(op: OpOverload) -> bool:
    """Whether ``op`` writes into none of its arguments, and returns no view of one. Collectives
    (namespace ``c10d``) write, though their schemas do not say so."""
    # Step 1: op._schema has is_mutable, and returns with an alias_info each
    raise NotImplementedError("exercise 2.27")


def at_least(flops_per_byte: float) -> Keep:
    """The policy that keeps an output if it saves at least so many FLOPs per byte.

    An operator on the limit is kept. With 0 every operator is. Raises ValueError if
    ``flops_per_byte`` is negative or no number.
    """
    # Step 2: compare by a product: an output may have no bytes
    raise NotImplementedError("exercise 2.27")


# -- kept outputs ---------------------------------------------------------------------------------
@dataclass
class Kept:
    """The output of an operator, which need not run again."""

    structure: Any  # the output, with Slots in the place of tensors
    tensors: list[Tensor]
    versions: list[int]  # of the tensors, when the operator returned
    random: RandomStates  # states after it, if it drew random numbers

    @classmethod
    def of(cls, operation: Operation) -> Kept:
        """Keep the output, which gets no graph here."""
        # Step 3: take the tensors out. Autograd gives them a graph that leads back to this
        #         segment, so keep detached ones: a circle is freed late
        # Step 4: an operator that draws random numbers has torch.Tag.nondeterministic_seeded
        raise NotImplementedError("exercise 2.27")

    @property
    def changed(self) -> bool:
        """Whether somebody wrote into a tensor after the operator had returned it."""
        # Step 5: every write in place adds to a tensor's _version, also one through a view
        raise NotImplementedError("exercise 2.27")

    def give(self) -> Any:
        """The output; random states are as after the operator."""
        # Step 6: first the random states, then the tensors in their places
        raise NotImplementedError("exercise 2.27")


# -- the two forwards, below autograd -------------------------------------------------------------
class Keeping(Mode):
    """The first forward: notes each operator, with its output if ``keep`` chooses it."""

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep
        self.steps: list[tuple[OpOverload, Kept | None]] = []
        self.parameters: dict[Tensor, int] = {}  # those that operators took, with their versions

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``op``, and ask ``keep`` once if ``op`` makes new tensors."""
        # Step 7: note the parameters among the arguments, also in lists, then run the operator
        # Step 8: let go of kept outputs that it wrote into (written_by)
        # Step 9: a view costs nothing, and what is written in place is gone: never keep these
        raise NotImplementedError("exercise 2.27")


class Giving(Mode):
    """The second forward: gives each kept output back once, and runs all other operators."""

    def __init__(self, steps: list[tuple[OpOverload, Kept | None]]) -> None:
        super().__init__()
        self.steps = steps
        self.done = 0  # operators so far

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The output of ``op``: kept or computed. RuntimeError if the first forward had another
        operator here. A kept output leaves ``steps``."""
        # Step 10: compare with the operator of the first forward before you give its output
        # Step 11: let go of what you give: backward frees it when it has used it
        # Step 12: a kept output that was changed is computed again
        raise NotImplementedError("exercise 2.27")


# -- one segment ----------------------------------------------------------------------------------
class Enough(BaseException):
    """Ends the second forward: all that backward needs is there."""


class Segment:
    """One call of ``fn``, and how it runs again."""

    def __init__(self, keep: Keep, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        tensors: list[Tensor] = []
        self.fn = fn
        self.inputs = take_out((args, kwargs), tensors)
        self.surroundings = Surroundings(tensors)
        self.arguments = saved_by(tensors)
        self.keeping = Keeping(keep)
        self.saved: list[tuple[torch.Size, torch.dtype]] = []  # what autograd saved, in order
        self.found: dict[int, Tensor] = {}  # the same after the second forward, by number
        self.needed = 0  # operators before the last tensor that autograd saved

    def pack(self, tensor: Tensor) -> int:
        """In the first forward: a number for ``tensor``, which is not kept."""
        # Step 13: note shape and dtype, and the number of operators: backward needs no later one
        raise NotImplementedError("exercise 2.27")

    def catch(self, tensor: Tensor) -> None:
        """In the second forward: hold on to ``tensor`` without its graph; stop after the last."""
        # Step 14: the k-th tensor here is the k-th of the first forward; raise Enough at the last.
        #          Nobody goes backward through the graph of the second forward
        raise NotImplementedError("exercise 2.27")

    def unpack(self, number: int) -> Tensor:
        """In backward: the tensor with this number, which leaves the segment."""
        # Step 15: run again only if the tensor is not there; a second backward needs that, too
        raise NotImplementedError("exercise 2.27")

    def run_again(self) -> None:
        """The second forward, which fills ``found``."""
        # Step 16: a parameter that changed would give other values: refuse it
        # Step 17: detach the inputs, and run in the surroundings of the first forward
        # Step 18: the second forward may save less than the first one: refuse that, too
        raise NotImplementedError("exercise 2.27")


def selective_checkpoint(keep: Keep, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, keeping its tensor arguments and the outputs that ``keep`` chooses.

    ``keep`` is asked in forward alone: once for each operator that makes new tensors (see
    ``makes_new``), in the order in which they run. A kept operator does not run again. Every other
    one runs once more in backward, up to the last tensor that backward needs. Kept outputs that
    come after this tensor go when ``fn`` returns, the others when backward has used them. So A + K
    bytes are held after forward, as the module's formula says. A kept output that was written into
    in place is computed again. A second backward through the same call computes everything again.

    Outputs and gradients equal those of the plain call, also gradients by ``torch.autograd.grad``
    and gradients of gradients. So do the random numbers of ``fn`` and of what follows, kept or not,
    on the CPU and on the CUDA devices of the arguments. Both forwards have the same autocast.
    Arguments and results may be nested, as in 2.7. ``fn`` may have such calls inside; they may ask
    again when ``fn`` runs again. Without grad mode it is the plain call, and ``keep`` is not asked.

    ``fn`` must compute the same twice, not change its arguments, and not go backward itself. Raises
    RuntimeError in backward if the second forward runs another operator, or if the tensors that
    autograd saves differ from the first forward's in number, shape or dtype. So it does if a tensor
    argument or a parameter was changed after forward.
    """
    # Step 19: without grad mode there is nothing to keep
    # Step 20: record the graph, without autocast's cache: both forwards run the same operators
    # Step 21: let go of the operators that the second forward does not reach
    raise NotImplementedError("exercise 2.27")
