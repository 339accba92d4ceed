# for: 2.27
"""Written differently: one mode with a queue writes in the first forward and reads in the second;
the arguments are kept with their versions, and no node saves them."""

from __future__ import annotations

import contextlib
from collections import deque

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from given.operators import NOT_COUNTED, Mode, Operation, detached, storage_of, written_by


def makes_new(op):
    if "c10d" in str(op):
        return False
    return "!" not in str(op._schema) and not any(r.alias_info for r in op._schema.returns)


def at_least(flops_per_byte):
    if not flops_per_byte >= 0:
        raise ValueError("a limit is zero or more")
    return lambda operation: operation.flops - flops_per_byte * operation.nbytes >= 0


class _Stop(BaseException):
    """The rest is not needed."""


class _Random:
    """States of all generators that matter."""

    def __init__(self, devices):
        self.devices = devices
        self.cpu = torch.get_rng_state()
        self.gpus = [torch.cuda.get_rng_state(device) for device in devices]

    def put_back(self):
        torch.set_rng_state(self.cpu)
        for device, state in zip(self.devices, self.gpus, strict=True):
            torch.cuda.set_rng_state(state, device)


class _Tape(Mode):
    def __init__(self, keep, devices):
        super().__init__()
        self.keep, self.devices = keep, devices
        self.entries, self.reading, self.parameters = [], None, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op is NOT_COUNTED:
            return op(*args, **kwargs)
        return (self.write if self.reading is None else self.read)(op, args, kwargs)

    def write(self, op, args, kwargs):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.nn.Parameter) and leaf not in self.parameters:
                self.parameters[leaf] = leaf._version
        out, kept = op(*args, **kwargs), None
        written = written_by(op, args, kwargs)
        for entry in self.entries if written else ():
            mine = entry[1][0] if entry[1] else []
            if any(storage_of(x) in written for x in mine if isinstance(x, torch.Tensor)):
                entry[1] = None
        if makes_new(op) and self.keep(Operation(op, args, kwargs, out)):
            leaves, spec = tree_flatten(out)
            leaves = [detached(x) if isinstance(x, torch.Tensor) else x for x in leaves]
            versions = [getattr(x, "_version", None) for x in leaves]
            seeded = torch.Tag.nondeterministic_seeded in op.tags
            kept = leaves, spec, versions, _Random(self.devices) if seeded else None
        self.entries.append([op, kept])
        return out

    def read(self, op, args, kwargs):
        entry = self.reading.popleft() if self.reading else [None, None]
        if entry[0] is not op:
            raise RuntimeError(f"{op} where {entry[0]} was")
        kept, entry[1] = entry[1], None
        if kept is None:
            return op(*args, **kwargs)
        leaves, spec, versions, random = kept
        if [getattr(x, "_version", None) for x in leaves] != versions:
            return op(*args, **kwargs)
        if random is not None:
            random.put_back()
        return tree_unflatten(leaves, spec)


class _Segment:
    def __init__(self, keep, fn, args, kwargs):
        self.fn = fn
        self.leaves, self.spec = tree_flatten((args, kwargs))
        tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]
        self.versions = [t._version for t in tensors]
        self.devices = sorted({t.get_device() for t in tensors if t.is_cuda})
        self.random = _Random(self.devices)
        kinds = {"cpu"} | {t.device.type for t in tensors}
        self.casts = {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds}
        self.tape = _Tape(keep, self.devices)
        self.looks, self.values, self.reached = [], {}, 0

    @contextlib.contextmanager
    def casting(self):
        with contextlib.ExitStack() as stack:
            for kind, (enabled, dtype) in self.casts.items():
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)
                )
            yield

    def pack(self, tensor):
        self.looks.append((tensor.shape, tensor.dtype))
        self.reached = len(self.tape.entries)
        return len(self.looks)

    def unpack(self, number):
        if number not in self.values:
            self.again()
        return self.values.pop(number)

    def again(self):
        tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]
        now = [t._version for t in tensors]
        if now != self.versions or any(p._version != v for p, v in self.tape.parameters.items()):
            raise RuntimeError("an argument or a parameter was changed")
        values = self.values = {}

        def catch(tensor):
            looks = tensor.shape, tensor.dtype
            number = len(values) + 1
            if looks != self.looks[number - 1]:
                raise RuntimeError(f"{looks} is saved, {self.looks[number - 1]} was")
            values[number] = tensor.detach()
            if number == len(self.looks):
                raise _Stop
            return values[number]

        leaves = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in self.leaves
        ]
        args, kwargs = tree_unflatten(leaves, self.spec)
        self.tape.reading = deque(self.tape.entries)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.devices))
            self.random.put_back()
            stack.enter_context(self.casting())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(contextlib.suppress(_Stop))
            stack.enter_context(saved_tensors_hooks(catch, lambda tensor: tensor))
            stack.enter_context(self.tape)
            self.fn(*args, **kwargs)
        if len(values) != len(self.looks):
            raise RuntimeError(f"{len(values)} tensors are saved, {len(self.looks)} were")


def selective_checkpoint(keep, fn, *args, **kwargs):
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    segment = _Segment(keep, fn, args, kwargs)
    with segment.casting(), saved_tensors_hooks(segment.pack, segment.unpack), segment.tape:
        result = fn(*args, **kwargs)
    del segment.tape.entries[segment.reached :]
    return result
