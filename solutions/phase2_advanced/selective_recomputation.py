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

from .activation_checkpointing import Surroundings, put_in, take_out


# -- what to keep ---------------------------------------------------------------------------------
@cache
def makes_new(op: OpOverload) -> bool:
    """Whether ``op`` writes into none of its arguments, and returns no view of one. Collectives
    (namespace ``c10d``) write, though their schemas do not say so."""
    # --- exercise 2.27: start
    # Step 1: op._schema has is_mutable, and returns with an alias_info each
    writes = op.namespace == "c10d" or op._schema.is_mutable
    return not writes and all(r.alias_info is None for r in op._schema.returns)
    # --- exercise 2.27: end


def at_least(flops_per_byte: float) -> Keep:
    """The policy that keeps an output if it saves at least so many FLOPs per byte.

    An operator on the limit is kept. With 0 every operator is. Raises ValueError if
    ``flops_per_byte`` is negative or no number.
    """
    # --- exercise 2.27: start
    # Step 2: compare by a product: an output may have no bytes
    if not flops_per_byte >= 0:
        raise ValueError(f"a limit of {flops_per_byte} FLOPs per byte: give a number from 0 on")
    return lambda operation: operation.flops >= flops_per_byte * operation.nbytes
    # --- exercise 2.27: end


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
        # --- exercise 2.27: start
        # Step 3: take the tensors out. Autograd gives them a graph that leads back to this
        #         segment, so keep detached ones: a circle is freed late
        # Step 4: an operator that draws random numbers has torch.Tag.nondeterministic_seeded
        outputs: list[Tensor] = []
        structure = take_out(operation.out, outputs)
        draws = torch.Tag.nondeterministic_seeded in operation.op.tags
        tensors = [detached(t) for t in outputs]
        random = random_states(outputs) if draws else []
        return cls(structure, tensors, [t._version for t in tensors], random)
        # --- exercise 2.27: end

    @property
    def changed(self) -> bool:
        """Whether somebody wrote into a tensor after the operator had returned it."""
        # --- exercise 2.27: start
        # Step 5: every write in place adds to a tensor's _version, also one through a view
        return [t._version for t in self.tensors] != self.versions
        # --- exercise 2.27: end

    def give(self) -> Any:
        """The output; random states are as after the operator."""
        # --- exercise 2.27: start
        # Step 6: first the random states, then the tensors in their places
        set_random_states(self.random)
        return put_in(self.structure, self.tensors)
        # --- exercise 2.27: end


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
        # --- exercise 2.27: start
        # Step 7: note the parameters among the arguments, also in lists, then run the operator
        # Step 8: let go of kept outputs that it wrote into (written_by)
        # Step 9: a view costs nothing, and what is written in place is gone: never keep these
        kwargs = kwargs or {}
        for taken in tree_leaves(args):
            if isinstance(taken, nn.Parameter):
                self.parameters.setdefault(taken, taken._version)
        out = op(*args, **kwargs)
        if written := written_by(op, args, kwargs):
            for number, (before, kept) in enumerate(self.steps):
                if kept is not None and written & {storage_of(t) for t in kept.tensors}:
                    self.steps[number] = (before, None)
        if op is not NOT_COUNTED:
            operation = Operation(op, args, kwargs, out)
            chosen = makes_new(op) and self.keep(operation)
            self.steps.append((op, Kept.of(operation) if chosen else None))
        return out
        # --- exercise 2.27: end


class Giving(Mode):
    """The second forward: gives each kept output back once, and runs all other operators."""

    def __init__(self, steps: list[tuple[OpOverload, Kept | None]]) -> None:
        super().__init__()
        self.steps = steps
        self.done = 0  # operators so far

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The output of ``op``: kept or computed. RuntimeError if the first forward had another
        operator here. A kept output leaves ``steps``."""
        # --- exercise 2.27: start
        # Step 10: compare with the operator of the first forward before you give its output
        # Step 11: let go of what you give: backward frees it when it has used it
        # Step 12: a kept output that was changed is computed again
        if op is NOT_COUNTED:
            return op(*args)
        if self.done == len(self.steps) or op is not self.steps[self.done][0]:
            raise RuntimeError(f"the second forward runs {op}, the first one did not run it here")
        kept = self.steps[self.done][1]
        self.steps[self.done] = (op, None)
        self.done += 1
        if kept is None or kept.changed:
            return op(*args, **(kwargs or {}))
        return kept.give()
        # --- exercise 2.27: end


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
        # --- exercise 2.27: start
        # Step 13: note shape and dtype, and the number of operators: backward needs no later one
        self.needed = len(self.keeping.steps)
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1
        # --- exercise 2.27: end

    def catch(self, tensor: Tensor) -> None:
        """In the second forward: hold on to ``tensor`` without its graph; stop after the last."""
        # --- exercise 2.27: start
        # Step 14: the k-th tensor here is the k-th of the first forward; raise Enough at the last.
        #          Nobody goes backward through the graph of the second forward
        now, then = (tensor.shape, tensor.dtype), self.saved[len(self.found)]
        if now != then:
            raise RuntimeError(f"the second forward saves {now}, the first one saved {then}")
        self.found[len(self.found)] = tensor.detach()
        if len(self.found) == len(self.saved):
            raise Enough
        # --- exercise 2.27: end

    def unpack(self, number: int) -> Tensor:
        """In backward: the tensor with this number, which leaves the segment."""
        # --- exercise 2.27: start
        # Step 15: run again only if the tensor is not there; a second backward needs that, too
        if number not in self.found:
            self.run_again()
        return self.found.pop(number)
        # --- exercise 2.27: end

    def run_again(self) -> None:
        """The second forward, which fills ``found``."""
        # --- exercise 2.27: start
        # Step 16: a parameter that changed would give other values: refuse it
        # Step 17: detach the inputs, and run in the surroundings of the first forward
        # Step 18: the second forward may save less than the first one: refuse that, too
        if any(p._version != version for p, version in self.keeping.parameters.items()):
            raise RuntimeError("a parameter of a segment was changed after its forward")
        saved = self.arguments.saved_tensors
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in saved]
        args, kwargs = put_in(self.inputs, tensors)
        self.found.clear()
        with (
            suppress(Enough),
            self.surroundings.restored(),
            torch.enable_grad(),
            saved_tensors_hooks(self.catch, lambda nothing: nothing),
            Giving(self.keeping.steps),
        ):
            self.fn(*args, **kwargs)
        if len(self.found) < len(self.saved):
            raise RuntimeError("the second forward saves fewer tensors than the first one")
        # --- exercise 2.27: end


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
    # --- exercise 2.27: start
    # Step 19: without grad mode there is nothing to keep
    # Step 20: record the graph, without autocast's cache: both forwards run the same operators
    # Step 21: let go of the operators that the second forward does not reach
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    segment = Segment(keep, fn, args, kwargs)
    with (
        segment.surroundings.casting(),
        saved_tensors_hooks(segment.pack, segment.unpack),
        segment.keeping,
    ):
        result = fn(*args, **kwargs)
    del segment.keeping.steps[segment.needed :]
    return result
    # --- exercise 2.27: end
