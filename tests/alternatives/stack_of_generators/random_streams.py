# for: 2.19
"""Written differently: generators as objects, hashed seeds, a stack of who is in use."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def hashed(*parts):
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Region:
    """The stream on top of the stack is the one in the default generators."""

    def __init__(self, streams, name):
        self.streams, self.name = streams, name

    def __enter__(self):
        self.streams.keep()
        self.streams.stack.append(self.name)
        self.streams.put()

    def __exit__(self, *exc):
        self.streams.keep()
        self.streams.stack.pop()
        self.streams.put()


class Recomputing:
    """Copies of the generators and of the stack, put in place of the present ones for a while."""

    def __init__(self, streams):
        self.streams = streams
        streams.keep()
        self.stack = list(streams.stack)
        self.then = {k: [g.clone_state() for g in v] for k, v in streams.own.items()}

    def __enter__(self):
        streams = self.streams
        self.present = streams.stack, streams.own
        streams.stack = list(self.stack)
        streams.own = {k: [g.clone_state() for g in v] for k, v in self.then.items()}

    def __exit__(self, *exc):
        self.streams.stack, self.streams.own = self.present


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *exc):
        pass


class RandomStreams:
    """``own``: for each stream a generator per device, up to date unless it is on top."""

    def __init__(self, seed, *, device="cpu", group=None):
        rank = dist.get_rank(group)
        if seed < 0:
            raise ValueError(f"the seed must not be negative: {seed}")
        if rank == -1:
            raise ValueError("not a member of the group")
        self.default = [torch.default_generator]
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.init()
            self.default.append(torch.cuda.default_generators[device.index or 0])
        self.stack = ["outside"]
        self.own = {}
        for name, number in (("replicated", "all"), ("sharded", rank), ("outside", "none")):
            value = hashed(seed, name, number)
            self.own[name] = [torch.Generator(g.device).manual_seed(value) for g in self.default]

    def keep(self):
        for own, default in zip(self.own[self.stack[-1]], self.default, strict=True):
            own.set_state(default.get_state())

    def put(self):
        for own, default in zip(self.own[self.stack[-1]], self.default, strict=True):
            default.set_state(own.get_state())

    def replicated(self):
        return Region(self, "replicated")

    def sharded(self):
        return Region(self, "sharded")

    def contexts(self):
        return Nothing(), Recomputing(self)

    def state_dict(self):
        self.keep()
        names = "replicated", "sharded"
        return {f"{n}.{i}": g.get_state() for n in names for i, g in enumerate(self.own[n])}

    def load_state_dict(self, states):
        if len(self.stack) > 1:
            raise ValueError(f"inside of a region ({self.stack[-1]}) nothing can be loaded")
        for name in ("replicated", "sharded"):
            for number, generator in enumerate(self.own[name]):
                generator.set_state(states[f"{name}.{number}"])
