# for: 2.27
"""Written differently: an output is found by its operator and how often that one ran before, and
tokens stand for saved tensors."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from given.operators import (
    NOT_COUNTED,
    Mode,
    Operation,
    detached,
    random_states,
    saved_by,
    set_random_states,
    storage_of,
    written_by,
)

from .activation_checkpointing import Surroundings, put_in, take_out


def makes_new(op):
    schema = op._schema
    if op.namespace == "c10d":
        return False
    arguments = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not arguments and not any(r.alias_info for r in schema.returns)


def at_least(flops_per_byte):
    if flops_per_byte != flops_per_byte or flops_per_byte < 0:
        raise ValueError(f"{flops_per_byte} is no limit")

    def keep(operation):
        return not operation.flops < flops_per_byte * operation.nbytes

    return keep


class _Token:
    """Stands for a saved tensor; knows what it looked like."""

    def __init__(self, tensor):
        self.looks = str(tensor.dtype), tuple(tensor.shape)
        self.tensor = None


class _Calls:
    """How often each operator ran, and the outputs that are kept."""

    def __init__(self):
        self.order, self.outputs, self.counts = [], {}, Counter()
        self.versions = {}

    def key(self, op):
        self.counts[op] += 1
        return op, self.counts[op]


class _Write(Mode):
    def __init__(self, calls, keep):
        super().__init__()
        self.calls, self.keep = calls, keep

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.nn.Parameter):
                self.calls.versions.setdefault(leaf, leaf._version)
        out = op(*args, **kwargs)
        written = written_by(op, args, kwargs)
        for key, (_, tensors, _) in [*self.calls.outputs.items()]:
            if any(storage_of(t) in written for t, _ in tensors):
                del self.calls.outputs[key]
        if op is NOT_COUNTED:
            return out
        key = self.calls.key(op)
        self.calls.order.append(key)
        if makes_new(op) and self.keep(Operation(op, args, kwargs, out)):
            kept = tree_map_only(torch.Tensor, detached, out)
            tensors = [t for t in tree_leaves(kept) if isinstance(t, torch.Tensor)]
            seeded = torch.Tag.nondeterministic_seeded in op.tags
            states = random_states(tensors) if seeded else []
            self.calls.outputs[key] = kept, [(t, t._version) for t in tensors], states
        return out


class _Read(Mode):
    def __init__(self, calls):
        super().__init__()
        self.calls, self.place = calls, 0
        calls.counts.clear()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is NOT_COUNTED:
            return op(*args, **(kwargs or {}))
        key = self.calls.key(op)
        if self.calls.order[self.place : self.place + 1] != [key]:
            raise RuntimeError(f"{op} does not belong here")
        self.place += 1
        kept, tensors, states = self.calls.outputs.pop(key, (None, [], []))
        if not tensors or any(t._version != version for t, version in tensors):
            return op(*args, **(kwargs or {}))
        set_random_states(states)
        return kept


class _Done(BaseException):
    pass


class _Again:
    def __init__(self, fn, args, kwargs):
        tensors = []
        self.fn, self.inputs = fn, take_out((args, kwargs), tensors)
        self.around, self.node = Surroundings(tensors), saved_by(tensors)
        self.calls, self.tokens, self.length = _Calls(), [], 0

    def pack(self, tensor):
        token = _Token(tensor)
        self.tokens.append(weakref.ref(token))
        self.length = len(self.calls.order)
        return token

    def unpack(self, token):
        if token.tensor is None:
            self.run()
        tensor, token.tensor = token.tensor, None
        return tensor

    def run(self):
        for parameter, version in self.calls.versions.items():
            if parameter._version != version:
                raise RuntimeError("a parameter is not what it was")
        wanted = list(self.tokens)

        def catch(tensor):
            token = wanted.pop(0)()
            if token is not None:
                if token.looks != (str(tensor.dtype), tuple(tensor.shape)):
                    raise RuntimeError(f"saved {tensor.dtype}, {tensor.shape}: not as before")
                token.tensor = tensor.detach()
            if not wanted:
                raise _Done
            return tensor.detach()

        inputs = [t.detach().requires_grad_(t.requires_grad) for t in self.node.saved_tensors]
        args, kwargs = put_in(self.inputs, inputs)
        with self.around.restored(), torch.enable_grad(), saved_tensors_hooks(catch, lambda t: t):
            try:
                with _Read(self.calls):
                    self.fn(*args, **kwargs)
            except _Done:
                return
        raise RuntimeError("not all tensors came again")


def selective_checkpoint(keep, fn, *args, **kwargs):
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    again = _Again(fn, args, kwargs)
    hooks, mode = saved_tensors_hooks(again.pack, again.unpack), _Write(again.calls, keep)
    with again.around.casting(), hooks, mode:
        result = fn(*args, **kwargs)
    for key in again.calls.order[again.length :]:
        again.calls.outputs.pop(key, None)
    return result
