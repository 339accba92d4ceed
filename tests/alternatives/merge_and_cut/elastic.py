# State merged before it is cut; for: 4.4

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from .fault_tolerance import Saved
from .sample_seeds import random_state, set_random_state


def chunk_of(numel, world_size, rank):
    chunk = (numel + world_size - 1) // world_size
    return range(numel)[rank * chunk : (rank + 1) * chunk]


def cut(own, numel, world_size, rank):
    kept = torch.empty(len(chunk_of(numel, world_size, rank)), dtype=own.dtype, device=own.device)
    kept.copy_(own[: len(kept)].detach())
    return {"numel": numel, "chunk": kept}


def flatten(tree, path=()):
    """(path, chunk) of every chunk of a tree."""
    if isinstance(tree, dict) and set(tree) == {"numel", "chunk"}:
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, (dict, list, tuple)):
            yield from flatten(value, (*path, key))


def rebuilt(tree, fresh, path=()):
    """A copy of a tree with other chunks."""
    if path in fresh:
        return fresh[path]
    if isinstance(tree, dict):
        return {key: rebuilt(value, fresh, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(rebuilt(value, fresh, (*path, i)) for i, value in enumerate(tree))
    return tree


def recut(saved, world_size, rank):
    """Merge neighbours to one vector, then cut it."""
    old = saved.world_size
    nearest = rank * old // world_size
    trees = {nearest: saved.own(nearest)}
    fresh = {}
    for path, leaf in flatten(trees[nearest]):
        numel, mine = leaf["numel"], chunk_of(leaf["numel"], world_size, rank)
        needed = [r for r in range(old) if set(chunk_of(numel, old, r)) & set(mine)]
        joined = leaf["chunk"][:0]
        for r in needed:
            if r not in trees:
                trees[r] = saved.own(r)
            found = dict(flatten(trees[r]))[path]["chunk"]
            if len(found) != len(chunk_of(numel, old, r)):
                raise ValueError(f"rank {r} has {len(found)} elements of {path}")
            joined = torch.cat([joined, found])
        begin = mine.start - chunk_of(numel, old, needed[0]).start if needed else 0
        fresh[path] = {"numel": numel, "chunk": joined[begin : begin + len(mine)].clone()}
    return rebuilt(trees[nearest], fresh)


@dataclasses.dataclass
class View:
    """The checkpoint seen by other ranks."""

    saved: Saved
    world_size: int
    seed: int

    def __getattr__(self, name):
        return getattr(self.saved, name)

    def own(self, rank):
        tree = dict(recut(self.saved, self.world_size, rank))
        known = rank < self.saved.world_size
        source = self.saved.own(rank) if known else self.fresh(tree, rank)
        tree["random"] = source["random"]
        tree["parts"] = {
            name: source["parts"][name] if isinstance(part, torch.Tensor) else part
            for name, part in tree["parts"].items()
        }
        return tree

    def fresh(self, like, rank):
        key = random.Random(f"{self.seed}/{self.saved.step}/{rank}").getrandbits(31)
        before = random_state()
        torch.default_generator.manual_seed(key)
        np.random.seed(key ^ 0x2A5C)
        random.seed(key)
        made = {"random": random_state(), "parts": {}}
        set_random_state(before)
        for number, name in enumerate(like["parts"]):
            generator = torch.Generator().manual_seed(key + 1 + number)
            made["parts"][name] = generator.get_state()
        return made


def adapt(saved, world_size, seed=0):
    if world_size < 1:
        raise ValueError(f"{world_size} ranks can't load anything")
    return saved if world_size == saved.world_size else View(saved, world_size, seed)
