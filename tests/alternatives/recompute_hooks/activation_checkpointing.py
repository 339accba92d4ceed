# for: 2.7
"""Written differently: no node of its own; hooks on what autograd saves forget it and bring it
back, from a second forward whose hooks catch the same tensors in the same order."""

from __future__ import annotations

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten


class _Enough(Exception):
    """Everything that backward needs has been computed again."""


class _Segment:
    def __init__(self, fn, args, kwargs):
        leaves, self.spec = tree_flatten((args, kwargs))
        self.fn = fn
        self.tensors = {i: t for i, t in enumerate(leaves) if isinstance(t, torch.Tensor)}
        self.versions = {i: t._version for i, t in self.tensors.items()}
        self.others = {i: v for i, v in enumerate(leaves) if i not in self.tensors}
        self.devices = sorted({t.device.index for t in self.tensors.values() if t.is_cuda})
        self.random = torch.get_rng_state()
        self.cuda_random = {d: torch.cuda.get_rng_state(d) for d in self.devices}
        kinds = {"cpu"} | {t.device.type for t in self.tensors.values()}
        self.casts = {k: (torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds}
        self.cache = torch.is_autocast_cache_enabled()
        self.packed, self.unpacked, self.again = 0, 0, {}

    def pack(self, _):
        self.packed += 1
        return self.packed - 1

    def unpack(self, number):
        if number not in self.again:
            self.recompute()
        self.unpacked += 1
        return self.again.pop(number)

    def recompute(self):
        for i, tensor in self.tensors.items():
            if tensor._version != self.versions[i]:
                raise RuntimeError("an argument was changed after its forward")
        found = []

        def catch(tensor):
            found.append(tensor.detach())
            if len(found) == self.packed:
                raise _Enough
            return len(found) - 1

        def never(_):
            raise AssertionError("backward goes through the first graph")

        leaves = dict(self.others)
        for i, tensor in self.tensors.items():
            leaves[i] = tensor.detach().requires_grad_(tensor.requires_grad)
        args, kwargs = tree_unflatten([leaves[i] for i in range(len(leaves))], self.spec)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=self.devices))
            torch.set_rng_state(self.random)
            for device, state in self.cuda_random.items():
                torch.cuda.set_rng_state(state, device)
            for kind, (enabled, dtype) in self.casts.items():
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cache)
                )
            stack.enter_context(torch.enable_grad())
            stack.enter_context(contextlib.suppress(_Enough))
            stack.enter_context(saved_tensors_hooks(catch, never))
            self.fn(*args, **kwargs)
        self.again = dict(enumerate(found))


def checkpoint(fn, *args, **kwargs):
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    segment = _Segment(fn, args, kwargs)
    with saved_tensors_hooks(segment.pack, segment.unpack):
        return fn(*args, **kwargs)


def checkpoint_sequential(layers, segments, x):
    layers = list(layers)
    if segments < 1 or segments > len(layers):
        raise ValueError(f"{segments} segments of {len(layers)} layers can't be made")
    while segments > 1:
        size = -(-len(layers) // segments)
        head, layers, segments = layers[:size], layers[size:], segments - 1

        def run(x, head=tuple(head)):
            for layer in head:
                x = layer(x)
            return x

        x = checkpoint(run, x)
    for layer in layers:
        x = layer(x)
    return x
